"""README's table of torch.distributed's calls is complete, names real things, and its tests exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.device_mesh
import torch.distributed.tensor
from test_c10d_rest import REFUSED

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("tide", "gloo", "PyTorch", "refused", "as the calls above", "no")
# Of Backend and distributed_c10d, what is no call to a backend.
NOT_CALLS = {
    "Options",
    "GroupName",
    "get_backend_impl",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_node_local_rank",
    "get_pg_count",
    "get_rank",
    "get_world_size",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "supports_complex",
}
NEWEST_LISTED = (2, 14)
VERSION = tuple(int(v) for v in torch.__version__.split(".")[:2])


@dataclass(frozen=True)
class Row:
    names: tuple[str, ...]
    way: str
    tests: tuple[str, ...]


def rows() -> Iterator[Row]:
    """The table's rows, from README."""
    section = (ROOT / "README.md").read_text().split("## Calls of torch.distributed\n")[1].split("\n## ")[0]
    for line in re.findall(r"^\| (`.*) \|$", section, flags=re.M):
        names, way, tests = line.split(" | ")
        yield Row(tuple(re.findall(r"`([^`]+)`", names)), way, tuple(re.findall(r"`([^`]+)`", tests)))


def named() -> set[str]:
    return {name for row in rows() for name in row.names}


def backend_methods() -> set[str]:
    return {
        name
        for name in dir(torch._C._distributed_c10d.Backend)
        if not name.startswith("__") and "pybind11" not in name
    }


def public_functions() -> set[str]:
    found = set()
    for name in dist.distributed_c10d.__all__:
        if name == "reduce_op":  # warns when it is touched
            continue
        value = getattr(dist.distributed_c10d, name, None)
        if callable(value) and not inspect.isclass(value):
            found.add(name)
    return found


def test_every_method_of_a_backend_has_a_row() -> None:
    missing = backend_methods() - named() - NOT_CALLS
    if VERSION <= NEWEST_LISTED:
        assert missing == set()
    assert len(backend_methods() & named()) > 30


def test_every_public_function_has_a_row() -> None:
    missing = public_functions() - named() - NOT_CALLS
    if VERSION <= NEWEST_LISTED:
        assert missing == set()
    assert len(public_functions() & named()) > 30


def test_no_name_has_two_rows_or_none_of_the_known_ways() -> None:
    every = [name for row in rows() for name in row.names]
    assert sorted(every) == sorted(set(every))
    for row in rows():
        assert row.way.startswith(WAYS) and row.tests, row


@pytest.mark.skipif(VERSION != NEWEST_LISTED, reason="names of another version")
def test_every_name_is_real() -> None:
    places = [
        torch._C._distributed_c10d.Backend,
        torch._C._distributed_c10d.ProcessGroup,
        torch._C._distributed_c10d,
        dist,
        dist.distributed_c10d,
        dist.device_mesh,
        dist.tensor,
        torch.nn.parallel,
    ]
    plain = {name for name in named() if name.isidentifier()}
    assert {name for name in plain if not any(hasattr(place, name) for place in places)} == set()


def test_refused_calls_are_those_that_are_tested() -> None:
    refused = {name for row in rows() if row.way.startswith("refused") for name in row.names}
    assert refused - {"shrink_group"} == set(REFUSED)  # dist.shrink_group calls Backend.shrink


@pytest.mark.parametrize("test", sorted({test for row in rows() for test in row.tests}))
def test_the_named_test_exists(test: str) -> None:
    file, name = test.split("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

"""Set-ups that the FSDP2 seam leaves to PyTorch, and PyTorch versions that it does not know."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from fsdp2_fallback_cases import (
    SETUPS,
    comm_objects_are_kept,
    fall_back,
    no_shared_memory,
    no_slot,
    one_rank,
    slots_come_back,
    unknown_fsdp2,
)
from ranks import run_ranks

from tide_backend.fsdp2.contract import contract_problems
from tide_backend.fsdp2.journal import Journal, Reason

NAMES = ("_fsdp_param_group", "_fsdp_collectives", "_fsdp_param")


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_falls_back_with_reason_and_one_warning(name: str) -> None:
    assert run_ranks(2, fall_back, name) == [None, None]


def test_one_rank() -> None:
    assert run_ranks(2, one_rank) == [None, None]


def test_unknown_fsdp2_keeps_pytorchs_path() -> None:
    assert run_ranks(2, unknown_fsdp2) == [None, None]


def test_comm_objects_of_the_user_are_kept() -> None:
    assert run_ranks(2, comm_objects_are_kept) == [None, None]


def test_ranks_without_shared_memory() -> None:
    assert run_ranks(2, no_shared_memory) == [None, None]


def test_arena_too_small_for_a_slot() -> None:
    assert run_ranks(2, no_slot) == [None, None]


def test_slots_come_back() -> None:
    assert run_ranks(2, slots_come_back) == [None, None]


def fsdp2_modules() -> list[Any]:
    """Copies of FSDP2's three modules' namespaces, to be doctored."""
    found = [importlib.import_module(f"torch.distributed.fsdp._fully_shard.{name}") for name in NAMES]
    return [SimpleNamespace(**vars(module)) for module in found]


def test_this_pytorch_is_known() -> None:
    assert contract_problems(*fsdp2_modules()) == []


def _another_signature(group: Any, collectives: Any, param: Any) -> None:
    collectives.foreach_reduce_scatter_copy_in = lambda grads, world_size, out: None


def _another_field(group: Any, collectives: Any, param: Any) -> None:
    collectives.AllGatherResult = SimpleNamespace(_fields=("output",))


def _already_replaced(group: Any, collectives: Any, param: Any) -> None:
    original = group.foreach_all_gather_copy_out
    group.foreach_all_gather_copy_out = lambda all_gather_result, fsdp_params, group: original


def _missing_class(group: Any, collectives: Any, param: Any) -> None:
    del group.FSDPParamGroup


def _copy_in_not_called(group: Any, collectives: Any, param: Any) -> None:
    collectives.foreach_reduce = lambda reduce_scatter_comm: reduce_scatter_comm.allocate()


def _missing_attribute(group: Any, collectives: Any, param: Any) -> None:
    param.FSDPParam = type("FSDPParam", (), {})


def _free_that_keeps(group: Any, collectives: Any, param: Any) -> None:
    param.free_storage = lambda tensor: None


@pytest.mark.parametrize(
    ("doctor", "word"),
    [
        (_another_signature, "foreach_reduce_scatter_copy_in"),
        (_another_field, "AllGatherResult"),
        (_already_replaced, "already replaced"),
        (_missing_class, "unshard"),
        (_copy_in_not_called, "foreach_reduce"),
        (_missing_attribute, "_sharded_param_data"),
        (_free_that_keeps, "freeing"),
    ],
)
def test_contract_finds(doctor: Any, word: str) -> None:
    modules = fsdp2_modules()
    doctor(*modules)
    problems = contract_problems(*modules)
    assert problems and any(word in problem for problem in problems), problems


def test_seam_waits_for_fsdp2_to_be_imported() -> None:
    code = """
import sys
import tide_backend
from tide_backend import fsdp2
target = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
assert fsdp2.state() == "not installed" and target not in sys.modules
before = len(sys.meta_path)
assert fsdp2.install() == fsdp2.install() == "waiting for FSDP2's import"
assert target not in sys.modules and len(sys.meta_path) == before + 1
import torch.distributed.fsdp
assert fsdp2.state() == "installed" and len(sys.meta_path) == before, fsdp2.problems()
group = sys.modules[target]
assert "tide_backend" in group.foreach_all_gather.__module__
import inspect
assert "class FSDPParamGroup" in inspect.getsource(group)
assert fsdp2.install() == "installed"
fsdp2.uninstall()
assert "tide_backend" not in group.foreach_all_gather.__module__
assert "tide_backend" not in group.FSDPParamGroup.lazy_init.__module__
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


def test_journal_counts_and_warns_once_per_kind() -> None:
    journal = Journal()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in ("a", "b", "a"):
            journal.fall_back("0", module, "all_gather", Reason("odd", "it is odd"), 8)
        journal.fall_back("0", "a", "all_gather", Reason("even", "it is even"), 8)
    assert [str(w.message).count("it is odd") for w in caught] == [1, 0]
    assert [(r.module, r.kind, r.calls, r.bytes) for r in journal.rows()] == [
        ("a", "odd", 2, 16),
        ("b", "odd", 1, 8),
        ("a", "even", 1, 8),
    ]
    kept = journal.row("0", "a", "all_gather", Reason("odd", "it is odd"))
    journal.reset("1")
    assert len(journal.rows("0")) == 3 and journal.rows("1") == []
    journal.reset()
    assert journal.rows() == []
    kept.calls += 1  # plans keep their row over a reset
    assert journal.rows() == [kept]

"""What each rank runs where the gradients of one group are bf16 and fp32 side by side, reduced in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from fsdp2_both import Result, full
from fsdp2_cases import KEEPS_AUTOGRADS_DTYPES, close, mesh, shard
from fsdp2_models import Case, build, loss_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tide_backend

INNER = "ranks have gradients of different dtypes for the same parameters"


def accumulate(backend: str, rank: int, early: bool) -> Result:
    """Two micro-batches; the second uses a parameter that the first uses only with `early`. The first leaves fp32
    gradients, to which the second adds; what the second alone uses is bf16."""
    case = Case("unused", unused=True)
    model = build(case)
    shard(model, case, backend)
    spare = model.blocks[0].spare

    def use_spare(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out + spare(args[0]).sum()

    def step(number: int, spare_too: bool) -> None:
        hook = model.blocks[0].norm.register_forward_hook(use_spare) if spare_too else None
        loss_of(model, rank, number).backward()
        if hook is not None:
            hook.remove()

    model.set_requires_gradient_sync(False)
    step(0, early)
    model.set_requires_gradient_sync(True)
    step(1, True)
    return full(model)


def compare(train: Callable[[str], Result]) -> list[Any]:
    """tide's result against gloo's. Returns what the report says of tide's reduce-scatters."""
    tide_backend.report(reset=True)
    ours = train("tide")
    rows = [row for row in tide_backend.report().rows if row.op == "reduce_scatter"]
    theirs = train("gloo")
    assert ours.keys() == theirs.keys() and any(name.startswith("gradient") for name in ours)
    for name, value in ours.items():
        close(value, theirs[name], 1e-6, name)
    assert rows and all(row.path == "tide" and row.copies_avoided > 0 for row in rows), rows
    return rows


def mixed_accumulation(rank: int, world: int) -> None:
    """A parameter that only the last micro-batch uses: bf16 beside accumulated fp32 gradients. FSDP2 up to 2.14
    refuses; tide must neither hide nor worsen that."""
    if KEEPS_AUTOGRADS_DTYPES:
        rows = compare(lambda backend: accumulate(backend, rank, early=False))
        assert all(row.backend_path == "staged" for row in rows), rows
        return
    for backend in ("tide", "gloo"):
        try:
            accumulate(backend, rank, early=False)
        except AssertionError as error:
            assert "uniform gradient dtype" in str(error), error
        else:
            raise AssertionError("FSDP2 reduced what it is known to refuse")


def accumulation_that_differs_by_rank(rank: int, world: int) -> None:
    """The same parameter's gradient is fp32 on one rank and bf16 on the other: right by FSDP2's contract from 2.15 on,
    so no error, and the inner backend reduces what tide cannot."""
    rows = compare(lambda backend: accumulate(backend, rank, early=rank == 0))
    ways = {row.module: (row.backend_path, row.kind, row.reason) for row in rows}
    assert ways.pop("blocks.0") == ("inner", "inner", INNER), rows
    assert set(ways.values()) == {("staged", "", "")}, rows


class Norms(nn.Module):
    """Each rank uses one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.RMSNorm(5), nn.RMSNorm(7)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        norm = self.left if left else self.right
        return (norm(x[:, : norm.weight.numel()]) * 3).square().sum()


def unused_norms_as_zeros(rank: int, world: int) -> None:
    """Zeros for what a rank did not use are bf16, in the parameter's dtype; an RMSNorm's own gradient is fp32 from 2.15
    on, which then differs by rank."""

    def train(backend: str) -> Result:
        model = Norms()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh(backend), mp_policy=policy)
        model.set_reduce_scatter_unused_params(True)
        x = torch.arange(14.0).view(2, 7) + rank
        model(x, rank % 2 == 0).backward()
        return full(model)

    (row,) = compare(train)
    want = ("inner", INNER) if KEEPS_AUTOGRADS_DTYPES else ("staged", "")
    assert (row.backend_path, row.reason) == want, row

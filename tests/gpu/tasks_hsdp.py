"""Tasks of test_gpu_hsdp.py: what each rank does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gpu_rank import enter, grid, same
from tasks_collectives import BUSY
from tasks_fsdp2 import Model, sharded_on, steps
from torch.distributed.fsdp import MixedPrecisionPolicy

import tide_backend

BACKENDS = ("tide", "nccl")


def train(
    rank: int, world: int, dtypes: tuple[str, str], reshard: bool | None, pace: bool, microbatches: int
) -> dict[str, Any]:
    """The same training on 2 x 2 ranks, on tide's groups and on nccl's; two ranks in each dimension add the same."""
    device, found, weights = enter(rank), {}, {}
    policy = MixedPrecisionPolicy(*(getattr(torch, t) for t in dtypes))
    for name in BACKENDS:
        tide_backend.report(reset=True)
        with grid(name, device) as mesh:
            model = sharded_on(mesh, device, reshard, policy)
            found[name] = steps(model, rank, device, 4, pace, microbatches)
            weights[name] = [p.to_local().detach().clone() for p in model.parameters()]
            if name == "tide":
                report = tide_backend.report()
                found["paths"] = sorted({(row.op, row.backend_path or row.path) for row in report.rows})
                found["fallbacks"] = [(row.op, row.reason) for row in report.fallbacks]
            del model
    pairs = zip(weights["tide"], weights["nccl"], strict=True)
    found["different"] = sum(int((a != b).sum()) for a, b in pairs)
    return found


def gradients(model: Model, rank: int, device: torch.device, partial: bool) -> dict[str, torch.Tensor]:
    """Name -> local gradient, of one backward; `partial`: of two, the first without an all-reduce."""
    generator = torch.Generator(device).manual_seed(rank)
    for last in (False, True) if partial else (True,):
        model.set_requires_all_reduce(last)
        x = torch.randn(2, 48, 37, device=device, dtype=model.enter.weight.dtype, generator=generator)
        model(x).float().pow(2).mean().backward()
    # On the compute stream, before anything was awaited: what is freed too early is written over.
    junk = [torch.full((1 << 14,), float("nan"), dtype=torch.bfloat16, device=device) for _ in range(200)]
    junk += [torch.full_like(p.to_local(), float("nan"), dtype=torch.bfloat16) for p in model.parameters()]
    del junk
    return {name: p.grad.to_local() for name, p in model.named_parameters()}


def slow_all_reduce(rank: int, world: int, stored: str, reduced: str, partial: bool) -> dict[str, Any]:
    """Gradients with an all-reduce that is late by milliseconds, against those with none that is late."""
    device, real = enter(rank), dist.all_reduce
    policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, reduced))
    late = False

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        if late:
            torch.cuda._sleep(BUSY // 8 * (1 + rank % 2))
        return real(*args, **kwargs)

    found: dict[str, dict[str, torch.Tensor]] = {}
    dist.all_reduce = all_reduce
    try:
        for name in BACKENDS:
            with grid(name, device) as mesh:
                model = sharded_on(mesh, device, None, policy, getattr(torch, stored), layers=6)
                for late in (False, True):
                    for turn in range(2):
                        model.zero_grad()
                        found[f"{name}, late {late}, turn {turn}"] = gradients(model, rank, device, partial)
                storages = {p.grad.to_local().untyped_storage().data_ptr() for p in model.parameters()}
                torch.cuda.synchronize()
                found = {way: {n: g.clone() for n, g in of.items()} for way, of in found.items()}
                del model
    finally:
        dist.all_reduce = real
    wanted = found["nccl, late False, turn 0"]
    layers = [wanted[f"blocks.{i}.up.weight"] for i in range(6)]
    return {
        "differ": [(way, n) for way, of in found.items() for n, g in of.items() if not same(g, wanted[n])],
        "alike": sum(torch.equal(a, b) for i, a in enumerate(layers) for b in layers[:i]),
        "storages": len(storages),
    }

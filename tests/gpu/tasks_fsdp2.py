"""Tasks of test_gpu_fsdp2.py: what each rank does."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from gpu_rank import backend, barrier, enter, mesh_of, own_group
from tasks_collectives import BUSY, device_work, kernels
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tide_backend
from tide_backend.bench.llama import Block, Shape

SHAPE = Shape(width=256, heads=4, key_value_heads=2, hidden=640)


class Model(nn.Module):
    """Blocks with an odd projection in front and behind, which also leaves the root parameters of its own."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(37, SHAPE.width)
        self.blocks = nn.ModuleList(Block(SHAPE) for _ in range(layers))
        self.leave = nn.Linear(SHAPE.width, 101)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def sharded(group: Any, device: torch.device, reshard: bool | int | None, policy: MixedPrecisionPolicy) -> Model:
    return sharded_on(mesh_of(group, device, "shard"), device, reshard, policy)


def sharded_on(
    mesh: DeviceMesh,
    device: torch.device,
    reshard: bool | int | None,
    policy: MixedPrecisionPolicy,
    dtype: torch.dtype = torch.float32,
    layers: int = 3,
) -> Model:
    torch.manual_seed(0)
    with device:
        model = Model(layers).to(dtype)
    options = {} if reshard is None else {"reshard_after_forward": reshard}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    fully_shard(model, mesh=mesh, mp_policy=policy, **options)
    return model


def prefetch(blocks: nn.ModuleList) -> None:
    """Each block asks for the next one's parameters in either direction."""
    for before, after in pairwise(blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def steps(model: Model, rank: int, device: torch.device, count: int, pace: bool, microbatches: int) -> list[float]:
    """Losses; with `pace`, ranks and layers are late by turns."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    if pace:
        for i, block in enumerate(model.blocks):
            block.register_forward_hook(lambda *_, i=i: torch.cuda._sleep(BUSY // 20) if (i + rank) % 2 else None)
    for step in range(count):
        total = 0.0
        for micro in range(microbatches):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == microbatches - 1)
            generator = torch.Generator(device).manual_seed(step * 100 + micro * 10 + rank)
            x = torch.randn(2, 48, 37, device=device, generator=generator)
            loss = model(x).float().pow(2).mean()
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train(
    rank: int,
    world: int,
    reshard: bool | int | None,
    dtypes: tuple[str | None, str | None],
    pace: bool,
    microbatches: int,
    options: dict[str, Any] | None = None,
    prefetched: bool = False,
) -> dict[str, Any]:
    """The same training on tide's group and on one of nccl; at two ranks fp32 sums cannot differ in any bit.

    `options`: of a tide group of its own in place of the default one.
    """
    device = enter(rank)
    with own_group(device, **options) if options else nullcontext(dist.group.WORLD) as group:
        return train_on(group, rank, device, reshard, dtypes, pace, microbatches, prefetched)


def train_on(
    ours: Any,
    rank: int,
    device: torch.device,
    reshard: bool | int | None,
    dtypes: tuple[str | None, str | None],
    pace: bool,
    microbatches: int,
    prefetched: bool,
) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(*(getattr(torch, t) if t else None for t in dtypes))
    stock = dist.new_group(backend="nccl")
    tide_backend.report(reset=True)
    found: dict[str, Any] = {}
    weights = {}
    for name, group in {"tide": ours, "nccl": stock}.items():
        model = sharded(group, device, reshard, policy)
        if prefetched:
            prefetch(model.blocks)
        found[name] = steps(model, rank, device, 4, pace, microbatches)
        weights[name] = [p.to_local().clone() for p in model.parameters()]
    pairs = list(zip(weights["tide"], weights["nccl"], strict=True))
    found["different"] = sum(int((a != b).sum()) for a, b in pairs)
    found["distance"] = max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
    report = tide_backend.report()
    found["paths"] = sorted({(row.op, row.backend_path or row.path) for row in report.rows})
    found["fallbacks"] = [(row.op, row.reason) for row in report.fallbacks]
    found["arena"] = backend(device, ours).arena_bytes("cuda")[1]
    barrier(device)
    dist.destroy_process_group(stock)
    return found


def kernels_of_a_step(rank: int, world: int) -> dict[str, Any]:
    device = enter(rank)
    model = sharded(dist.group.WORLD, device, None, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    x = torch.randn(2, 48, 37, device=device)

    def step() -> None:
        model.zero_grad()
        model(x).float().pow(2).mean().backward()

    step()
    barrier(device)
    names = kernels(device_work(step))
    barrier(device)
    return {
        "tide": [n for n in names if "tide::" in n],
        "stock": [n for n in names if "split_with_sizes" in n or "chunk_cat" in n or "nccl" in n.lower()],
        "all": len(names),
    }


def slots_of_layers(rank: int, world: int) -> dict[str, Any]:
    """Addresses of the blocks' weights in a forward, each behind a pause of the device."""
    device = enter(rank)
    slots: list[int] = []

    def note(block: nn.Module, *_: object) -> None:
        slots.append(block.gate.weight.data_ptr())
        torch.cuda._sleep(BUSY // 10)

    with own_group(device) as group:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = sharded_on(mesh_of(group, device, "shard"), device, None, policy, layers=6)
        for block in model.blocks:
            block.register_forward_pre_hook(note)
        x = torch.randn(2, 48, 37, device=device)
        model(x).float().sum().backward()
        barrier(device)
        slots.clear()
        loss = model(x).float().sum()
        busy = not torch.cuda.current_stream(device).query()
        loss.backward()
        barrier(device)
    return {"slots": slots, "busy": busy}


def unsharded_outlives_group(rank: int, world: int) -> dict[str, Any]:
    """A root that stays unsharded after a no-grad forward reads the arena when its group is gone."""
    device = enter(rank)
    group = dist.new_group(backend="tide")
    model = sharded(group, device, None, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    x = torch.randn(2, 48, 37, device=device)
    with torch.no_grad():
        before = model(x).clone()
    copy = model.leave.weight.detach().clone()
    barrier(device)
    dist.destroy_process_group(group)
    held = {"shape": tuple(model.leave.weight.shape), "finite": bool(copy.isfinite().all())}
    junk = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(8)]  # into whatever was freed
    held["same"] = torch.equal(model.leave.weight, copy)
    del junk
    return {**held, "output": bool(before.isfinite().all())}


def again_and_again(rank: int, world: int, rounds: int) -> list[float]:
    """Driver memory (MiB) that is in use after each of several groups was made, used and destroyed."""
    device = enter(rank)
    used = []
    for _ in range(rounds):
        group = dist.new_group(backend="tide")
        model = sharded(group, device, None, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        steps(model, rank, device, 1, False, 1)
        del model
        barrier(device)
        dist.destroy_process_group(group)
        del group
        torch.cuda.empty_cache()
        barrier(device)
        free, total = torch.cuda.mem_get_info(device)
        used.append((total - free) / (1 << 20))
    return used


def arena_reported(rank: int, world: int) -> int:
    device = enter(rank)
    held = backend(device).slot(1 << 20, str(device), torch.cuda.current_stream().cuda_stream)
    assert held[0] is not None, held[1]
    return next(row.held for row in tide_backend.report().memory if row.device == "cuda")

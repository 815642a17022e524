"""Tasks of test_gpu_lifetimes.py: what each rank does."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from gpu_rank import barrier, enter
from tasks_collectives import BUSY
from tasks_fsdp2 import Model, sharded
from torch.distributed.fsdp import MixedPrecisionPolicy

import tide_backend

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(step * 100 + rank)
    return torch.randn(2, 48, 37, device=device, generator=generator)


def train_step(model: Model, step: int, rank: int, device: torch.device) -> torch.Tensor:
    loss = model(batch(step, rank, device)).float().pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().sub_(p.grad.to_local(), alpha=0.1)
    model.zero_grad()
    return loss.detach()


def weights(model: Model) -> list[torch.Tensor]:
    return [p.to_local().detach().clone() for p in model.parameters()]


def differing(these: list[torch.Tensor], those: list[torch.Tensor]) -> int:
    return sum(int((a != b).sum()) for a, b in zip(these, those, strict=True))


def destroyed_in_order(rank: int, world: int, order: list[int], models_first: bool) -> dict[str, Any]:
    """Three groups train the same model; they go one by one in this order, and those that are left train on. What
    differs from the same training on nccl, and what changes of a model when its group goes.

    `models_first`: a model goes before its group; else all models stay until the last group is gone.
    """
    device = enter(rank)
    stock = dist.new_group(backend="nccl")
    model, wanted = sharded(stock, device, None, POLICY), []
    for step in range(len(order) + 1):
        wanted.append((train_step(model, step, rank, device), weights(model)))
    del model
    tide_backend.report(reset=True)
    groups: dict[int, Any] = {i: dist.new_group(backend="tide") for i in order}
    models = {i: sharded(group, device, None, POLICY) for i, group in groups.items()}
    wrong: list[str] = []
    kept = {}
    for step, gone in enumerate([*order, None]):
        for i in groups:
            loss = train_step(models[i], step, rank, device)
            if loss != wanted[step][0] or differing(weights(models[i]), wanted[step][1]):
                wrong.append(f"step {step} on group {i} with {sorted(groups)} alive")
        if gone is None:
            continue
        before = weights(models[gone])
        with torch.no_grad():  # leaves the root's parameters unsharded, in the arena
            models[gone](batch(step, rank, device))
        if models_first:
            del models[gone]
            gc.collect()
        else:
            kept[gone] = before, models[gone].leave.weight.detach().clone()
        barrier(device)
        dist.destroy_process_group(groups.pop(gone))
        if not groups:
            break
    junk = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(8)]  # into whatever was freed
    for i, (before, unsharded) in kept.items():
        same = torch.equal(models[i].leave.weight, unsharded)
        models[i].reshard()  # gives the slot back to a group that is gone
        if not same or differing(weights(models[i]), before):
            wrong.append(f"the model of group {i} changed when its group went")
    del junk
    report = tide_backend.report()
    models.clear()
    gc.collect()
    barrier(device)
    dist.destroy_process_group(stock)
    return {"wrong": wrong, "fallbacks": [(row.op, row.reason) for row in report.fallbacks]}


def two_models(rank: int, world: int) -> dict[str, Any]:
    """Two models on two groups in one graph: one behind the other, and side by side, with a rank that is late."""
    device = enter(rank)
    losses: dict[str, list[float]] = {}
    trained: dict[str, list[torch.Tensor]] = {}
    for name in ("nccl", "tide"):
        tide_backend.report(reset=True)
        groups = [dist.new_group(backend=name) for _ in range(2)]
        first, second = (sharded(g, device, r, POLICY) for g, r in zip(groups, (None, False), strict=True))
        optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2)
        losses[name] = []
        for step in range(6):
            x = batch(step, rank, device)
            if step % world == rank:
                torch.cuda._sleep(BUSY // 5)
            if step % 2:
                loss = second(first(x)[..., :37]).float().pow(2).mean()
            else:
                loss = first(x).float().pow(2).mean() + second(x).float().abs().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(float(loss.detach()))
        trained[name] = weights(first) + weights(second)
        report = tide_backend.report()
        barrier(device)
        for group in groups:  # the models are alive
            dist.destroy_process_group(group)
        del first, second, optimizer
    return {
        **losses,
        "different": differing(trained["tide"], trained["nccl"]),
        "groups": len({row.group for row in report.rows}),
        "fallbacks": [(row.op, row.reason) for row in report.fallbacks],
    }

"""What each rank runs for the ways of training that FSDP2 allows around a step."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from fsdp2_both import Result, full, on_both
from fsdp2_cases import mesh, shard
from fsdp2_models import Case, Net, build, loss_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import tide_backend

FP32 = Case("fp32", precision="fp32")
BF16 = Case("bf16")


def sharded(backend: str, case: Case = BF16) -> Net:
    model = build(case)
    shard(model, case, backend)
    return model


def run_steps(model: nn.Module, optimizer: Any, steps: range) -> Result:
    result: Result = {}
    for step in steps:
        loss = loss_of(model, dist.get_rank(), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result[f"loss {step}"] = loss.item()
    return result


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def optimizer_in_backward(rank: int, world: int) -> None:
    """Each parameter is updated as soon as its gradient is reduced (post-accumulate hooks)."""

    def train(backend: str) -> Result:
        model = sharded(backend)
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
        updates = []

        def update(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()
            updates.append(p)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        losses = {}
        for step in range(3):
            loss = loss_of(model, rank, step)
            loss.backward()
            losses[f"loss {step}"] = loss.item()
        assert len(updates) == 3 * len(optimizers)
        return {**losses, **full(model)}

    on_both(train, tolerance=1e-4)


def clip_gradients(rank: int, world: int) -> None:
    def train(backend: str) -> Result:
        model = sharded(backend, FP32)
        optimizer = adam(model)
        result: Result = {}
        for step in range(3):
            loss_of(model, rank, step).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            result[f"norm {step}"] = norm.full_tensor().item()
            optimizer.step()
            if step < 2:
                optimizer.zero_grad()
        return {**result, **full(model)}

    ours, _ = on_both(train)
    clipped = sum(v.double().square().sum() for k, v in ours.items() if k.startswith("gradient")).sqrt()
    assert abs(clipped.item() - 0.05) < 1e-5, "the gradients are not as short as they were clipped to"


def grad_scaler(rank: int, world: int) -> None:
    """An infinity on one rank makes every rank skip that step."""

    def train(backend: str) -> Result:
        model = sharded(backend, FP32)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        result: Result = {}
        for step in range(3):
            loss = loss_of(model, rank, step)
            scaler.scale(loss * (float("inf") if step == 1 and rank == 0 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            result[f"scale {step}"] = scaler.get_scale()
        assert result["scale 0"] == 1024.0 and result["scale 1"] == 512.0, result
        return {**result, **full(model)}

    on_both(train)


def compiled_blocks(rank: int, world: int) -> None:
    """torch.compile of each block, with inductor; FSDP2's hooks stay outside of the graphs."""

    def train(backend: str) -> Result:
        torch._dynamo.reset()
        model = build(FP32)
        for block in model.blocks:
            block.compile(backend="inductor")
        shard(model, FP32, backend)
        counters = torch._dynamo.utils.counters
        counters.clear()
        losses = run_steps(model, adam(model), range(3))
        assert counters["stats"]["unique_graphs"] > 0 and counters["graph_break"] == {}, counters
        return {**losses, **full(model)}

    on_both(train, tolerance=1e-5, trace=False)


def state_dicts_between_steps(rank: int, world: int) -> None:
    """state_dict and load_state_dict while the root's parameters are still gathered, then on."""

    def train(backend: str) -> Result:
        model = sharded(backend, Case("no-reshard", reshard=False))
        optimizer = adam(model)
        losses = run_steps(model, optimizer, range(2))
        kept = {name: t.clone() for name, t in model.state_dict().items()}
        loss_of(model, rank, 7)  # leaves the parameters gathered
        model.load_state_dict({name: t * 0.5 for name, t in kept.items()})
        halved = full(model, "halved")
        loss_of(model, rank, 8)
        model.load_state_dict(kept)
        return {**losses, **halved, **run_steps(model, optimizer, range(2, 4)), **full(model)}

    on_both(train, tolerance=1e-4)


def checkpoint_in_training(rank: int, world: int, folder: str) -> None:
    """DCP: async_save while training goes on, save, load into a new model; it continues as the first did."""

    def train(backend: str) -> Result:
        model = sharded(backend, FP32)
        optimizer = adam(model)
        run_steps(model, optimizer, range(2))
        at = Path(folder) / backend
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        pending = dcp.async_save(state, checkpoint_id=at / "async")
        first = {**run_steps(model, optimizer, range(2, 4)), **full(model)}
        pending.result()
        result: Result = {f"first {k}": v for k, v in first.items()}
        other = sharded(backend, FP32)
        other_optimizer = adam(other)
        state = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
        dcp.load(state, checkpoint_id=at / "async")
        set_state_dict(
            other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        again = {**run_steps(other, other_optimizer, range(2, 4)), **full(other)}
        for name, value in again.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(first[name])), f"{name} after loading"
        dcp.save({"model": other.state_dict()}, checkpoint_id=at / "sync")
        third = sharded(backend, FP32)
        state = {"model": third.state_dict()}
        dcp.load(state, checkpoint_id=at / "sync")
        third.load_state_dict(state["model"])
        return {**result, **full(third, "third")}

    on_both(train)


def several_input_buffers(rank: int, world: int) -> None:
    """Three reductions' inputs (on tide: the gradients themselves) may be alive at a time."""

    def train(backend: str) -> Result:
        model = sharded(backend)
        model.set_reduce_scatter_max_input_buffers(3)
        return {**run_steps(model, adam(model), range(3)), **full(model)}

    on_both(train, tolerance=1e-4)


def separate_reduce_scatter_group(rank: int, world: int) -> None:
    """Reduce-scatter in a group of its own (FSDP2 makes it with the default backend, tide)."""

    def train(backend: str) -> Result:
        model = sharded(backend)
        if backend == "tide":
            model.set_separate_reduce_scatter_group()
        return {**run_steps(model, adam(model), range(3)), **full(model)}

    _, report = on_both(train, tolerance=1e-4)
    groups = {op: {row.group for row in report.rows if row.op == op} for op in ("all_gather", "reduce_scatter")}
    assert all(len(names) == 1 for names in groups.values()), groups
    assert groups["all_gather"] != groups["reduce_scatter"], groups


class Branches(nn.Module):
    """Each rank uses one of two branches. Of different sizes: like PyTorch, tide cannot tell equal ones apart."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 7), nn.Linear(5, 9)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(x).square().sum()


def _branches(backend: str) -> Branches:
    torch.manual_seed(2)
    return fully_shard(Branches(), mesh=mesh(backend))


def unused_as_zeros(rank: int, world: int) -> None:
    """Ranks that use different parameters, with zeros for what a rank did not use."""

    def train(backend: str) -> Result:
        model = _branches(backend)
        model.set_reduce_scatter_unused_params(True)
        model(torch.full((2, 5), rank + 1.0), rank % 2 == 0).backward()
        return full(model)

    on_both(train)


def unused_without_zeros(rank: int, world: int) -> None:
    """The same without them: every rank hears what does not fit, nobody waits, and the group goes on."""
    model = _branches("tide")
    try:
        model(torch.full((2, 5), rank + 1.0), rank % 2 == 0).backward()
    except tide_backend.UsageError as error:
        assert "reduce_scatter" in str(error) and "layout" in str(error), error
    else:
        raise AssertionError("ranks reduced different parameters without an error")
    model.reset_iter_state()
    model(torch.full((2, 5), rank + 1.0), True).backward()
    want = _plain_gradient(world)
    assert torch.allclose(model.left.weight.grad.full_tensor(), want, rtol=1e-5), "the group is not usable any more"


def _plain_gradient(world: int) -> torch.Tensor:
    torch.manual_seed(2)
    plain = Branches()
    for rank in range(world):
        plain(torch.full((2, 5), rank + 1.0), True).backward()
    return plain.left.weight.grad / world


def nothing_stays_gathered(rank: int, world: int) -> None:
    """Several roots under no_grad: after each forward, none of the slots is held any more."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    gc.collect()
    before = backend.arena_bytes()[0]
    models = [build(BF16) for _ in range(3)]
    for model in models:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh("tide"), reshard_after_forward=True)
    with torch.no_grad():
        for model in models * 2:
            inside: list[int] = []
            hook = model.norm.register_forward_hook(lambda *_, seen=inside: seen.append(backend.arena_bytes()[0]))
            loss_of(model, rank, 0)
            hook.remove()
            assert inside and inside[0] > before
            assert backend.arena_bytes()[0] == before, "gathered parameters outlive a forward without gradients"


def tied_with_empty_shards(rank: int, world: int) -> None:
    """5 tied rows over the ranks, of which the last may hold none: each row is trained, wherever it lies."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 6)
            self.head = nn.Linear(6, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens))

    def train(backend: str) -> Result:
        torch.manual_seed(4)
        model = Tied()
        before = model.embed.weight.detach().clone()
        fully_shard(model, mesh=mesh(backend))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            tokens = (torch.arange(4) + rank + step) % 5
            nn.functional.cross_entropy(model(tokens), (tokens + 1) % 5).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.head.weight is model.embed.weight
        after = model.embed.weight.full_tensor().detach()
        assert ((after - before).abs().amax(dim=1) > 1e-4).all(), "a row was never updated"
        return {"weight": after}

    on_both(train)


def two_models(rank: int, world: int) -> None:
    """Two models by turns, the second trained on what the first gives (a frozen third between them)."""

    def train(backend: str) -> Result:
        first, second = sharded(backend), sharded(backend, FP32)
        frozen = sharded(backend, Case("fp32-frozen", precision="fp32")).requires_grad_(False)
        optimizers = adam(first), adam(second)
        result: Result = {}
        for step in range(3):
            with torch.no_grad():
                goal = loss_of(frozen, rank, step)
            for i, (model, optimizer) in enumerate(zip((first, second), optimizers, strict=True)):
                loss = (loss_of(model, rank, step) - 0.5 * goal).square()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                result[f"loss {i} {step}"] = loss.item()
        return {**result, **full(first, "first"), **full(second, "second")}

    on_both(train, tolerance=1e-4)


def many_tiny_parameters(rank: int, world: int) -> None:
    """300 parameters of one to five elements in one group."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(1 + i % 5)) for i in range(300))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((x * (1 + i % 7) - s).square().sum() for i, s in enumerate(self.scales))

    def train(backend: str) -> Result:
        model = fully_shard(Tiny(), mesh=mesh(backend))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(2):
            model(torch.tensor(rank + step * 0.5)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full(model)

    on_both(train)

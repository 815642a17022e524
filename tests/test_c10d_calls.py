"""Calls of torch.distributed around tide's own: futures, DDP, coalescing, dist.nn, memory from the group."""

from __future__ import annotations

import os
import tempfile
import time
from datetime import timedelta
from typing import Any

import numpy as np
import oracle
import pytest
import rank_process
import torch
import torch.distributed as dist
import torch.distributed.nn as dist_nn
from fsdp2_cases import close, mesh
from rank_data import backend, check_bits, error_of, expect_path, random_bytes, random_values, tensor
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import tide_backend

DEFAULT = dist.distributed_c10d._get_default_group


def chained_futures(rank: int, world: int) -> str:
    """A callback that issues calls of the same kind, waits for one, and has another queued before it."""
    shards = [random_bytes(1, r, 9, torch.float32) for r in range(world)]
    out, inner, queued = (torch.empty(world * 9) for _ in range(3))
    own = tensor(shards[rank], torch.float32)
    held = torch.empty(world)

    def again(future: torch.futures.Future) -> torch.Tensor:
        dist.all_gather_into_tensor(inner, own + 0)  # synchronous, from a callback
        dist.all_gather_into_tensor(queued, own, async_op=True).wait()
        return future.value()[0] * 1

    # The future is taken before the call can be over: rank 0 comes late.
    if rank == 0:
        time.sleep(0.2)
    work = dist.all_gather_into_tensor(out, own, async_op=True)
    chained = work.get_future().then(again)
    # Issued while the callback may be under way; the ranks agree on an order, as for any threads, by waiting.
    for got in (chained.wait(), inner, queued):
        check_bits(got, oracle.all_gather(shards), "chained")
    dist.all_gather_into_tensor(held, torch.full((1,), float(rank)))
    check_bits(held, np.arange(world, dtype=np.float32))

    # A future taken after the end, twice; a call that does not fit says so at once.
    work.wait()
    first, second = work.get_future(), work.get_future()
    if not (first.done() and second.done()):
        raise AssertionError("the future of a finished call is not done")
    return error_of(dist.all_gather_into_tensor, torch.empty(5), own, async_op=True)[1]


def test_future_callbacks_may_issue_and_await_calls() -> None:
    for text in run_ranks(2, chained_futures):
        assert "sizes do not fit" in text


def tide_hook(state, bucket):  # no annotations: DDP compares them with types, and here they are text
    """The mean of a bucket by a reduce-scatter and, in its callback, an all-gather."""
    flat = bucket.buffer()
    world = dist.get_world_size()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % world))
    part = torch.empty(padded.numel() // world)
    work = dist.reduce_scatter_tensor(part, padded, op=dist.ReduceOp.AVG, async_op=True)

    def gather(_: torch.futures.Future) -> torch.Tensor:
        dist.all_gather_into_tensor(padded, part)
        return padded[: flat.numel()]

    return work.get_future().then(gather)


def ddp(rank: int, world: int, views: bool, hook: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    batches = [torch.from_numpy(random_values(4, r, 24, "float32").reshape(4, 6)) / 4096 for r in range(world)]
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    for batch in batches:
        gradients = torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))
        for total, gradient in zip(wanted, gradients, strict=True):
            total += gradient / world
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views, bucket_cap_mb=1)
    hooks = {"allreduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook, "tide": tide_hook}
    if hook:
        wrapped.register_comm_hook(None, hooks[hook])
    for _ in range(2):  # buckets are rebuilt after the first step
        wrapped.zero_grad()
        wrapped(batches[rank]).square().mean().backward()
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if hook == "fp16" else {"rtol": 1e-5, "atol": 1e-7}
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, want, **tolerance)


@pytest.mark.parametrize("hook", ["", "allreduce", "fp16", "tide"])
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_ddp(views: bool, hook: str) -> None:
    run_ranks(2, ddp, views, hook)


def coalescing_with_device(rank: int, world: int) -> None:
    """_coalescing_manager(device=): calls go to the backend one by one, one handle stands for all."""
    cpu = torch.device("cpu")
    after, before = (rank + 1) % world, (rank - 1) % world
    got = torch.empty(3)
    total, gathered = torch.full((2,), float(rank)), torch.empty(world)
    with dist._coalescing_manager(group=DEFAULT(), device=cpu, async_ops=True) as manager:
        dist.irecv(got, before)
        dist.isend(torch.full((3,), float(rank)), after)
    manager.wait()
    check_bits(got, np.full(3, before, np.float32), "send and receive")
    with dist._coalescing_manager(group=DEFAULT(), device=cpu, async_ops=True) as manager:
        dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank)))
    with dist._coalescing_manager(group=DEFAULT(), device=cpu) as second:
        dist.all_reduce(total)
    manager.wait()
    check_bits(gathered, np.arange(world, dtype=np.float32), "all_gather")
    check_bits(total, np.full(2, sum(range(world)), np.float32), "all_reduce")
    with dist._coalescing_manager(group=DEFAULT(), device=cpu, async_ops=True) as second:
        pass
    if second.works:
        raise AssertionError(f"a handle for no call: {second.works}")
    # A ring of mixed sends and receives: one handle, as on nccl.
    left, right = torch.empty(2), torch.empty(2)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), after),
            dist.P2POp(dist.irecv, left, before),
            dist.P2POp(dist.isend, torch.full((2,), float(rank) + 9), before, tag=1),
            dist.P2POp(dist.irecv, right, after, tag=1),
        ]
    )
    for work in works:
        work.wait()
    if len(works) != 1:
        raise AssertionError(f"{len(works)} handles")
    check_bits(left, np.full(2, before, np.float32), "from the left")
    check_bits(right, np.full(2, after + 9, np.float32), "from the right")


@pytest.mark.parametrize("world", [2, 3])
def test_coalescing_with_a_device(world: int) -> None:
    run_ranks(world, coalescing_with_device)


def gradients_through_collectives(rank: int, world: int) -> str:
    x = torch.arange(4.0).requires_grad_()
    (dist_nn.all_reduce(x * (rank + 1)) ** 2).sum().backward()
    factor = sum(r + 1 for r in range(world))
    expected = 2 * factor * np.arange(4, dtype=np.float32) * world * (rank + 1)
    check_bits(x.grad, expected.astype(np.float32), "all_reduce")

    x = torch.full((2,), float(rank + 1), requires_grad=True)
    parts = dist_nn.all_gather(x)
    (torch.stack(parts) * (rank + 1)).sum().backward()
    check_bits(x.grad, np.full(2, factor, np.float32), "all_gather")

    x = torch.arange(float(world)).requires_grad_()
    out = dist_nn.all_to_all_single(torch.empty(world), x)
    (out * (rank + 1)).sum().backward()
    check_bits(x.grad, np.arange(1, world + 1, dtype=np.float32), "all_to_all_single")

    x = torch.ones(1, requires_grad=True)
    return error_of(dist_nn.functional._all_gather_base(torch.empty(world), x).sum().backward)[1]


def test_dist_nn_and_its_name_check() -> None:
    """_all_gather_base looks for the name nccl: its gradient stays an error under any other backend."""
    for text in run_ranks(2, gradients_through_collectives):
        assert "Backend not supported" in text


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="newer than this torch")
def test_gather_single() -> None:
    run_ranks(3, gather_single)


def gather_single(rank: int, world: int) -> None:
    out = torch.empty(world, 2) if rank == 1 else None
    dist.gather_single(torch.full((2,), float(rank)), out, dst=1)
    if rank == 1:
        check_bits(out, np.repeat(np.arange(world, dtype=np.float32), 2))


def memory(rank: int, world: int) -> None:
    cpu = torch.device("cpu")
    ours = backend()
    if not ours.supports_tensor_alloc(cpu):
        raise AssertionError("no tensor allocation")
    out = ours.allocate_tensor(world * 5, dtype=torch.bfloat16, device=cpu)
    if out.shape != (world * 5,) or out.dtype != torch.bfloat16 or not ours.in_arena(out):
        raise AssertionError(f"{out.shape}, {out.dtype}, {ours.in_arena(out)}")
    shards = [random_bytes(7, r, 5, torch.bfloat16) for r in range(world)]
    dist.all_gather_into_tensor(out, tensor(shards[rank], torch.bfloat16))
    check_bits(out, oracle.all_gather(shards))
    expect_path("zero_copy")
    if ours.allocate_tensor(0, dtype=torch.float32, device=cpu).numel() != 0:
        raise AssertionError("an empty tensor is not empty")


def test_memory_from_the_group() -> None:
    run_ranks(2, memory)


def memory_beyond_the_arena(rank: int, world: int) -> tuple[bool, str]:
    options = tide_backend.Options()
    options.arena_bytes = 32 << 20
    rank_process.init("tide", pg_options=options)
    with tempfile.TemporaryFile() as file:  # C++ warnings go to the descriptor, not to Python's warnings
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        big = backend().allocate_tensor(64 << 20, dtype=torch.uint8, device=torch.device("cpu"))
        os.dup2(before, 2)
        os.close(before)
        file.seek(0)
        text = file.read().decode()
    inside = backend().in_arena(big)
    out = big[: 2 * world]
    dist.all_gather_into_tensor(out, torch.full((2,), rank, dtype=torch.uint8))
    check_bits(out, np.repeat(np.arange(world, dtype=np.uint8), 2))
    expect_path("staged")
    dist.destroy_process_group()
    return inside, text


def test_memory_beyond_the_arena_is_ordinary_and_says_so() -> None:
    for inside, text in run_ranks(2, memory_beyond_the_arena, backend=None, fresh=True):
        assert not inside and "ordinary memory: a slot of 67108864 bytes does not fit" in text, text


def fsdp2_with_group_memory(rank: int, world: int) -> list[str]:
    """Stock FSDP2 objects, memory from the group: tide's plain all-gather finds its output in the arena."""
    from torch.distributed.fsdp import fully_shard

    def train(name: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5))
        fully_shard(model, mesh=mesh(name))
        if name == "tide":
            model.set_allocate_memory_from_process_group_for_comm(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * rank + step)
            model(torch.randn(4, 7, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.full_tensor().detach() for p in model.parameters()]

    backend().reset_totals()
    for ours, theirs in zip(train("tide"), train("gloo"), strict=True):
        close(ours, theirs, 1e-6, "parameter")
    return sorted({f"{t['op']} {t['path']}" for t in backend().totals()})


def test_stock_fsdp2_with_memory_from_the_group() -> None:
    for calls in run_ranks(2, fsdp2_with_group_memory):
        assert "all_gather zero_copy" in calls and "reduce_scatter staged" in calls, calls


def later_timeout(rank: int, world: int) -> tuple[str, float]:
    """The backend's own setter, which every version has; the new value holds for the inner group as well."""
    dist.all_gather_into_tensor(torch.empty(world), torch.ones(1))
    backend().set_timeout(timedelta(seconds=1.5))
    dist.barrier()
    if rank != 0:
        time.sleep(2.5)
        return "", 0.0
    start = time.monotonic()
    kind, _ = error_of(dist.all_gather_into_tensor, torch.empty(world), torch.ones(1))
    return kind, time.monotonic() - start


def test_set_timeout_of_the_backend() -> None:
    kind, seconds = run_ranks(2, later_timeout, fresh=True)[0]
    assert kind == "CollectiveTimeoutError" and 1 < seconds < 2.4


def recorded_by_pytorch(rank: int, world: int) -> dict[str, Any]:
    from torch._C import _distributed_c10d as c10d

    recorder = c10d.FlightRecorderHook.attach(DEFAULT())
    dist.all_gather_into_tensor(torch.empty(world), torch.ones(1))
    dist.all_reduce(torch.ones(1))
    work = dist.reduce_scatter_tensor(torch.empty(1), torch.ones(world), async_op=True)
    work.wait()
    return {"calls": dir(recorder)}


def has_recorder() -> bool:
    return hasattr(torch._C._distributed_c10d, "FlightRecorderHook")


@pytest.mark.skipif(not has_recorder(), reason="newer than this torch")
def test_pytorchs_flight_recorder_attaches() -> None:
    for got in run_ranks(2, recorded_by_pytorch, fresh=True):
        assert got["calls"]

"""What tide hands to its inner backend works as on that backend alone: the rest of torch.distributed."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import numpy as np
import oracle
import pytest
import rank_process
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_data import backend, check_bits, error_of, expect_path, random_bytes, random_values, tensor
from ranks import run_ranks

import tide_backend

# Older ones raise for every backend that is not called gloo.
VERSION = tuple(int(v) for v in torch.__version__.split(".")[:2])
MONITORED = VERSION >= (2, 14)


def row(rank: int, n: int = 5) -> np.ndarray:
    return np.arange(n, dtype=np.float32) + 10 * rank


def expect(got: torch.Tensor, want: Any, what: str) -> None:
    np.testing.assert_array_equal(got.numpy(), np.asarray(want, dtype=got.numpy().dtype), err_msg=what)


def collectives(rank: int, world: int) -> None:
    rows = [row(r) for r in range(world)]
    own = torch.from_numpy(rows[rank].copy())

    for source in range(world):
        value = own.clone()
        dist.broadcast(value, source)
        expect(value, rows[source], f"broadcast from {source}")

    for op, want in [
        (dist.ReduceOp.SUM, sum(rows)),
        (dist.ReduceOp.MAX, rows[-1]),
        (dist.ReduceOp.MIN, rows[0]),
        (dist.ReduceOp.AVG, sum(rows) / world),
    ]:
        value = own.clone()
        dist.all_reduce(value, op)
        expect(value, want, f"all_reduce {op}")

    value = own.clone()
    dist.reduce(value, 1)
    if rank == 1:
        expect(value, sum(rows), "reduce")

    parts = [torch.empty(5) for _ in range(world)]
    dist.all_gather(parts, own)
    expect(torch.stack(parts), rows, "all_gather")

    dist.gather(own, parts if rank == 0 else None, dst=0)
    if rank == 0:
        expect(torch.stack(parts), rows, "gather")

    value = torch.empty(5)
    dist.scatter(value, [torch.from_numpy(r * 2) for r in rows] if rank == 0 else None, src=0)
    expect(value, rows[rank] * 2, "scatter")

    dist.reduce_scatter(value, [own + q for q in range(world)])
    expect(value, sum(rows) + world * rank, "reduce_scatter of a list")
    dist.barrier()
    if MONITORED:
        dist.monitored_barrier()


@pytest.mark.parametrize("world", [2, 4])
def test_collectives(world: int) -> None:
    run_ranks(world, collectives)


def point_to_point(rank: int, world: int) -> None:
    after, before = (rank + 1) % world, (rank - 1) % world
    value = torch.empty(5)
    if rank % 2:
        dist.recv(value, before)
        dist.send(torch.from_numpy(row(rank)), after)
    else:
        dist.send(torch.from_numpy(row(rank)), after)
        dist.recv(value, before)
    expect(value, row(before), "send and recv")

    works = [dist.isend(torch.from_numpy(row(rank)), after, tag=3), dist.irecv(value.zero_(), before, tag=3)]
    for work in works:
        work.wait()
    expect(value, row(before), "isend and irecv")

    left, right = torch.empty(5), torch.empty(5)
    ring = [
        dist.P2POp(dist.isend, torch.from_numpy(row(rank)), after),
        dist.P2POp(dist.irecv, left, before),
        dist.P2POp(dist.isend, torch.from_numpy(row(rank) + 100), before, tag=1),
        dist.P2POp(dist.irecv, right, after, tag=1),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    expect(left, row(before), "batch, from the left")
    expect(right, row(after) + 100, "batch, from the right")

    if rank == 0:
        total = torch.zeros(5)
        for _ in range(world - 1):
            dist.recv(value)  # from anybody
            total += value
        expect(total, sum(row(r) for r in range(1, world)), "recv from anybody")
    else:
        dist.send(torch.from_numpy(row(rank)), 0)


def test_point_to_point() -> None:
    run_ranks(4, point_to_point)


def objects(rank: int, world: int) -> None:
    mine = {"rank": rank, "text": "x" * (rank * 100)}
    every = [{"rank": r, "text": "x" * (r * 100)} for r in range(world)]
    got: list[Any] = [None] * world
    dist.all_gather_object(got, mine)
    shared = [mine, rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    gathered: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    part: list[Any] = [None]
    dist.scatter_object_list(part, every if rank == 0 else None, src=0)
    for what, value, want in [
        ("all_gather_object", got, every),
        ("broadcast_object_list", shared, [every[1], 1]),
        ("gather_object", gathered, every if rank == 0 else None),
        ("scatter_object_list", part, [every[rank]]),
    ]:
        if value != want:
            raise AssertionError(f"{what}: got {value}, expected {want}")


def test_objects() -> None:
    run_ranks(3, objects)


def coalesced(rank: int, world: int) -> None:
    shards = [[random_bytes(i, r, 10 + i, torch.float32) for r in range(world)] for i in range(3)]
    outs = [torch.empty(world * (10 + i)) for i in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for i, out in enumerate(outs):
            dist.all_gather_into_tensor(out, tensor(shards[i][rank], torch.float32))
    manager.wait()
    for i, out in enumerate(outs):
        check_bits(out, oracle.all_gather(shards[i]), f"coalesced all_gather {i}")

    inputs = [[random_values(i, r, world * (3 + i), "float32") for r in range(world)] for i in range(3)]
    outs = [torch.empty(3 + i) for i in range(3)]
    with dist._coalescing_manager():
        for i, out in enumerate(outs):
            dist.reduce_scatter_tensor(out, tensor(inputs[i][rank], torch.float32))
    for i, out in enumerate(outs):
        check_bits(out, oracle.reduce_scatter(inputs[i], "float32")[rank], f"coalesced reduce_scatter {i}")

    values = [torch.full((4,), float(rank + i)) for i in range(2)]
    with dist._coalescing_manager():
        for value in values:
            dist.all_reduce(value)
    for i, value in enumerate(values):
        expect(value, np.full(4, sum(r + i for r in range(world))), f"coalesced all_reduce {i}")


def test_coalescing_manager() -> None:
    run_ranks(2, coalesced)


def cut_off(rank: int, world: int) -> None:
    """An error ends the calls before their handle is there; it is not that of the next ones."""
    cpu = torch.device("cpu")
    with pytest.raises(tide_backend.UsageError), dist._coalescing_manager(device=cpu, async_ops=True):
        wrong = dist.all_to_all_single(torch.empty(world), torch.ones(2 * world), async_op=True)
        wrong.wait()
    out = torch.empty(world)
    with dist._coalescing_manager(device=cpu, async_ops=True) as manager:
        dist.all_to_all_single(out, torch.arange(float(world)), async_op=True)
    manager.wait()
    expect(out, np.full(world, float(rank)), "after an error")


def test_an_error_among_coalesced_calls_is_not_the_next_ones() -> None:
    run_ranks(2, cut_off)


def functional_calls(rank: int, world: int) -> None:
    group = dist.distributed_c10d._get_default_group()
    shards = [random_values(1, r, 12, "float32").reshape(4, 3) for r in range(world)]
    own = torch.from_numpy(shards[rank].copy())
    gathered = functional.all_gather_tensor(own, 0, group)
    check_bits(functional.wait_tensor(gathered), np.concatenate(shards), "all_gather_tensor")
    by_column = functional.all_gather_tensor(own, 1, group)
    check_bits(functional.wait_tensor(by_column), np.concatenate(shards, axis=1), "all_gather_tensor, dim 1")

    packed = [s.reshape(-1)[: 12 // world * world] for s in shards]
    scattered = functional.reduce_scatter_tensor(torch.from_numpy(packed[rank].copy()), "sum", 0, group)
    check_bits(functional.wait_tensor(scattered), oracle.reduce_scatter(packed, "float32")[rank])

    splits = [[r + q for q in range(world)] for r in range(world)]
    inputs = [random_bytes(2, r, sum(splits[r]), torch.float32) for r in range(world)]
    received = [splits[r][rank] for r in range(world)]
    source = tensor(inputs[rank], torch.float32)
    swapped = functional.all_to_all_single(source, received, splits[rank], group)
    check_bits(functional.wait_tensor(swapped), oracle.all_to_all(inputs, splits)[rank], "all_to_all_single")

    total = functional.wait_tensor(functional.all_reduce(torch.full((3,), float(rank)), "sum", group))
    expect(total, np.full(3, sum(range(world))), "all_reduce")
    expect(functional.broadcast(torch.full((2,), float(rank)), 1, group) + 0, np.ones(2), "broadcast")
    lists = functional.all_gather_into_tensor_coalesced([own, own * 2], group)
    for factor, whole in zip((1, 2), lists, strict=True):
        check_bits(functional.wait_tensor(whole), np.concatenate(shards) * np.float32(factor), "coalesced")


def test_functional_collectives() -> None:
    run_ranks(2, functional_calls)


def futures(rank: int, world: int) -> None:
    shards = [random_bytes(3, r, 7, torch.float32) for r in range(world)]
    out = torch.empty(world * 7)
    work = dist.all_gather_into_tensor(out, tensor(shards[rank], torch.float32), async_op=True)
    chained = work.get_future().then(lambda f: f.value()[0] * 1)
    check_bits(chained.wait(), oracle.all_gather(shards), "future")
    check_bits(work.result()[0] if isinstance(work.result(), list) else work.result(), out.numpy(), "result")
    # In 2.11 no backend's Work.exception() can be called from Python.
    if not work.is_success() or (VERSION >= (2, 13) and work.exception() is not None):
        raise AssertionError("a good call looks failed")


def test_futures() -> None:
    run_ranks(2, futures)


def ddp_step(rank: int, world: int) -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    batches = [torch.from_numpy(random_values(4, r, 24, "float32").reshape(4, 6)) / 4096 for r in range(world)]
    # The expectation, without any communication: the mean of the gradients of every rank's batch.
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    for batch in batches:
        gradients = torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))
        for total, gradient in zip(wanted, gradients, strict=True):
            total += gradient / world
    wrapped = DistributedDataParallel(model)
    wrapped(batches[rank]).square().mean().backward()
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, want, rtol=1e-5, atol=1e-7)
    return [float(p.grad.sum()) for p in model.parameters()]


def test_ddp_step() -> None:
    first, second = run_ranks(2, ddp_step)
    assert first == second


def without_shared_memory(rank: int, world: int) -> list[str]:
    """Options.shared_memory False: the same results, by the inner backend, with the reason."""
    options = tide_backend.Options()
    options.shared_memory = False
    rank_process.init("tide", pg_options=options)
    reasons = []
    theirs = oracle.Layout(world, [5, 0, 3], [9, 0, 3], 4)
    mine = tide_backend.ParameterLayout(world, [5, 0, 3], [9, 0, 3], 4)

    shards = [random_bytes(1, r, 8, torch.float32) for r in range(world)]
    out = torch.zeros(theirs.gathered_numel)
    tide_backend.apply_layout(out, mine)
    dist.all_gather_into_tensor(out, tensor(shards[rank], torch.float32))
    check_bits(out, oracle.all_gather(shards, theirs), "all_gather with a layout")
    reasons.append(expect_path("inner")["reason"])

    grads = [[np.full(n, r + i + 0.5, np.float32) for i, n in enumerate(theirs.numels)] for r in range(world)]
    source = torch.zeros(1).bfloat16().expand(world * 8)
    tensors = [torch.from_numpy(g.copy()).bfloat16() for g in grads[rank]]
    tide_backend.apply_layout(source, mine, tensors=tensors)
    out = torch.empty(8)
    dist.reduce_scatter_tensor(out, source, op=dist.ReduceOp.AVG)
    check_bits(out, oracle.reduce_scatter(grads, "float32", theirs, scale=1 / world)[rank], "reduce_scatter")
    reasons.append(expect_path("inner")["reason"])

    out = torch.empty(2, 3, dtype=torch.float32)
    dist.reduce_scatter_tensor(out, torch.full((world * 2, 3), rank + 1.0).bfloat16())
    check_bits(out, np.full((2, 3), sum(range(1, world + 1)), np.float32), "bfloat16 into two dimensions of float32")

    inputs = [random_bytes(2, r, world * 3, torch.float32) for r in range(world)]
    out = torch.empty(world * 3)
    dist.all_to_all_single(out, tensor(inputs[rank], torch.float32))
    check_bits(out, oracle.all_to_all(inputs, [[3] * world] * world)[rank], "all_to_all")
    reasons.append(expect_path("inner")["reason"])

    slot, why = backend().slot(100)
    if slot is not None:
        raise AssertionError("a slot without shared memory")
    dist.destroy_process_group()
    return [*reasons, why]


def test_without_shared_memory_everything_goes_inner_and_says_why() -> None:
    for reasons in run_ranks(2, without_shared_memory, backend=None):
        assert all("switched off" in reason for reason in reasons), reasons


def timeout_setter(rank: int, world: int) -> tuple[str, float]:
    dist.all_gather_into_tensor(torch.empty(world), torch.ones(1))
    dist.set_timeout(timedelta(seconds=1.5))
    dist.barrier()
    if rank != 0:
        time.sleep(2.5)
        return "", 0.0
    start = time.monotonic()
    kind, _ = error_of(dist.all_gather_into_tensor, torch.empty(world), torch.ones(1))
    return kind, time.monotonic() - start


@pytest.mark.skipif(not hasattr(dist, "set_timeout"), reason="this torch ignores plugins when it sets timeouts")
def test_a_new_timeout_holds() -> None:
    kind, seconds = run_ranks(2, timeout_setter, fresh=True)[0]
    assert kind == "CollectiveTimeoutError" and 1 < seconds < 3


def errors_of_both(rank: int, world: int) -> dict[str, list[tuple[str, str]]]:
    """What gloo refuses, through tide and without: a call that tide hands down, and one that it never carries."""
    gloo = dist.new_group(backend="gloo")
    bitwise, x = dist.ReduceOp.BXOR, torch.ones(2 * world)
    return {
        name: [error_of(call, *tensors, op=bitwise, group=group) for group in (None, gloo)]
        for name, call, tensors in (
            ("scatter", dist.reduce_scatter_tensor, (torch.empty(2), x)),
            ("reduce", dist.all_reduce, (x,)),
        )
    }


def test_errors_of_the_inner_backend_say_whose_call_it_was() -> None:
    for rank, errors in enumerate(run_ranks(2, errors_of_both)):
        (kind, text), (kind_of_gloo, text_of_gloo) = errors["scatter"]
        assert kind == kind_of_gloo and "BXOR" in text_of_gloo
        assert text.startswith(text_of_gloo.splitlines()[0])
        assert f'tide[rank {rank}/2, group "' in text and ", reduce_scatter #" in text
        assert "handed to the inner backend (reduction other is left to the inner backend)" in text
        ours, of_gloo = errors["reduce"]
        assert ours == of_gloo and "tide" not in ours[1]


def refused_devices(rank: int, world: int) -> tuple[list[tuple[str, str]], list[dict[str, Any]]]:
    """Tensors that neither tide nor an inner backend carries: the calls go by, on the record."""
    rank_process.init("tide", pg_options=tide_backend.Options(cuda=False))
    there, here = torch.empty(world, device="meta"), torch.ones(world)
    one = torch.empty(1, device="meta")
    errors = [
        error_of(backend()._allgather_base, there, one),
        error_of(backend()._reduce_scatter_base, one, there),
        error_of(backend().alltoall_base, there, here, [], []),
    ]
    records = backend().records()
    dist.destroy_process_group()
    return errors, records


def test_calls_that_go_by_are_recorded_with_the_reason() -> None:
    for errors, records in run_ranks(2, refused_devices, backend=None):
        assert errors == [("RuntimeError", 'tide has no inner backend for "meta" tensors; expected cpu or cuda')] * 3
        assert [(r["device"], r["op"], r["path"], r["state"]) for r in records] == [
            ("cuda", op, "inner", "failed") for op in ("all_gather", "reduce_scatter", "all_to_all")
        ]
        assert [r["reason"] for r in records] == [
            *["tide carries CPU and CUDA tensors; got one on meta"] * 2,
            "an input on cpu and an output on meta",
        ]


def layout_without_a_sum(rank: int, world: int) -> tuple[str, str]:
    rank_process.init("tide", pg_options=tide_backend.Options(cuda=False))
    out, rows = torch.empty(3, device="meta"), torch.empty(3 * world, device="meta")
    tide_backend.apply_layout(rows, tide_backend.ParameterLayout(world, [3]))
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.MAX
    error = error_of(backend()._reduce_scatter_base, out, rows, options)
    dist.destroy_process_group()
    return error


def test_a_layout_without_a_sum_is_refused_where_tide_does_not_carry_the_call() -> None:
    for rank, (kind, text) in enumerate(run_ranks(2, layout_without_a_sum, backend=None)):
        assert kind == "UsageError"
        assert text.startswith(f"tide[rank {rank}/2, group ")
        assert text.endswith("reduce_scatter]: a layout with max; expected SUM, AVG or PREMUL_SUM; pack the input")


@pytest.mark.parametrize("cuda", [False, True])
def test_a_rank_without_cuda_calls_says_so_where_the_others_look(cuda: bool) -> None:
    """Before anybody asks: the others' handshake would otherwise wait for it."""
    store = dist.HashStore()
    made = tide_backend._C.TideBackend(store, 1, 2, tide_backend.Options(cuda=cuda), lambda *_: None)
    key = "cuda//shm/contact/1"
    assert store.check([key]) is not cuda
    if not cuda:
        assert store.get(key) == b"failed: CUDA calls are left to nccl (TIDE_CUDA_TRANSPORT=0 or Options.cuda)"
    del made

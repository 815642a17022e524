"""All-gather, reduce-scatter and all-to-all of one group mixed: in threads, outstanding, a thousand times."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable

import numpy as np
import oracle
import torch
import torch.distributed as dist
from rank_data import backend, check_bits, random_bytes, random_values, small_staging, tensor
from ranks import run_ranks

# A check of one finished call.
Check = Callable[[], None]


def gather(rank: int, world: int, seed: int, numel: int, in_arena: bool, asynchronous: bool) -> Check:
    shards = [random_bytes(seed, r, numel, torch.int32) for r in range(world)]
    out = torch.empty(world * numel, dtype=torch.int32)
    if in_arena:
        slot, reason = backend().slot(max(out.nbytes, 1))
        if slot is None:
            raise AssertionError(reason)
        out = slot[: out.nbytes].view(torch.int32)
    work = dist.all_gather_into_tensor(out, tensor(shards[rank], torch.int32), async_op=asynchronous)
    return check_later(work, out, oracle.all_gather(shards), f"all_gather, seed {seed}")


def scatter(rank: int, world: int, seed: int, numel: int, asynchronous: bool) -> Check:
    inputs = [random_values(seed, r, world * numel, "bfloat16") for r in range(world)]
    out = torch.empty(numel)
    work = dist.reduce_scatter_tensor(out, tensor(inputs[rank], torch.bfloat16), async_op=asynchronous)
    want = oracle.reduce_scatter(inputs, "bfloat16", out_kind="float32")[rank]
    return check_later(work, out, want, f"reduce_scatter, seed {seed}")


def swap(rank: int, world: int, seed: int, numel: int, asynchronous: bool) -> Check:
    drawn = np.random.default_rng(seed).integers(0, max(2 * numel // world, 2), (world, world))
    splits = drawn.tolist()
    inputs = [random_bytes(seed, r, sum(splits[r]), torch.int32) for r in range(world)]
    received = [splits[r][rank] for r in range(world)]
    out = torch.empty(sum(received), dtype=torch.int32)
    source = tensor(inputs[rank], torch.int32)
    work = dist.all_to_all_single(out, source, received, splits[rank], async_op=asynchronous)
    return check_later(work, out, oracle.all_to_all(inputs, splits)[rank], f"all_to_all, seed {seed}")


def check_later(work: dist.Work | None, out: torch.Tensor, want: np.ndarray, what: str) -> Check:
    def check() -> None:
        if work is not None:
            work.wait()
        check_bits(out, want, what)

    return check


def call(rank: int, world: int, kind: int, seed: int, numel: int, asynchronous: bool) -> Check:
    if kind == 0:
        return gather(rank, world, seed, numel, seed % 2 == 0, asynchronous)
    if kind == 1:
        return scatter(rank, world, seed, numel, asynchronous)
    return swap(rank, world, seed, numel, asynchronous)


def threads(rank: int, world: int, calls: int) -> None:
    """One thread per kind of call: calls of one kind come in the same order on every rank, kinds in any."""
    failures: list[str] = []

    def issue(kind: int) -> None:
        try:
            generator = np.random.default_rng(kind)
            for n in range(calls):
                numel = int(generator.integers(1, 30_000))
                call(rank, world, kind, n, numel, asynchronous=n % 3 == 0)()
        except BaseException:
            failures.append(traceback.format_exc())

    workers = [threading.Thread(target=issue, args=(kind,), daemon=True) for kind in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(50)
        if worker.is_alive():
            failures.append("a thread did not finish")
    if failures:
        raise AssertionError("\n".join(failures))


def test_three_threads() -> None:
    run_ranks(4, threads, 30)


def threads_in_small_chunks(rank: int, world: int) -> None:
    small_staging()
    threads(rank, world, 15)
    dist.destroy_process_group()


def test_three_threads_and_many_chunks() -> None:
    run_ranks(3, threads_in_small_chunks, backend=None)


def issued_in_any_order(rank: int, world: int) -> None:
    """Kinds of calls interleaved differently on each rank: they are separate channels."""
    for round_number in range(10):
        order = [(kind + rank + round_number) % 3 for kind in range(3)]
        checks = [call(rank, world, kind, 100 * round_number + kind, 5000, asynchronous=True) for kind in order]
        for check in checks[:: -1 if rank % 2 else 1]:
            check()


def test_kinds_of_calls_may_come_in_any_order() -> None:
    run_ranks(4, issued_in_any_order)


def a_thousand(rank: int, world: int) -> float:
    sizes = np.random.default_rng(4)
    start = time.monotonic()
    pending: list[Check] = []
    for n in range(1000):
        numel = int(sizes.choice([0, 1, 2, 5, 33, 257, 1500]))
        pending.append(call(rank, world, n % 3, n, numel, asynchronous=n % 5 == 0))
        if len(pending) > 6:
            pending.pop(0)()
    for check in pending:
        check()
    return time.monotonic() - start


def test_a_thousand_calls_of_varying_sizes() -> None:
    run_ranks(4, a_thousand, timeout=120)


def late_by_turns(rank: int, world: int) -> None:
    """Each rank lags in turn, so that every kind of wait happens on every rank."""
    for n in range(24):
        if rank == n % world:
            time.sleep(0.01)
        call(rank, world, n % 3, n, 20_000, asynchronous=False)()


def test_ranks_that_lag_in_turn() -> None:
    run_ranks(4, late_by_turns)

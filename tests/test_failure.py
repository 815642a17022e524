"""Killed, stopped and diverging ranks, and Ctrl-C: the others raise in bounded time and say who and why."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_data import backend, error_of
from ranks import run_ranks

VICTIM = 1


def issue(kind: str, world: int, asynchronous: bool = False) -> None:
    numel = 500_000
    if kind == "all_gather":
        work = dist.all_gather_into_tensor(torch.empty(world * numel), torch.ones(numel), async_op=asynchronous)
    elif kind == "reduce_scatter":
        work = dist.reduce_scatter_tensor(torch.empty(numel), torch.ones(world * numel), async_op=asynchronous)
    elif kind == "maximum":  # the inner backend's, once the ranks have agreed on it
        out, whole = torch.empty(numel), torch.ones(world * numel)
        work = dist.reduce_scatter_tensor(out, whole, op=dist.ReduceOp.MAX, async_op=asynchronous)
    else:
        work = dist.all_to_all_single(torch.empty(world * numel), torch.ones(world * numel), async_op=asynchronous)
    if work is not None:
        work.wait()


def timed_error(call: Callable[..., Any], *args: Any) -> tuple[str, str, float]:
    start = time.monotonic()
    kind, text = error_of(call, *args)
    return kind, text, time.monotonic() - start


def lose_a_rank(
    rank: int, world: int, how: int, kind: str, asynchronous: bool
) -> tuple[list[tuple[str, str, float]], int]:
    issue("all_gather", world)
    issue(kind, world)
    if rank == VICTIM:
        os.kill(os.getpid(), how)
        time.sleep(60)
    first = timed_error(issue, kind, world, asynchronous)
    return [first, timed_error(issue, kind, world), timed_error(issue, "all_gather", world)], os.getpid()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_a_killed_rank_is_named_at_once(kind: str, asynchronous: bool) -> None:
    results = run_ranks(4, lose_a_rank, signal.SIGKILL, kind, asynchronous, fresh=True, dies={VICTIM}, timeout=40)
    for result in results[:VICTIM] + results[VICTIM + 1 :]:
        (name, text, seconds), later, other = result[0]
        assert name == "PeerError", text
        assert f"rank {VICTIM} (pid" in text or "gave up" in text or "aborted" in text, text
        assert f"rank {VICTIM}" in text and kind in text, text
        assert "last" in text, text  # what that rank did last
        assert seconds < 2, f"{seconds} s"
        for again in (later, other):
            assert again[0] == "PeerError" and again[2] < 0.5, again
            assert "destroy the group and make a new one" in again[1]


def in_the_middle(rank: int, world: int) -> tuple[str, str, float]:
    """The victim dies while data flows, not between two calls."""
    from rank_data import small_staging

    small_staging()
    if rank == VICTIM:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()
    while time.monotonic() - start < 20:
        kind, text, seconds = timed_error(issue, "reduce_scatter", world)
        if kind:
            return kind, text, seconds
    return "", "no error in 20 s", 20.0


def test_a_rank_killed_in_the_middle() -> None:
    results = run_ranks(4, in_the_middle, backend=None, fresh=True, dies={VICTIM}, timeout=40)
    for kind, text, seconds in results[:VICTIM] + results[VICTIM + 1 :]:
        assert kind == "PeerError" and f"rank {VICTIM}" in text, text
        assert seconds < 3


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_stopped_rank_is_named_within_the_timeout(kind: str) -> None:
    results = run_ranks(
        3, lose_a_rank, signal.SIGSTOP, kind, False, fresh=True, dies={VICTIM}, group_timeout=2, timeout=40
    )
    for result in results[:VICTIM] + results[VICTIM + 1 :]:
        name, text, seconds = result[0][0]
        assert name in ("CollectiveTimeoutError", "PeerError"), text
        assert f"rank {VICTIM} (pid" in text, text
        assert "last" in text
        assert 1 < seconds < 4
    texts = [r[0][0] for r in results[:VICTIM] + results[VICTIM + 1 :]]
    assert any(name == "CollectiveTimeoutError" for name, _, _ in texts)


def never_came(rank: int, world: int) -> tuple[str, str, float]:
    if rank == VICTIM:
        time.sleep(4)
        return "", "", 0.0
    return timed_error(issue, "all_gather", world)


def test_a_rank_that_never_makes_its_first_call() -> None:
    results = run_ranks(3, never_came, fresh=True, group_timeout=2, timeout=30)
    for rank in (0, 2):
        kind, text, seconds = results[rank]
        assert kind in ("CollectiveTimeoutError", "PeerError"), (kind, text)
        assert f"rank {VICTIM}" in text and 1 < seconds < 4, (text, seconds)


def left_early(rank: int, world: int) -> tuple[str, str, float]:
    issue("all_gather", world)
    if rank == VICTIM:
        dist.destroy_process_group()
        return "", "", 0.0
    return timed_error(issue, "all_gather", world)


def test_a_rank_that_left_the_group() -> None:
    results = run_ranks(3, left_early, fresh=True)
    for rank in (0, 2):
        kind, text, seconds = results[rank]
        assert kind == "PeerError" and f"rank {VICTIM}" in text and seconds < 2, text


def different_order(rank: int, world: int) -> tuple[str, str, float]:
    issue("all_gather", world)
    order = ["all_gather", "reduce_scatter"] if rank == 0 else ["reduce_scatter", "all_gather"]
    return timed_error(issue, order[0], world)


def test_a_wrong_order_of_calls_says_what_each_rank_did_last() -> None:
    results = run_ranks(2, different_order, fresh=True, group_timeout=2, timeout=30)
    for rank, (kind, text, seconds) in enumerate(results):
        assert kind in ("CollectiveTimeoutError", "PeerError"), text
        assert f"rank {1 - rank}" in text
        assert ("reduce_scatter" if rank == 0 else "all_gather") in text, text
        assert seconds < 4
    assert any(kind == "CollectiveTimeoutError" for kind, _, _ in results)


def one_call_more(rank: int, world: int) -> tuple[str, str, float]:
    issue("all_gather", world)
    issue("reduce_scatter", world)
    if rank == 0:
        return timed_error(issue, "reduce_scatter", world)
    time.sleep(3)
    return "", "", 0.0


def test_a_missing_call_times_out_and_names_the_last_one() -> None:
    kind, text, seconds = run_ranks(3, one_call_more, fresh=True, group_timeout=1.5, timeout=30)[0]
    assert kind == "CollectiveTimeoutError", text
    assert "rank 1 (pid" in text and "rank 2 (pid" in text and "reduce_scatter #" in text
    assert 1 < seconds < 2.5


def interrupt_in(seconds: float) -> list[float]:
    """Ctrl-C after that long; the list gets the moment."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(seconds, send).start()
    return sent


def interrupted(rank: int, world: int, kind: str) -> tuple[str, str, float]:
    issue("all_gather", world)
    if rank != 0:
        time.sleep(2)
        return timed_error(issue, kind, world)
    sent = interrupt_in(0.4)
    try:
        issue(kind, world)
    except KeyboardInterrupt:
        return "KeyboardInterrupt", "", time.monotonic() - sent[0]
    return "", "not interrupted", 0.0


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all", "maximum"])
def test_ctrl_c_ends_a_wait(kind: str) -> None:
    results = run_ranks(2, interrupted, kind, fresh=True)
    assert results[0][0] == "KeyboardInterrupt" and results[0][2] < 0.5, results
    name, text, seconds = results[1]
    assert name == "PeerError" and "rank 0" in text and "interrupted" in text and seconds < 1, text


def interrupted_work(rank: int, world: int) -> tuple[str, float, bool]:
    issue("all_gather", world)
    if rank != 0:
        time.sleep(1.5)
    out = torch.zeros(world)
    work = dist.all_gather_into_tensor(out, torch.full((1,), rank + 1.0), async_op=True)
    seconds, name = 0.0, ""
    if rank == 0:
        sent = interrupt_in(0.4)
        try:
            work.wait()
        except KeyboardInterrupt:
            name, seconds = "KeyboardInterrupt", time.monotonic() - sent[0]
    work.wait()
    return name, seconds, out.tolist() == [r + 1.0 for r in range(world)]


def test_ctrl_c_ends_work_wait_and_the_call_goes_on() -> None:
    results = run_ranks(2, interrupted_work, fresh=True)
    assert results[0][0] == "KeyboardInterrupt" and results[0][1] < 0.5, results
    assert all(good for _, _, good in results)


def impatient(rank: int, world: int) -> tuple[str, float, list[float]]:
    issue("all_gather", world)
    if rank == 1:
        time.sleep(1)
    out = torch.zeros(world)
    work = dist.all_gather_into_tensor(out, torch.full((1,), rank + 1.0), async_op=True)
    start = time.monotonic()
    text = error_of(work.wait, timedelta(seconds=0.2))[1] if rank == 0 else ""
    took = time.monotonic() - start
    work.wait()
    return text, took, out.tolist()


def test_a_wait_with_a_timeout_of_its_own() -> None:
    results = run_ranks(2, impatient)
    assert "not over after 200 ms" in results[0][0] and results[0][1] < 0.7
    assert [r[2] for r in results] == [[1.0, 2.0]] * 2


def aborts(rank: int, world: int) -> tuple[str, str, float]:
    issue("all_gather", world)
    if rank == 0:
        group = dist.distributed_c10d._get_default_group()
        threading.Timer(0.3, group.abort).start()
        return timed_error(issue, "all_gather", world)
    time.sleep(1)
    return timed_error(issue, "all_gather", world)


def test_abort_from_another_thread_ends_the_wait() -> None:
    for kind, text, seconds in run_ranks(2, aborts, fresh=True):
        assert kind == "PeerError" and "aborted" in text and seconds < 1.5, text


def shm_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_a_crash_leaves_no_file_behind() -> None:
    before = shm_files()
    run_ranks(2, lose_a_rank, signal.SIGKILL, "all_gather", False, fresh=True, dies={VICTIM}, timeout=40)
    assert {f for f in shm_files() - before if "tide" in f} == set()


def records_failure(rank: int, world: int) -> list[str]:
    issue("all_gather", world)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    error_of(issue, "all_gather", world)
    return [r["state"] for r in backend().records()]


def test_the_recorder_shows_the_failed_call() -> None:
    assert run_ranks(2, records_failure, fresh=True, dies={VICTIM})[0] == ["done", "failed"]

"""The harness itself: a failure on any rank is a failure, with that rank's traceback."""

from __future__ import annotations

import os
import signal
import time

import pytest
from ranks import RanksFailed, run_ranks


def answer(rank: int, world: int, more: int) -> tuple[int, int, int]:
    return rank, world, more


def fail_on(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        raise KeyError(f"rank {rank} broke")


def die_on(rank: int, world: int, bad: int) -> str:
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def hang_on(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        time.sleep(60)


def pid(rank: int, world: int) -> int:
    return os.getpid()


def backend_and_sum(rank: int, world: int) -> tuple[str, float]:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_backend(), float(total)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(2, answer, 7, backend=None) == [(0, 2, 7), (1, 2, 7)]


@pytest.mark.parametrize("bad", [0, 1])
def test_one_failing_rank_fails_the_job(bad: int) -> None:
    with pytest.raises(RanksFailed, match=rf"rank {bad} of 2: Traceback(.|\n)*KeyError: 'rank {bad} broke'"):
        run_ranks(2, fail_on, bad, backend=None)


def test_a_dead_rank_fails_the_job_and_the_pool_is_replaced() -> None:
    before = run_ranks(2, pid, backend=None)
    with pytest.raises(RanksFailed, match="rank 1 of 2: the process died, exit code -9"):
        run_ranks(2, die_on, 1, backend=None)
    after = run_ranks(2, pid, backend=None)
    assert not set(before) & set(after)
    assert after == run_ranks(2, pid, backend=None)


def test_a_hung_rank_fails_the_job_with_its_stack() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1 of 2: no answer(.|\n)*in hang_on"):
        run_ranks(2, hang_on, 1, backend=None, timeout=1)
    assert time.monotonic() - start < 10


def test_ranks_that_are_meant_to_die() -> None:
    assert run_ranks(2, die_on, 0, backend=None, fresh=True, dies={0}) == [None, "alive"]
    with pytest.raises(ValueError, match="fresh=True"):
        run_ranks(2, die_on, 0, dies={0})


def test_the_group_is_the_one_asked_for() -> None:
    assert run_ranks(2, backend_and_sum, backend="gloo") == [("gloo", 2.0)] * 2
    assert run_ranks(2, backend_and_sum) == [("tide", 2.0)] * 2

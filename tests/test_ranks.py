"""The harness itself: a failure on any rank is a failure, with that rank's traceback."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from fallback_kinds import STOCK_KINDS
from ranks import RanksFailed, run_ranks

ROOT = Path(__file__).resolve().parent.parent


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


def falls_back(rank: int, world: int, kind: str, reason: str) -> None:
    from tide_backend.fsdp2.journal import Reason, journal

    if rank == 1:
        journal.fall_back("0", "layer", "all_gather", Reason(kind, reason))


@pytest.mark.parametrize(("kind", "reason"), [("made_up", "a reason"), ("device", " ")])
def test_a_fallback_without_a_known_reason_fails_the_job(kind: str, reason: str) -> None:
    with pytest.raises(RanksFailed, match=rf"rank 1 of 2: Traceback(.|\n)*all_gather of layer.*kind '{kind}'"):
        run_ranks(2, falls_back, kind, reason, backend=None, fresh=True)


def test_a_fallback_with_a_known_reason_is_fine() -> None:
    assert run_ranks(2, falls_back, "device", "a reason", backend=None, fresh=True) == [None, None]


def test_the_known_kinds_are_those_of_the_seam() -> None:
    """A kind that nothing gives any more, or that is not on the list yet, is a mistake in one of the two."""
    given = set()
    for path in (ROOT / "tide_backend/fsdp2").glob("*.py"):
        text = path.read_text()
        names = dict(re.findall(r'^([A-Z_]+) = "(\w+)"$', text, flags=re.M))
        for quoted, name in re.findall(r'\bReason\((?:"(\w+)"|([A-Z_]+)),', text):
            given.add(quoted or names[name])
    assert given == STOCK_KINDS

"""Groups of one name in one store: every generation gets a word of its own, whatever earlier ones left behind."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from tide_backend import CollectiveTimeoutError
from tide_backend.generation import agree

SIZE = 4


def generation(store: dist.Store, late: int = 0, without: tuple[int, ...] = (), timeout_s: float = 20) -> list[str]:
    """The word of each rank, or its error; rank `late` comes after the others, ranks `without` never."""

    def one(rank: int) -> str:
        time.sleep(0.1 if rank == late else 0)
        try:
            return agree(store, rank, SIZE, timedelta(seconds=timeout_s), "dp")
        except CollectiveTimeoutError as error:
            return f"error: {error}"

    ranks = [rank for rank in range(SIZE) if rank not in without]
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(one, ranks))


@pytest.mark.parametrize("late", range(SIZE))
def test_every_generation_has_its_own_word(late: int) -> None:
    store = dist.HashStore()
    words = []
    for _ in range(3):
        got = generation(store, late)
        assert len(set(got)) == 1 and not got[0].startswith("error"), got
        words.append(got[0])
    assert len(set(words)) == 3


@pytest.mark.parametrize("dead", [(0,), (1,), (2, 3), (0, 3)])
def test_a_generation_that_was_never_complete_is_not_met(dead: tuple[int, ...]) -> None:
    """Ranks of the earlier attempt wrote part of their keys and died, also in the middle of a later one."""
    store = dist.HashStore()
    complete = generation(store)
    assert all(text.startswith("error") for text in generation(store, without=dead, timeout_s=0.3))
    for late in (0, 3):
        after = generation(store, late)
        assert len(set(after)) == 1 and not after[0].startswith("error") and after[0] != complete[0], after


def test_the_error_names_who_did_not_come() -> None:
    got = generation(dist.HashStore(), without=(2,), timeout_s=0.2)
    first = 'error: tide[rank 0/4, group "dp"]: waited 0.2 s for rank 2 to make the group; expected every rank'
    assert got[0].startswith(first), got
    assert "rank 0, or one that it waits for" in got[1]


def test_one_rank_waits_for_nobody() -> None:
    store = dist.HashStore()
    assert agree(store, 0, 1, timedelta(seconds=0), "one") != agree(store, 0, 1, timedelta(seconds=0), "one")

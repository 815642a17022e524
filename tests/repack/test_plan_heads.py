"""Head maps against head-by-head enumeration."""

from __future__ import annotations

import random

import pytest
from plan_oracle import head_of

from tide_backend.repack import HeadMap, RepackError


def check(heads: HeadMap) -> None:
    """Query heads partition, KV ranges are exactly the KV heads that are read, replicas invert them."""
    q = [list(range(*r)) for r in heads.q_ranges]
    assert [h for rank in q for h in rank] == list(range(heads.q_heads))
    group = heads.q_heads // heads.kv_heads
    for rank, mine in enumerate(q):
        read = sorted({h // group for h in mine})
        assert list(range(*heads.kv_ranges[rank])) == read
        assert [read[i] for i in heads.kv_index(rank)] == [h // group for h in mine]
    for k in range(heads.kv_heads):
        assert heads.replicas(k) == [r for r, mine in enumerate(q) if any(h // group == k for h in mine)]


def usable_by_kernels(heads: HeadMap) -> bool:
    for first, end in heads.q_ranges:
        mine, group = range(first, end), heads.q_heads // heads.kv_heads
        kv = sorted({h // group for h in mine})
        for i, h in enumerate(mine):
            if len(mine) % len(kv) or kv[i // (len(mine) // len(kv))] != h // group:
                return False
    return True


def test_random_maps() -> None:
    rng, uniform = random.Random(0), 0
    for _ in range(2000):
        kv, group, width = rng.randint(1, 12), rng.randint(1, 8), 2 ** rng.randrange(6)
        q = kv * group
        balanced, grouped, chosen = (
            f(q, kv, width) for f in (HeadMap.balanced, HeadMap.grouped, HeadMap.choose)
        )
        for heads in (balanced, grouped, chosen):
            check(heads)
            assert heads.uniform == usable_by_kernels(heads)
        assert [list(range(*r)) for r in balanced.q_ranges] == head_of(q, width)
        assert grouped.uniform and chosen.uniform
        assert chosen == (balanced if balanced.uniform else grouped)
        uniform += balanced.uniform
    assert 200 < uniform < 1900


@pytest.mark.parametrize(
    ("q", "kv", "width", "q_counts", "kv_counts"),
    [
        (32, 8, 8, [4] * 8, [1] * 8),
        (32, 2, 16, [2] * 16, [1] * 16),
        (40, 8, 16, [2, 3] * 8, [1] * 16),
        (12, 12, 8, [1, 2] * 4, [1, 2] * 4),
        (6, 3, 2, [2, 4], [1, 2]),
        (2, 2, 4, [0, 1, 0, 1], [0, 1, 0, 1]),
        (16, 1, 32, [0, 1] * 16, [0, 1] * 16),
    ],
)
def test_reported_shapes(q: int, kv: int, width: int, q_counts: list[int], kv_counts: list[int]) -> None:
    heads = HeadMap.choose(q, kv, width)
    assert [e - f for f, e in heads.q_ranges] == q_counts
    assert [e - f for f, e in heads.kv_ranges] == kv_counts
    check(heads)


def test_a_torn_group_is_only_made_on_request() -> None:
    torn = HeadMap.balanced(6, 3, 2)
    assert torn.q_ranges == ((0, 3), (3, 6)) and torn.kv_ranges == ((0, 2), (1, 3))
    assert not torn.uniform and torn.kv_index(0) == [0, 0, 1] and torn.kv_index(1) == [0, 1, 1]
    # Equal counts but another grouping: the case in which a kernel would be silently wrong.
    assert not HeadMap(6, 2, ((0, 2), (2, 6))).uniform


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((7, 2, 2), "query heads are not a multiple of KV heads; got 7 query and 2 KV heads"),
        ((0, 1, 2), "not a multiple"),
        ((4, 0, 2), "not a multiple"),
    ],
)
def test_bad_counts(arguments: tuple[int, int, int], says: str) -> None:
    with pytest.raises(RepackError, match=says):
        HeadMap.choose(*arguments)


def test_bad_ranges() -> None:
    with pytest.raises(RepackError, match="not consecutive at rank 1"):
        HeadMap(4, 4, ((0, 2), (1, 4)))
    with pytest.raises(RepackError, match="do not cover all heads; got 3, expected 4"):
        HeadMap(4, 4, ((0, 2), (2, 3)))

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(world)`: a pool of that many gloo ranks, started once and again only when a test broke it."""
    pools: dict[int, RankPool] = {}

    def get(world: int) -> RankPool:
        if world not in pools or not pools[world].alive:
            pools[world] = RankPool(world)
        return pools[world]

    yield get
    for pool in pools.values():
        pool.close()

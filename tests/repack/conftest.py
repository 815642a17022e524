from __future__ import annotations

import os
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., RankPool]]:
    """`ranks(world, backend="gloo")`: a pool of ranks, started once and again only when a test broke it."""
    pools: dict[tuple[int, str], RankPool] = {}

    def get(world: int, backend: str = "gloo") -> RankPool:
        key = (world, backend)
        if key not in pools or not pools[key].alive:
            pools[key] = RankPool(world, backend)
        return pools[key]

    yield get
    for pool in pools.values():
        pool.close()

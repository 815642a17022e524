"""All-to-all of CUDA tensors, bit by bit: through staging, and straight into memory of the group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tasks_all_to_all as tasks

pytestmark = pytest.mark.gpu

WAYS = list(tasks.OPTIONS)


def named_cases(world: int) -> dict[str, tuple[tasks.Splits, int]]:
    """Name -> (splits, row width)."""
    everyone = range(world)
    return {
        "even": ([[1000] * world] * world, 3),
        "one row": ([[1] * world] * world, 1),
        "large": ([[40_000] * world] * world, 5),
        "uneven": ([[(r * 7 + q * 3) % 5 * 101 + r for q in everyone] for r in everyone], 3),
        "one rank sends nothing": ([[0 if r == 1 else 3 * q + 1 for q in everyone] for r in everyone], 7),
        "one rank receives nothing": ([[0 if q == 0 else r + 2 for q in everyone] for r in everyone], 64),
        "one pair only": ([[9 * (r == world - 1 and q == 0) for q in everyone] for r in everyone], 5),
        "only to oneself": ([[4 * (r == q) for q in everyone] for r in everyone], 33),
        "nobody sends anything": ([[0] * world] * world, 2),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_all_to_all(run: Callable, world: int, way: str) -> None:
    named = named_cases(world)
    for dtype in ("bfloat16", "float32", "uint8", "int64") if world == 2 else ("bfloat16",):
        for answers in run(world, tasks.exchange, way, dtype, list(named.values()), 0):
            for name, answer in zip(named, answers, strict=True):
                # Where nobody receives anything no output lies in memory of the group.
                path = "inner" if way == "zero_copy" and name == "nobody sends anything" else way
                assert answer == {"bad": 0, "path": path}, (name, dtype)


@pytest.mark.parametrize("world", [2, 4])
def test_many_chunks(run: Callable, world: int) -> None:
    """A budget of 1 MiB cuts every pair's part into chunks, whose number differs from pair to pair."""
    splits = [[(r * 5 + q * 3) % 4 * 70_001 for q in range(world)] for r in range(world)]
    cases = [(splits, 5), ([[90_000] * world] * world, 3)]
    for answers in run(world, tasks.exchange, "staged", "float32", cases, 1 << 20):
        assert answers == [{"bad": 0, "path": "staged"}] * 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 4])
def test_slow_rank_before_the_next_all_gather(run: Callable, world: int, way: str) -> None:
    """PyTorch #137171: an exchange without a barrier behind it was overwritten by the next all-gather."""
    rounds = 24
    for answer in run(world, tasks.slow_reader, way, rounds):
        assert (answer["exchanged"], answer["gathered"]) == (0, 0)
        assert answer["paths"] == [way]
        if way == "zero_copy":
            assert answer["taken over"] > rounds // 2, "the all-gather did not get the memory of the all-to-all"

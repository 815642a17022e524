"""Ulysses' all-to-alls of permuted views, bit by bit, and without a kernel that permutes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tasks_strided import Case, profiled, there_and_back
from test_gpu_collectives import needs_kernels

pytestmark = pytest.mark.gpu


def cases(world: int) -> dict[str, Case]:
    uneven = tuple((r * 701 + 13) % 900 for r in range(world))
    return {
        "even": Case((1024,) * world, 4, 128),
        "one head": Case((300,) * world, 1, 128),
        "fp32": Case((128,) * world, 2, 64, "float32"),
        "rows of no multiple of 16 bytes": Case((257,) * world, 1, 131),
        "odd bytes": Case((100,) * world, 3, 101, "uint8"),
        "uneven": Case(uneven, 2, 128),
        "a rank without tokens": Case((0, *uneven[1:]), 3, 96),
        "gaps in attention's layout": Case(uneven, 2, 128, gap=64),
        "gaps that align nothing": Case(uneven, 1, 129, gap=3),
    }


@pytest.mark.parametrize("way", ["staged", "zero_copy"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_there_and_back(run: Callable, world: int, way: str) -> None:
    for answers in run(world, there_and_back, way, list(cases(world).values())):
        for name, answer in zip(cases(world), answers, strict=True):
            assert answer == {"good": [True] * 6, "paths": [way], "copies": [0] * 4, "why": [""]}, name


@pytest.mark.parametrize("world", [2, 4])
def test_many_chunks_that_end_within_rows(run: Callable, world: int) -> None:
    big = [Case((5000,) * world, 2, 128), Case((5000,) * world, 1, 131), Case((2000,) * world, 1, 300, gap=20)]
    for answers in run(world, there_and_back, "staged", big, 1 << 20):
        for answer in answers:
            assert answer == {"good": [True] * 6, "paths": ["staged"], "copies": [0] * 4, "why": [""]}


@pytest.mark.parametrize("way", ["staged", "zero_copy"])
def test_short_rows_are_copied(run: Callable, way: str) -> None:
    for (answer,) in run(2, there_and_back, way, [Case((500, 500), 1, 64)]):
        assert answer["good"] == [True] * 6 and answer["copies"] == [1] * 4, answer
        assert answer["why"] == ["input: rows of 128 bytes", "output: rows of 128 bytes"]


def test_nccl_gets_contiguous_tensors(run: Callable) -> None:
    for answers in run(2, there_and_back, "inner", [Case((500, 700), 2, 128), Case((64, 64), 2, 128, gap=64)]):
        for answer, copies in zip(answers, ([1] * 4, [2] * 4), strict=True):
            assert answer["good"] == [True] * 6 and answer["paths"] == ["inner"], answer
            assert answer["copies"] == copies and answer["why"] == ["the inner backend takes contiguous tensors"]


@pytest.mark.parametrize("way", ["staged", "zero_copy"])
def test_nothing_permutes(run: Callable, way: str) -> None:
    """tide's own kernel copies what stays on the GPU, in both calls; the copy engines do the rest."""
    needs_kernels()
    for answer in run(2, profiled, way):
        if not answer["profiler works"]:
            pytest.skip("the profiler sees no kernels here")
        assert answer["path"] == way
        assert len(answer["kernels"]) == 1 and "place_kernel" in answer["kernels"][0], answer["kernels"]
        if way == "zero_copy":
            assert answer["copies"] == 2, answer

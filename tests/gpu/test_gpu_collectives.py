"""Collectives of CUDA tensors, bit by bit: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tasks_collectives as tasks
import torch

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SHARDS = {
    "one": [1],
    "tiny": [3, 1, 2, 1, 5, 7, 1, 1, 1, 2],
    "uneven": [100_003, 1, 65_536, 77],
    "large": [8 * MIB, 12_345, 2 * MIB + 1],
}


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_all_gather(run: Callable, world: int, shards: str) -> None:
    dtypes = ["bfloat16"] if world > 2 or shards == "large" else ["bfloat16", "float32", "float16", "int64", "uint8"]
    for dtype in dtypes:
        for answer in run(world, tasks.gather, dtype, SHARDS[shards], 4):
            assert answer == {"wrong": [], "path": "zero_copy"}, dtype


def needs_kernels() -> None:
    from tide_backend import _C

    if not _C.with_cuda_kernels:
        pytest.skip("built without CUDA kernels")


SHAPES = {
    "tiny": [(1, 3), (5,), (2, 2)],
    "uneven": [(101, 37), (8,), (64, 513), (3, 1)],
    "large": [(4096, 2048), (11, 1000), (2049, 512)],
}


@pytest.mark.parametrize("types", [("bfloat16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_reduce_scatter(run: Callable, world: int, types: tuple[str, str]) -> None:
    needs_kernels()
    for name, shapes in SHAPES.items():
        for op in ("sum", "avg", "premul") if name == "uneven" else ("avg",):
            # A small budget cuts the call into many chunks.
            for staging in (0, MIB) if name == "large" and world == 2 else (0,):
                for answer in run(world, tasks.scatter, types, op, shapes, staging):
                    assert answer["good"] == [True] * 3, (name, op, staging)
                    assert answer["path"] == "staged", answer["reason"]


@pytest.mark.parametrize("world", [2, 8])
def test_plain_widening(run: Callable, world: int) -> None:
    needs_kernels()
    for numel in (1, 1001, 300_000):
        assert run(world, tasks.plain_widening, numel) == [{"good": True, "path": "staged"}] * world


def test_not_contiguous(run: Callable) -> None:
    needs_kernels()
    assert run(2, tasks.not_contiguous) == [{"good": True, "repairs": 2}] * 2


@pytest.mark.parametrize("world", [2, 4])
def test_uneven_pace(run: Callable, world: int) -> None:
    needs_kernels()
    assert run(world, tasks.uneven_pace) == [[]] * world


def test_two_groups(run: Callable) -> None:
    assert run(2, tasks.two_groups) == [[], []]


def test_different_sizes(run: Callable) -> None:
    for answer in run(2, tasks.different_sizes):
        assert answer["wrong"] == []
        slots, call = answer["texts"]
        assert "ranks asked for different memory; got " in slots
        assert "sizes do not fit" in call


def test_profile(run: Callable) -> None:
    needs_kernels()
    for answer in run(2, tasks.profiled):
        if not answer["profiler works"]:
            pytest.skip("the profiler sees no kernels here")
        assert answer["gather"] == []
        # Two parameters to one peer; a batch of copies (cuMemcpyBatchAsync) to another GPU may show as one record.
        assert 1 <= answer["gather copies"] <= 2, answer
        assert len(answer["scatter"]) >= 1 and all("accumulate" in n for n in answer["scatter"]), answer["scatter"]


def test_capture(run: Callable) -> None:
    needs_kernels()
    for answer in run(2, tasks.capture):
        assert len(answer["texts"]) == 3
        assert all("called while a CUDA graph is captured" in t for t in answer["texts"]), answer["texts"]
        assert answer["wrong"] == []
        assert answer["replayed"] == 3.0
        assert answer["reduced"] == 2.0


def test_there_is_a_gpu(gpus: int) -> None:
    assert gpus > 0, "no GPU: torch " + torch.__version__

"""How much memory a backward takes: unsharded gradients go as soon as their reduction has read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tasks_memory as tasks
from test_gpu_collectives import needs_kernels

pytestmark = pytest.mark.gpu

LAYERS = [4, 12]
LAYER = 2 * tasks.SHAPE.parameters  # bytes of one layer's unsharded bf16 gradients
MIB = 1 << 20


def shown(peaks: dict[str, dict[int, int]]) -> str:
    return "; ".join(f"{name} {n} layers {p / MIB:.0f} MiB" for name, of in peaks.items() for n, p in of.items())


def growth(peaks: dict[int, int]) -> int:
    return peaks[LAYERS[1]] - peaks[LAYERS[0]]


def test_gradients_do_not_pile_up_behind_a_slow_rank(run: Callable) -> None:
    """What a layer adds is its fp32 shard, not its bf16 gradients too."""
    needs_kernels()
    for peaks in run(2, tasks.backward_peaks, LAYERS, False, "float32"):
        shards = (LAYERS[1] - LAYERS[0]) * 4 * tasks.SHAPE.parameters // 2
        print(shown(peaks))
        assert growth(peaks["tide"]) < shards + 2 * LAYER, shown(peaks)
        for count in LAYERS:
            assert 0 < peaks["tide"][count] < peaks["nccl"][count], shown(peaks)


def test_hsdp_keeps_no_more_than_on_nccl(run: Callable) -> None:
    """PyTorch #179443: bf16 parameters reduced in fp32 keep a buffer a layer for the all-reduce. Not more with tide."""
    needs_kernels()
    for peaks in run(4, tasks.backward_peaks, LAYERS, True, "bfloat16"):
        print(shown(peaks))
        assert 0 < growth(peaks["tide"]) <= growth(peaks["nccl"]) + LAYER // 4, shown(peaks)

"""HSDP on 2 x 2 ranks: tide's reduce-scatter with an all-reduce of nccl's behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tasks_hsdp as tasks
from test_gpu_collectives import needs_kernels
from test_gpu_fsdp2 import MIXED, OWN

pytestmark = pytest.mark.gpu

CASES: dict[str, tuple[Any, ...]] = {
    "default": (MIXED, None, False, 1),
    "bf16 reduction": (("bfloat16", "bfloat16"), None, False, 1),
    "accumulation, uneven pace": (MIXED, None, True, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_trains_bit_for_bit_as_nccl(run: Callable, case: str) -> None:
    needs_kernels()
    for answer in run(4, tasks.train, *CASES[case]):
        assert answer["fallbacks"] == []
        assert answer["paths"] == OWN
        assert answer["tide"] == answer["nccl"]
        assert answer["different"] == 0


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial sums"])
@pytest.mark.parametrize(("stored", "reduced"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_slow_all_reduce(run: Callable, stored: str, reduced: str, partial: bool) -> None:
    """PyTorch #180889: with a late all-reduce, buffers that were freed early gave every layer the last one's gradients;
    it takes a reduction in another dtype than the parameters are stored in."""
    needs_kernels()
    for answer in run(4, tasks.slow_all_reduce, stored, reduced, partial):
        assert answer["differ"] == []
        assert answer["alike"] == 0, "layers have the same gradients: this shows nothing"
        assert answer["storages"] == 7, "each block's and the root's gradients lie in memory of their own"

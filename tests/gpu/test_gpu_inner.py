"""Groups whose CUDA calls are nccl's: `pytest -m gpu tests/gpu/test_gpu_inner.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tasks_inner as tasks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("async_op", [False, True])
def test_a_group_without_cuda_transport(run: Callable, async_op: bool) -> None:
    """nccl gives no handle of a call that is not asynchronous."""
    for answer in run(2, tasks.calls, async_op):
        assert all(answer["good"].values()) and len(answer["good"]) == 6, answer
        assert answer["paths"] == ["inner"], answer
        assert answer["reasons"] == ["CUDA calls are left to nccl (TIDE_CUDA_TRANSPORT=0 or Options.cuda)"], answer

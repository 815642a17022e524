"""GPU tests: real ranks on the GPUs that are there, several to a GPU where there are fewer of them.

`ci/gpu.sh` sets what ranks that share a GPU need. Every test has a deadline of its own, and all tests of one pytest
process together a budget, after which the rest fail instead of holding the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import ranks
import torch

STRESS_S = float(os.environ.get("GPU_STRESS_SECONDS", "10"))  # of each stress test
BUDGET_S = float(os.environ.get("GPU_TEST_BUDGET_S", "280")) + 2 * max(0.0, STRESS_S - 10)
_start = time.monotonic()


def remaining() -> float:
    return BUDGET_S - (time.monotonic() - _start)


@pytest.fixture(scope="session")
def gpus() -> int:
    return torch.cuda.device_count()


@pytest.fixture(scope="session")
def stress_seconds() -> float:
    return STRESS_S


@pytest.fixture
def deadline() -> Callable[[float], float]:
    """Seconds that a test may take: what it asks for, or what is left."""

    def limit(wanted: float) -> float:
        left = remaining()
        if left < 5:
            pytest.fail(f"the budget of {BUDGET_S:.0f} s for the GPU tests of this process is spent")
        return min(wanted, left)

    return limit


@pytest.fixture
def require(gpus: int) -> Callable[[int], None]:
    """Skips what this machine cannot run."""

    def check(world: int) -> None:
        if gpus == 0:
            pytest.skip("no GPU")
        if world > gpus and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            pytest.skip(f"{world} ranks on {gpus} GPUs need NCCL_MULTI_RANK_GPU_ENABLE=1 and an NCCL that knows it")

    return check


@pytest.fixture
def run(require: Callable[[int], None], deadline: Callable[[float], float]) -> Callable[..., list]:
    """`run(world, task, *args)`: the task on every rank, in a group of backend tide."""

    def call(world: int, task: Callable, *args: object, seconds: float = 60, **more: object) -> list:
        require(world)
        return ranks.run_ranks(world, task, *args, timeout=deadline(seconds), group_timeout=60, **more)

    return call

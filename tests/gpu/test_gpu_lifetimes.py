"""Groups that go in any order, and several FSDP2 models at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tasks_lifetimes as tasks
from test_gpu_collectives import needs_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("models_first", [False, True], ids=["models stay", "models go first"])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=str)
def test_groups_destroyed_in_any_order(run: Callable, order: list[int], models_first: bool) -> None:
    needs_kernels()
    for answer in run(2, tasks.destroyed_in_order, order, models_first):
        assert answer == {"wrong": [], "fallbacks": []}


def test_two_models_on_two_groups(run: Callable) -> None:
    needs_kernels()
    for answer in run(2, tasks.two_models):
        assert answer["fallbacks"] == [] and answer["groups"] == 2
        assert answer["tide"] == answer["nccl"]
        assert answer["different"] == 0

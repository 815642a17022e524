"""No call may wait for what its own rank has queued behind it, even where all streams are one queue."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tasks_connections as tasks
from test_gpu_collectives import needs_kernels
from test_gpu_fsdp2 import OWN

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("world", [2, 4])
def test_one_connection(run: Callable, world: int) -> None:
    needs_kernels()
    answers = run(world, tasks.one_connection, fresh=True, backend=None, seconds=90)
    print("streams wait behind each other:", [a["one queue"] for a in answers])
    for answer in answers:
        assert answer["gather"] == {"wrong": [], "path": "zero_copy"}
        assert answer["scatter"]["good"] == [True] * 3 and answer["scatter"]["path"] == "staged", answer["scatter"]
        assert answer["pace"] == answer["groups"] == []
        assert answer["together"] == [0, 0, 0]
        train = answer["train"]
        assert train["fallbacks"] == [] and train["paths"] == OWN
        assert train["tide"] == pytest.approx(train["nccl"], rel=0 if world == 2 else 1e-3)
        assert train["distance"] == 0 if world == 2 else train["distance"] < 2e-2

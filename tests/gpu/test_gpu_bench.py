"""The benchmarks' data on GPUs: every rank draws the same for every other, and finds a wrong element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tasks_bench as tasks

pytestmark = pytest.mark.gpu


def test_data_is_the_same_on_every_rank(run: Callable) -> None:
    answers = run(2, tasks.drawn_and_compared)
    assert len(set(answers[0]["sums"])) == 2
    for answer in answers:
        assert answer["devices"]
        assert answer["sums"] == answers[0]["sums"]
        assert answer["apart"] > 0.99 * tasks.NUMEL  # two elements agree by chance about once in 2^12
        assert answer["differing"] == [0, 1]
        assert answer["wrong"] == [0, 1]

"""The same exchanges and callers over the project's own backend."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tide_backend._C") is None, reason="tide_backend's compiled module is not built"
)


@pytest.mark.parametrize(
    ("task", "arguments"),
    [
        ("exchange_tasks:values_and_gradients", [list(range(200, 208))]),
        ("exchange_tasks:low_precision", []),
        ("exchange_tasks:nothing_to_send", []),
        ("exchange_tasks:one_forward_one_backward", []),
        ("hybrid_tasks:envelope", []),
        ("hybrid_tasks:explicit", [True, None, None]),
        ("caller_tasks:split_sizes", [list(range(210, 214))]),
        *[("caller_tasks:equal_split", [name, [220, 221, 222]]) for name in ("alst", "verl", "megatron", "functional")],
    ],
)
def test_on_tide(ranks, task: str, arguments: list) -> None:
    ranks(4, "tide").run(task, *arguments)


def test_refusals_on_tide(ranks) -> None:
    answers = ranks(4, "tide").run("refusal_tasks:another_plan", [2])
    assert [(name, named) for name, _, named, _ in answers] == [("AgreementError", (2,))] * 4

"""Pads are harmless: NaN in them, weight gradients, router statistics."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("task", ["pads_hold_nan", "router_statistics"])
def test_pads(ranks, task: str) -> None:
    ranks(4).run(f"caller_tasks:{task}", list(range(80, 88)))

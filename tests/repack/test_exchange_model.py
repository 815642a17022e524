"""A hybrid-attention model, three sparse layers to one full, on repacked ranks: outputs and gradients."""

from __future__ import annotations

import pytest


def test_equal_split_layers_on_the_envelope(ranks) -> None:
    ranks(4).run("hybrid_tasks:envelope")


@pytest.mark.parametrize("cut", ["envelope", "balanced"])
@pytest.mark.parametrize("order", ["rank-major", "canonical"])
def test_explicit_exchange(ranks, cut: str, order: str) -> None:
    ranks(4).run("hybrid_tasks:explicit", False, cut, order)


def test_explicit_exchange_with_a_sample_as_wide_as_the_parent(ranks) -> None:
    ranks(4).run("hybrid_tasks:explicit", True, None, None)

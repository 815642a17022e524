"""DeepSpeed from PyPI on the envelope (skipped where it is not installed)."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed (pip install deepspeed)"
)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_distributed_attention(ranks, batch_dim: int) -> None:
    ranks(4).run("deepspeed_tasks:distributed_attention", list(range(6)), batch_dim)


def test_alst_attention_for_transformers(ranks) -> None:
    ranks(4).run("deepspeed_tasks:alst", list(range(8)))

"""Unmodified FSDP2 models on tide against the same on gloo: path, numbers, and no layout copies."""

from __future__ import annotations

import pytest
from fsdp2_cases import compare_with_gloo, gradients_match_float64
from fsdp2_models import Case
from ranks import run_ranks

CASES = [
    Case("bf16"),
    Case("fp32", precision="fp32"),
    Case("no-reshard", reshard=False),
    Case("frozen-and-unused", frozen=True, unused=True),
    Case("prefetch", prefetch=True, precision="fp32"),
    Case("accumulate-no-sync", accumulate="no_sync"),
    Case("accumulate-no-reshard", accumulate="no_reshard", precision="fp32"),
    Case("checkpoint", checkpoint=True),
    Case("evaluate", evaluate=True, precision="fp32"),
    Case("evaluate-no-reshard", evaluate=True, reshard=False),
    Case("state-dict", state_dict=True),
    Case("tied", tied=True),
    Case("moe", moe=True),
    Case("async-unshard", async_unshard=True),
    Case("deterministic", deterministic=True),
]
FOUR_RANKS = [
    Case("bf16"),
    Case("fp32-everything", precision="fp32", tied=True, frozen=True, unused=True, checkpoint=True),
    Case("moe", moe=True, prefetch=True),
    Case("reshard-to-2", reshard=2),
    Case("hsdp", hsdp=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_two_ranks_agree_with_gloo(case: Case) -> None:
    assert max(run_ranks(2, compare_with_gloo, case)) <= 1e-4


@pytest.mark.parametrize("case", FOUR_RANKS, ids=lambda c: c.name)
def test_four_ranks_agree_with_gloo(case: Case) -> None:
    assert max(run_ranks(4, compare_with_gloo, case)) <= 1e-4


def test_eight_ranks_agree_with_gloo() -> None:
    assert max(run_ranks(8, compare_with_gloo, Case("moe-tied", moe=True, tied=True), timeout=120)) <= 1e-4


@pytest.mark.parametrize(
    "case", [Case("mean"), Case("factor", divide=3.0), Case("fp32", precision="fp32")], ids=lambda c: c.name
)
def test_gradients_against_float64(case: Case) -> None:
    assert run_ranks(4, gradients_match_float64, case) == [None] * 4

"""The odd cases of FSDP2's contract, each against gloo or against float64, with the path that was taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp2_contract_cases as cases
import pytest
from ranks import run_ranks

TWO_RANKS = [
    cases.optimizer_in_backward,
    cases.clip_gradients,
    cases.grad_scaler,
    cases.state_dicts_between_steps,
    cases.several_input_buffers,
    cases.separate_reduce_scatter_group,
    cases.unused_as_zeros,
    cases.unused_without_zeros,
    cases.mixed_accumulation,
    cases.nothing_stays_gathered,
    cases.two_models,
    cases.many_tiny_parameters,
]


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.__name__)
def test_two_ranks(case: Any) -> None:
    assert run_ranks(2, case) == [None, None]


@pytest.mark.parametrize("world", [2, 4])
def test_tied_parameters_with_empty_shards(world: int) -> None:
    assert run_ranks(world, cases.tied_with_empty_shards) == [None] * world


def test_checkpoint_in_training(tmp_path: Path) -> None:
    assert run_ranks(2, cases.checkpoint_in_training, str(tmp_path)) == [None, None]


def test_compiled_blocks() -> None:
    assert run_ranks(2, cases.compiled_blocks, timeout=150) == [None, None]

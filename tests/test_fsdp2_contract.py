"""The odd cases of FSDP2's contract, each against gloo or against float64, with the path that was taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp2_contract_cases as cases
import fsdp2_dtype_cases as dtypes
import fsdp2_extension_cases as extensions
import fsdp2_mesh_cases as meshes
import pytest
from fsdp2_cases import KEEPS_AUTOGRADS_DTYPES
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
    cases.nothing_stays_gathered,
    cases.two_models,
    cases.many_tiny_parameters,
]


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.__name__)
def test_two_ranks(case: Any) -> None:
    assert run_ranks(2, case) == [None, None]


@pytest.mark.parametrize(
    "case", [dtypes.mixed_accumulation, dtypes.unused_norms_as_zeros], ids=lambda case: case.__name__
)
def test_gradients_of_two_dtypes(case: Any) -> None:
    assert run_ranks(2, case) == [None, None]


@pytest.mark.skipif(not KEEPS_AUTOGRADS_DTYPES, reason="FSDP2 refuses such gradients before PyTorch 2.15")
def test_gradients_of_other_dtypes_by_rank() -> None:
    # Fresh ranks: the backend's record of the last calls of "blocks.0" is then this case's alone.
    assert run_ranks(2, dtypes.accumulation_that_differs_by_rank, fresh=True) == [None, None]


@pytest.mark.parametrize("world", [2, 4])
def test_tied_parameters_with_empty_shards(world: int) -> None:
    assert run_ranks(world, cases.tied_with_empty_shards) == [None] * world


def test_checkpoint_in_training(tmp_path: Path) -> None:
    assert run_ranks(2, cases.checkpoint_in_training, str(tmp_path)) == [None, None]


def test_compiled_blocks() -> None:
    assert run_ranks(2, cases.compiled_blocks, timeout=150) == [None, None]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-reduced-in-bf16"])
@pytest.mark.parametrize("factor", [300.0, 2.0])
def test_divide_factor_in_one_and_two_dimensions(precision: str, factor: float) -> None:
    assert run_ranks(4, meshes.divided, precision, factor) == [None] * 4


@pytest.mark.parametrize("factor", [None, 3.0])
def test_forced_sum(factor: float | None) -> None:
    assert run_ranks(4, meshes.divided, "bf16", factor, True) == [None] * 4


@pytest.mark.parametrize(
    "case",
    [
        meshes.forced_sum_as_on_gloo,
        meshes.slow_all_reduce,
        meshes.buffers_of_the_all_reduce,
        meshes.tensor_parallel,
        meshes.several_meshes,
    ],
    ids=lambda case: case.__name__,
)
def test_four_ranks(case: Any) -> None:
    assert run_ranks(4, case) == [None] * 4


def test_slow_all_reduce_in_bf16() -> None:
    assert run_ranks(4, meshes.slow_all_reduce, "bf16-reduced-in-bf16") == [None] * 4


@pytest.mark.parametrize(("world", "precision"), [(2, "fp32"), (4, "bf16")])
def test_other_shard_dims(world: int, precision: str) -> None:
    assert run_ranks(world, meshes.other_shard_dims, precision) == [None] * world


@pytest.mark.parametrize("world", [2, 3])
def test_extensions(world: int) -> None:
    assert run_ranks(world, extensions.extensions) == [None] * world


@pytest.mark.parametrize("world", [2, 4])
def test_several_dtypes_in_a_group(world: int) -> None:
    assert run_ranks(world, extensions.several_dtypes) == [None] * world

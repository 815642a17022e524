"""Unmodified FSDP2 models on tide's group and on nccl's: the same losses and the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tasks_fsdp2 as tasks
from test_gpu_collectives import needs_kernels

pytestmark = pytest.mark.gpu

MIXED = ("bfloat16", "float32")
OWN = [("all_gather", "zero_copy"), ("reduce_scatter", "staged")]
CASES: dict[str, tuple[Any, ...]] = {
    "default": (None, MIXED, False, 1),
    "fp32": (None, (None, None), False, 1),
    "bf16 reduction": (None, ("bfloat16", "bfloat16"), False, 1),
    "no reshard": (False, MIXED, False, 1),
    "accumulation": (None, MIXED, False, 2),
    "uneven pace": (None, MIXED, True, 1),
}


def expect_as_nccl(answer: dict[str, Any]) -> None:
    assert answer["fallbacks"] == []
    assert answer["paths"] == OWN
    assert answer["tide"] == answer["nccl"]
    assert answer["different"] == 0, answer["distance"]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_bit_for_bit_as_nccl(run: Callable, case: str) -> None:
    needs_kernels()
    for answer in run(2, tasks.train, *CASES[case]):
        expect_as_nccl(answer)


@pytest.mark.parametrize("case", ["default", "no reshard", "uneven pace"])
def test_staging_in_vacated_slots(run: Callable, case: str) -> None:
    needs_kernels()
    staging = 64 << 20
    for answer in run(2, tasks.train, *CASES[case], {"slot_reuse": True, "cuda_staging_bytes": staging}):
        expect_as_nccl(answer)
        if case != "no reshard":  # reshard vacates a slot before each reduction, so that no segment is made for staging
            assert answer["arena"] < staging, answer["arena"]


@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks_train_as_nccl(run: Callable, world: int) -> None:
    """nccl adds in another order."""
    needs_kernels()
    reshard = 2 if world == 4 else None
    for answer in run(world, tasks.train, reshard, MIXED, False, 1, seconds=90):
        assert answer["fallbacks"] == []
        assert answer["tide"] == pytest.approx(answer["nccl"], rel=1e-3)
        assert answer["distance"] < 2e-2  # four steps of AdamW at 1e-2, where signs of tiny gradients decide


def test_no_copies_and_only_the_kernels_that_are_meant(run: Callable) -> None:
    needs_kernels()
    for answer in run(2, tasks.kernels_of_a_step):
        if answer["all"] == 0:
            pytest.skip("the profiler sees no kernels here")
        assert answer["stock"] == []
        own = answer["tide"]
        assert own and all("accumulate_kernel" in n or "cast_kernel" in n for n in own), own


def test_slots_take_turns(run: Callable) -> None:
    """Layer by layer while the device is behind, as in training: each gather may run beside the compute before it."""
    for answer in run(2, tasks.slots_of_layers):
        first, second = answer["slots"][:2]
        assert first != second
        assert answer["slots"] == [first, second] * 3
        assert answer["busy"], "the device was not behind the host"


def test_unsharded_parameters_outlive_their_group(run: Callable) -> None:
    for answer in run(2, tasks.unsharded_outlives_group):
        assert answer == {"shape": (101, 256), "finite": True, "same": True, "output": True}


@pytest.mark.alone
def test_groups_made_again_do_not_pile_up(run: Callable) -> None:
    needs_kernels()
    for used in run(2, tasks.again_and_again, 4):
        # The first brings NCCL's and the kernels' own memory. Measured in MiB.
        assert used[-1] - used[1] < 64, used


def test_the_arena_is_reported(run: Callable) -> None:
    assert all(nbytes >= 1 << 20 for nbytes in run(2, tasks.arena_reported))

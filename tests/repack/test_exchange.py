"""enter, exit and enter_qkv over gloo: values, gradients, recompute, interleaving, empty ranks."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("world", [2, 4, 8])
def test_values_and_gradients(ranks, world: int) -> None:
    seeds = list(range(100, 112))
    assert ranks(world).run("exchange_tasks:values_and_gradients", seeds) == [len(seeds)] * world


@pytest.mark.parametrize("world", [4, 8])
def test_two_models_and_two_groups_in_one_process(ranks, world: int) -> None:
    ranks(world).run("exchange_tasks:two_parents")


@pytest.mark.parametrize(
    "task", ["low_precision", "padded", "in_place_and_strided", "one_forward_one_backward"]
)
def test_on_four_ranks(ranks, task: str) -> None:
    ranks(4).run(f"exchange_tasks:{task}")


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(ranks, reentrant: bool) -> None:
    ranks(4).run("exchange_tasks:recompute", reentrant)


@pytest.mark.parametrize("world", [2, 8])
def test_a_rank_with_nothing_to_send(ranks, world: int) -> None:
    ranks(world).run("exchange_tasks:nothing_to_send")


def test_mostly_empty_ranks_many_times(ranks) -> None:
    ranks(8).run("exchange_tasks:sparse_counts", 150)


def test_torch_compile_keeps_the_gradients(ranks) -> None:
    ranks(2).run("exchange_tasks:compiled")

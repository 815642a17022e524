"""Unmodified callers: the all-to-all shapes of real frameworks on the envelope; split sizes; enter_qkv."""

from __future__ import annotations

import pytest
from ulysses_callers import EQUAL_SPLIT

SEEDS = list(range(6))


@pytest.mark.parametrize("name", EQUAL_SPLIT)
def test_attention_and_gradients_on_the_envelope(ranks, name: str) -> None:
    ranks(4).run("caller_tasks:equal_split", name, SEEDS)


@pytest.mark.parametrize(
    ("world", "name"), [(2, "deepspeed_batch_first"), (8, "deepspeed_batch_first"), (8, "verl")]
)
def test_attention_and_gradients_at_other_widths(ranks, world: int, name: str) -> None:
    ranks(world).run("caller_tasks:equal_split", name, list(range(20, 26)))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_explicit_form(ranks, world: int) -> None:
    ranks(world).run("caller_tasks:explicit", list(range(40, 48)))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_callers_that_pass_split_sizes(ranks, world: int) -> None:
    ranks(world).run("caller_tasks:split_sizes", list(range(60, 66)))


def test_spill_through_the_gathering_wrapper(ranks) -> None:
    ranks(8).run("caller_tasks:gathered", SEEDS)


def test_no_attention_across_samples(ranks) -> None:
    ranks(4).run("caller_tasks:no_attention_across_samples")


def test_gathered_position_ids(ranks) -> None:
    ranks(4).run("caller_tasks:gathered_position_ids")


def test_rows_that_do_not_divide_raise_on_every_rank(ranks) -> None:
    assert all("divi" in text for text in ranks(4).run("caller_tasks:indivisible"))

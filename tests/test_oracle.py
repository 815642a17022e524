"""The oracle against values worked out by hand, so that a mistake in it cannot hide one in the product."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import Layout, all_gather, all_to_all, float32_to_bf16, reduce_in_rank_order, reduce_scatter


def test_layout_by_hand() -> None:
    layout = Layout(2, [3, 1], align=4)
    assert layout.shard_offsets == [0, 3]
    assert layout.gathered_offsets == [0, 8]
    assert layout.gathered_numel == 12
    shards = [np.array([1, 2, 3, 4]), np.array([5, 6, 7, 8])]
    assert all_gather(shards, layout, fill=0).tolist() == [1, 2, 3, 5, 6, 7, 0, 0, 4, 8, 0, 0]
    assert all_gather(shards).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_uneven_parameters_end_in_zeros() -> None:
    layout = Layout(2, [2], [3])
    inputs = [[np.array([1, 2, 3], np.int32)], [np.array([10, 20, 30], np.int32)]]
    assert [o.tolist() for o in reduce_scatter(inputs, "int32", layout)] == [[11, 22], [33, 0]]


def test_order_of_ranks_decides_the_rounding() -> None:
    pieces = [np.array([v], np.float32) for v in (1e8, 1.0, -1e8)]
    assert reduce_in_rank_order(pieces, "float32").tolist() == [0.0]
    assert reduce_in_rank_order([pieces[0], pieces[2], pieces[1]], "float32").tolist() == [1.0]


def test_integers_wrap_and_are_not_scaled() -> None:
    pieces = [np.array([2**31 - 1], np.int32), np.array([1], np.int32)]
    assert reduce_in_rank_order(pieces, "int32", scale=0.5).tolist() == [-(2**31)]


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        (1.00390625, 0x3F80),  # half way, down to even
        (1.01171875, 0x3F82),  # half way, up to even
        (np.nan, 0x7FC0),
        (np.inf, 0x7F80),
    ],
)
def test_bf16_rounds_to_nearest_even(value: float, bits: int) -> None:
    assert float32_to_bf16(np.array([value]))[0] == bits


def test_bf16_adds_in_float32() -> None:
    # 256 + 1 + 1: in bf16 arithmetic (8 bits of precision) each 1 would be lost.
    pieces = [float32_to_bf16(np.array([v])) for v in (256.0, 1.0, 1.0)]
    assert reduce_in_rank_order(pieces, "bfloat16", "float32", scale=0.5).tolist() == [129.0]
    assert reduce_in_rank_order(pieces, "bfloat16").tolist() == [0x4381]


def test_all_to_all_by_hand() -> None:
    inputs = [np.array([1, 2, 3]), np.array([4, 5])]
    assert [o.tolist() for o in all_to_all(inputs, [[1, 2], [0, 2]])] == [[1], [2, 3, 4, 5]]

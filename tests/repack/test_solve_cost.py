"""The cost model against its formulas written out."""

from __future__ import annotations

import pytest

from tide_backend.repack import CostModel
from tide_backend.repack.cost import unit_width


@pytest.mark.parametrize("k", [0.001, 0.005, 0.0058, 0.02])
def test_break_even_imbalance(k):
    """(b + 4 k_out) / (b + k_out + 3 k_in) with k_in = k b, k_out = 7 k b."""
    assert CostModel.from_ratio(k).break_even(32) == pytest.approx((1 + 28 * k) / (1 + 10 * k))


def test_break_even_of_a_parent_inside_a_node_is_one():
    assert CostModel.from_ratio(0.005).break_even(8) == pytest.approx(1.0)


def test_rows_of_a_period():
    model = CostModel(linear_us=12, intra_us=0.7, inter_us=5.0, full_layers=1, sparse_layers=3)
    assert model.full_row_us(32) == pytest.approx(3 + 5.0)
    assert model.sparse_row_us(8) == pytest.approx(9 + 3 * 0.7)
    assert model.sparse_row_us(2) == pytest.approx(9 + 3 * 0.7 * (1 / 2) / (7 / 8))
    assert model.sparse_row_us(1) == pytest.approx(9)
    assert model.sparse_row_us(32) == pytest.approx(9 + 3 * 5.0)
    assert model.sparse_row_us(4, ranks_per_node=2) == pytest.approx(9 + 3 * 5.0)


def test_from_a_models_shape():
    """Bytes and FLOPs counted for a model of 64 query and 8 KV heads of 128, bf16."""
    model = CostModel.from_shape(
        q_heads=64,
        kv_heads=4,
        head_dim=128,
        active_parameters=1e9,
        attention_tflops=600,
        linear_tflops=500,
        intra_gb_per_s=350,
        inter_gb_per_s=50,
    )
    forward = 2 * 64 * 128  # causal: half of 4 L^2 H d
    assert model.attention_us == pytest.approx(3.5 * forward / 600e12 * 1e6)
    assert model.linear_us == pytest.approx(6 * 1e9 / 500e12 * 1e6)
    for width in (2, 4, 8):
        # q and output, k and v with replicas when the width exceeds the KV heads; forward and backward.
        sent = 2 * 2 * 128 * (2 * 64 + 2 * max(4, width)) * (1 - 1 / width)
        assert model.exchange_us(width) == pytest.approx(sent / 350e9 * 1e6)
    wide = 2 * 2 * 128 * (2 * 64 + 2 * 32)
    assert model.exchange_us(32) == pytest.approx(wide / 50e9 * 1e6)
    assert model.exchange_us(1) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_us": -1}, "attention_us: got -1"),
        ({"linear_us": float("nan")}, "linear_us: got nan"),
        ({"sparse_layers": 0}, "sparse_layers: got 0"),
        ({"q_heads": 8}, "give both"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        CostModel(**fields)


def test_widest_child():
    assert [unit_width(*shape) for shape in ((32, 8), (16, 4), (4, 8), (64, 16), (1, 8))] == [8, 4, 4, 8, 1]
    with pytest.raises(ValueError, match="parent width: got 24"):
        unit_width(24, 8)

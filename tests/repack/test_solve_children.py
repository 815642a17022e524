"""Children of one parent: legal, within the limits, and near the best there is."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solve_oracle import best_split, lognormal, milp_split

from tide_backend.repack import Assignment, pack_children

LENGTHS = st.lists(st.integers(1, 300_000), min_size=0, max_size=60)
SHAPES = st.sampled_from([(w, node) for node in (2, 4, 8, 16) for w in (1, 2, 4, 8, 16, 32)])


def rows_of_ranks(assignment: Assignment) -> list[int]:
    """Most rows of every rank when each child's row is cut evenly."""
    (parent,) = assignment.parents
    rows = [0] * parent.width
    for child in parent.children:
        held = math.ceil(sum(assignment.lengths[s] for s in child.samples) / child.width)
        for rank in range(child.first_rank, child.first_rank + child.width):
            rows[rank] += held
    return rows


@settings(max_examples=300, deadline=None)
@given(LENGTHS, SHAPES)
def test_legal_and_reported_as_built(lengths, shape):
    width, node = shape
    assignment = pack_children(lengths, width, first_rank=64, ranks_per_node=node)
    assignment.validate()
    (facts,) = assignment.stats["parents"]
    unit = min(8, node, width)
    assert all(c.width <= unit or c.width == width for c in assignment.parents[0].children)
    assert facts["max_rows"] == max(rows_of_ranks(assignment))
    # Narrow children may add rows up to 0.5 % above the bound, or up to what the uncut nodes hold.
    assert facts["max_rows"] <= max(facts["balanced_rows"], facts["bound_rows"] * 1.005)
    assert facts["bound_rows"] <= facts["balanced_rows"]
    assert facts["balanced_rows"] <= math.ceil(sum(lengths) / unit)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.sampled_from([2, 4]))
def test_bound_below_and_balance_near_the_exhaustive_optimum(lengths, nodes):
    # With nodes of one rank, rows and tokens are the same.
    (facts,) = pack_children(lengths, nodes, ranks_per_node=1).stats["parents"]
    best = best_split(lengths, nodes)
    assert facts["bound_rows"] <= best <= facts["balanced_rows"]
    assert (
        facts["balanced_rows"] <= best * (4 / 3 - 1 / (3 * nodes)) + 1e-9
    )  # longest first alone promises this


@pytest.mark.parametrize(("samples", "nodes"), [(16, 2), (16, 4), (24, 4), (40, 4), (80, 4)])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_within_one_percent_of_the_bound_on_average(samples, nodes, sigma):
    balanced, built = [], []
    for seed in range(60):
        (facts,) = pack_children(lognormal(seed, samples, 10, sigma), 8 * nodes).stats["parents"]
        balanced.append(facts["balanced_rows"] / facts["bound_rows"])
        built.append(facts["max_rows"] / facts["bound_rows"])
    assert statistics.mean(balanced) < 1.01
    assert statistics.mean(built) < 1.01


@pytest.mark.parametrize("seed", range(6))
def test_near_the_milp(seed):
    lengths = lognormal(seed, 16, 10, 1.0)
    found, proven = milp_split(lengths, 4)
    (facts,) = pack_children(lengths, 32).stats["parents"]
    assert facts["bound_rows"] <= math.ceil(found / 8)
    assert math.ceil(proven / 8 * 0.999) <= facts["balanced_rows"] <= found / 8 * 1.02


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=40), st.integers(4_000, 12_000), st.booleans())
def test_memory_cap_is_kept_or_refused(lengths, cap, spill):
    try:
        assignment = pack_children(lengths, 16, max_rows=cap, spill=spill, guard=True)
    except ValueError as error:
        assert sum(lengths) > 16 * cap
        assert "16 ranks holds at most" in str(error)
    else:
        assignment.validate()
        assert max(rows_of_ranks(assignment)) <= cap


def test_a_sample_that_fits_no_node_stays_parent_wide():
    lengths = [100_000, 500, 700, 900]
    assignment = pack_children(lengths, 16, max_rows=8_000)
    assert assignment.parents[0].form == "baseline"
    assert "memory limits" in assignment.parents[0].reason
    spilled = pack_children(lengths, 16, max_rows=8_000, spill=True)
    assert spilled.validate().parents[0].spill.samples == (0,)
    with pytest.raises(
        ValueError, match="sample 0 has 100000 tokens, but a parent of 16 ranks holds at most 64000"
    ):
        pack_children(lengths, 16, max_rows=4_000)


def test_spilling_is_used_only_where_it_helps():
    even = lognormal(3, 40, 8, 0.3)
    assert pack_children(even, 16, guard=True, spill=True).parents[0].form == "partition"
    uneven = [200_000, *lognormal(3, 40, 8, 0.3)]
    plain = pack_children(uneven, 16, guard=True)
    spilled = pack_children(uneven, 16, guard=True, spill=True)
    assert plain.parents[0].form == "baseline"
    assert spilled.validate().parents[0].form == "spill"
    assert spilled.stats["cost_us"] < plain.stats["cost_us"]


def test_short_samples_need_no_exchange():
    children = pack_children([1000] * 64, 16).parents[0].children
    assert [c.width for c in children] == [1] * 16


def test_a_sample_as_long_as_its_node_takes_the_whole_node():
    children = pack_children([8000] + [100] * 80, 16).parents[0].children
    assert (children[0].width, children[0].samples) == (8, (0,))
    assert sum(len(c.samples) for c in children[1:]) == 80


def test_no_samples_and_fewer_samples_than_ranks():
    empty = pack_children([], 16).validate()
    assert empty.parents[0].samples == ()
    assert empty.parents[0].reason == "empty parent"
    few = pack_children([5, 3], 32).validate()
    assert sorted(few.parents[0].samples) == [0, 1]


def test_the_same_input_gives_the_same_answer():
    lengths = lognormal(7, 300, 9, 1.2)
    first = pack_children(lengths, 32)
    assert all(pack_children(lengths, 32) == first for _ in range(3))

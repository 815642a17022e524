"""Samples to parents: legal, priced as the oracle prices, never worse than no repacking, near the bound."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solve_oracle import (
    best_total,
    cost,
    lognormal,
    milp_parents,
    spread_by_work,
    total,
    unrepacked,
)

from tide_backend.repack import CostModel, solve
from tide_backend.simulate.workloads import Workload

MODEL = CostModel.from_ratio(0.005)
MODELS = st.builds(
    CostModel,
    attention_us=st.sampled_from([0.0, 1e-5, 1e-4, 1e-3]),
    linear_us=st.sampled_from([0.0, 4.0, 11.0]),
    intra_us=st.sampled_from([0.0, 0.05, 2.0]),
    inter_us=st.sampled_from([0.0, 0.01, 0.4, 5.0]),
    full_layers=st.integers(1, 2),
    sparse_layers=st.integers(1, 5),
)
SYNC = st.sampled_from(["step", "layer"])
LENGTHS = st.lists(st.one_of(st.integers(1, 3000), st.integers(1, 300_000)), max_size=80)
PARENTS = st.sampled_from([(1, 16), (2, 16), (3, 32), (8, 16), (4, 8), (5, 4), (16, 1), (2, 64)])


@settings(max_examples=300, deadline=None)
@given(LENGTHS, PARENTS, st.sampled_from([2, 4, 8]), MODELS, SYNC, st.booleans(), st.booleans())
def test_legal_priced_right_and_bounded(lengths, parents, node, model, sync, guard, spill):
    assignment = solve(
        lengths, parents=[parents], ranks_per_node=node, cost_model=model, sync=sync, guard=guard, spill=spill
    )
    assignment.validate()
    stats = assignment.stats
    assert stats["cost_us"] == pytest.approx(cost(assignment, model, sync), rel=1e-9, abs=1e-6)
    assert stats["gap"] >= -1e-9
    members = [parent.samples for parent in assignment.parents]
    alone = total(unrepacked(members, parents[1], lengths, model, node), sync)
    assert stats["baseline_us"] == pytest.approx(alone, rel=1e-9, abs=1e-6)


@settings(max_examples=300, deadline=None)
@given(LENGTHS, PARENTS, st.sampled_from([2, 4, 8]), MODELS, SYNC, st.booleans())
def test_guarded_is_never_worse_than_no_repacking(lengths, parents, node, model, sync, spill):
    count, width = parents
    assignment = solve(
        lengths, parents=[parents], ranks_per_node=node, cost_model=model, sync=sync, spill=spill
    )
    ours = cost(assignment, model, sync)
    same_parents = [parent.samples for parent in assignment.parents]
    by_work = spread_by_work(lengths, count, width, model, node)
    for members in (same_parents, by_work):
        assert ours <= total(unrepacked(members, width, lengths, model, node), sync) * (1 + 1e-9) + 1e-6


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(800, 100_000), min_size=1, max_size=6), SYNC, MODELS)
def test_bound_below_the_exhaustive_optimum(lengths, sync, model):
    stats = solve(lengths, parents=[(2, 16)], cost_model=model, sync=sync, guard=False).stats
    best = best_total(lengths, 2, 16, model, sync)
    assert stats["bound_us"] <= best * (1 + 1e-3) + 1e-6  # the product rounds rows up, the oracle does not
    balance = stats["bound_us"] * (1 + stats["gap"])
    assert balance >= best * (1 - 1e-9) - 1e-6


@pytest.mark.parametrize("sync", ["step", "layer"])
@pytest.mark.parametrize("seed", range(3))
def test_near_the_milp(sync, seed):
    lengths = lognormal(seed, 18, 9, 1.0)
    found, proven = milp_parents(lengths, 2, 16, MODEL, sync, seconds=2)
    stats = solve(lengths, parents=[(2, 16)], cost_model=MODEL, sync=sync, guard=False).stats
    balance = stats["bound_us"] * (1 + stats["gap"])
    assert stats["bound_us"] <= found * (1 + 1e-4)
    assert proven * (1 - 1e-4) <= balance <= found * 1.02


def gaps(name: str, factor: float, samples: int, count: int, width: int, sync: str, seeds: int) -> float:
    draw = Workload(name, factor).sampler()
    found = []
    for seed in range(seeds):
        rng = random.Random(seed)
        lengths = [draw(rng) for _ in range(samples)]
        found.append(
            solve(lengths, parents=[(count, width)], cost_model=MODEL, sync=sync, guard=False).stats["gap"]
        )
    return statistics.mean(found)


@pytest.mark.parametrize(
    ("name", "factor", "samples", "count", "width"),
    [
        ("wlbllm", 2, 1000, 8, 32),
        ("wlbllm", 4, 10000, 16, 32),
        ("prolong", 2, 1000, 8, 16),
        ("magi", 2, 4000, 8, 32),
        ("lognormal_8.3_1.5", 1, 1000, 8, 32),
        ("longalign", 1, 1000, 16, 16),
    ],
)
def test_distance_to_the_bound(name, factor, samples, count, width):
    assert gaps(name, factor, samples, count, width, "step", 6) < 0.001
    assert gaps(name, factor, samples, count, width, "layer", 6) < 0.02


@pytest.mark.parametrize("name", ["lognormal_9.0_1.2", "wlbllm", "prolong"])
def test_distance_to_the_bound_sixteen_parents_of_sixteen(name):
    assert gaps(name, 1, 1000, 16, 16, "step", 6) < 0.001
    assert gaps(name, 1, 1000, 16, 16, "layer", 6) < 0.04


@pytest.mark.parametrize("sync", ["step", "layer"])
def test_one_giant_sample_is_a_disaster_only_without_the_guard(sync):
    lengths = [500_000, *lognormal(1, 300, 8.3, 1.0)]
    unguarded = solve(lengths, parents=[(4, 32)], cost_model=MODEL, sync=sync, guard=False)
    guarded = solve(lengths, parents=[(4, 32)], cost_model=MODEL, sync=sync)
    spilled = solve(lengths, parents=[(4, 32)], cost_model=MODEL, sync=sync, spill=True)
    assert unguarded.stats["cost_us"] > 1.2 * unguarded.stats["work_us"]
    assert guarded.stats["cost_us"] <= guarded.stats["work_us"]
    assert spilled.stats["cost_us"] <= guarded.stats["cost_us"] * (1 + 1e-9)
    giant = next(p for p in guarded.parents if 0 in p.samples)
    assert giant.form == "baseline"
    assert not giant.repacked
    assert giant.reason.startswith("left alone: children would cost +")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=60), st.integers(5_000, 9_000), SYNC)
def test_memory_caps_hold_in_every_parent(lengths, cap, sync):
    try:
        assignment = solve(lengths, parents=[(4, 16)], sync=sync, max_rows=cap, max_parent_tokens=15 * cap)
    except ValueError as error:
        assert sum(lengths) > 0.8 * 4 * 15 * cap
        assert "holds at most" in str(error)
    else:
        for parent in assignment.validate().parents:
            assert max(parent.rank_rows(assignment.lengths)) <= cap
            assert sum(lengths[s] for s in parent.samples) <= 15 * cap


def test_parents_of_several_widths():
    lengths = lognormal(2, 100, 8, 1.0)
    needed = [16 if length > 8000 else 8 if length > 3000 else 1 for length in lengths]
    assignment = solve(lengths, parents=[(2, 16), (3, 8), (8, 1)], sample_widths=needed, sync="layer")
    assignment.validate()
    assert assignment.world_size == 64
    assert [p.width for p in assignment.parents] == [16] * 2 + [8] * 3 + [1] * 8
    for parent in assignment.parents:
        assert {needed[s] for s in parent.samples} <= {parent.width}
    assert assignment.stats["cost_us"] == pytest.approx(cost(assignment, CostModel(), "layer"))


def test_members_are_kept():
    lengths = lognormal(5, 40, 9, 1.0)
    members = [list(range(0, 40, 2)), list(range(1, 40, 2))]
    assignment = solve(lengths, parents=[(2, 16)], members=members)
    assert [sorted(p.samples) for p in assignment.parents] == members
    assert assignment.stats["rule"] == "fixed"


def test_by_work_is_what_jobs_do_without_the_solver():
    lengths = lognormal(6, 200, 9, 1.0)
    assignment = solve(lengths, parents=[(4, 16)], cost_model=MODEL, membership="work")
    expected = spread_by_work(lengths, 4, 16, MODEL, 8)
    assert [sorted(p.samples) for p in assignment.parents] == [sorted(m) for m in expected]


def test_the_same_input_gives_the_same_answer():
    lengths = lognormal(9, 500, 9, 1.2)
    for sync in ("step", "layer"):
        first = solve(lengths, parents=[(8, 16)], sync=sync)
        assert solve(lengths, parents=[(8, 16)], sync=sync) == first


def test_order_of_samples_does_not_change_the_cost():
    lengths = lognormal(11, 300, 9, 1.2)
    for sync in ("step", "layer"):
        a = solve(lengths, parents=[(8, 16)], sync=sync).stats["cost_us"]
        b = solve(lengths[::-1], parents=[(8, 16)], sync=sync).stats["cost_us"]
        assert math.isclose(a, b, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [5, 0]}, "sample 1 has length 0, expected at least 1"),
        ({"lengths": [5, 1 << 31]}, "sample 1 has length 2147483648: too long for 2 samples"),
        ({"parents": [(0, 8)]}, "got 0 parents of width 8"),
        ({"parents": [(1, 12)]}, "parent width: got 12, expected a power of two"),
        ({"parents": [(1, 16)], "ranks_per_node": 6}, "ranks_per_node: got 6"),
        ({"parents": [(1, 16)], "world_size": 32}, "got 16 ranks in all, expected world_size 32"),
        ({"parents": None}, "expected world_size and parent_width"),
        ({"parents": None, "world_size": 24, "parent_width": 16}, "expected a multiple of parent_width 16"),
        ({"parents": [(1, 16), (2, 8)]}, "say with sample_widths"),
        ({"sample_widths": [8]}, "sample_widths: got 1"),
        ({"sample_widths": [8, 16, 4]}, "sample_widths: sample 0 needs width 8"),
        ({"members": [[0, 1]]}, "expected one for each of 2 parents"),
        ({"members": [[0, 1], [1, 2]]}, "sample 1 is in parents 0 and 1"),
        ({"members": [[0], [1]]}, "1 of 3 samples are in no child: 2"),
        ({"members": [[0], [1, 7]]}, "parent 1 has sample 7"),
        ({"sync": "never"}, 'sync: got "never"'),
        ({"membership": "chance"}, 'membership: got "chance"'),
        ({"max_rows": 0}, "max_rows: got 0"),
        ({"slack": 1.5}, "slack: got 1.5"),
        ({"first_rank": 4}, "first rank 4 is not aligned"),
        ({"max_rows": 10}, "sample 2 has 900 tokens, but a parent of 16 ranks holds at most 160"),
        ({"max_parent_tokens": 950, "lengths": [900, 900, 900]}, "got 1800 tokens"),
    ],
)
def test_bad_input_is_named(arguments, message):
    given_arguments = {"lengths": [500, 600, 900], "parents": [(2, 16)], **arguments}
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        solve(given_arguments.pop("lengths"), **given_arguments)


def test_lengths_must_be_whole_numbers():
    with pytest.raises(TypeError):
        solve([3.5, 2], parents=[(1, 8)])

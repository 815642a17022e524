"""Plans against the token-by-token oracle."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from expecttest import assert_expected_inline
from plan_oracle import held_tokens, parent_tokens, random_assignment

from tide_backend.repack import Assignment, Child, HeadMap, Parent, Plan, plans
from tide_backend.repack.summary import traffic

SMALL = Assignment(
    lengths=(10, 7, 3, 20, 5),
    ranks_per_node=2,
    parents=(Parent(0, 4, (Child(0, 2, (3,)), Child(2, 1, (0, 1)), Child(3, 1, (4, 2))), True, "a test"),),
)


def spilled(parent: Parent) -> bool:
    return len(parent.children) > 1 and parent.children[0].width == parent.width


def random_plans(seed: int):
    """(plan, oracle's held tokens, assignment) with random options."""
    rng = random.Random(seed)
    a = random_assignment(seed)
    for parent in a.parents:
        multiple = rng.choice([1, 1, 4])
        cut, order = rng.choice(["envelope", "balanced"]), rng.choice(["rank-major", "canonical"])
        if spilled(parent):
            cut, order = "balanced", "canonical"
        plan = Plan.of(
            parent, a.lengths, ranks_per_node=a.ranks_per_node, cut=cut, order=order, row_multiple=multiple
        )
        yield plan, held_tokens(parent, a.lengths, cut, multiple), a


@pytest.mark.parametrize("block", range(4))
def test_rows_tokens_and_positions_of_every_rank(block: int) -> None:
    for seed in range(block * 75, block * 75 + 75):
        for plan, held, a in random_plans(seed):
            base = [0, *accumulate(a.lengths)]
            assert list(plan.rows) == [len(h) for h in held]
            assert list(plan.offsets) == [0, *accumulate(len(h) for h in held)]
            assert plan.row_cap % plan.row_multiple == 0 and plan.row_cap >= max(plan.rows)
            for rank, tokens in enumerate(held):
                assert plan.local_index(rank).tolist() == [base[s] + i for s, i in tokens]
                assert plan.position_ids(rank=rank).tolist() == [i for _, i in tokens]
                spelled = [(s.sample, s.start + j) for s in plan.segments(rank) for j in range(s.length)]
                assert spelled == tokens


@pytest.mark.parametrize("block", range(4))
def test_parent_and_child_sequences(block: int) -> None:
    for seed in range(1000 + block * 75, 1000 + block * 75 + 75):
        for plan, held, a in random_plans(seed):
            tokens = parent_tokens(held, plan.order)
            assert plan.position_ids().tolist() == [i for _, i in tokens]
            assert plan.cu_seqlens().tolist() == [
                *[n for n, t in enumerate(tokens) if t[1] == 0],
                len(tokens),
            ]
            assert [s for s, _, _ in plan.sequences()] == [s for s, i in tokens if i == 0]
            flat = [t for h in held for t in h]
            assert [flat[i] for i in plan.canonical_index.tolist()] == sorted(flat)
            for number, child in enumerate(plan.children):
                ends = [0, *accumulate(a.lengths[s] for s in child.samples)]
                assert plan.cu_seqlens(child=number).tolist() == ends
                positions = [i for s in child.samples for i in range(a.lengths[s])]
                assert plan.position_ids(child=number).tolist() == positions
                assert plan.max_seqlen(child=number) == max([a.lengths[s] for s in child.samples], default=0)


def test_every_token_is_on_exactly_one_rank() -> None:
    for seed in range(100):
        a = random_assignment(seed)
        index = [plan.local_index(r) for plan in plans(a) for r in range(plan.width)]
        assert torch.cat(index).sort().values.tolist() == list(range(sum(a.lengths)))


def test_splits_transpose_between_directions() -> None:
    for seed in range(100):
        for plan, held, _ in random_plans(seed):
            width, rows = plan.width, [len(h) for h in held]
            heads = HeadMap.balanced(7, 7, width)
            count = [7 * (p + 1) // width - 7 * p // width for p in range(width)]
            for r in range(width):
                assert plan.in_splits("enter", r) == [rows[r]] * width == plan.out_splits("exit", r)
                assert plan.out_splits("enter", r) == rows == plan.in_splits("exit", r)
                enter = plan.in_splits("enter", r, heads=heads, head_dim=5)
                assert enter == [rows[r] * count[p] * 5 for p in range(width)]
                assert plan.out_splits("exit", r, heads=heads, head_dim=5) == enter
                back = plan.out_splits("enter", r, heads=heads, head_dim=5)
                assert back == [rows[p] * count[r] * 5 for p in range(width)]
                assert plan.in_splits("exit", r, heads=heads, head_dim=5) == back


def test_describe() -> None:
    assert_expected_inline(
        plans(SMALL)[0].describe(),
        """\
parent of 4 ranks (global 0..3), repacked: a test
  5 samples, 45 tokens; cut envelope, order rank-major, hash 9f0f6c35f899
  rows a rank: 3 to 17, mean 11.2, phi 1.511; envelope of 17 rows, 23 pad rows (33.8 %)
  child 0: ranks 0..1, rows 17 3, 20 tokens, samples 3
  child 1: ranks 2, rows 17, 17 tokens, samples 0 1
  child 2: ranks 3, rows 8, 8 tokens, samples 4 2""",
    )


def test_stats() -> None:
    s = plans(SMALL)[0].stats()
    assert (s["rows_min"], s["rows_max"], s["row_cap"], s["tokens"]) == (3, 17, 17, 45)
    assert s["pad_rows"] == 4 * 17 - 45
    assert s["phi"] == 17 / (45 / 4)
    assert s["empty_ranks"] == 0 and s["repacked"] is True and s["reason"] == "a test"


def test_off_rank_volume_does_not_depend_on_the_rows() -> None:
    """With equal heads enter moves T * H * d * (W - 1) / W elements off the rank, whatever the children."""
    seen = 0
    for seed in range(200):
        for plan, _, _ in random_plans(seed):
            q, kv, dim, v_dim = 2 * plan.width, plan.width, 4, 6
            moved = traffic(plan, HeadMap.balanced(q, kv, plan.width), dim, v_dim)
            per_token = q * dim + kv * (dim + v_dim)
            expected = plan.tokens * per_token * (plan.width - 1) // plan.width
            for name in ("enter", "even"):
                assert moved[name]["same_node"] + moved[name]["other_node"] == expected
            assert sum(moved["exit"].values()) == plan.tokens * q * v_dim
            seen += plan.width > 1 and plan.tokens > 0
    assert seen > 50


def test_replicated_kv_heads_are_counted_once_per_replica() -> None:
    a = Assignment((16,), 2, (Parent(0, 4, (Child(0, 4, (0,)),)),))
    moved = traffic(plans(a)[0], HeadMap.choose(4, 1, 4), head_dim=8)
    # Every rank gets 1 q head, k and v of the single KV head, of all 16 tokens: 16 * 3 * 8 elements, 4 ranks.
    assert sum(moved["enter"].values()) == 4 * 16 * 3 * 8
    assert moved["enter"]["same_rank"] == 4 * 4 * 3 * 8
    assert moved["enter"]["other_node"] == 2 * moved["enter"]["same_node"]


def test_child_plans_keep_the_rows() -> None:
    """A child's own plan cuts its packed row as the parent's plan does, and finds its rows on every rank."""
    for seed in range(200):
        for plan, held, a in random_plans(seed):
            for number, c in enumerate(plan.children):
                mine = plan.child_plan(number)
                assert mine.ranks == plan.ranks[c.first_rank : c.first_rank + c.width]
                assert mine.row_cap == plan.row_cap
                tokens = []
                for j in range(c.width):
                    part = held[c.first_rank + j][plan.child_rows(number, c.first_rank + j)]
                    assert [
                        (s.sample, s.start + i) for s in mine.segments(j) for i in range(s.length)
                    ] == part
                    tokens += part
                assert tokens == [(s, i) for s in c.samples for i in range(a.lengths[s])]
                assert mine.cu_seqlens().tolist() == plan.cu_seqlens(child=number).tolist()


def test_min_row_cap() -> None:
    plan = plans(SMALL, min_row_cap=19)[0]
    assert (plan.row_cap, plan.rows) == (19, (19, 1, 17, 8))
    assert plans(SMALL, min_row_cap=19, row_multiple=8)[0].row_cap == 24
    assert plans(SMALL, min_row_cap=10)[0].row_cap == 17

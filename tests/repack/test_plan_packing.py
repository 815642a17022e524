"""The exchange as a linear map on many random plans, all ranks in one process, against token indexing."""

from __future__ import annotations

import random

import pytest
import torch
from plan_oracle import held_tokens, parent_tokens, random_assignment
from simulated_ranks import SimulatedParent, items

from tide_backend.repack import HeadMap, Plan

SEEDS = [range(block * 60, block * 60 + 60) for block in range(6)]


def random_case(seed: int):
    """A plan, its oracle tokens per rank, a head map, and q, k, v tails."""
    rng = random.Random(seed)
    a = random_assignment(seed, parents=1, longest=12)
    parent = a.parents[0]
    cut, order = rng.choice(["envelope", "balanced"]), rng.choice(["rank-major", "canonical"])
    if len(parent.children) > 1 and parent.children[0].width == parent.width:
        cut, order = "balanced", "canonical"
    plan = Plan.of(parent, a.lengths, cut=cut, order=order)
    kv, group = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 2, 5])
    make = rng.choice([HeadMap.balanced, HeadMap.grouped])
    tails = ((3,), (3,), rng.choice([(3,), (5,), (2, 2), ()]))
    return plan, held_tokens(parent, a.lengths, cut), make(kv * group, kv, plan.width), tails


def values(held, heads: int, tail: tuple[int, ...], name: int) -> list[torch.Tensor]:
    """Child-side tensors whose every element says which tensor, sample, position, head and tail it is."""
    out = []
    for tokens in held:
        t = torch.empty(len(tokens), heads, *tail, dtype=torch.float64)
        for row, (s, i) in enumerate(tokens):
            for h in range(heads):
                label = h + 100 * (i + 100 * (s + 100 * name))
                t[row, h] = torch.arange(t[row, h].numel()).reshape(tail) + 100 * label
        out.append(t)
    return out


def dot(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> float:
    return sum(float((u * v).sum()) for x, y in zip(a, b, strict=True) for u, v in zip(x, y, strict=True))


@pytest.mark.parametrize("seeds", SEEDS)
def test_enter_and_its_adjoint(seeds: range) -> None:
    replicated = empty = headless = 0
    for seed in seeds:
        plan, held, heads, tails = random_case(seed)
        group = SimulatedParent(plan, items(heads, "qkv", tails))
        counts = (heads.q_heads, heads.kv_heads, heads.kv_heads)
        named = [values(held, counts[n], tails[n], n) for n in range(3)]
        x = [[t[r] for t in named] for r in range(plan.width)]
        y = group.enter(x)

        # Element by element: row (s, i) of the parent order, own heads.
        order = parent_tokens(held, plan.order)
        where = {t: (r, row) for r, tokens in enumerate(held) for row, t in enumerate(tokens)}
        for p in range(plan.width):
            own = (heads.q_ranges[p], heads.kv_ranges[p], heads.kv_ranges[p])
            for n, (first, end) in enumerate(own):
                expected = [x[where[t][0]][n][where[t][1], first:end] for t in order]
                assert y[p][n].shape == (plan.tokens, end - first, *tails[n])
                assert torch.equal(y[p][n], torch.stack(expected) if expected else y[p][n])

        # <E x, g> = <x, E^T g> with integers, hence exactly.
        g = [[torch.randint(-9, 9, t.shape).double() for t in rank] for rank in y]
        back = group.exit(g)
        small = [[torch.randint(-9, 9, t.shape).double() for t in rank] for rank in x]
        assert dot(group.enter(small), g) == dot(small, back)

        # Round trip: queries come back, keys and values once per replica.
        times = torch.tensor([len(heads.replicas(k)) for k in range(heads.kv_heads)], dtype=torch.float64)
        for rank, got in enumerate(group.exit(y)):
            assert torch.equal(got[0], x[rank][0])
            for n in (1, 2):
                assert torch.equal(got[n], x[rank][n] * times.reshape(1, -1, *[1] * len(tails[n])))
        replicated += max(times) > 1
        empty += 0 in plan.rows
        headless += any(f == e for f, e in heads.q_ranges)
    assert replicated and empty and headless


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_any_dtype_travels_unchanged(dtype: torch.dtype) -> None:
    for seed in range(10):
        plan, held, heads, _ = random_case(seed)
        group = SimulatedParent(plan, items(heads, "q", [(4,)]))
        x = [[torch.randint(0, 2, (len(t), heads.q_heads, 4)).to(dtype)] for t in held]
        for rank, (got,) in enumerate(group.exit(group.enter(x))):
            assert got.dtype == dtype and torch.equal(got, x[rank][0])


def test_replica_gradients_are_added_in_fp32_in_rank_order() -> None:
    """Eight bf16 replicas: rounding after every addition, or another order, gives another number."""
    plan = Plan.of(random_assignment(3, width=8, parents=1).parents[0], random_assignment(3, 8, 1).lengths)
    heads = HeadMap.choose(8, 1, 8)
    group = SimulatedParent(plan, items(heads, "k", [(16,)]))
    torch.manual_seed(0)
    scale = torch.tensor([1.0, 300.0, -300.0, 1e-2, 7.0, -7.0, 1e3, -1e3]).reshape(8, 1, 1, 1)
    g = (torch.randn(8, plan.tokens, 1, 16) * scale).bfloat16()
    back = torch.cat([t for (t,) in group.exit([[g[r]] for r in range(8)])])
    expected = torch.zeros(plan.tokens, 1, 16)
    for r in range(8):
        expected = expected + g[r].float()
    assert torch.equal(back, expected.bfloat16()) and back.dtype == torch.bfloat16
    rounded = torch.zeros(plan.tokens, 1, 16, dtype=torch.bfloat16)
    for r in range(8):
        rounded = rounded + g[r]
    assert not torch.equal(back, rounded)


@pytest.mark.parametrize(("q", "kv", "width"), [(40, 8, 16), (32, 2, 16), (16, 2, 32), (12, 12, 8), (6, 3, 2)])
def test_reported_head_counts(q: int, kv: int, width: int) -> None:
    """Heads that do not divide, or fewer than ranks: each query head meets its KV head, gradients reach all."""
    a = random_assignment(1, width=width, parents=1, longest=12)
    plan = Plan.of(a.parents[0], a.lengths)
    assert plan.tokens > 0
    heads = HeadMap.choose(q, kv, width)
    group = SimulatedParent(plan, items(heads, "qk", [(), ()]))
    x = [[torch.arange(q).double().expand(n, q), torch.arange(kv).double().expand(n, kv)] for n in plan.rows]
    for rank, (mine, keys) in enumerate(group.enter(x)):
        read = keys[:, heads.kv_index(rank)]
        assert torch.equal(read, mine.div(q // kv, rounding_mode="floor"))
        assert keys.shape[0] == mine.shape[0] == plan.tokens
    ones = [[torch.ones(plan.tokens, e - f) for f, e in (heads.q_ranges[r], heads.kv_ranges[r])] for r in range(width)]
    for (dq, dk), rows in zip(group.exit(ones), plan.rows, strict=True):
        assert torch.equal(dq, torch.ones(rows, q))
        assert torch.equal(dk, torch.tensor([float(len(heads.replicas(k))) for k in range(kv)]).expand(rows, kv))

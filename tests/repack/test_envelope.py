"""Physical layouts of the envelope against the token-by-token oracle."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch
from plan_oracle import held_tokens, parent_tokens, random_assignment

from tide_backend.repack import Assignment, Child, Parent, Plan, RepackError, plans
from tide_backend.repack.envelope import PAD_CHUNK

PAD = None


def cases(seeds: range):
    """(plan, physical tokens of each rank with PAD at pads, assignment)."""
    for seed in seeds:
        rng = random.Random(seed)
        a = random_assignment(seed, parents=1)
        parent = a.parents[0]
        cut, order, multiple = rng.choice(["envelope", "balanced"]), None, rng.choice([1, 1, 4])
        if len(parent.children) > 1 and parent.children[0].width == parent.width:
            cut, order = "balanced", "canonical"
        plan = Plan.of(parent, a.lengths, cut=cut, order=order, row_multiple=multiple)
        held = held_tokens(parent, a.lengths, cut, multiple)
        cap = max(map(len, held))
        cap += -cap % multiple
        yield plan, [h + [PAD] * (cap - len(h)) for h in held], a


def sequence_starts(tokens: list) -> list[int]:
    """Rows at which a token does not follow its left neighbour in the same sample."""
    return [n for n, t in enumerate(tokens) if t is not PAD and (n == 0 or tokens[n - 1] != (t[0], t[1] - 1))]


def test_masks_indices_and_positions() -> None:
    for plan, physical, a in cases(range(200)):
        e, base = plan.envelope, [0, *accumulate(a.lengths)]
        assert e.rows == len(physical[0])
        for rank, tokens in enumerate(physical):
            assert e.pad_mask(rank=rank).tolist() == [t is PAD for t in tokens]
            assert e.local_index(rank).tolist() == [-1 if t is PAD else base[t[0]] + t[1] for t in tokens]
            positions = e.position_ids(rank=rank).tolist()
            assert all(t is PAD or t[1] == i for t, i in zip(tokens, positions, strict=True))
        everything = [t for tokens in physical for t in tokens]
        assert e.pad_mask().tolist() == [t is PAD for t in everything]
        positions = e.position_ids().tolist()
        assert all(t is PAD or t[1] == i for t, i in zip(everything, positions, strict=True))
        for number, c in enumerate(plan.children):
            mine = [t for r in range(c.first_rank, c.first_rank + c.width) for t in physical[r]]
            assert e.pad_mask(child=number).tolist() == [t is PAD for t in mine]
            assert len(e.position_ids(child=number)) == len(mine)


def test_sequences_separate_samples_and_pads() -> None:
    for plan, physical, _ in cases(range(200, 400)):
        views = [({}, [t for tokens in physical for t in tokens])]
        views += [({"rank": r}, tokens) for r, tokens in enumerate(physical)]
        for number, c in enumerate(plan.children):
            mine = [t for r in range(c.first_rank, c.first_rank + c.width) for t in physical[r]]
            views.append(({"child": number}, mine))
        for which, tokens in views:
            cu = plan.envelope.cu_seqlens(**which).tolist()
            assert cu[0] == 0 and cu[-1] == len(tokens)
            assert set(sequence_starts(tokens)) <= set(cu)
            longest = 0
            for begin, end in pairwise(cu):
                inside = tokens[begin:end]
                longest = max(longest, end - begin)
                assert all(t is PAD for t in inside) or len({t[0] if t else t for t in inside}) == 1
            assert plan.envelope.max_seqlen(**which) == longest


def test_envelope_cut_keeps_every_sample_contiguous() -> None:
    for seed in range(200):
        a = random_assignment(seed, parents=1)
        parent = a.parents[0]
        if len(parent.children) > 1 and parent.children[0].width == parent.width:
            continue
        e = Plan.of(parent, a.lengths).envelope
        assert e.direct
        whole = [s for s, first, n in e.sequences() if s >= 0 and (first, n) == (0, a.lengths[s])]
        assert sorted(whole) == sorted(parent.samples)


def test_index_gathers_the_plans_parent_order() -> None:
    direct = 0
    for plan, physical, _ in cases(range(400, 600)):
        flat = [t for tokens in physical for t in tokens]
        valid = [[t for t in tokens if t is not PAD] for tokens in physical]
        assert [flat[i] for i in plan.envelope.index().tolist()] == parent_tokens(valid, plan.order)
        direct += plan.envelope.direct
        for number, c in enumerate(plan.children):
            mine = [t for r in range(c.first_rank, c.first_rank + c.width) for t in physical[r]]
            expected = [(s, i) for s in c.samples for i in range(plan.length_of[s])]
            assert [mine[i] for i in plan.envelope.index(child=number).tolist()] == expected
    assert 50 < direct < 190


def test_place_and_clean() -> None:
    for plan, physical, a in cases(range(600, 650)):
        data = torch.arange(1, 2 * sum(a.lengths) + 1, dtype=torch.float64).reshape(-1, 2)
        base = [0, *accumulate(a.lengths)]
        for rank, tokens in enumerate(physical):
            expected = [[-7.0, -7.0] if t is PAD else data[base[t[0]] + t[1]].tolist() for t in tokens]
            placed = plan.envelope.place(data, rank, fill=-7)
            assert placed.tolist() == expected
            dirty = placed.clone()
            dirty[plan.rows[rank] :] = float("nan")
            dirty.requires_grad_()
            cleaned = plan.envelope.clean(dirty, rank, fill=-7)
            assert cleaned.tolist() == expected
            cleaned.sum().backward()
            assert dirty.grad is not None
            assert dirty.grad.tolist() == [[float(t is not PAD)] * 2 for t in tokens]


def test_a_long_run_of_pads_is_cut_into_short_sequences() -> None:
    """An empty child beside a full one: its pads must not become one sequence that attention squares."""
    a = Assignment((4000, 4000), 4, (Parent(0, 8, (Child(0, 4, (0, 1)), Child(4, 4, ()))),))
    e = plans(a)[0].envelope
    assert e.rows == 2000 and e.pad_mask().sum() == 8000
    pads = [n for s, _, n in e.sequences() if s < 0]
    assert sum(pads) == 8000 and max(pads) == PAD_CHUNK
    assert e.position_ids()[8000:].max() == PAD_CHUNK - 1
    assert e.max_seqlen() == 4000


def test_row_multiple_rounds_the_envelope() -> None:
    a = Assignment((10, 3), 2, (Parent(0, 2, (Child(0, 1, (0,)), Child(1, 1, (1,)))),))
    assert [plans(a, row_multiple=m)[0].envelope.rows for m in (1, 4, 16)] == [10, 12, 16]
    assert plans(a, row_multiple=16)[0].rows == (10, 3)


def test_an_empty_parent_has_no_rows() -> None:
    plan = plans(Assignment((), 2, (Parent(0, 4, (Child(0, 2, ()), Child(2, 2, ()))),)))[0]
    e = plan.envelope
    assert e.rows == 0 and e.cu_seqlens().tolist() == [0] and e.position_ids().numel() == 0
    assert e.place(torch.zeros(0, 3), 1).shape == (0, 3) and e.direct


def test_wrong_rows_are_refused() -> None:
    plan = plans(Assignment((10, 3), 2, (Parent(0, 2, (Child(0, 1, (0,)), Child(1, 1, (1,)))),)))[0]
    with pytest.raises(RepackError, match="x has another number of rows; got 9, expected 10"):
        plan.envelope.clean(torch.zeros(9), 0)
    with pytest.raises(RepackError, match="rows in dimension 0 of q, k, v"):
        plan.envelope.gathered(lambda q, k, v: q)(*[torch.zeros(13, 1)] * 3)
    with pytest.raises(RepackError, match="a child and a rank at once"):
        plan.envelope.cu_seqlens(child=0, rank=0)

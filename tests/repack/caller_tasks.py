"""Attention and its gradients through equal-split callers on the envelope, against a per-sample reference."""

from __future__ import annotations

import functools
import random

import torch
import torch.distributed as dist
from attention_reference import by_cu_seqlens, by_lengths, by_position_ids
from plan_oracle import random_assignment
from ulysses_callers import EQUAL_SPLIT

from tide_backend.repack import Plan

TOLERANCE = {"rtol": 1e-11, "atol": 1e-11}


class Case:
    """A random plan of `world` ranks, global q, k, v, loss weights; the reference's outputs and gradients."""

    def __init__(self, seed: int, world: int, kv: int, spill: bool | None = False, v_dim: int = 6):
        rng = random.Random(seed)
        while True:
            a = random_assignment(rng.randrange(10**6), width=world, parents=1, longest=24)
            parent = a.parents[0]
            spilled = len(parent.children) > 1 and parent.children[0].width == parent.width
            if a.lengths and (spill is None or spilled == spill):
                break
        self.plan = Plan.of(parent, a.lengths, ranks_per_node=a.ranks_per_node)
        self.lengths, self.tokens, self.rng = a.lengths, sum(a.lengths), rng
        generator = torch.Generator().manual_seed(seed)
        heads = 2 * world if kv != 3 * world else 6 * world
        shapes = ((heads, 4), (kv, 4), (kv, v_dim), (heads, v_dim))
        made = [torch.randn(self.tokens, *s, generator=generator, dtype=torch.float64) for s in shapes]
        self.qkv, self.weight = made[:3], made[3]
        leaves = [t.clone().requires_grad_() for t in self.qkv]
        self.out = by_lengths(*leaves, self.lengths)
        (self.out * self.weight).sum().backward()
        self.grads = [t.grad for t in leaves]

    def check(self, rank: int, out: torch.Tensor, local: list[torch.Tensor], what: str) -> None:
        """Valid rows of this rank's output and gradients equal the reference's."""
        index, rows = self.plan.local_index(rank), self.plan.rows[rank]
        torch.testing.assert_close(out[:rows].detach(), self.out[index].detach(), **TOLERANCE, msg=what)
        for name, t, grad in zip("qkv", local, self.grads, strict=True):
            torch.testing.assert_close(t.grad[:rows], grad[index], **TOLERANCE, msg=f"{what}: grad of {name}")


def local_attention(kernel, sequences: torch.Tensor, q, k, v) -> torch.Tensor:
    return kernel(q, k, v, sequences)


def replicated(x: torch.Tensor, world: int) -> torch.Tensor:
    """Keys or values with fewer heads than ranks, repeated before the exchange as every caller does."""
    return x if x.shape[1] >= world else x.repeat_interleave(world // x.shape[1], dim=1)


def layer(caller, attention, q, k, v) -> torch.Tensor:
    """An unmodified Ulysses attention layer."""
    world = caller.world
    q, k, v = caller.enter(q), caller.enter(replicated(k, world)), caller.enter(replicated(v, world))
    return caller.exit(attention(q, k, v))


def equal_split(rank: int, world: int, name: str, seeds: list[int]) -> None:
    """The named caller on the envelope of random plans: only cu_seqlens or position_ids are new to it."""
    for seed in seeds:
        case = Case(seed, world, kv=(1, 2, world, 2 * world)[seed % 4])
        e = case.plan.envelope
        assert e.direct
        caller = EQUAL_SPLIT[name](dist.group.WORLD)
        local = [e.place(t, rank).requires_grad_() for t in case.qkv]
        kernel, sequences = (
            (by_cu_seqlens, e.cu_seqlens()) if seed % 2 else (by_position_ids, e.position_ids())
        )
        out = layer(caller, functools.partial(local_attention, kernel, sequences), *local)
        (out * e.place(case.weight, rank)).sum().backward()
        case.check(rank, out, local, f"{name}, seed {seed}, rank {rank}")
        for t in local:
            assert torch.isfinite(t.grad).all()


def gathered(rank: int, world: int, seeds: list[int]) -> None:
    """Spill: samples are not contiguous in physical rows; the wrapped local attention gathers them."""
    for seed in seeds:
        case = Case(seed, world, kv=2, spill=True)
        e = case.plan.envelope
        caller = EQUAL_SPLIT["veomni"](dist.group.WORLD)
        local = [e.place(t, rank).requires_grad_() for t in case.qkv]
        inner = e.gathered(functools.partial(local_attention, by_cu_seqlens, case.plan.cu_seqlens()))
        out = layer(caller, inner, *local)
        (out * e.place(case.weight, rank)).sum().backward()
        case.check(rank, out, local, f"spill, seed {seed}, rank {rank}")


def explicit(rank: int, world: int, seeds: list[int]) -> None:
    """enter_qkv and exit: no pads at all, fewer or more KV heads than ranks, no replication by the caller."""
    for seed in seeds:
        case = Case(seed, world, kv=(1, 2, world, 3 * world)[seed % 4], spill=None)
        plan = case.plan.bind(q_heads=case.qkv[0].shape[1], kv_heads=case.qkv[1].shape[1])
        index = plan.local_index()
        local = [t[index].requires_grad_() for t in case.qkv]
        q, k, v = plan.enter_qkv(*local)
        out = plan.exit(by_cu_seqlens(q, k, v, plan.cu_seqlens()))
        (out * case.weight[index]).sum().backward()
        case.check(rank, out, local, f"explicit, seed {seed}, rank {rank}")


def split_sizes(rank: int, world: int, seeds: list[int]) -> None:
    """A caller that passes split sizes and hands them to its backward swapped, as Megatron's mappings do."""

    class WithSplits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, out_splits, in_splits):
            ctx.splits = out_splits, in_splits
            out = x.new_empty(sum(out_splits), *x.shape[1:])
            dist.all_to_all_single(out, x.contiguous(), out_splits, in_splits)
            return out

        @staticmethod
        def backward(ctx, grad):
            out_splits, in_splits = ctx.splits
            return WithSplits.apply(grad, in_splits, out_splits), None, None

    for seed in seeds:
        case = Case(seed, world, kv=world)
        plan, index = case.plan, case.plan.local_index(rank)
        local = [t[index].requires_grad_() for t in case.qkv]
        entered = []
        for t in local:
            rows = torch.cat(t.split(t.shape[1] // world, dim=1))
            entered.append(
                WithSplits.apply(rows, plan.out_splits("enter", rank), plan.in_splits("enter", rank))
            )
        o = by_cu_seqlens(*entered, plan.cu_seqlens())
        back = WithSplits.apply(o, plan.out_splits("exit", rank), plan.in_splits("exit", rank))
        out = torch.cat(
            back.split(plan.rows[rank]) if plan.rows[rank] else [back.view(0, 2 * world, 6)], dim=1
        )
        (out * case.weight[index]).sum().backward()
        case.check(rank, out, local, f"splits, seed {seed}, rank {rank}")


def no_attention_across_samples(rank: int, world: int) -> None:
    """Changing sample 0 leaves every output of the other samples bit-identical."""
    case = Case(5, world, kv=world, spill=False)
    while len(case.lengths) < 3:
        case = Case(case.rng.randrange(1000), world, kv=world)
    e, outs = case.plan.envelope, []
    for change in (0.0, 10.0):
        changed = [t.clone() for t in case.qkv]
        for t in changed:
            t[: case.lengths[0]] += change
        local = [e.place(t, rank) for t in changed]
        inner = functools.partial(local_attention, by_cu_seqlens, e.cu_seqlens())
        outs.append(layer(EQUAL_SPLIT["deepspeed_batch_first"](dist.group.WORLD), inner, *local))
    other = case.plan.local_index(rank) >= case.lengths[0]
    valid = [o[: case.plan.rows[rank]] for o in outs]
    assert torch.equal(valid[0][other], valid[1][other])
    assert other.all() or not torch.equal(valid[0], valid[1])


def pads_hold_nan(rank: int, world: int, seeds: list[int]) -> None:
    """NaN in pads reaches no valid row, forward or backward; `clean` keeps it out of weight gradients."""
    for seed in seeds:
        case = Case(seed, world, kv=world)
        e = case.plan.envelope
        local = [e.place(t, rank, fill=float("nan")).requires_grad_() for t in case.qkv]
        inner = functools.partial(local_attention, by_cu_seqlens, e.cu_seqlens())
        out = layer(EQUAL_SPLIT["megatron"](dist.group.WORLD), inner, *local)
        (out[: case.plan.rows[rank]] * case.weight[case.plan.local_index(rank)]).sum().backward()
        case.check(rank, out, local, f"NaN pads, seed {seed}, rank {rank}")

        x = e.place(case.qkv[0][:, 0], rank, fill=float("nan"))
        w = torch.eye(4, dtype=torch.float64, requires_grad=True)
        y = e.clean(x, rank) @ w
        (y * e.place(case.weight[:, 0, :4], rank)).sum().backward()
        total = w.grad.clone()
        dist.all_reduce(total)
        expected = case.qkv[0][:, 0].T @ case.weight[:, 0, :4]
        torch.testing.assert_close(total, expected, **TOLERANCE)


def routed(x: torch.Tensor, w: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Sums over the kept rows of each expert's probability and of its top-2 choices: `[2, experts]`."""
    p = (x @ w).softmax(-1) * keep.unsqueeze(1)
    chosen = torch.zeros_like(p).scatter(1, p.topk(2, dim=-1).indices, 1.0) * keep.unsqueeze(1)
    return torch.stack([p.sum(0), chosen.sum(0)])


def router_statistics(rank: int, world: int, seeds: list[int]) -> None:
    """Load counts and balancing loss of a top-2 router, pads masked, equal those of the unpadded tokens."""
    for seed in seeds:
        case = Case(seed, world, kv=world)
        e, x = case.plan.envelope, case.qkv[0][:, 0]
        w = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        reference, mine = w.clone().requires_grad_(), w.clone().requires_grad_()
        everything = routed(x, reference, torch.ones(len(x), dtype=torch.float64))
        (everything[0] * everything[1].detach()).sum().backward()

        local = routed(e.place(x, rank), mine, (~e.pad_mask(rank=rank)).double())
        total = local.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, everything.detach(), **TOLERANCE)
        (local[0] * total[1]).sum().backward()
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad, reference.grad, **TOLERANCE)
        if case.plan.row_cap * world > case.tokens:
            unmasked = routed(e.place(x, rank), w, torch.ones(e.rows, dtype=torch.float64))
            dist.all_reduce(unmasked)
            assert unmasked[1].sum() > everything[1].sum()  # pads would have been counted


def gathered_position_ids(rank: int, world: int) -> None:
    """A framework that shards position ids and gathers them on the same group gets the parent's."""
    e = Case(7, world, kv=world).plan.envelope
    parts = [torch.empty(e.rows, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(parts, e.position_ids()[rank * e.rows : (rank + 1) * e.rows])
    assert torch.equal(torch.cat(parts), e.position_ids())


def indivisible(rank: int, world: int) -> str:
    """Equal split of rows that the group's size does not divide: an error on every rank."""
    try:
        dist.all_to_all_single(torch.empty(world + 1, 2), torch.empty(world + 1, 2))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""

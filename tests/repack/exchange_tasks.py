"""What each rank does in test_exchange.py. The oracle is a global tensor that every rank makes by a seed."""

from __future__ import annotations

import random
from itertools import accumulate

import torch
import torch.distributed as dist
from plan_oracle import held_tokens, parent_tokens, random_assignment
from torch.utils.checkpoint import checkpoint

from tide_backend.repack import Assignment, Child, HeadMap, Parent, Plan, plans

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def group_of(world: int, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """One group per rank list and process; all ranks of the world call it (creation is collective)."""
    if len(ranks) == world:
        return dist.group.WORLD
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(ranks))
    return _groups[ranks]


def data(seed: int, *shape: int) -> torch.Tensor:
    """The same integers on every rank, as float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, shape, generator=generator).double()


def random_plan(seed: int, width: int, longest: int = 20) -> tuple[Plan, list, list]:
    """A random plan of `width` ranks, the dataset tokens of each rank, and those of the parent in order."""
    rng = random.Random(seed)
    a = random_assignment(seed, width=width, parents=1, longest=longest)
    parent = a.parents[0]
    cut, order = rng.choice(["envelope", "balanced"]), rng.choice(["rank-major", "canonical"])
    if len(parent.children) > 1 and parent.children[0].width == parent.width:
        cut, order = "balanced", "canonical"
    plan = Plan.of(parent, a.lengths, ranks_per_node=a.ranks_per_node, cut=cut, order=order)
    held = held_tokens(parent, a.lengths, cut)
    base = [0, *accumulate(a.lengths)]
    index = [[base[s] + i for s, i in tokens] for tokens in held]
    return plan, index, [base[s] + i for s, i in parent_tokens(held, order)]


def own(heads: HeadMap, rank: int) -> tuple[slice, slice]:
    return slice(*heads.q_ranges[rank]), slice(*heads.kv_ranges[rank])


def values_and_gradients(rank: int, world: int, seeds: list[int]) -> int:
    """enter_qkv, enter of each, exit, and all gradients, for random plans and heads."""
    for seed in seeds:
        rng = random.Random(seed)
        plan, held, order = random_plan(seed, world)
        kv, group = rng.choice([1, 2, 3, world, 2 * world]), rng.choice([1, 2, 4])
        h, d, dv, tokens = kv * group, 4, rng.choice([4, 6]), plan.tokens
        bound = plan.bind(q_heads=h, kv_heads=kv)
        q_own, kv_own = own(bound.heads, rank)

        whole = [data(seed, tokens, n, w) for n, w in ((h, d), (kv, d), (kv, dv))]
        local = [t[held[rank]].requires_grad_() for t in whole]
        out = bound.enter_qkv(*local)
        for got, t, heads in zip(out, whole, (q_own, kv_own, kv_own), strict=True):
            assert torch.equal(got, t[order][:, heads])
        for got, t, heads in zip(map(bound.enter, local), whole, (q_own, kv_own, kv_own), strict=True):
            assert torch.equal(got, t[order][:, heads])

        # Every rank weighs its own copy of a head: a KV head gets the sum over the ranks that hold it.
        weights = [
            [data(1000 * seed + 10 * p + n, *t.shape) for n, t in enumerate(whole)] for p in range(world)
        ]
        mine = [w[order][:, heads] for w, heads in zip(weights[rank], (q_own, kv_own, kv_own), strict=True)]
        sum((a * b).sum() for a, b in zip(out, mine, strict=True)).backward()
        for n, t in enumerate(local):
            expected = torch.zeros_like(whole[n])
            for p in range(world):
                heads = own(bound.heads, p)[min(n, 1)]
                expected[:, heads] += weights[p][n][:, heads]
            assert torch.equal(t.grad, expected[held[rank]])

        o = data(seed + 7, tokens, h, dv)
        local_o = o[order][:, q_own].requires_grad_()
        back = bound.exit(local_o)
        assert torch.equal(back, o[held[rank]])
        w = data(seed + 8, tokens, h, dv)
        (back * w[held[rank]]).sum().backward()
        assert torch.equal(local_o.grad, w[order][:, q_own])
    return len(seeds)


def two_parents(rank: int, world: int) -> None:
    """Two models with other head counts in one process, two groups, calls interleaved."""
    half = world // 2
    lengths = (9, 4, 7, 2, 6, 11)
    made = plans(
        Assignment(
            lengths,
            1,
            (
                Parent(0, half, (Child(0, half, (0, 3, 5)),)),
                Parent(
                    half, half, tuple(Child(r, 1, ((1,), (2, 4))[r] if r < 2 else ()) for r in range(half))
                ),
            ),
        )
    )
    groups = [group_of(world, p.ranks) for p in made]
    mine = rank // half
    plan = made[mine]
    twelve, three = (plan.bind(groups[mine], q_heads=h, kv_heads=k) for h, k in ((12, 12), (6, 3)))
    for bound, h in ((twelve, 12), (three, 6), (twelve, 12)):
        t = data(h, sum(lengths), h, 2)
        q_own = slice(*bound.heads.q_ranges[rank % half])
        inside = torch.cat([t[b : b + n] for b, n in zip(plan.bases, plan.lengths, strict=True)])
        o = bound.enter(t[plan.local_index(rank % half)])
        assert sorted(o.flatten().tolist()) == sorted(inside[:, q_own].flatten().tolist())
        assert torch.equal(bound.exit(o), t[plan.local_index(rank % half)])


def low_precision(rank: int, world: int) -> None:
    """bf16 travels unchanged; replicas of a KV head are added in fp32 in rank order."""
    plan, held, order = random_plan(5, world)
    bound = plan.bind(q_heads=2 * world, kv_heads=1)
    k = data(1, plan.tokens, 1, 8).bfloat16()
    local = k[held[rank]].requires_grad_()
    out = bound.enter(local)
    assert torch.equal(out, k[order])
    scale = [1.0, 300.0, -300.0, 1e-2, 7.0, -7.0, 1e3, -1e3]
    g = [(data(100 + p, plan.tokens, 1, 8) * scale[p % 8] / 3).bfloat16() for p in range(world)]
    out.backward(g[rank][order])
    expected = torch.zeros(plan.tokens, 1, 8)
    for p in range(world):
        expected = expected + g[p].float()
    assert torch.equal(local.grad, expected.bfloat16()[held[rank]])


def padded(rank: int, world: int) -> None:
    """`padded=True`: pads (NaN here) do not travel and come back as zeros, with zero gradient."""
    for seed in range(10):
        plan, held, order = random_plan(seed, world)
        bound = plan.bind(q_heads=world)
        x = data(seed, plan.tokens, world, 3)
        local = torch.full((plan.row_cap, world, 3), float("nan"), dtype=torch.float64)
        local[: plan.rows[rank]] = x[held[rank]]
        local.requires_grad_()
        o = bound.enter(local, padded=True)
        assert torch.equal(o, x[order][:, rank : rank + 1])
        back = bound.exit(2 * o, padded=True)
        assert back.shape == local.shape
        assert torch.equal(back[: plan.rows[rank]], 2 * x[held[rank]]) and not back[plan.rows[rank] :].any()
        back.sum().backward()
        assert (local.grad[: plan.rows[rank]] == 2).all() and not local.grad[plan.rows[rank] :].any()


def in_place_and_strided(rank: int, world: int) -> None:
    """Outputs may be changed in place (rotary embeddings), inputs and gradients may be strided."""
    plan, held, order = random_plan(11, world)
    bound = plan.bind(q_heads=world, kv_heads=world)
    x = data(3, plan.tokens, world, 4)
    strided = x[held[rank]].permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not strided.is_contiguous() or strided.numel() == 0
    local = strided.requires_grad_()
    q, k, _ = bound.enter_qkv(local, local, local)
    q.mul_(2)
    k += 1
    assert torch.equal(q, 2 * x[order][:, rank : rank + 1])
    one = bound.enter(local)
    one.neg_()
    grad = torch.ones(4, 1, plan.tokens, dtype=torch.float64).permute(2, 1, 0)
    torch.autograd.backward([q, k, one], [grad, grad, grad])
    assert (local.grad == 2 + 1 - 1).all()
    o = x[order][:, rank : rank + 1].permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(bound.exit(o), x[held[rank]])


def block(bound, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A non-linear layer around the exchange: its backward needs saved activations."""
    y = torch.tanh(bound.enter(x * w))
    return x + bound.exit(y * y)


def recompute(rank: int, world: int, reentrant: bool) -> None:
    """Activation checkpointing repeats the exchanges in backward; gradients equal those without it."""
    plan, held, _ = random_plan(21, world)
    bound = plan.bind(q_heads=world)
    x0 = data(4, plan.tokens, world, 3)[held[rank]] / 50
    grads = []
    for saved in (False, True):
        x, w = x0.clone().requires_grad_(), torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
        y = x
        for _ in range(3):
            y = block(bound, y, w) if not saved else checkpoint(block, bound, y, w, use_reentrant=reentrant)
        y.square().sum().backward()
        grads.append((x.grad, w.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


def one_forward_one_backward(rank: int, world: int) -> None:
    """Plans A and B in flight: forward A, forward B, backward A, backward B; with and without recompute."""
    cases = [random_plan(seed, world) for seed in (31, 32)]
    inputs = [data(seed, p.tokens, world, 3)[held[rank]] / 50 for seed, (p, held, _) in enumerate(cases)]

    def run(interleaved: bool, saved: bool) -> list[torch.Tensor]:
        xs, losses = [x.clone().requires_grad_() for x in inputs], []
        w = torch.full((3,), 0.7, dtype=torch.float64, requires_grad=True)
        for (plan, _, _), x in zip(cases, xs, strict=True):
            bound = plan.bind(q_heads=world)
            y = checkpoint(block, bound, x, w, use_reentrant=False) if saved else block(bound, x, w)
            losses.append(block(bound, y, w).square().sum())
            del bound  # the graph alone keeps the plan
            if not interleaved:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        return [x.grad for x in xs] + [w.grad]

    reference = run(False, False)
    for interleaved, saved in ((True, False), (True, True), (False, True)):
        for got, expected in zip(run(interleaved, saved), reference, strict=True):
            assert torch.equal(got, expected)


def nothing_to_send(rank: int, world: int) -> None:
    """Only rank 0 holds rows: the others send nothing and receive, then the mirror; splits and exchange."""
    children = tuple(Child(r, 1, (0,) if r == 0 else ()) for r in range(world))
    plan = plans(Assignment((3,), 1, (Parent(0, world, children),)))[0]
    assert plan.in_splits("enter", rank) == [3 if rank == 0 else 0] * world
    assert plan.out_splits("enter", rank) == [3] + [0] * (world - 1)
    x = torch.arange(3.0 * world).reshape(world * 3, 1) if rank == 0 else torch.empty(0, 1)
    out = torch.empty(3, 1)
    dist.all_to_all_single(out, x, plan.out_splits("enter", rank), plan.in_splits("enter", rank))
    assert out.flatten().tolist() == [3.0 * rank, 3.0 * rank + 1, 3.0 * rank + 2]
    bound = plan.bind(q_heads=world)
    local = torch.ones(3 if rank == 0 else 0, world, 2, requires_grad=True)
    for _ in range(20):
        back = bound.exit(bound.enter(local) * (rank + 1))
        back.sum().backward()
    assert back.shape == local.shape
    if rank == 0:
        assert torch.equal(back[0, :, 0], torch.arange(1.0, world + 1))
        assert torch.equal(local.grad[0, :, 0], 20 * torch.arange(1.0, world + 1))


def sparse_counts(rank: int, world: int, times: int) -> None:
    """Random plans in which most ranks are empty, one exchange after the other."""
    for n in range(times):
        rng = random.Random(n)
        lengths = tuple(rng.randint(1, 5) for _ in range(max(1, int(0.4 * world))))
        where = rng.sample(range(world), len(lengths))
        children = tuple(Child(r, 1, tuple(s for s, w in enumerate(where) if w == r)) for r in range(world))
        bound = plans(Assignment(lengths, 1, (Parent(0, world, children),)))[0].bind(
            q_heads=world, verify="never"
        )
        x = data(n, sum(lengths), world, 1)[bound.local_index()]
        assert torch.equal(bound.exit(bound.enter(x)), x)


def compiled(rank: int, world: int) -> None:
    """Under torch.compile the exchange stays an eager call with its own backward: gradients are not lost."""
    plan, held, _ = random_plan(41, world)
    bound = plan.bind(q_heads=world)
    x0 = data(4, plan.tokens, world, 3)[held[rank]] / 50
    got = []
    for f in (block, torch.compile(block, backend="aot_eager")):
        x, w = x0.clone().requires_grad_(), torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
        y = f(bound, x, w)
        y.square().sum().backward()
        got.append((y.detach(), x.grad, w.grad))
    for a, b in zip(*got, strict=True):
        assert torch.equal(a, b)
    assert not rank or got[0][1].numel() == 0 or got[0][1].abs().sum() > 0

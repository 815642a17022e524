"""A small hybrid-attention model on repacked ranks, against the same model on all samples in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from attention_reference import by_cu_seqlens, by_lengths
from ulysses_callers import RowsOnly

from tide_backend.repack import Assignment, Child, Parent, plans

HEADS, DIM, WINDOW = 8, 4, 5
HIDDEN = HEADS * DIM
LENGTHS = (23, 9, 14, 3, 30, 6, 2)
NODE_PARTITION = (Child(0, 2, (4,)), Child(2, 1, (0, 3)), Child(3, 1, (1, 2, 5, 6)))
SPILL = (Child(0, 4, (4,)), Child(0, 2, (0, 1)), Child(2, 1, (2, 3)), Child(3, 1, (5, 6)))
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def weights() -> list[dict[str, torch.Tensor]]:
    """One full layer after three sparse ones, twice."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"qkv": (HIDDEN, 3 * HIDDEN), "out": (HIDDEN, HIDDEN)}
    return [
        {
            name: (
                torch.randn(*size, generator=generator, dtype=torch.float64) / HIDDEN**0.5
            ).requires_grad_()
            for name, size in sizes.items()
        }
        for _ in range(8)
    ]


def model(x: torch.Tensor, layers: list[dict[str, torch.Tensor]], sparse, full) -> torch.Tensor:
    """`sparse` and `full` take q, k, v `[rows, HEADS, DIM]` in the caller's layout."""
    for number, w in enumerate(layers):
        q, k, v = (t.reshape(-1, HEADS, DIM) for t in (x @ w["qkv"]).chunk(3, dim=1))
        attention = full if number % 4 == 3 else sparse
        x = x + torch.tanh(attention(q, k, v).reshape(-1, HIDDEN) @ w["out"])
    return x


def dataset() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = sum(LENGTHS)
    return tuple(torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))


def reference() -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    x, target = dataset()
    layers = weights()
    y = model(
        x,
        layers,
        lambda q, k, v: by_lengths(q, k, v, LENGTHS, WINDOW),
        lambda q, k, v: by_lengths(q, k, v, LENGTHS),
    )
    ((y - target).square().sum() / len(x)).backward()
    return y.detach(), layers


def block_groups(children: tuple[Child, ...]) -> list[dist.ProcessGroup]:
    """A group per child; collective over the world, made once."""
    for c in children:
        ranks = tuple(range(c.first_rank, c.first_rank + c.width))
        if ranks not in _groups:
            _groups[ranks] = dist.new_group(list(ranks))
    return [_groups[tuple(range(c.first_rank, c.first_rank + c.width))] for c in children]


def compare(rank, y, index, layers, what: str) -> None:
    """Outputs of this rank's tokens, and weight gradients summed over the ranks."""
    expected, ref = reference()
    torch.testing.assert_close(
        y.detach(), expected[index], rtol=1e-10, atol=1e-10, msg=f"{what}, rank {rank}"
    )
    for mine, theirs in zip(layers, ref, strict=True):
        for name in mine:
            dist.all_reduce(mine[name].grad)
            torch.testing.assert_close(mine[name].grad, theirs[name].grad, rtol=1e-10, atol=1e-10)


def envelope(rank: int, world: int) -> None:
    """Equal-split layers on the parent and on the child, padded rows, plain torch.distributed groups."""
    plan = plans(Assignment(LENGTHS, 2, (Parent(0, 4, NODE_PARTITION, True, "a test"),)))[0]
    e, (number,) = plan.envelope, plan.children_of(rank)
    parent, child = RowsOnly(dist.group.WORLD), RowsOnly(block_groups(plan.children)[number])

    def ulysses(caller, cu_seqlens, window, q, k, v):
        q, k, v = map(caller.enter, (q, k, v))
        return caller.exit(by_cu_seqlens(q, k, v, cu_seqlens, window))

    x, target = dataset()
    layers, keep = weights(), ~e.pad_mask(rank=rank)
    y = model(
        e.place(x, rank),
        layers,
        lambda q, k, v: ulysses(child, e.cu_seqlens(child=number), WINDOW, q, k, v),
        lambda q, k, v: ulysses(parent, e.cu_seqlens(), 0, q, k, v),
    )
    (((y - e.place(target, rank)).square() * keep.unsqueeze(1)).sum() / len(x)).backward()
    compare(rank, y[keep], plan.local_index(rank), layers, "envelope")


def explicit(rank: int, world: int, spill: bool, cut: str | None, order: str | None) -> None:
    """enter_qkv and exit on the parent's and the children's plans; with spill a rank is in two children."""
    children = SPILL if spill else NODE_PARTITION
    made = plans(Assignment(LENGTHS, 2, (Parent(0, 4, children, True, "a test"),)), cut=cut, order=order)[0]
    plan = made.bind(q_heads=HEADS)
    groups = block_groups(plan.children)
    mine = {n: plan.child_plan(n).bind(groups[n], q_heads=HEADS) for n in plan.children_of()}

    def ulysses(bound, window, q, k, v):
        q, k, v = bound.enter_qkv(q, k, v)
        return bound.exit(by_cu_seqlens(q, k, v, bound.cu_seqlens(), window))

    def sparse(q, k, v):
        parts = []
        for n, bound in mine.items():
            rows = plan.child_rows(n)
            parts.append(ulysses(bound, WINDOW, q[rows], k[rows], v[rows]))
        return torch.cat(parts)

    x, target = dataset()
    layers, index = weights(), plan.local_index()
    y = model(x[index], layers, sparse, lambda q, k, v: ulysses(plan, 0, q, k, v))
    ((y - target[index]).square().sum() / len(x)).backward()
    compare(rank, y, index, layers, "explicit")

"""All ranks of a parent in one process: packers with an all-to-all made of slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tide_backend.repack import HeadMap, Plan
from tide_backend.repack.packing import Item, Packer


def items(heads: HeadMap, kinds: str, tails: Sequence[tuple[int, ...]]) -> tuple[Item, ...]:
    """`kinds` has a letter per tensor: q, k or v."""
    cut = {"q": (heads.q_heads, heads.q_ranges), "k": (heads.kv_heads, heads.kv_ranges)}
    cut["v"] = cut["k"]
    return tuple(Item(*cut[kind], tuple(tail)) for kind, tail in zip(kinds, tails, strict=True))


def all_to_all(sent: list[torch.Tensor], counts: list[list[int]]) -> list[torch.Tensor]:
    """Rank r sends `counts[r][p]` elements to p; received buffers hold the pieces in source order."""
    pieces = [list(buffer.split(n)) for buffer, n in zip(sent, counts, strict=True)]
    return [torch.cat([pieces[r][p] for r in range(len(sent))]) for p in range(len(sent))]


class SimulatedParent:
    def __init__(self, plan: Plan, message: Sequence[Item]):
        self.packers = [Packer(plan, r, message) for r in range(plan.width)]

    def enter(self, tensors: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Child-side tensors of every rank -> parent-side tensors of every rank."""
        sent = [p.pack_child(t) for p, t in zip(self.packers, tensors, strict=True)]
        received = all_to_all(sent, [p.child_counts for p in self.packers])
        for p, buffer in zip(self.packers, received, strict=True):
            assert buffer.numel() == sum(p.parent_counts)
        return [p.unpack_parent(b.view(p.parent_shape)) for p, b in zip(self.packers, received, strict=True)]

    def exit(self, tensors: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The mirror of `enter`; heads that several ranks hold are added."""
        sent = [p.pack_parent(t) for p, t in zip(self.packers, tensors, strict=True)]
        received = all_to_all(sent, [p.parent_counts for p in self.packers])
        return [p.unpack_child(b) for p, b in zip(self.packers, received, strict=True)]

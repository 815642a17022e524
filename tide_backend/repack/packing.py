"""Messages of the head exchange: tensors of one rank <-> flat buffers, one message per peer. No
communication.

Child side: tensors `[rows[rank], heads, *tail]` with all heads. Parent side: `[tokens, own heads, *tail]`.
The message between child-side rank r and parent-side rank p holds, tensor after tensor, r's rows with p's
heads: `[rows[r], heads of p, *tail]`. Enter sends these from r to p, exit and the backward of enter from p
to r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import torch

from .heads import Range

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True)
class Item:
    """One tensor of a message: its heads, the heads of each rank (replicas overlap), and the tail."""

    heads: int
    ranges: tuple[Range, ...]
    tail: tuple[int, ...]

    def count(self, rank: int) -> int:
        """Heads of `rank`."""
        return self.ranges[rank][1] - self.ranges[rank][0]

    def row(self, rank: int) -> int:
        """Elements of one row with the heads of `rank`."""
        return self.count(rank) * prod(self.tail)

    @cached_property
    def replicated(self) -> bool:
        """True if some head is on more than one rank."""
        return sum(map(self.count, range(len(self.ranges)))) > self.heads


class Packer:
    """Packs and unpacks the messages of `rank` for a fixed list of tensors of one dtype."""

    def __init__(self, plan: Plan, rank: int, items: Sequence[Item]):
        self.items = tuple(items)
        self.rank = rank
        self.rows = plan.rows
        self.tokens = plan.tokens
        self._canonical = plan.canonical_index if plan.order == "canonical" else None
        self._canonical_on: dict[torch.device, torch.Tensor] = {}
        row = [sum(item.row(p) for item in self.items) for p in range(plan.width)]
        self.child_counts = [self.rows[rank] * n for n in row]
        """Elements exchanged with each peer when this rank is the child side."""
        self.parent_counts = [r * row[rank] for r in self.rows]
        """Elements exchanged with each peer when this rank is the parent side."""
        self.parent_shape = [sum(self.parent_counts)]
        """Shape of the buffer `unpack_parent` takes; the tensor's own shape when there is only one."""
        if len(self.items) == 1:
            self.parent_shape = [self.tokens, self.items[0].count(rank), *self.items[0].tail]

    def pack_child(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Child-side tensors -> send buffer, `child_counts[p]` elements for each p."""
        buffer = tensors[0].new_empty(sum(self.child_counts))
        views = self._child_views(buffer)
        for pieces, tensor in zip(views, tensors, strict=True):
            for (first, end), piece in pieces:
                piece.copy_(tensor[:, first:end])
        return buffer

    def unpack_child(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Receive buffer -> child-side tensors. Replicas are added in at least fp32, in rank order."""
        out = []
        for item, pieces in zip(self.items, self._child_views(buffer), strict=True):
            shape = (self.rows[self.rank], item.heads, *item.tail)
            if not item.replicated:
                tensor = buffer.new_empty(shape)
                for (first, end), piece in pieces:
                    tensor[:, first:end].copy_(piece)
            else:
                tensor = buffer.new_zeros(shape, dtype=torch.promote_types(buffer.dtype, torch.float32))
                for (first, end), piece in pieces:
                    tensor[:, first:end] += piece
            out.append(tensor.to(buffer.dtype))
        return out

    def pack_parent(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Parent-side tensors -> send buffer, `parent_counts[r]` elements for each r."""
        if self._canonical is not None:
            index = self._canonical_index(tensors[0].device)
            tensors = [torch.empty_like(t).index_copy_(0, index, t) for t in tensors]
        if len(tensors) == 1:
            return tensors[0].reshape(-1)  # rank-major rows are already the messages in rank order
        buffer = tensors[0].new_empty(sum(self.parent_counts))
        for pieces, tensor in zip(self._parent_views(buffer), tensors, strict=True):
            for (first, end), piece in pieces:
                piece.copy_(tensor[first:end])
        return buffer

    def unpack_parent(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Receive buffer -> parent-side tensors in the plan's row order."""
        if len(self.items) == 1:
            out = [buffer]
        else:
            out = [buffer.new_empty(self.tokens, item.count(self.rank), *item.tail) for item in self.items]
            for pieces, tensor in zip(self._parent_views(buffer), out, strict=True):
                for (first, end), piece in pieces:
                    tensor[first:end].copy_(piece)
        if self._canonical is not None:
            index = self._canonical_index(buffer.device)
            out = [t.index_select(0, index) for t in out]
        return out

    def _canonical_index(self, device: torch.device) -> torch.Tensor:
        assert self._canonical is not None
        if device not in self._canonical_on:
            self._canonical_on[device] = self._canonical.to(device)
        return self._canonical_on[device]

    def _child_views(self, buffer: torch.Tensor) -> list[list[tuple[Range, torch.Tensor]]]:
        """For each item: (its head range on p, view of its part of the message with p), in rank order."""
        views: list[list[tuple[Range, torch.Tensor]]] = [[] for _ in self.items]
        rows, position = self.rows[self.rank], 0
        for p in range(len(self.rows)):
            for item, pieces in zip(self.items, views, strict=True):
                size = rows * item.row(p)
                view = buffer[position : position + size].view(rows, item.count(p), *item.tail)
                pieces.append((item.ranges[p], view))
                position += size
        return views

    def _parent_views(self, buffer: torch.Tensor) -> list[list[tuple[Range, torch.Tensor]]]:
        """For each item: (row range of r, view of its part of the message with r), in rank order."""
        views: list[list[tuple[Range, torch.Tensor]]] = [[] for _ in self.items]
        first, position = 0, 0
        for rows in self.rows:
            for item, pieces in zip(self.items, views, strict=True):
                size = rows * item.row(self.rank)
                view = buffer[position : position + size].view(rows, item.count(self.rank), *item.tail)
                pieces.append(((first, first + rows), view))
                position += size
            first += rows
        return views

"""Who holds what: the result of a solve, as plain data.

Ranks, parents, children and samples are described here and nowhere else; a plan (layouts, split sizes,
exchanges) is derived from an ``Assignment`` and adds no decision of its own.

* A *parent* is an aligned block of consecutive ranks that runs full attention over all its samples.
* A *child* is an aligned block inside one node (or the whole parent) that holds the rows of its samples in
  the sparse layers; its samples are packed into one row in the order given and cut over its ranks.

A parent has one of three forms:

* baseline: one child of the parent's full width, no repacking;
* partition: node-local children, every rank in exactly one of them (a child may be empty);
* spill: a partition and, listed before it, one child of the full width for samples that would overload a
  node. Only a parent wider than a node has this form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True)
class Child:
    """Samples and the ``width`` ranks that hold them; ``first_rank`` counts from the parent's first rank."""

    first_rank: int
    width: int
    samples: tuple[int, ...]

    def tokens(self, lengths: tuple[int, ...]) -> int:
        """Packed length of the child's row, in tokens."""
        return sum(lengths[s] for s in self.samples)

    def max_rows(self, lengths: tuple[int, ...]) -> int:
        """Rows of its fullest rank: the packed row cut over ``width`` ranks."""
        return -(-self.tokens(lengths) // self.width)


@dataclass(frozen=True)
class Parent:
    """``width`` global ranks from ``first_rank``; ``reason`` says why it was repacked or left alone."""

    first_rank: int
    width: int
    children: tuple[Child, ...]
    repacked: bool = False
    reason: str = ""

    @property
    def samples(self) -> tuple[int, ...]:
        """All samples of the parent, child by child."""
        return tuple(s for child in self.children for s in child.samples)

    @property
    def spill(self) -> Child | None:
        """The full-width child beside a partition, if there is one."""
        first = self.children[0] if len(self.children) > 1 else None
        return first if first is not None and first.width == self.width else None

    @property
    def form(self) -> str:
        """``"baseline"``, ``"partition"`` or ``"spill"``."""
        if len(self.children) == 1 and self.children[0].width == self.width:
            return "baseline"
        return "spill" if self.spill is not None else "partition"

    def rank_rows(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Most rows each of the parent's ranks holds, in rank order (every child cut evenly, rounded up)."""
        rows = [0] * self.width
        for child in self.children:
            for rank in range(child.first_rank, child.first_rank + child.width):
                rows[rank] += child.max_rows(lengths)
        return tuple(rows)


@dataclass(frozen=True)
class Assignment:
    """Every sample's parent and child for one micro-batch.

    ``lengths`` are in tokens, indexed by sample. ``stats`` is what the solver reports; it is not compared.
    """

    lengths: tuple[int, ...]
    ranks_per_node: int
    parents: tuple[Parent, ...]
    stats: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def world_size(self) -> int:
        """One past the last rank of any parent."""
        return max((p.first_rank + p.width for p in self.parents), default=0)

    def parent_of(self, rank: int) -> Parent:
        """The parent that holds a global rank; ``ValueError`` when none does."""
        for parent in self.parents:
            if parent.first_rank <= rank < parent.first_rank + parent.width:
                return parent
        raise ValueError(f"rank {rank} is in no parent of this assignment; expected 0..{self.world_size - 1}")

    def validate(self) -> Assignment:
        """Return self, or raise ``ValueError`` naming the first sample, child or parent that is wrong."""
        if not is_power_of_two(self.ranks_per_node):
            raise ValueError(f"ranks_per_node: got {self.ranks_per_node}, expected a power of two")
        for s, length in enumerate(self.lengths):
            if length < 1:
                raise ValueError(f"sample {s} has length {length}, expected at least 1; drop empty samples")
        if not self.parents:
            raise ValueError("no parents: got an empty list, expected at least one")
        self.check_parent_blocks()
        for index, parent in enumerate(self.parents):
            self._check_children(index, parent)
        self._check_samples()
        return self

    def check_parent_blocks(self) -> None:
        """The part of `validate` about parents alone; cheap."""
        end_of_last, last = 0, -1
        for index, p in sorted(enumerate(self.parents), key=lambda item: item[1].first_rank):
            if not is_power_of_two(p.width):
                raise ValueError(f"parent {index}: width {p.width}, expected a power of two")
            if p.first_rank < 0 or p.first_rank % min(p.width, self.ranks_per_node):
                raise ValueError(
                    f"parent {index}: first rank {p.first_rank} is not aligned for width {p.width}; expected "
                    f"a multiple of {min(p.width, self.ranks_per_node)}"
                )
            if p.first_rank < end_of_last:
                raise ValueError(
                    f"parents {last} and {index} overlap: rank {p.first_rank} is in both; expected none"
                )
            end_of_last, last = p.first_rank + p.width, index

    def _check_children(self, index: int, parent: Parent) -> None:
        if not parent.children:
            raise ValueError(f"parent {index} has no children; an empty parent has one empty child")
        owner = [-1] * parent.width
        spill = parent.spill
        if spill is not None and parent.width <= self.ranks_per_node:
            raise ValueError(
                f"parent {index}: a full-width child beside others, but width {parent.width} fits in a node "
                f"of {self.ranks_per_node}; only a parent wider than a node can spill"
            )
        for number, child in enumerate(parent.children):
            name = f"parent {index}, child {number}"
            block = f"ranks {child.first_rank}..{child.first_rank + child.width - 1}"
            if child.first_rank < 0 or child.first_rank + child.width > parent.width:
                raise ValueError(f"{name}: {block} lie outside the parent's 0..{parent.width - 1}")
            if child.width == parent.width and (len(parent.children) == 1 or child is spill):
                continue
            if not is_power_of_two(child.width):
                raise ValueError(f"{name}: width {child.width}, expected a power of two")
            start = parent.first_rank + child.first_rank
            if start // self.ranks_per_node != (start + child.width - 1) // self.ranks_per_node:
                raise ValueError(
                    f"{name}: {block} cross a node of {self.ranks_per_node} ranks; a child is node-local or "
                    f"as wide as its parent"
                )
            if start % child.width:
                raise ValueError(f"{name}: {block} are not aligned to the width {child.width}")
            for rank in range(child.first_rank, child.first_rank + child.width):
                if owner[rank] >= 0:
                    raise ValueError(
                        f"parent {index}: children {owner[rank]} and {number} overlap on rank {rank}"
                    )
                owner[rank] = number
        if parent.form != "baseline" and -1 in owner:
            raise ValueError(f"parent {index}: rank {owner.index(-1)} is in no child; give it an empty child")

    def _check_samples(self) -> None:
        holder: dict[int, str] = {}
        for index, parent in enumerate(self.parents):
            for number, child in enumerate(parent.children):
                name = f"parent {index}, child {number}"
                for s in child.samples:
                    if not 0 <= s < len(self.lengths):
                        raise ValueError(
                            f"{name}: sample {s} does not exist; expected 0..{len(self.lengths) - 1}"
                        )
                    if s in holder:
                        raise ValueError(f"sample {s} is assigned twice: to {holder[s]} and to {name}")
                    holder[s] = name
        missing = [s for s in range(len(self.lengths)) if s not in holder]
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise ValueError(f"{len(missing)} of {len(self.lengths)} samples are in no child: {shown}")

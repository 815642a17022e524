"""The plan of one sequence-parallel parent: which rank holds which tokens, and where each row goes.

Two layouts of the same tokens:

* *child layout* (sparse layers): every child packs its samples into one row and cuts it over its ranks;
  rank r holds `rows[r]` rows, all attention heads.
* *parent layout* (full attention): every rank holds all `tokens` rows of the parent, its own heads only. Row
  order is `"rank-major"` (the ranks' rows one after the other: every sample stays contiguous as long as no
  rank is in two children) or `"canonical"` (samples in dataset order).

Ranks in this module are parent-local, 0..width-1, unless called global.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from . import layout
from .assignment import Assignment, Child, Parent
from .errors import bad, message
from .layout import Segment
from .serial import plan_from_json, plan_hash, plan_to_json
from .splits import split_sizes
from .validate import check_assignment, check_plan, check_rows

if TYPE_CHECKING:
    import torch.distributed as dist

    from .envelope import Envelope
    from .exchange import BoundPlan
    from .heads import HeadMap

Direction = Literal["enter", "exit"]
Run = tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    """Layouts of one parent for one micro-batch. Immutable; build with `plans` or `Plan.of`.

    Attributes:
        ranks: global ranks of the parent, in group order.
        children: the children, sorted by first rank (wider first); `first_rank` is parent-local.
        samples: dataset indices, ascending.
        lengths: tokens of each sample, aligned with `samples`.
        bases: index of each sample's first token in the dataset (all samples of the micro-batch concatenated
            in dataset order), aligned with `samples`.
        cut: `"envelope"` front-loads a child's ranks to the common `row_cap`, which lets an unmodified
            equal-split Ulysses layer work on padded tensors; `"balanced"` cuts evenly, for callers that pass
            split sizes.
        order: row order of the parent layout.
        row_multiple: `row_cap` is rounded up to a multiple of it (kernels that want 16 or 128 rows).
        min_row_cap: `row_cap` is at least this (to meet one of few sizes, as CUDA graphs want).
        ranks_per_node: for the traffic figures only.
        repacked, reason: what the solver decided and why; not part of the hash.
    """

    ranks: tuple[int, ...]
    children: tuple[Child, ...]
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    bases: tuple[int, ...]
    cut: str = "envelope"
    order: str = "rank-major"
    row_multiple: int = 1
    min_row_cap: int = 0
    ranks_per_node: int = 8
    repacked: bool = field(default=True, compare=False)
    reason: str = field(default="", compare=False)

    @classmethod
    def of(
        cls,
        parent: Parent,
        lengths: Sequence[int],
        *,
        ranks_per_node: int = 8,
        cut: str | None = None,
        order: str | None = None,
        row_multiple: int = 1,
        min_row_cap: int = 0,
        ranks: Sequence[int] | None = None,
    ) -> Plan:
        """Plan of `parent`.

        Args:
            lengths: tokens of every sample of the micro-batch, indexed by sample (not only this parent's).
            cut, order: as in the class; left out, `"envelope"` and `"rank-major"`, or for a parent in which a
                rank is in two children (spill) `"balanced"` and `"canonical"`.
            ranks: global ranks of the parent's group where they are not consecutive.

        Raises:
            RepackError: samples missing, repeated or unknown, or blocks outside the parent.
        """
        bases = layout.starts(lengths)
        samples = tuple(sorted(parent.samples))
        for sample in samples:
            if not 0 <= sample < len(lengths):
                raise bad("plan", f"sample {sample} does not exist", expected=f"0..{len(lengths) - 1}")
        partition, first = layout.is_partition(parent.children), parent.first_rank
        return cls(
            ranks=tuple(ranks if ranks is not None else range(first, first + parent.width)),
            children=tuple(sorted(parent.children, key=lambda c: (c.first_rank, -c.width))),
            samples=samples,
            lengths=tuple(int(lengths[s]) for s in samples),
            bases=tuple(bases[s] for s in samples),
            cut=cut or ("envelope" if partition else "balanced"),
            order=order or ("rank-major" if partition else "canonical"),
            row_multiple=row_multiple,
            min_row_cap=min_row_cap,
            ranks_per_node=ranks_per_node,
            repacked=parent.repacked,
            reason=parent.reason,
        )

    def __post_init__(self) -> None:
        check_plan(self)

    @property
    def width(self) -> int:
        """Ranks of the parent."""
        return len(self.ranks)

    @property
    def tokens(self) -> int:
        """Rows of the parent layout (no pads)."""
        return sum(self.lengths)

    @cached_property
    def partition(self) -> bool:
        """True if every rank is in at most one child."""
        return layout.is_partition(self.children)

    @cached_property
    def length_of(self) -> dict[int, int]:
        """Tokens by dataset index of the sample."""
        return dict(zip(self.samples, self.lengths, strict=True))

    @cached_property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """Rows of each rank of each child."""
        totals = [c.tokens(self.length_of) for c in self.children]
        widths = [c.width for c in self.children]
        if self.cut == "balanced":
            return tuple(map(layout.balanced_cut, totals, widths))
        fullest = max((-(-t // w) for t, w in zip(totals, widths, strict=True)), default=0)
        cap = layout.round_up(max(fullest, self.min_row_cap), self.row_multiple)
        return tuple(layout.envelope_cut(t, w, cap) for t, w in zip(totals, widths, strict=True))

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Valid rows of each rank in the child layout (0 is legal)."""
        rows = [0] * self.width
        for child, cut in zip(self.children, self.cuts, strict=True):
            for j, count in enumerate(cut):
                rows[child.first_rank + j] += count
        return tuple(rows)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First row of each rank in the rank-major parent layout, then `tokens` (width + 1 values)."""
        return tuple(layout.starts(self.rows))

    @cached_property
    def row_cap(self) -> int:
        """T_cap: rows of the envelope on every rank: the largest of `rows`, rounded up as asked."""
        return layout.round_up(max(*self.rows, self.min_row_cap), self.row_multiple)

    @cached_property
    def _segments(self) -> tuple[tuple[Segment, ...], ...]:
        held = layout.cut_segments(self.children, self.cuts, self.length_of, self.width)
        return tuple(map(tuple, held))

    def _rank(self, rank: int | None) -> int:
        if rank is None:
            raise bad(
                "plan", "no rank given", do="pass rank=, or use the plan returned by plan.bind(group, ...)"
            )
        if not 0 <= rank < self.width:
            raise bad(
                "plan", "rank outside the parent", got=rank, expected=f"parent-local 0..{self.width - 1}"
            )
        return rank

    def segments(self, rank: int | None = None) -> tuple[Segment, ...]:
        """Runs of tokens on `rank`, in local row order."""
        return self._segments[self._rank(rank)]

    def local_index(self, rank: int | None = None) -> torch.Tensor:
        """Dataset token of each local row: int64 `[rows[rank]]`.

        Dataset tokens are numbered over all samples of the micro-batch concatenated in dataset order.
        """
        base = dict(zip(self.samples, self.bases, strict=True))
        return layout.index_of_runs((base[s.sample] + s.start, s.length) for s in self.segments(rank))

    def children_of(self, rank: int | None = None) -> tuple[int, ...]:
        """Indices of the children `rank` belongs to."""
        rank = self._rank(rank)
        return tuple(n for n, c in enumerate(self.children) if c.first_rank <= rank < c.first_rank + c.width)

    def sequences(self, *, child: int | None = None, rank: int | None = None) -> tuple[Run, ...]:
        """(sample, first position, tokens) of every sequence, in row order.

        Without arguments of the parent layout in the plan's order; with `child` of that child's packed row;
        with `rank` of the rows of one rank, where a sample may start or end on another rank.
        """
        if child is not None and rank is not None:
            raise bad("plan", "sequences of a child and of a rank at once", do="pass one of them")
        if rank is not None:
            return tuple((s.sample, s.start, s.length) for s in self.segments(rank))
        if child is not None:
            order: Iterable[int] = self.children[self._child(child)].samples
        elif self.order == "canonical":
            order = self.samples
        else:
            order = (s for c in self.children for s in c.samples)
        return tuple((s, 0, self.length_of[s]) for s in order)

    def _child(self, child: int) -> int:
        if not 0 <= child < len(self.children):
            raise bad("plan", "no such child", got=child, expected=f"0..{len(self.children) - 1}")
        return child

    def cu_seqlens(self, *, child: int | None = None, rank: int | None = None) -> torch.Tensor:
        """Cumulative sequence lengths, int32 `[sequences + 1]`, as variable-length kernels take them."""
        lengths = [n for _, _, n in self.sequences(child=child, rank=rank)]
        return torch.tensor(layout.starts(lengths), dtype=torch.int32)

    def max_seqlen(self, *, child: int | None = None, rank: int | None = None) -> int:
        """Longest sequence in tokens; 0 when there is none."""
        return max((n for _, _, n in self.sequences(child=child, rank=rank)), default=0)

    def position_ids(self, *, child: int | None = None, rank: int | None = None) -> torch.Tensor:
        """Position of each row in its sample: int64, one per row of the same layout as `cu_seqlens`."""
        return layout.index_of_runs((start, n) for _, start, n in self.sequences(child=child, rank=rank))

    @cached_property
    def canonical_index(self) -> torch.Tensor:
        """Rank-major parent row of each canonical row: int64 `[tokens]`; `canonical = rank_major[index]`."""
        runs: dict[int, list[tuple[int, int, int]]] = {sample: [] for sample in self.samples}
        for rank, held in enumerate(self._segments):
            for s in held:
                runs[s.sample].append((s.start, self.offsets[rank] + s.row, s.length))
        return layout.index_of_runs((row, n) for held in runs.values() for _, row, n in sorted(held))

    def in_splits(
        self,
        direction: Direction,
        rank: int | None = None,
        *,
        heads: HeadMap | None = None,
        head_dim: int = 1,
    ) -> list[int]:
        """`input_split_sizes` of `all_to_all_single` for one tensor: rows, equal heads on every rank.

        Enter sends the rank's own `rows[rank]` rows to each rank, exit returns to each rank its rows. With
        `heads` and `head_dim` the sizes are elements of a query-like tensor `[rows, heads, head_dim]` (uneven
        heads).
        """
        return split_sizes(self, direction, "in", self._rank(rank), heads, head_dim)

    def out_splits(
        self,
        direction: Direction,
        rank: int | None = None,
        *,
        heads: HeadMap | None = None,
        head_dim: int = 1,
    ) -> list[int]:
        """`output_split_sizes` of `all_to_all_single`; see `in_splits`."""
        return split_sizes(self, direction, "out", self._rank(rank), heads, head_dim)

    def child_rows(self, child: int, rank: int | None = None) -> slice:
        """Local rows of `rank` that belong to `child`: all of them unless the rank is in several children."""
        rank, block = self._rank(rank), self.children[self._child(child)]
        if not block.first_rank <= rank < block.first_rank + block.width:
            raise bad(
                "plan", f"rank {rank} is not in child {child}", expected=f"one of {self.children_of(rank)}"
            )
        before = sum(
            self.cuts[c][rank - self.children[c].first_rank] for c in self.children_of(rank) if c < child
        )
        return slice(before, before + self.cuts[child][rank - block.first_rank])

    def child_plan(self, child: int) -> Plan:
        """Plan of one child on its own ranks, with the same rows: for head exchanges in the sparse layers.

        Bind it on the child's group and give it `x[plan.child_rows(child)]`.
        """
        block = self.children[self._child(child)]
        samples = tuple(sorted(block.samples))
        base = dict(zip(self.samples, self.bases, strict=True))
        return Plan(
            ranks=self.ranks[block.first_rank : block.first_rank + block.width],
            children=(Child(0, block.width, block.samples),),
            samples=samples,
            lengths=tuple(self.length_of[s] for s in samples),
            bases=tuple(base[s] for s in samples),
            cut=self.cut,
            row_multiple=self.row_multiple,
            min_row_cap=self.row_cap,
            ranks_per_node=self.ranks_per_node,
            repacked=self.repacked,
            reason=f"child {child}",
        )

    @cached_property
    def envelope(self) -> Envelope:
        """The padded equal-split view of the same plan."""
        from .envelope import Envelope

        return Envelope(self)

    def describe(self) -> str:
        """The plan as readable text."""
        from .summary import describe

        return describe(self)

    def stats(self) -> dict[str, Any]:
        """Figures of the plan; see `summary.stats`."""
        from .summary import stats

        return stats(self)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) of everything that decides where an element goes; the same in every process."""
        return plan_hash(self)

    def check_agreement(self, group: dist.ProcessGroup | None = None, *, deadline_s: float = 60.0) -> None:
        """Collective over `group`: raise `AgreementError` on every rank unless all hold this plan."""
        from .agreement import agree_on_plan

        agree_on_plan(self, group, deadline_s=deadline_s)

    def bind(self, group: dist.ProcessGroup | None = None, **options: Any) -> BoundPlan:
        """Collective: the same plan, ready to exchange tensors on `group`; options as in `exchange.bind`."""
        from .exchange import bind

        return bind(self, group, **options)

    def __getattr__(self, name: str) -> Any:
        if name in ("enter", "exit", "enter_qkv"):
            raise AttributeError(
                message(
                    "plan",
                    f"{name} needs a process group",
                    do="use the plan that plan.bind(group, ...) returns",
                )
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(plan_to_json(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what `save` wrote; `RepackError` when it is damaged or of another format."""
        return cls(**plan_from_json(Path(path)))


def plans(
    assignment: Assignment,
    *,
    cut: str | None = None,
    order: str | None = None,
    row_multiple: int = 1,
    min_row_cap: int = 0,
    max_rows: int | None = None,
) -> list[Plan]:
    """One plan per parent of `assignment`, in its order.

    Args:
        cut, order, row_multiple, min_row_cap: as in the class.
        max_rows: rows that fit on a rank (`row_cap` may not exceed it).

    Raises:
        RepackError: samples missing or in two places, blocks that overlap or leave their parent, rows beyond
            `max_rows`. The same on every rank, as the assignment is.
    """
    check_assignment(assignment)
    made = [
        Plan.of(
            parent,
            assignment.lengths,
            ranks_per_node=assignment.ranks_per_node,
            cut=cut,
            order=order,
            row_multiple=row_multiple,
            min_row_cap=min_row_cap,
        )
        for parent in assignment.parents
    ]
    for number, plan in enumerate(made):
        check_rows(plan, number, max_rows)
    return made

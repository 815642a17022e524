"""The envelope of a plan: padded, equal-split layouts in which an unmodified Ulysses layer is right.

Every rank owns `rows = plan.row_cap` physical rows, valid ones first. An equal-split all-to-all puts the
ranks' physical rows one after the other, so the parent sees `width * row_cap` rows. With the `"envelope"`
cut pads sit only behind a child's last token, hence every sample is contiguous in the parent, and only
`cu_seqlens` and `position_ids` change. Pads form short sequences of their own there, so attention never
mixes them with tokens.

Pads must hold zeros or finite numbers: a weight gradient X^T dY is NaN where X is NaN even if dY is 0.
`place` fills them, `clean` resets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from .errors import bad
from .layout import index_of_runs, starts

if TYPE_CHECKING:
    from .plan import Plan

PAD = -1
PAD_CHUNK = 128  # longest pad sequence: bounds what attention spends on pads, and their position ids


@dataclass(frozen=True)
class Envelope:
    """Physical layouts of `plan`. Where a method takes `child` and `rank`, pass one, or none for the parent.

    Physical rows: the parent has `width * row_cap`, a child `child.width * row_cap`, a rank `row_cap`.
    """

    plan: Plan

    @property
    def rows(self) -> int:
        """T_cap: physical rows of every rank."""
        return self.plan.row_cap

    def _ranks(self, child: int | None, rank: int | None) -> range:
        if child is not None and rank is not None:
            raise bad("envelope", "a child and a rank at once", do="pass one of them")
        if rank is not None:
            rank = self.plan._rank(rank)
            return range(rank, rank + 1)
        if child is None:
            return range(self.plan.width)
        block = self.plan.children[self.plan._child(child)]
        return range(block.first_rank, block.first_rank + block.width)

    def pad_mask(self, *, child: int | None = None, rank: int | None = None) -> torch.Tensor:
        """True at pads: bool, one per physical row. Keep these rows out of losses and router statistics."""
        ranks = self._ranks(child, rank)
        valid = torch.tensor([self.plan.rows[r] for r in ranks]).unsqueeze(1)
        return (torch.arange(self.rows) >= valid).reshape(-1)

    def sequences(self, *, child: int | None = None, rank: int | None = None) -> list[tuple[int, int, int]]:
        """(sample, first position, rows) of every sequence of the physical layout, pads as sample -1.

        A sample cut by a rank boundary is one sequence as long as its rows stay neighbours (see `direct`).
        """
        merged: list[list[int]] = []
        for r in self._ranks(child, rank):
            runs = [(s.sample, s.start, s.length) for s in self.plan.segments(r)]
            pads = self.rows - self.plan.rows[r]
            for sample, start, length in runs:
                last = merged[-1] if merged else [PAD, 0, 0]
                if last[0] == sample:
                    last[2] += length
                else:
                    merged.append([sample, start, length])
            merged += [[PAD, 0, min(PAD_CHUNK, pads - first)] for first in range(0, pads, PAD_CHUNK)]
        return [(a, b, c) for a, b, c in merged]

    def cu_seqlens(self, *, child: int | None = None, rank: int | None = None) -> torch.Tensor:
        """Cumulative lengths of `sequences`, pads included: int32, from 0 to the physical rows."""
        lengths = [n for _, _, n in self.sequences(child=child, rank=rank)]
        return torch.tensor(starts(lengths), dtype=torch.int32)

    def max_seqlen(self, *, child: int | None = None, rank: int | None = None) -> int:
        """Longest of `sequences` in rows, pads included."""
        return max((n for _, _, n in self.sequences(child=child, rank=rank)), default=0)

    def position_ids(self, *, child: int | None = None, rank: int | None = None) -> torch.Tensor:
        """Position of each physical row in its sample, int64; every pad sequence counts from 0.

        A framework that finds sequence starts by `position == 0` therefore sees pads as sequences of their
        own.
        """
        return index_of_runs((first, n) for _, first, n in self.sequences(child=child, rank=rank))

    @cached_property
    def direct(self) -> bool:
        """True if every sample is contiguous in the parent's physical rows (no gather around attention)."""
        samples = [s for s, _, _ in self.sequences() if s != PAD]
        return len(samples) == len(set(samples))

    def index(self, *, child: int | None = None) -> torch.Tensor:
        """Physical row of each valid row: int64, `valid = physical[index]`.

        Valid rows are those of the plan's parent layout (`plan.order`), or of `child`'s packed row.
        """
        plan, ranks = self.plan, self._ranks(child, None)
        runs: dict[int, list[tuple[int, int, int]]] = {}
        for number, r in enumerate(ranks):
            for s in plan.segments(r):
                if child is None or s.child == child:
                    runs.setdefault(s.sample, []).append((s.start, s.length, number * self.rows + s.row))
        return index_of_runs(
            (row, length)
            for sample, _, _ in plan.sequences(child=child)
            for _, length, row in sorted(runs[sample])
        )

    def local_index(self, rank: int | None = None) -> torch.Tensor:
        """Dataset token of each physical row of `rank`, -1 at pads: int64 `[row_cap]`."""
        valid = self.plan.local_index(rank)
        return torch.nn.functional.pad(valid, (0, self.rows - len(valid)), value=PAD)

    def place(self, dataset: torch.Tensor, rank: int | None = None, *, fill: float = 0) -> torch.Tensor:
        """Rows of `rank` from a dataset tensor `[dataset tokens, ...]`: `[row_cap, ...]`, pads set to `fill`.

        For token ids, embeddings, labels (shift them within each sample first; `fill=-100` for a loss that
        ignores that label).
        """
        index = self.plan.local_index(rank).to(dataset.device)
        out = dataset.new_full((self.rows, *dataset.shape[1:]), fill)
        out[: len(index)] = dataset[index]
        return out

    def clean(self, x: torch.Tensor, rank: int | None = None, *, fill: float = 0) -> torch.Tensor:
        """`x` `[row_cap, ...]` with pads set to `fill`, whatever they held (NaN too); their gradient is 0."""
        if x.shape[0] != self.rows:
            raise bad("envelope", "x has another number of rows", got=x.shape[0], expected=self.rows)
        pads = self.pad_mask(rank=self.plan._rank(rank)).to(x.device)
        return torch.where(pads.reshape(-1, *[1] * (x.dim() - 1)), torch.full((), fill, dtype=x.dtype), x)

    def gathered(self, attention: Callable[..., torch.Tensor], dim: int = 0) -> Callable[..., torch.Tensor]:
        """Wrap a local attention of an equal-split layer for plans that are not `direct`.

        The result takes q, k, v (and more arguments) with `width * row_cap` physical rows in dimension
        `dim`, calls `attention` with the parent's `tokens` rows in the plan's order (`plan.cu_seqlens()`),
        and returns physical rows again, zeros at pads.
        """

        def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
            index = self.index().to(args[0].device)
            total = self.plan.width * self.rows
            if any(t.shape[dim] != total for t in args[:3]):
                got = [t.shape[dim] for t in args[:3]]
                raise bad("envelope", f"rows in dimension {dim} of q, k, v", got=got, expected=total)
            out = attention(*(t.index_select(dim, index) for t in args[:3]), *args[3:], **kwargs)
            shape: Sequence[int] = [total if d == dim else n for d, n in enumerate(out.shape)]
            return out.new_zeros(shape).index_copy(dim, index, out)

        return wrapped

"""Arithmetic of a plan: cuts of a packed row, the segments each rank holds, sequence boundaries.

Plain integers; only `index_of_runs` makes a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from .assignment import Child


class Segment(NamedTuple):
    """A run of consecutive tokens of one sample on one rank.

    Attributes:
        sample: dataset index of the sample.
        start: position of the first token in the sample.
        length: tokens.
        row: local row of the first token.
        child: index of the child it belongs to.
    """

    sample: int
    start: int
    length: int
    row: int
    child: int


def balanced_cut(tokens: int, width: int) -> tuple[int, ...]:
    """Rows of each of `width` ranks: floor((j+1) * tokens / width) - floor(j * tokens / width)."""
    return tuple(tokens * (j + 1) // width - tokens * j // width for j in range(width))


def envelope_cut(tokens: int, width: int, cap: int) -> tuple[int, ...]:
    """Rows of each of `width` ranks when every rank but the last used one is full: min(cap, what is left)."""
    return tuple(min(cap, max(0, tokens - j * cap)) for j in range(width))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def starts(sizes: Sequence[int]) -> list[int]:
    """Exclusive prefix sums with the total at the end: [0, s0, s0+s1, ...]."""
    return [0, *accumulate(sizes)]


def nested_or_disjoint(children: Sequence[Child]) -> tuple[int, int] | None:
    """Indices of two children whose rank blocks overlap without one holding the other, or None."""
    for i, a in enumerate(children):
        for j in range(i):
            b = children[j]
            low, high = max(a.first_rank, b.first_rank), min(a.first_rank + a.width, b.first_rank + b.width)
            if low < high and high - low < min(a.width, b.width):
                return j, i
    return None


def is_partition(children: Sequence[Child]) -> bool:
    """True if no rank lies in two children."""
    blocks = sorted((c.first_rank, c.width) for c in children)
    return all(first + width <= following for (first, width), (following, _) in pairwise(blocks))


def cut_segments(
    children: Sequence[Child], cuts: Sequence[Sequence[int]], length_of: dict[int, int], width: int
) -> list[list[Segment]]:
    """Segments of each rank, in local row order.

    A child's samples are packed into one row in the order given; rank j of the child holds `cuts[child][j]`
    consecutive rows of it. A rank of several children holds their rows one child after the other.
    """
    held: list[list[Segment]] = [[] for _ in range(width)]
    filled = [0] * width
    for number, child in enumerate(children):
        bounds = starts(cuts[number])
        j, position = 0, 0
        for sample in child.samples:
            begin, end = position, position + length_of[sample]
            while position < end:
                while bounds[j + 1] <= position:
                    j += 1
                rank, take = child.first_rank + j, min(end, bounds[j + 1]) - position
                held[rank].append(Segment(sample, position - begin, take, filled[rank], number))
                filled[rank] += take
                position += take
    return held


def index_of_runs(runs: Iterable[tuple[int, int]]) -> torch.Tensor:
    """(first, length) of every run -> first, first + 1, ... of each, one run after the other: int64."""
    pairs = torch.tensor(list(runs), dtype=torch.int64).reshape(-1, 2)
    first, length = pairs[:, 0], pairs[:, 1]
    ends = length.cumsum(0)
    index = torch.arange(int(ends[-1]) if len(ends) else 0)
    return index.add_(torch.repeat_interleave(first - ends + length, length))

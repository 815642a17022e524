"""What bytes hold, as symbols: every input byte differs, so stale or misplaced data never looks right.

A value is the tuple of the input bytes that were added to make a byte, in the order of addition: one for
copied data, one per rank for a sum, none for zero. Contents of a region are segments over which that
tuple advances byte by byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

Region = Hashable
Value = tuple[tuple[Region, int], ...]
Segment = tuple[int, int, Value]  # begin, end, value of the byte at begin
Contents = tuple[Segment, ...]


def shifted(value: Value, by: int) -> Value:
    return tuple((region, offset + by) for region, offset in value) if by else value


def origin(region: Region, size: int) -> Contents:
    """A region whose byte x holds (region, x)."""
    return ((0, size, ((region, 0),)),) if size else ()


def read(contents: Contents, begin: int, end: int) -> Contents:
    """[begin, end), moved to start at 0."""
    out = []
    for a, b, value in contents:
        if a < end and begin < b:
            lo, hi = max(a, begin), min(b, end)
            out.append((lo - begin, hi - begin, shifted(value, lo - a)))
    return tuple(out)


def write(contents: Contents, begin: int, data: Contents, size: int) -> Contents:
    """`contents` with `data` (which starts at 0 and is `size` long) at `begin`."""
    end = begin + size
    out = []
    for a, b, value in contents:
        if a < begin:
            out.append((a, min(b, begin), value))
        if b > end:
            lo = max(a, end)
            out.append((lo, b, shifted(value, lo - a)))
    out += [(a + begin, b + begin, value) for a, b, value in data]
    return joined(sorted(out, key=lambda s: s[0]))


def joined(segments: Sequence[Segment]) -> Contents:
    """Neighbours that continue each other become one, so that equal contents compare equal."""
    out: list[Segment] = []
    for a, b, value in segments:
        if out and out[-1][1] == a and shifted(out[-1][2], a - out[-1][0]) == value:
            out[-1] = (out[-1][0], b, out[-1][2])
        else:
            out.append((a, b, value))
    return tuple(out)


def added(sources: Sequence[Contents], size: int) -> Contents:
    """The sum of ranges of equal length, in the given order."""
    cuts = sorted({0, size}.union(*({a for a, _, _ in s} for s in sources)))
    out = []
    for a, b in itertools.pairwise(cuts):
        value: Value = ()
        for source in sources:
            for _, _, part in read(source, a, b):
                value += part
        out.append((a, b, value))
    return joined(out)


def describe(contents: Contents) -> str:
    def one(value: Value) -> str:
        return " + ".join(f"{region}[{offset}]" for region, offset in value) or "zero"

    return ", ".join(f"[{a}, {b}) = {one(value)}" for a, b, value in contents) or "nothing"

"""What every collective must produce, in plain Python and numpy: independent of the product's code.

Gathered buffers of W ranks and parameters i with shards of s_i elements:

    rank-major            out[r*S + o_i + x]    S = sum of s_i, o_i = s_0 + ... + s_(i-1)
    parameter-contiguous  out[p_i + r*s_i + x]  p_0 = 0, p_(i+1) = p_i + W*s_i rounded up to the alignment

Arrays are one-dimensional numpy arrays. numpy has no bfloat16: such values are their bit patterns in uint16,
and `kind="bfloat16"` says so. All-gather and all-to-all only move elements and accept any dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

KINDS = {
    "float32": np.float32,
    "float64": np.float64,
    "bfloat16": np.uint16,
    "int32": np.int32,
    "int64": np.int64,
}


@dataclass(frozen=True)
class Layout:
    """The parameter-contiguous layout, in elements. numels[i]: how many of parameter i exist (all)."""

    world: int
    shard_numels: Sequence[int]
    numels: Sequence[int] = field(default=())
    align: int = 1

    def __post_init__(self) -> None:
        if not self.numels:
            object.__setattr__(self, "numels", [self.world * s for s in self.shard_numels])

    @property
    def shard_offsets(self) -> list[int]:
        """o_i, start of parameter i in one rank's concatenated shard."""
        return [sum(self.shard_numels[:i]) for i in range(len(self.shard_numels))]

    @property
    def gathered_offsets(self) -> list[int]:
        """p_i, start of parameter i in the gathered buffer."""
        starts, at = [], 0
        for shard in self.shard_numels:
            starts.append(at)
            at += -(-shard * self.world // self.align) * self.align
        return starts

    @property
    def shard_numel(self) -> int:
        return sum(self.shard_numels)

    @property
    def gathered_numel(self) -> int:
        return sum(-(-s * self.world // self.align) * self.align for s in self.shard_numels)

    def gathered_index(self, rank: int) -> np.ndarray:
        """Index in the gathered buffer of every element of `rank`'s concatenated shard."""
        index = [
            start + rank * shard + x
            for start, shard in zip(self.gathered_offsets, self.shard_numels, strict=True)
            for x in range(shard)
        ]
        return np.array(index, dtype=np.int64)


def all_gather(shards: Sequence[np.ndarray], layout: Layout | None = None, fill: int = 0) -> np.ndarray:
    """What every rank's output holds. Gaps that the alignment leaves between parameters keep `fill`."""
    if layout is None:
        return np.concatenate(list(shards))
    out = np.full(layout.gathered_numel, fill, dtype=shards[0].dtype)
    for rank, shard in enumerate(shards):
        out[layout.gathered_index(rank)] = shard
    return out


def split_parameters(packed: np.ndarray, layout: Layout) -> list[np.ndarray]:
    """The parameters (without padding) of a parameter-contiguous buffer."""
    return [packed[p : p + n].copy() for p, n in zip(layout.gathered_offsets, layout.numels, strict=True)]


def exists(layout: Layout, rank: int) -> np.ndarray:
    """Which elements of `rank`'s concatenated shard are no padding."""
    return np.array(
        [
            rank * shard + x < numel
            for shard, numel in zip(layout.shard_numels, layout.numels, strict=True)
            for x in range(shard)
        ],
        dtype=bool,
    )


def contribution(
    source: np.ndarray | Sequence[np.ndarray], owner: int, world: int, layout: Layout | None = None
) -> np.ndarray:
    """What one rank's `source` adds to `owner`'s shard: a packed buffer, or one array per parameter.

    An array per parameter holds numels[i] elements; what lies behind its end counts as zero.
    """
    if layout is None:
        assert isinstance(source, np.ndarray)
        numel = len(source) // world
        return source[owner * numel : (owner + 1) * numel]
    if isinstance(source, np.ndarray):
        return source[layout.gathered_index(owner)]
    shards = []
    for array, shard in zip(source, layout.shard_numels, strict=True):
        padded = np.zeros(layout.world * shard, dtype=array.dtype)
        padded[: array.size] = array.reshape(-1)
        shards.append(padded[owner * shard : (owner + 1) * shard])
    return np.concatenate(shards) if shards else np.zeros(0)


def reduce_in_rank_order(
    pieces: Sequence[np.ndarray], kind: str, out_kind: str | None = None, scale: float = 1.0
) -> np.ndarray:
    """((piece_0 + piece_1) + piece_2 + ...) * scale, each operation rounded once.

    bfloat16 and float32 add in float32, float64 in float64, integers in their own type with wrap-around and
    without scale.
    """
    out_kind = out_kind or kind
    if kind == "bfloat16":
        wide = [bf16_to_float32(p) for p in pieces]
    else:
        wide = [np.asarray(p, dtype=KINDS[kind]) for p in pieces]
    total = wide[0].copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in wide[1:]:
            total = total + piece
        if kind not in ("int32", "int64") and scale != 1.0:
            total = total * total.dtype.type(scale)
    if kind == "bfloat16" and out_kind == "bfloat16":
        return float32_to_bf16(total)
    if out_kind != kind and (kind, out_kind) != ("bfloat16", "float32"):
        raise ValueError(f"no reduction of {kind} into {out_kind}")
    return total


def reduce_scatter(
    inputs: Sequence[np.ndarray | Sequence[np.ndarray]],
    kind: str,
    layout: Layout | None = None,
    out_kind: str | None = None,
    scale: float = 1.0,
) -> list[np.ndarray]:
    """Every rank's output. inputs[r]: rank r's packed buffer (rank-major without a layout), or a list of one
    array per parameter. With a layout, elements behind the end of a parameter are zero whatever was passed.
    """
    world = len(inputs)
    outputs = []
    for owner in range(world):
        pieces = [contribution(x, owner, world, layout) for x in inputs]
        total = reduce_in_rank_order(pieces, kind, out_kind, scale)
        if layout is not None:
            total[~exists(layout, owner)] = 0
        outputs.append(total)
    return outputs


def all_to_all(inputs: Sequence[np.ndarray], in_splits: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Every rank's output. in_splits[r][q]: elements that rank r sends to rank q."""
    world = len(inputs)
    starts = [[sum(splits[:q]) for q in range(world)] for splits in in_splits]
    return [
        np.concatenate([inputs[r][starts[r][q] : starts[r][q] + in_splits[r][q]] for r in range(world)])
        for q in range(world)
    ]


def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Bit patterns, rounded to nearest even; NaN becomes the quiet NaN 0x7fc0."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)

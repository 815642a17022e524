"""A collective call of a modelled program, its plan (the product's own) and its result (the oracle's)."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import oracle

from model.memory import Contents, Value, joined
from tide_backend import _C

ITEMSIZE = 4  # float32: input and output elements are equally long
CHUNK = 16  # elements: 64 bytes, the least to which the product rounds small calls


@dataclass(frozen=True)
class Call:
    """`shards`: elements of each parameter's shard. `slots`: ranks whose all-gather or all-to-all output is a slot."""

    op: str
    name: str
    shards: tuple[int, ...] = ()
    numels: tuple[int, ...] = ()
    layout: bool = True
    align: int = 1
    slots: tuple[int, ...] = ()
    placed: bool = False
    separate: bool = False
    multicast: bool = False
    splits: tuple[tuple[int, ...], ...] = ()
    depth: int = 2
    chunk: int = CHUNK

    @property
    def channel(self) -> str:
        return self.op

    @property
    def numel(self) -> int:
        return sum(self.shards)

    @property
    def contract(self) -> int:
        return zlib.crc32(repr(replace(self, name="", slots=())).encode())

    def zero_copy(self, world: int) -> bool:
        writable = [r for r in range(world) if self.op == "all_gather" or self.output_bytes(r, world)]
        return self.op != "reduce_scatter" and bool(writable) and list(self.slots) == writable

    def oracle_layout(self, world: int) -> oracle.Layout | None:
        return oracle.Layout(world, self.shards, self.numels, self.align) if self.layout else None

    def output_bytes(self, rank: int, world: int) -> int:
        if self.op == "all_gather":
            layout = self.oracle_layout(world)
            return ITEMSIZE * (layout.gathered_numel if layout else world * self.numel)
        if self.op == "reduce_scatter":
            return ITEMSIZE * self.numel
        return ITEMSIZE * sum(row[rank] for row in self.splits)

    def input_numels(self, rank: int, world: int) -> list[int]:
        """Elements of each of this rank's inputs."""
        if self.op == "all_gather":
            return [self.numel]
        if self.op == "all_to_all":
            return [sum(self.splits[rank])]
        layout = self.oracle_layout(world)
        if layout is None:
            return [world * self.numel]
        return list(layout.numels) if self.separate else [layout.gathered_numel]


@dataclass(frozen=True)
class PlanOf:
    path: str
    window_bytes: int
    steps: tuple[dict, ...]


@cache
def plan_of(call: Call, rank: int, world: int) -> PlanOf:
    layout = None
    if call.op != "all_to_all" and call.layout:
        layout = _C.ParameterLayout(world, list(call.shards), list(call.numels) or None, call.align)
    splits = {}
    if call.op == "all_to_all":
        splits = {
            "in_splits": list(call.splits[rank]),
            "out_splits": [row[rank] for row in call.splits],
            "peer_offsets": [sum(row[peer] for row in call.splits[:rank]) for peer in range(world)],
        }
    plan = _C.plan(
        call.op,
        rank,
        world,
        ITEMSIZE,
        sum(call.splits[rank]) if splits else call.numel,
        layout=layout,
        in_arena=call.zero_copy(world),
        placed=call.placed,
        separate_inputs=call.separate,
        multicast=call.multicast,
        budget=1,
        depth=call.depth,
        smallest_chunk=call.chunk * ITEMSIZE,
        in_type="float32",
        out_type="float32",
        **splits,
    )
    return PlanOf(plan.path, plan.window_bytes, tuple(plan.steps))


# --- what the oracle says, as symbols -------------------------------------------------------------

_BIG = 1 << 24


def _ids(call: Call, rank: int, world: int) -> list[np.ndarray]:
    """Inputs whose elements are numbered, from 1: (rank, input, position)."""
    return [
        1 + (rank * 256 + index) * _BIG + np.arange(numel, dtype=np.int64)
        for index, numel in enumerate(call.input_numels(rank, world))
    ]


def _value(call: Call, ids: list[int]) -> Value:
    value = []
    for number in ids:
        where, position = divmod(number - 1, _BIG)
        value.append((("in", where // 256, call.name, where % 256), position * ITEMSIZE))
    return tuple(value)


def _contents(call: Call, columns: list[np.ndarray]) -> Contents:
    """Columns of ids, added in this order; id 0 counts as zero, id -1 as not written."""
    table = np.stack(columns)
    if table.shape[1] == 0:
        return ()
    jumps = np.any(table[:, 1:] != table[:, :-1] + (table[:, :-1] > 0), axis=0)
    cuts = [0, *(np.flatnonzero(jumps) + 1).tolist(), table.shape[1]]
    segments = []
    for a, b in itertools.pairwise(cuts):
        ids = table[:, a].tolist()
        if ids[0] >= 0:
            value = () if 0 in ids else _value(call, ids)
            segments.append((a * ITEMSIZE, b * ITEMSIZE, value))
    return joined(segments)


@cache
def expected(call: Call, rank: int, world: int) -> Contents:
    """What the output of `rank` holds after the call; gaps are left out."""
    inputs = [_ids(call, r, world) for r in range(world)]
    layout = call.oracle_layout(world)
    if call.op == "all_gather":
        return _contents(call, [oracle.all_gather([x[0] for x in inputs], layout, fill=-1)])
    if call.op == "all_to_all":
        return _contents(call, [oracle.all_to_all([x[0] for x in inputs], call.splits)[rank]])
    sources = [x if call.separate else x[0] for x in inputs]
    columns = [oracle.contribution(s, rank, world, layout) for s in sources]
    if layout is not None:
        hole = ~oracle.exists(layout, rank)
        for column in columns:
            column[hole] = 0
    return _contents(call, columns)


@cache
def own_shard(call: Call, rank: int, world: int) -> tuple[tuple[int, int, int], ...]:
    """Where a caller of a `placed` all-gather puts its shard: (offset in the shard, in the output, bytes)."""
    return tuple(
        (value[0][1], a, b - a) for a, b, value in expected(call, rank, world) if value[0][0][1] == rank
    )

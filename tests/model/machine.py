"""What operations do to memory, records and pools. When they may run, and what races, the explorers know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from model import memory
from model.memory import Contents, Region
from model.ops import Move, Place, Produce, Publish, Thread
from model.programs import Program


class Violation(Exception):
    """kind: race, wrong data, out of bounds, deadlock, or mismatch (ranks disagree, and are told so)."""

    def __init__(self, kind: str, what: str, trace: list[str] | None = None) -> None:
        self.kind, self.what, self.trace = kind, what, trace or []
        super().__init__(kind, what)

    def __str__(self) -> str:
        return "\n".join([f"{self.kind}: {self.what}", "after:", *(f"  {line}" for line in self.trace)])


class Range(NamedTuple):
    region: Region
    begin: int
    end: int


class Pool(NamedTuple):
    freed: tuple[int, ...] = ()  # windows given back, the last one last
    fresh: int = 0  # the next window never used


class Machine:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.threads: list[Thread] = program.threads
        self.rules = program.setup.rules
        self.contents: dict[Region, Contents] = {}
        self.bound: dict[tuple[int, str], int] = {}  # (rank, window name) -> place in the arena
        self.seen: dict[tuple[int, str, int], int] = {}  # (rank, call, peer): read from its record
        self.users: dict[tuple[int, int], str] = {}  # (rank, window) -> the name it was last taken under
        self.before: dict[
            tuple[int, str], str
        ] = {}  # (rank, window name) -> the name before, of the same window
        self.pools: dict[int, Pool] = {rank: Pool() for rank in range(program.setup.world)}

    def copy_to(self, other: Machine) -> None:
        other.program, other.threads, other.rules = self.program, self.threads, self.rules
        other.contents, other.bound = dict(self.contents), dict(self.bound)
        other.seen, other.pools = dict(self.seen), dict(self.pools)
        other.users, other.before = dict(self.users), dict(self.before)

    # --- addresses --------------------------------------------------------------------------------

    def range(self, rank: int, place: Place, size: int) -> Range:
        if place.region is not None:
            limit = self.program.inputs.get(place.region)
            region = place.region
        else:
            limit = self.program.sizes.get((place.owner, place.call), 0)
            region = ("arena", place.owner, self.window(rank, place))
        if place.offset < 0 or (limit is not None and place.offset + size > limit):
            raise Violation(
                "out of bounds", f"{place} .. +{size} of {place.call} on rank {rank} exceeds {limit} bytes"
            )
        return Range(region, place.offset, place.offset + size)

    def window(self, rank: int, place: Place) -> int:
        own_offset = place.multicast and not self.rules.multicast_at_equal_offsets
        if place.owner == rank or own_offset or not self.rules.window_of_its_owner:
            return self.bound[rank, place.call]
        call = place.call
        if not self.rules.window_of_this_call:
            call = self.program.previous[call]
        at = self.seen.get((rank, call, place.owner))
        if at is None:
            raise Violation(
                "out of bounds", f"rank {rank} has not read where rank {place.owner}'s window of {call} lies"
            )
        return at

    # --- contents ---------------------------------------------------------------------------------

    def load(self, r: Range) -> Contents:
        if r.region not in self.contents:
            size = self.program.inputs.get(r.region, 1 << 30)
            late = r.region in self.program.computed
            self.contents[r.region] = memory.origin(("not yet", r.region) if late else r.region, size)
        return memory.read(self.contents[r.region], r.begin, r.end)

    def store(self, r: Range, data: Contents) -> None:
        self.load(r)
        self.contents[r.region] = memory.write(self.contents[r.region], r.begin, data, r.end - r.begin)

    def produced(self, rank: int, op: Produce) -> list[Range]:
        written = self.program.computed if op.wanted else self.program.overwritten
        regions = sorted(r for r in written if r[1:3] == (rank, op.call))
        return [Range(r, 0, self.program.inputs[r]) for r in regions]

    def produce(self, r: Range, wanted: bool) -> None:
        self.contents[r.region] = memory.origin(r.region if wanted else ("no longer", r.region), r.end)

    def move(self, targets: Sequence[Range], sources: Sequence[Range]) -> None:
        size = targets[0].end - targets[0].begin
        data = memory.added([self.load(s) for s in sources], size)
        for to in targets:
            self.store(to, data)

    def ranges(self, rank: int, op: Move) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """Targets and sources. A copy may end where it begins, byte by byte, and not overlap itself otherwise."""
        targets, sources = (
            tuple(self.range(rank, p, op.bytes) for p in places) for places in (op.targets, op.sources)
        )
        for to in targets:
            for s in sources:
                if to != s and to.region == s.region and to.begin < s.end and s.begin < to.end:
                    raise Violation("race", f"rank {rank}, {op.call}: overlaps itself: {op}")
        return targets, sources

    def compare(self, thread: Thread, op, ranges: list[Range]) -> None:
        for r, (_, _, value) in zip(ranges, op.expected, strict=True):
            got = self.load(r)
            want = ((0, r.end - r.begin, value),)
            if got != want:
                raise Violation(
                    "wrong data",
                    f"rank {thread.rank}, {op.call}, bytes [{r.begin}, {r.end}): "
                    f"got {memory.describe(got)}; expected {memory.describe(want)}",
                )

    # --- records ----------------------------------------------------------------------------------

    def record(self, rank: int, channel: str, sequence: int) -> Range:
        return Range(("record", rank, channel, sequence % self.rules.record_buffers), 0, 1)

    def publish(self, rank: int, op: Publish) -> None:
        text = (op.sequence, op.contract, self.bound.get((rank, op.call)))
        self.store(self.record(rank, op.channel, op.sequence), ((0, 1, ((text, 0),)),))

    def read_record(self, rank: int, op) -> None:
        ((_, _, value),) = self.load(self.record(op.peer, op.channel, op.sequence))
        text = value[0][0]
        if text[0] == "record":
            raise Violation("wrong data", f"rank {rank} reads record of rank {op.peer}, never written")
        sequence, contract, window = text
        if self.rules.records_by_equality:
            if sequence != op.sequence:
                raise Violation(
                    "wrong data",
                    f"rank {rank} reads record {sequence} of rank {op.peer}, expected {op.sequence}",
                )
            if contract != op.contract:
                raise Violation("mismatch", f"rank {op.peer} means another call than rank {rank}: {op.call}")
        if window is not None:
            self.seen[rank, op.call, op.peer] = window

    def satisfied(self, word: tuple, value: int, wanted: int) -> bool:
        if word[0] == "record word" and not self.rules.records_by_equality:
            return value >= wanted
        return value == wanted if self.rules.fleeting(word) else value >= wanted

    def last_use(self, rank: int, name: str) -> str | None:
        """The event after which the window called `name` is free of earlier work."""
        before = self.before.get((rank, name))
        return None if before is None else f"retired {before}"

    # --- pools ------------------------------------------------------------------------------------

    def options(self, rank: int) -> list[int]:
        """Windows that an acquire may get: freed ones first, as the arena does."""
        pool = self.pools[rank]
        if not pool.freed:
            return [pool.fresh]
        policy = self.program.setup.pool(rank)
        if policy == "any":
            return list(pool.freed)
        return [pool.freed[-1] if policy == "last" else pool.freed[0]]

    def acquire(self, rank: int, name: str, at: int) -> None:
        pool = self.pools[rank]
        freed = tuple(w for w in pool.freed if w != at)
        self.pools[rank] = Pool(freed, max(pool.fresh, at + 1))
        self.bound[rank, name] = at
        if (rank, at) in self.users:
            self.before[rank, name] = self.users[rank, at]
        self.users[rank, at] = name

    def release(self, rank: int, name: str) -> int:
        at = self.bound[rank, name]
        pool = self.pools[rank]
        freed = (*pool.freed, at)
        # When any of them may be taken next, the order in which they came back tells nothing.
        self.pools[rank] = pool._replace(
            freed=tuple(sorted(freed)) if self.program.setup.pool(rank) == "any" else freed
        )
        return at

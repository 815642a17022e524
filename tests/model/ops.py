"""The operations that the threads of a model are made of."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from model.memory import Contents, Region


@dataclass(frozen=True)
class Place:
    """An address: in a fixed region, or in `owner`'s window of `call`, known only at run time.

    `multicast`: reached by a write that the switch spreads.
    """

    region: Region | None
    owner: int
    call: str
    offset: int
    multicast: bool = False

    def __str__(self) -> str:
        if self.region is None:
            return f"window of rank {self.owner}+{self.offset}"
        return f"{self.region[0]}{self.region[3] if self.region[0] == 'in' else ''}+{self.offset}"


@dataclass(frozen=True)
class Op:
    call: str


@dataclass(frozen=True)
class Move(Op):
    """Zero sources: fill with zeros. One: copy. One per rank: the sum in rank order.

    `others`: where a multicast copy goes besides; the targets are written at any time and in any order.
    """

    to: Place
    sources: tuple[Place, ...]
    bytes: int
    others: tuple[Place, ...] = ()

    @property
    def targets(self) -> tuple[Place, ...]:
        return (self.to, *self.others)

    def __str__(self) -> str:
        verb = ["fill", "copy"][len(self.sources)] if len(self.sources) < 2 else "add"
        sources, targets = (", ".join(map(str, places)) for places in (self.sources, self.targets))
        return f"{verb} {sources} -> {targets}, {self.bytes} bytes"


@dataclass(frozen=True)
class Signal(Op):
    word: Hashable
    value: int

    def __str__(self) -> str:
        return f"signal {self.word} = {show(self.value)}"


@dataclass(frozen=True)
class Wait(Op):
    word: Hashable
    value: int

    def __str__(self) -> str:
        return f"wait {self.word} >= {show(self.value)}"


@dataclass(frozen=True)
class Publish(Op):
    """Writes this rank's record of exchange `sequence`: the contract's hash and where its window lies."""

    channel: str
    sequence: int
    contract: int

    def __str__(self) -> str:
        return f"publish record {self.sequence}"


@dataclass(frozen=True)
class Meet(Op):
    """Waits for the record of a peer and reads it."""

    peer: int
    channel: str
    sequence: int
    contract: int

    def __str__(self) -> str:
        return f"read record {self.sequence} of rank {self.peer}"


@dataclass(frozen=True)
class Acquire(Op):
    """Takes a window for the call from this rank's pool."""

    def __str__(self) -> str:
        return "acquire a window"


@dataclass(frozen=True)
class Release(Op):
    def __str__(self) -> str:
        return "release the window"


@dataclass(frozen=True)
class Claim(Op):
    """On a stream: waits until the work that used this window last is over."""

    def __str__(self) -> str:
        return "wait for the window's last use"


@dataclass(frozen=True)
class Retire(Op):
    """On a stream: the work that uses this window ends here."""

    def __str__(self) -> str:
        return "end of the window's use"


@dataclass(frozen=True)
class Post(Op):
    event: str

    def __str__(self) -> str:
        return f"post {self.event}"


@dataclass(frozen=True)
class Produce(Post):
    """Compute writes the call's inputs: what it is to send, or (not `wanted`) something else."""

    wanted: bool = True

    def __str__(self) -> str:
        return "write the inputs" if self.wanted else "overwrite the inputs"


@dataclass(frozen=True)
class Await(Op):
    event: str

    def __str__(self) -> str:
        return f"await {self.event}"


@dataclass(frozen=True)
class Check(Op):
    """Reads a result and compares it with what the oracle says."""

    at: Place
    expected: Contents

    def __str__(self) -> str:
        return f"read the result at {self.at}"


@dataclass(frozen=True)
class Thread:
    rank: int
    name: str
    ops: tuple[Op, ...]


CHUNK_BITS = 24


def show(value: int) -> str:
    call, chunk = value >> CHUNK_BITS, value & ((1 << CHUNK_BITS) - 1)
    return f"{call}:{chunk}" if call else str(chunk)

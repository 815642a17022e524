"""Runs the plans of all ranks of one call in plain Python: byte arrays, a dictionary of flags, rank by rank.

Only the schedule and the addresses come from the plans; sums are the oracle's, one per accumulate step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import oracle

POISON = 0xA5


@dataclass
class Rank:
    plan: object  # tide_backend._C.Plan
    inputs: Sequence[bytes]
    output: bytearray
    window: bytearray = field(default_factory=bytearray)
    at: int = 0


def beyond(address: tuple[str, int, int], more: int) -> tuple[str, int, int]:
    name, index, offset = address
    return name, index, offset + more


class Simulator:
    """`kind`, `out_kind`, `scale`: of the reduction, as the oracle names them."""

    def __init__(
        self,
        plans: Sequence,
        inputs: Sequence[Sequence[bytes]],
        outputs: Sequence[bytearray],
        kind: str = "int32",
        out_kind: str | None = None,
        scale: float = 1.0,
    ) -> None:
        self.kind, self.out_kind, self.scale = kind, out_kind or kind, scale
        self.flags: dict[tuple[int, int, str], int] = {}
        self.ranks = []
        for plan, data, output in zip(plans, inputs, outputs, strict=True):
            window = output if plan.path == "zero_copy" else bytearray([POISON]) * plan.window_bytes
            self.ranks.append(Rank(plan, data, output, window))

    def run(self, chance: random.Random) -> None:
        """One step of a rank that can go on, drawn at random, until all are over."""
        steps = [rank.plan.steps for rank in self.ranks]
        while True:
            able = [
                r
                for r, rank in enumerate(self.ranks)
                if rank.at < len(steps[r]) and self.can_go_on(r, steps[r][rank.at])
            ]
            if not able:
                break
            r = chance.choice(able)
            self.step(r, steps[r][self.ranks[r].at])
            self.ranks[r].at += 1
        stuck = {r: steps[r][rank.at] for r, rank in enumerate(self.ranks) if rank.at < len(steps[r])}
        assert not stuck, f"deadlock: {stuck}"

    def can_go_on(self, r: int, step: dict) -> bool:
        if step["kind"] != "wait":
            return True
        return self.flags.get((step["peer"], r, step["flag"]), 0) >= step["value"]

    def step(self, r: int, step: dict) -> None:
        kind = step["kind"]
        if kind == "signal":
            word = (r, step["peer"], step["flag"])
            assert step["value"] > self.flags.get(word, 0), "flag values only grow"
            self.flags[word] = step["value"]
        elif kind == "copy":
            for row in range(step["rows"]):
                data = self.read(r, beyond(step["from"], row * step["from_pitch"]), step["bytes"])
                for target in self.targets(step["to"]):
                    self.write(r, beyond(target, row * step["to_pitch"]), data)
        elif kind == "fill":
            self.write(r, step["to"], bytes(step["bytes"]))
        elif kind == "accumulate":
            pieces = []
            for other in range(len(self.ranks) - 1):
                place = ("window", r, step["staged"] + other * step["stride"])
                pieces.append(self.read(r, place, step["bytes"]))
            pieces.insert(r, self.read(r, step["from"], step["bytes"]))
            kind = self.kind if step["type"] == "bytes" else step["type"]
            arrays = [np.frombuffer(p, oracle.KINDS[kind]) for p in pieces]
            total = oracle.reduce_in_rank_order(arrays, kind, self.out_kind, self.scale)
            self.write(r, step["to"], total.tobytes())

    def targets(self, address: tuple[str, int, int]) -> list[tuple[str, int, int]]:
        """Where a copy to `address` lands: multicast reaches every rank's window, the writer's too."""
        name, _, offset = address
        return [("window", r, offset) for r in range(len(self.ranks))] if name == "multicast" else [address]

    def space(self, r: int, address: tuple[str, int, int]) -> bytes | bytearray:
        name, index, _ = address
        assert name in ("input", "output", "window"), f"rank {r} uses {address}, which only copies may write"
        if name == "input":
            return self.ranks[r].inputs[index]
        return self.ranks[r].output if name == "output" else self.ranks[index].window

    def read(self, r: int, address: tuple[str, int, int], size: int) -> bytes:
        space, offset = self.space(r, address), address[2]
        assert 0 <= offset <= offset + size <= len(space), (
            f"rank {r} reads {address} + {size} of {len(space)}"
        )
        return bytes(space[offset : offset + size])

    def write(self, r: int, address: tuple[str, int, int], data: bytes) -> None:
        space, offset = self.space(r, address), address[2]
        assert isinstance(space, bytearray), f"rank {r} writes its input"
        assert 0 <= offset <= offset + len(data) <= len(space), f"rank {r} writes {address} of {len(space)}"
        space[offset : offset + len(data)] = data

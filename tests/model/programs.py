"""From an application's calls to threads: one per channel and one for the application, or one FIFO a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from model.calls import Call, expected, own_shard, plan_of
from model.memory import Region
from model.ops import (
    Acquire,
    Await,
    Check,
    Meet,
    Move,
    Op,
    Place,
    Post,
    Publish,
    Release,
    Signal,
    Thread,
    Wait,
)
from model.rules import Rules


@dataclass(frozen=True)
class Issue:
    call: Call


@dataclass(frozen=True)
class Compute:
    """Reads the call's whole result."""

    call: Call


@dataclass(frozen=True)
class Reshard:
    """Gives the call's slot back to the pool; its data is dead from here on."""

    call: Call


Item = Issue | Compute | Reshard
EditSteps = Callable[[list[dict], Call, int], list[dict]]
EditOps = Callable[[list[Op], Call, int], list[Op]]


@dataclass(frozen=True)
class Setup:
    """How a program runs. merged: all streams of a rank are one FIFO. stream: ready words and asynchronous
    copies, as on a GPU; otherwise records are exchanged before the first step and copies are synchronous.
    """

    world: int
    merged: bool = False
    stream: bool = True
    rules: Rules = field(default_factory=Rules)
    edit_steps: EditSteps = lambda steps, call, rank: steps
    edit_ops: EditOps = lambda ops, call, rank: ops
    # Which freed window a rank takes: "any" explores all, "last" and "first" freed are one choice each.
    pools: tuple[str, ...] = ()

    def pool(self, rank: int) -> str:
        return self.pools[rank % len(self.pools)] if self.pools else "any"


@dataclass
class Program:
    setup: Setup
    threads: list[Thread] = field(default_factory=list)
    sizes: dict[tuple[int, str], int] = field(default_factory=dict)  # bytes of (rank, window)
    inputs: dict[Region, int] = field(default_factory=dict)
    previous: dict[str, str] = field(default_factory=dict)  # call -> the one before on its channel


def build(ranks: Sequence[Sequence[Item]] | Sequence[Item], setup: Setup) -> Program:
    """`ranks`: one program for all, or one per rank."""
    per_rank = ranks if isinstance(ranks[0], Sequence) else [ranks] * setup.world
    program = Program(setup)
    for rank, items in enumerate(per_rank):
        _Builder(program, rank).run(items)
    return program


class _Builder:
    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.setup, self.rank = program, program.setup, rank
        self.world, self.rules = self.setup.world, self.setup.rules
        self.peers = [(rank + d) % self.world for d in range(1, self.world)]
        self.calls: dict[str, int] = {}
        self.exchanges: dict[str, int] = {}
        self.last: dict[str, str] = {}

    def run(self, items: Sequence[Item]) -> None:
        app: list[Op] = []
        channels: dict[str, list[Op]] = {}
        for item in items:
            name = item.call.name
            if isinstance(item, Issue):
                app += [*self.before(item.call), Post(name, f"issued {name}")]
                lane = app if self.setup.merged else channels.setdefault(item.call.channel, [])
                call = self.collective(item.call)
                ops = [Await(name, f"issued {name}"), *call, Post(name, f"finished {name}")]
                lane += self.setup.edit_ops(ops, item.call, self.rank)
            elif isinstance(item, Compute):
                app += [Await(name, f"finished {name}"), self.check(item.call)]
            elif self.rank in item.call.slots:
                ops = [Await(name, f"finished {name}"), Release(slot(item.call, self.world))]
                app += self.setup.edit_ops(ops, item.call, self.rank)
        for lane, ops in [("app", app), *channels.items()]:
            self.program.threads.append(Thread(self.rank, lane, tuple(ops)))

    def output(self, call: Call, offset: int = 0) -> Place:
        if self.rank in call.slots:
            return Place(None, self.rank, slot(call, self.world), offset)
        return Place(("out", self.rank, call.name), self.rank, call.name, offset)

    def input(self, call: Call, index: int, offset: int) -> Place:
        return Place(("in", self.rank, call.name, index), self.rank, call.name, offset)

    def check(self, call: Call) -> Check:
        return Check(call.name, self.output(call), expected(call, self.rank, self.world))

    def before(self, call: Call) -> list[Op]:
        """What the caller does: take a slot, and put the shard there."""
        ops: list[Op] = []
        if self.rank in call.slots:
            self.program.sizes[self.rank, slot(call, self.world)] = call.output_bytes(self.rank, self.world)
            ops.append(Acquire(slot(call, self.world)))
        if call.placed:
            for source, to, size in own_shard(call, self.rank, self.world):
                ops.append(Move(call.name, self.output(call, to), (self.input(call, 0, source),), size))
        return ops

    def collective(self, call: Call) -> list[Op]:
        plan = plan_of(call, self.rank, self.world)
        for index, numel in enumerate(call.input_numels(self.rank, self.world)):
            self.program.inputs["in", self.rank, call.name, index] = 4 * numel
        self.program.previous[call.name] = self.last.get(call.channel, call.name)
        self.last[call.channel] = call.name
        self.calls[call.channel] = self.calls.get(call.channel, 0) + 1
        ops: list[Op] = []
        if call.slots and plan.path == "staged":
            ops += self.exchange(call)  # finds that some ranks have no slot; windows are agreed once more
        if plan.window_bytes:
            self.program.sizes[self.rank, call.name] = plan.window_bytes
            ops.append(Acquire(call.name))
        ops += self.exchange(call) if not self.setup.stream else [self.publish(call)]
        for step in self.setup.edit_steps(list(plan.steps), call, self.rank):
            ops += self.step(call, step)
        ops.append(self.check(call))
        if plan.window_bytes:
            ops.append(Release(call.name))
        return ops

    def publish(self, call: Call) -> Publish:
        self.exchanges[call.channel] = self.exchanges.get(call.channel, 0) + 1
        return Publish(call.name, call.channel, self.exchanges[call.channel], call.contract)

    def exchange(self, call: Call) -> list[Op]:
        return [
            self.publish(call),
            *(self.ready(call, peer) for peer in self.peers),
            *(self.meet(call, peer) for peer in self.peers),
        ]

    def ready(self, call: Call, peer: int) -> Signal:
        sequence = self.exchanges[call.channel]
        word = self.rules.ready_word(call.channel, self.rank, peer, sequence)
        return Signal(call.name, word, sequence)

    def meet(self, call: Call, peer: int, waits: bool = True) -> Meet:
        return Meet(call.name, peer, call.channel, self.exchanges[call.channel], call.contract, waits)

    def step(self, call: Call, step: dict) -> list[Op]:
        kind, peer, flag = step["kind"], step["peer"], step["flag"]
        if kind in ("signal", "wait", "meet_without_waiting"):
            if flag == "ready":
                if not self.setup.stream:
                    return []
                if kind == "signal":
                    return [self.ready(call, peer)]
                return [self.meet(call, peer, waits=kind == "wait")]
            value = self.rules.value(self.calls[call.channel], step["value"])
            if kind == "signal":
                return [Signal(call.name, self.rules.word(flag, call.channel, self.rank, peer), value)]
            return [Wait(call.name, self.rules.word(flag, call.channel, peer, self.rank), value)]
        to = self.address(call, step["to"])
        if kind == "fill":
            return [Move(call.name, to, (), step["bytes"])]
        sources = [self.address(call, step["from"])]
        if kind == "accumulate":
            for other in range(self.world - 1):
                at = step["staged"] + other * step["stride"]
                sources.insert(other + (other >= self.rank), Place(None, self.rank, call.name, at))
            own = sources.index(self.address(call, step["from"]))
            assert own == self.rank
        return [Move(call.name, to, tuple(sources), step["bytes"])]

    def address(self, call: Call, address: tuple[str, int, int]) -> Place:
        space, index, offset = address
        if space == "input":
            return self.input(call, index, offset)
        if space == "output":
            return self.output(call, offset)
        assert space == "window", space
        return Place(None, index, call.name, offset)


def slot(call: Call, world: int) -> str:
    """The name of the window that is a call's output; when every rank has one, it is what peers write."""
    return call.name if call.zero_copy(world) else f"{call.name} output"

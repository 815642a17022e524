"""From an application's calls to threads, as the product runs them on a CPU and on a GPU.

CPU: each channel of a rank is a thread that takes its staging, exchanges records and runs the plan's
steps, each over when it returns; the application is one more thread, which takes slots and gives them
back.
GPU: one host thread of a rank takes windows, exchanges records, puts the steps on the channel's stream
and gives staging back at once; whoever gets a window waits, on its stream, for the work that used it
last. A reduce-scatter sends on a stream of its own and adds on the channel's; an all-to-all likewise.
Copies on a stream are done in any order until the next signal. The application computes on a stream of
its own, where it also writes what reduce-scatters and all-to-alls send.
merged: all channels (CPU) or all streams (GPU) of a rank are one FIFO.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from model.calls import Call, expected, own_shard, plan_of
from model.memory import Region
from model.ops import (
    Acquire,
    Await,
    Check,
    Claim,
    Meet,
    Move,
    Op,
    Place,
    Post,
    Produce,
    Publish,
    Release,
    Retire,
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


@dataclass(frozen=True)
class Overwrite:
    """Writes something else where the call's inputs were, as soon as the call is over."""

    call: Call


Item = Issue | Compute | Reshard | Overwrite
EditSteps = Callable[[list[dict], Call, int], list[dict]]
EditOps = Callable[[list[Op], Call, int], list[Op]]


@dataclass(frozen=True)
class Setup:
    """edit_steps, edit_ops: what a mutation does to a plan, and to the operations of one call or reshard.

    pools: which freed window a rank takes, by rank: "any" explores all; "last" or "first" freed.
    """

    world: int
    device: str = "cpu"
    merged: bool = False
    rules: Rules = field(default_factory=Rules)
    edit_steps: EditSteps = lambda steps, call, rank: steps
    edit_ops: EditOps = lambda ops, call, rank: ops
    pools: tuple[str, ...] = ()

    def pool(self, rank: int) -> str:
        return self.pools[rank % len(self.pools)] if self.pools else "any"


@dataclass
class Program:
    setup: Setup
    threads: list[Thread] = field(default_factory=list)
    sizes: dict[tuple[int, str], int] = field(default_factory=dict)  # bytes of (rank, window)
    inputs: dict[Region, int] = field(default_factory=dict)
    computed: set[Region] = field(default_factory=set)  # inputs that are not there from the beginning
    overwritten: set[Region] = field(default_factory=set)
    previous: dict[str, str] = field(default_factory=dict)  # call -> the one before on its channel


def build(ranks: Sequence[Sequence[Item]] | Sequence[Item], setup: Setup) -> Program:
    """`ranks`: one program for all, or one per rank."""
    per_rank = ranks if isinstance(ranks[0], Sequence) else [ranks] * setup.world
    program = Program(setup)
    for rank, items in enumerate(per_rank):
        builder = (_Host if setup.device == "cuda" else _Threads)(program, rank)
        for item in items:
            builder.add(item)
        for name, ops in builder.lanes.items():
            program.threads.append(Thread(rank, name, tuple(ops)))
    return program


class _Builder:
    """Collects the operations of one rank's threads; how a call is spread over them is the subclasses'."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.setup, self.rank = program, program.setup, rank
        self.world, self.rules = self.setup.world, self.setup.rules
        self.peers = [(rank + d) % self.world for d in range(1, self.world)]
        self.calls: dict[str, int] = {}
        self.exchanges: dict[str, int] = {}
        self.last: dict[str, str] = {}
        self.lanes: dict[str, list[Op]] = {}

    def lane(self, name: str) -> list[Op]:
        return self.lanes.setdefault(name, [])

    def edited(self, ops: list[Op], call: Call) -> list[Op]:
        return self.setup.edit_ops(ops, call, self.rank)

    def output(self, call: Call, offset: int = 0) -> Place:
        if self.rank in call.slots:
            return Place(None, self.rank, slot(call, self.world), offset)
        return Place(("out", self.rank, call.name), self.rank, call.name, offset)

    def input(self, call: Call, index: int, offset: int) -> Place:
        return Place(("in", self.rank, call.name, index), self.rank, call.name, offset)

    def check(self, call: Call) -> Check:
        return Check(call.name, self.output(call), expected(call, self.rank, self.world))

    def acquire(self, name: str, size: int) -> list[Op]:
        if size == 0:
            return []
        self.program.sizes[self.rank, name] = size
        return [Acquire(name)]

    def slot(self, call: Call) -> list[Op]:
        if self.rank not in call.slots:
            return []
        return self.acquire(slot(call, self.world), call.output_bytes(self.rank, self.world))

    def placement(self, call: Call) -> list[Op]:
        """A caller that places its shard itself."""
        if not call.placed:
            return []
        return [
            Move(call.name, self.output(call, to), (self.input(call, 0, source),), size)
            for source, to, size in own_shard(call, self.rank, self.world)
        ]

    def inputs(self, call: Call) -> dict[Region, int]:
        numels = call.input_numels(self.rank, self.world)
        return {("in", self.rank, call.name, index): 4 * numel for index, numel in enumerate(numels)}

    def overwrite(self, call: Call) -> list[Op]:
        self.program.overwritten |= set(self.inputs(call))
        event = f"overwritten {call.name}"
        return [Await(call.name, f"finished {call.name}"), Produce(call.name, event, wanted=False)]

    def begin(self, call: Call) -> None:
        self.program.inputs |= self.inputs(call)
        self.program.previous[call.name] = self.last.get(call.channel, call.name)
        self.last[call.channel] = call.name
        self.calls[call.channel] = self.calls.get(call.channel, 0) + 1

    def exchange(self, call: Call) -> list[Op]:
        """Publishes this rank's record, then waits for and reads every peer's."""
        sequence = self.exchanges[call.channel] = self.exchanges.get(call.channel, 0) + 1
        word = self.rules.record_word(call.channel, self.rank, sequence)
        return [
            Publish(call.name, call.channel, sequence, call.contract),
            Signal(call.name, word, sequence),
            *(Meet(call.name, peer, call.channel, sequence, call.contract) for peer in self.peers),
        ]

    def steps(self, call: Call) -> list[Op]:
        plan = plan_of(call, self.rank, self.world)
        return [self.step(call, s) for s in self.setup.edit_steps(list(plan.steps), call, self.rank)]

    def step(self, call: Call, step: dict) -> Op:
        kind, peer, flag = step["kind"], step["peer"], step["flag"]
        if kind in ("signal", "wait"):
            value = self.rules.value(self.calls[call.channel], step["value"])
            source, at = (self.rank, peer) if kind == "signal" else (peer, self.rank)
            word = self.rules.word(flag, call.channel, source, at)
            return Signal(call.name, word, value) if kind == "signal" else Wait(call.name, word, value)
        if step["to"][0] == "multicast":
            assert kind == "copy", kind
            first, *others = (
                Place(None, owner, call.name, step["to"][2], multicast=True) for owner in range(self.world)
            )
            return Move(call.name, first, (self.address(call, step["from"]),), step["bytes"], tuple(others))
        to = self.address(call, step["to"])
        if kind == "fill":
            return Move(call.name, to, (), step["bytes"])
        own = self.address(call, step["from"])
        if kind == "copy":
            return Move(call.name, to, (own,), step["bytes"])
        assert kind == "accumulate", kind
        sources = [
            Place(None, self.rank, call.name, step["staged"] + other * step["stride"])
            for other in range(self.world - 1)
        ]
        return Move(call.name, to, (*sources[: self.rank], own, *sources[self.rank :]), step["bytes"])

    def address(self, call: Call, address: tuple[str, int, int]) -> Place:
        space, index, offset = address
        if space == "input":
            return self.input(call, index, offset)
        if space == "output":
            return self.output(call, offset)
        assert space == "window", space
        return Place(None, index, call.name, offset)


class _Threads(_Builder):
    """On a CPU."""

    def add(self, item: Item) -> None:
        call, name = item.call, item.call.name
        app = self.lane("app")
        if isinstance(item, Issue):
            app += [*self.slot(call), *self.placement(call), Post(name, f"issued {name}")]
            lane = app if self.setup.merged else self.lane(call.channel)
            ops = [Await(name, f"issued {name}"), *self.collective(call), Post(name, f"finished {name}")]
            lane += self.edited(ops, call)
        elif isinstance(item, Compute):
            app += [Await(name, f"finished {name}"), self.check(call)]
        elif isinstance(item, Overwrite):
            app += self.overwrite(call)
        elif self.rank in call.slots:
            app += self.edited([Await(name, f"finished {name}"), Release(slot(call, self.world))], call)

    def collective(self, call: Call) -> list[Op]:
        self.begin(call)
        plan = plan_of(call, self.rank, self.world)
        staging = self.acquire(name := call.name, plan.window_bytes)
        # Where only some ranks have a slot, the first exchange finds out and windows are agreed once more.
        first = self.exchange(call) if call.slots and plan.path == "staged" else []
        release = [Release(name)] if staging else []
        return [*first, *staging, *self.exchange(call), *self.steps(call), self.check(call), *release]


class _Host(_Builder):
    """On a GPU."""

    def pushed(self, op: Op) -> bool:
        """Whether a step is on the stream that sends: data goes out when its buffer is free."""
        if isinstance(op, Move):
            return op.to.owner != self.rank
        flag = op.word[0] if isinstance(op, Signal | Wait) else ""
        return flag == "data" if isinstance(op, Signal) else flag in ("ready", "credit")

    def stream(self, name: str) -> list[Op]:
        return self.lane("streams" if self.setup.merged else name)

    def add(self, item: Item) -> None:
        call, name = item.call, item.call.name
        host, compute = self.lane("host"), self.stream("compute")
        if isinstance(item, Issue):
            self.begin(call)
            plan = plan_of(call, self.rank, self.world)
            first = self.slot(call)
            # As on a CPU; also where staging is made for the first call that needs it.
            early = self.exchange(call) if call.slots and plan.path == "staged" else []
            staging = self.acquire(name, plan.window_bytes)
            host += [*first, *early, *staging, *self.exchange(call), Post(name, f"enqueued {name}")]
            host += [Release(name)] if staging else []
            if call.op != "all_gather":  # gradients and activations come from the compute before
                self.program.computed |= set(self.inputs(call))
                compute.append(Produce(name, f"computed {name}"))
            begin = [
                Await(name, f"enqueued {name}"),
                *([] if call.op == "all_gather" else [Await(name, f"computed {name}")]),
                *(Claim(op.call) for op in [*first, *staging]),
            ]
            own = self.steps(call)
            if call.op in ("reduce_scatter", "all_to_all") and not self.setup.merged:
                begin.append(Post(name, f"begun {name}"))
                pushes = [op for op in own if self.pushed(op)]
                own = [op for op in own if not self.pushed(op)]
                own.append(Await(name, f"pushed {name}"))
                push = self.stream(f"{call.channel} pushes")
                push += self.edited([Await(name, f"begun {name}"), *pushes, Post(name, f"pushed {name}")], call)
            ops = [
                *begin,
                *self.placement(call),
                *own,
                self.check(call),
                *([Retire(name)] if staging else []),
                Post(name, f"finished {name}"),
            ]
            self.stream(call.channel).extend(self.edited(ops, call))
        elif isinstance(item, Compute):
            compute += [Await(name, f"enqueued {name}"), Await(name, f"finished {name}"), self.check(call)]
        elif isinstance(item, Overwrite):
            compute += self.overwrite(call)
        elif self.rank in call.slots:
            window = slot(call, self.world)
            compute += self.edited([Await(name, f"finished {name}"), Retire(window)], call)
            host.append(Release(window))


def slot(call: Call, world: int) -> str:
    """The name of the window that is a call's output; when every rank has one, it is what peers write."""
    return call.name if call.zero_copy(world) else f"{call.name} output"

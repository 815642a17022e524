"""Explores every choice a program has, with races found by happens-before instead of by trying every order.

Why this covers all interleavings. A flag word has one writer and only grows, so a wait that is enabled
stays enabled, and the order in which threads run changes nothing but memory; and memory only where two
accesses conflict and nothing orders them, which is reported as a race whether or not it happened in this
order. (A ready word is awaited by equality and could be overwritten unseen: it counts as memory too.)
What orders two accesses is counted at its weakest: a wait learns what its *earliest* sufficient signal
knew; a window's next owner learns what its last one knew; copies are ordered by nothing but the next
signal of their thread. The choices left are who gets which window of a rank's pool: threads run until
each stands at its next acquire or release, then every order and every window is tried, and equal states
are visited once. `interleaving` checks the argument by brute force on small programs.
"""

from __future__ import annotations

from typing import NamedTuple

from model.machine import Machine, Range, Violation
from model.memory import Region
from model.ops import (
    Acquire,
    Await,
    Check,
    Claim,
    Meet,
    Move,
    Op,
    Post,
    Produce,
    Publish,
    Release,
    Retire,
    Signal,
    Wait,
)
from model.programs import Program

Clock = tuple[int, ...]


class Access(NamedTuple):
    begin: int
    end: int
    write: bool
    thread: int
    time: int
    what: Op


class State(Machine):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        n = len(self.threads)
        self.written = program.computed | program.overwritten
        self.pc = [0] * n
        self.clock: list[Clock] = [(0,) * n] * n  # what each thread knows to be over
        self.issued = [0] * n  # accesses begun; those above clock[t][t] are still in flight
        self.words: dict = {}  # word -> every (value, clock) written
        self.events: dict[tuple[int, str], Clock] = {}
        self.freed: dict[tuple[int, int], Clock] = {}  # (rank, window) -> what its last owner knew
        self.log: dict[Region, tuple[Access, ...]] = {}
        self.trace: tuple | None = None

    def fork(self) -> State:
        other = object.__new__(State)
        self.copy_to(other)
        other.written = self.written
        other.pc, other.clock, other.issued = list(self.pc), list(self.clock), list(self.issued)
        other.words, other.events, other.freed = dict(self.words), dict(self.events), dict(self.freed)
        other.log, other.trace = dict(self.log), self.trace
        return other

    def key(self) -> tuple:
        return (
            tuple(self.pc),
            tuple(self.clock),
            tuple(sorted(self.bound.items())),
            tuple(sorted(self.before.items())),
            tuple(sorted(self.pools.items())),
            tuple(sorted(self.freed.items())),
            tuple(sorted((r, frozenset(a)) for r, a in self.log.items())),
        )

    # --- order ------------------------------------------------------------------------------------

    def learn(self, t: int, clock: Clock) -> None:
        self.clock[t] = tuple(map(max, self.clock[t], clock))

    def drain(self, t: int) -> None:
        clock = self.clock[t]
        self.clock[t] = (*clock[:t], self.issued[t], *clock[t + 1 :])

    def access(self, t: int, r: Range, write: bool, what: Op) -> None:
        if r.begin == r.end or (r.region[0] == "in" and r.region not in self.written):
            return  # other inputs are only read
        known = self.clock[t]
        kept = []
        for old in self.log.get(r.region, ()):
            if old.begin < r.end and r.begin < old.end:
                itself = (old.thread, old.time) == (t, self.issued[t])
                if (write or old.write) and old.time > known[old.thread] and not itself:
                    ours = "writes" if write else "reads"
                    theirs = "write" if old.write else "read"
                    raise Violation(
                        "race",
                        f"{self.name(t)} {ours} {r.region} [{r.begin}, {r.end}) ({what}), and nothing "
                        f"orders it after the {theirs} of [{old.begin}, {old.end}) by "
                        f"{self.name(old.thread)} ({old.what})",
                    )
                if write:  # later accesses that conflict with the covered part conflict with this one too
                    if old.begin < r.begin:
                        kept.append(old._replace(end=r.begin))
                    if old.end > r.end:
                        kept.append(old._replace(begin=r.end))
                    continue
            kept.append(old)
        self.log[r.region] = (*kept, Access(r.begin, r.end, write, t, self.issued[t], what))

    def name(self, t: int) -> str:
        return f"rank {self.threads[t].rank} {self.threads[t].name}"

    # --- steps ------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Runs every thread until it is over, blocked, or at its next acquire or release."""
        moved = True
        while moved:
            moved = False
            for t, thread in enumerate(self.threads):
                while self.pc[t] < len(thread.ops) and self.step(t):
                    self.pc[t] += 1
                    moved = True

    def step(self, t: int) -> bool:
        thread = self.threads[t]
        op = thread.ops[self.pc[t]]
        rank = thread.rank
        if isinstance(op, (Acquire, Release)):
            return False
        before = self.trace
        self.trace = (before, t, op)
        if isinstance(op, Move):
            targets, sources = self.ranges(rank, op)
            self.issued[t] += 1
            for source in sources:
                self.access(t, source, False, op)
            for to in targets:
                self.access(t, to, True, op)
            self.move(targets, sources)
            if self.program.setup.device == "cpu":
                self.drain(t)
        elif isinstance(op, Signal):
            self.drain(t)
            if self.rules.fleeting(op.word):
                self.issued[t] += 1
                self.access(t, Range(op.word, 0, 1), True, op)
                self.drain(t)
            self.words[op.word] = (*self.words.get(op.word, ()), (op.value, self.clock[t]))
        elif isinstance(op, Publish):
            self.drain(t)
            self.issued[t] += 1
            self.access(t, self.record(rank, op.channel, op.sequence), True, op)
            self.publish(rank, op)
            self.drain(t)
        elif isinstance(op, (Post, Retire)):
            self.drain(t)
            if isinstance(op, Produce):
                self.issued[t] += 1
                for r in self.produced(rank, op):
                    self.access(t, r, True, op)
                    self.produce(r, op.wanted)
                self.drain(t)
            event = op.event if isinstance(op, Post) else f"retired {op.call}"
            self.events[rank, event] = self.clock[t]
        elif isinstance(op, Check):
            self.drain(t)
            self.issued[t] += 1
            ranges = [self.range(rank, op.at, b)._replace(begin=a) for a, b, _ in op.expected]
            for r in ranges:
                self.access(t, r, False, op)
            self.compare(thread, op, ranges)
            self.drain(t)
        else:
            known = self.enabled(t)
            if known is None:
                self.trace = before
                return False
            self.learn(t, known)
            if isinstance(op, Wait) and self.rules.fleeting(op.word):
                self.issued[t] += 1
                self.access(t, Range(op.word, 0, 1), False, op)
            elif isinstance(op, Meet):
                self.issued[t] += 1
                word = self.rules.record_word(op.channel, op.peer, op.sequence)
                self.access(t, Range(word, 0, 1), False, op)
                self.access(t, self.record(op.peer, op.channel, op.sequence), False, op)
                self.read_record(rank, op)
                self.drain(t)
        return True

    def enabled(self, t: int) -> Clock | None:
        """What the thread learns from the wait it stands at, or None while it must wait."""
        op = self.threads[t].ops[self.pc[t]]
        rank = self.threads[t].rank
        if isinstance(op, Await):
            return self.events.get((rank, op.event))
        if isinstance(op, Claim):
            event = self.last_use(rank, op.call)
            return self.clock[t] if event is None else self.events.get((rank, event))
        if isinstance(op, Meet):
            if not self.rules.records_awaited:
                return self.clock[t]
            word, wanted = self.rules.record_word(op.channel, op.peer, op.sequence), op.sequence
        else:
            assert isinstance(op, Wait)
            word, wanted = op.word, op.value
        for value, clock in self.words.get(word, ()):
            if self.satisfied(word, value, wanted):
                return clock
        return None

    def take(self, t: int, window: int | None) -> None:
        """The acquire or release that thread t stands at."""
        rank = self.threads[t].rank
        op = self.threads[t].ops[self.pc[t]]
        self.drain(t)
        if window is None:
            window = self.release(rank, op.call)
            self.freed[rank, window] = self.clock[t]
        else:
            self.acquire(rank, op.call, window)
            self.learn(t, self.freed.get((rank, window), self.clock[t]))
        self.trace = (self.trace, t, op)
        self.pc[t] += 1

    # --- choices ----------------------------------------------------------------------------------

    def at_pool(self, t: int) -> bool:
        ops = self.threads[t].ops
        return self.pc[t] < len(ops) and isinstance(ops[self.pc[t]], (Acquire, Release))

    def choices(self) -> list[tuple[int, int | None]]:
        """Every (thread, window) at a pool. If all that a rank's pool will ever see next is already there,
        other ranks cannot change what its choices are, and trying this rank's alone is enough."""
        by_rank: dict[int, list[tuple[int, int | None]]] = {}
        for t, thread in enumerate(self.threads):
            if not self.at_pool(t):
                continue
            op = thread.ops[self.pc[t]]
            options = self.options(thread.rank) if isinstance(op, Acquire) else [None]
            by_rank.setdefault(thread.rank, []).extend((t, window) for window in options)
        for rank, found in by_rank.items():
            if self.alone(rank):
                return found
        return [choice for found in by_rank.values() for choice in found]

    def alone(self, rank: int) -> bool:
        return all(
            self.waits_for_own_pool(t)
            for t, thread in enumerate(self.threads)
            if thread.rank == rank
            and any(isinstance(op, (Acquire, Release)) for op in thread.ops[self.pc[t] :])
        )

    def waits_for_own_pool(self, t: int) -> bool:
        """Whether the thread can only go on after a thread of its rank took its choice at the pool."""
        if self.at_pool(t):
            return True
        thread = self.threads[t]
        op = thread.ops[self.pc[t]] if self.pc[t] < len(thread.ops) else None
        if not isinstance(op, Await):
            return False
        for other, poster in enumerate(self.threads):
            if poster.rank == thread.rank and any(
                isinstance(o, Post) and o.event == op.event for o in poster.ops[self.pc[other] :]
            ):
                return other != t and self.waits_for_own_pool(other)
        return False

    def over(self) -> bool:
        return all(pc == len(thread.ops) for pc, thread in zip(self.pc, self.threads, strict=True))

    def deadlock(self) -> Violation:
        waiting = [
            f"{self.name(t)} at {thread.ops[self.pc[t]].call}: {thread.ops[self.pc[t]]}"
            for t, thread in enumerate(self.threads)
            if self.pc[t] < len(thread.ops)
        ]
        return Violation("deadlock", "nothing can move; " + "; ".join(waiting))

    def history(self) -> list[str]:
        lines, at = [], self.trace
        while at:
            at, t, op = at
            lines.append(f"{self.name(t):<22} {op.call}: {op}")
        return lines[::-1]


class Result(NamedTuple):
    states: int
    ends: int


def explore(program: Program, limit: int = 200_000) -> Result:
    """Visits every state. Raises the first Violation, with a trace that leads to it."""
    stack, visited, ends = [State(program)], set(), 0
    while stack:
        state = stack.pop()
        try:
            state.advance()
            key = state.key()
            if key in visited:
                continue
            visited.add(key)
            if len(visited) > limit:
                raise RuntimeError(f"more than {limit} states; make the program smaller")
            choices = state.choices()
            if not choices and not state.over():
                raise state.deadlock()
        except Violation as violation:
            violation.trace = state.history()
            raise
        ends += not choices
        for t, window in choices:
            fork = state.fork()
            fork.take(t, window)
            stack.append(fork)
    return Result(len(visited), ends)

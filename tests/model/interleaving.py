"""Runs a small program in every order there is: no reduction but visiting equal states once.

A copy has a beginning and an end with anything in between; two that conflict and are in flight together
are a race. Waits look at what a word holds now. This shares nothing with `causal` but the effects of
operations.
"""

from __future__ import annotations

from typing import NamedTuple

from model.causal import Result
from model.machine import Machine, Range, Violation
from model.ops import Acquire, Await, Check, Claim, Meet, Move, Post, Produce, Publish, Release, Retire, Signal, Wait
from model.programs import Program


class Flight(NamedTuple):
    thread: int
    op: int
    writes: tuple[Range, ...]
    reads: tuple[Range, ...]


class State(Machine):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.pc = (0,) * len(self.threads)
        self.words: dict = {}
        self.events: frozenset = frozenset()
        self.flights: frozenset[Flight] = frozenset()
        self.trace: tuple | None = None

    def fork(self, line: str) -> State:
        other = object.__new__(State)
        self.copy_to(other)
        other.pc, other.events, other.flights = self.pc, self.events, self.flights
        other.words, other.trace = dict(self.words), (self.trace, line)
        return other

    def key(self) -> tuple:
        return (
            self.pc,
            self.flights,
            self.events,
            *(frozenset(d.items()) for d in (self.words, self.contents, self.bound, self.seen, self.pools)),
            frozenset(self.before.items()),
        )

    def name(self, t: int) -> str:
        return f"rank {self.threads[t].rank} {self.threads[t].name}"

    def successors(self) -> list[State]:
        found = [self.land(flight) for flight in self.flights]
        for t, thread in enumerate(self.threads):
            if self.pc[t] < len(thread.ops):
                found += self.step(t)
        return found

    def step(self, t: int) -> list[State]:
        thread = self.threads[t]
        op = thread.ops[self.pc[t]]
        rank = thread.rank
        mine = [f for f in self.flights if f.thread == t]
        streams = self.program.setup.device == "cuda"
        asynchronous = streams and all(isinstance(thread.ops[f.op], Move) for f in mine)
        if mine and not (asynchronous and isinstance(op, (Move, Wait, Await, Claim))):
            return []
        if not self.enabled(rank, op):
            return []
        windows = self.options(rank) if isinstance(op, Acquire) else [None]
        return [self.fork(f"{self.name(t):<22} {op.call}: {op}").go(t, op, window) for window in windows]

    def enabled(self, rank: int, op) -> bool:
        if isinstance(op, Await):
            return (rank, op.event) in self.events
        if isinstance(op, Claim):
            event = self.last_use(rank, op.call)
            return event is None or (rank, event) in self.events
        if isinstance(op, Wait):
            return self.satisfied(op.word, self.words.get(op.word, 0), op.value)
        if isinstance(op, Meet) and self.rules.records_awaited:
            word = self.rules.record_word(op.channel, op.peer, op.sequence)
            return self.satisfied(word, self.words.get(word, 0), op.sequence)
        return True

    def go(self, t: int, op, window: int | None) -> State:
        thread = self.threads[t]
        rank = thread.rank
        if isinstance(op, Move):
            self.launch(t, *self.ranges(rank, op))
        elif isinstance(op, Publish):
            self.launch(t, (self.record(rank, op.channel, op.sequence),), ())
        elif isinstance(op, Meet):
            self.launch(t, (), (self.record(op.peer, op.channel, op.sequence),))
        elif isinstance(op, Check):
            self.launch(t, (), tuple(self.range(rank, op.at, b)._replace(begin=a) for a, b, _ in op.expected))
        elif isinstance(op, Signal):
            self.words[op.word] = op.value
        elif isinstance(op, (Post, Retire)):
            event = op.event if isinstance(op, Post) else f"retired {op.call}"
            self.events |= {(rank, event)}
            if isinstance(op, Produce):
                ranges = self.produced(rank, op)
                self.refuse_clash(t, tuple(ranges), ())
                for r in ranges:
                    self.produce(r, op.wanted)
        elif isinstance(op, Acquire):
            self.acquire(rank, op.call, window)
        elif isinstance(op, Release):
            self.release(rank, op.call)
        self.pc = (*self.pc[:t], self.pc[t] + 1, *self.pc[t + 1 :])
        return self

    def refuse_clash(self, t: int, writes: tuple[Range, ...], reads: tuple[Range, ...]) -> None:
        for other in self.flights:
            clash = [
                (a, b)
                for ours, theirs in ((writes, other.writes + other.reads), (reads, other.writes))
                for a in ours
                for b in theirs
                if a.region == b.region and a.begin < b.end and b.begin < a.end
            ]
            if clash:
                op = self.threads[other.thread].ops[other.op]
                raise self.told(
                    Violation(
                        "race",
                        f"{self.name(t)} touches {clash[0][0]} while {self.name(other.thread)} does: {op}",
                    )
                )

    def launch(self, t: int, writes: tuple[Range, ...], reads: tuple[Range, ...]) -> None:
        self.refuse_clash(t, writes, reads)
        self.flights |= {Flight(t, self.pc[t], writes, reads)}

    def land(self, flight: Flight) -> State:
        thread = self.threads[flight.thread]
        op = thread.ops[flight.op]
        state = self.fork(f"{self.name(flight.thread):<22} {op.call}: done: {op}")
        state.flights -= {flight}
        try:
            if isinstance(op, Move):
                state.move(flight.writes, flight.reads)
            elif isinstance(op, Publish):
                state.publish(thread.rank, op)
            elif isinstance(op, Meet):
                state.read_record(thread.rank, op)
            else:
                state.compare(thread, op, list(flight.reads))
        except Violation as violation:
            raise state.told(violation) from None
        return state

    def told(self, violation: Violation) -> Violation:
        lines, at = [], self.trace
        while at:
            at, line = at
            lines.append(line)
        violation.trace = violation.trace or lines[::-1]
        return violation


def explore(program: Program, limit: int = 400_000) -> Result:
    start = State(program)
    stack, visited, ends = [start], {start.key()}, 0
    while stack:
        state = stack.pop()
        try:
            following = state.successors()
        except Violation as violation:
            raise state.told(violation) from None
        if not following:
            ends += 1
            waiting = [
                f"{state.name(t)} at {thread.ops[state.pc[t]].call}: {thread.ops[state.pc[t]]}"
                for t, thread in enumerate(state.threads)
                if state.pc[t] < len(thread.ops)
            ]
            if waiting:
                raise state.told(Violation("deadlock", "nothing can move; " + "; ".join(waiting)))
        for successor in following:
            key = successor.key()
            if key not in visited:
                visited.add(key)
                stack.append(successor)
        if len(visited) > limit:
            raise RuntimeError(f"more than {limit} states; make the program smaller")
    return Result(len(visited), ends)

"""Collectives and GEMMs on one rank at the same time, and each alone, timed by the same code.

GPUs        the GEMMs run on the current stream, the collectives on a stream of high priority, as FSDP2's do; both are
            timed by CUDA events. The host keeps the GEMMs coming until the last collective is over, and only those
            count that lie between the first collective's start and the last one's end.
CPU ranks   the main thread starts a collective and multiplies until it is over, which it asks between two GEMMs. A
            second thread waits for the collective too, since gloo's reduce-scatter does not say that it is over
            before somebody waits. The layout copies of the main thread are part of the collective's time.

No wait without end: collectives have their group's timeout, and all of a measurement `DEADLINE_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from .call import Call
from .gemm import Gemm

DEADLINE_S = 60.0
AHEAD_S = 0.01  # of GEMMs that wait on the compute stream, so that a host that is busy with a call does not starve it


@dataclass(frozen=True)
class Seen:
    """Seconds of one GEMM and of one collective, means over one measurement; None where there was none. On CPU ranks
    also the CPU time of a collective without GEMMs, and the part of it that its layout copies took."""

    gemm: float | None = None
    collective: float | None = None
    gemms: int = 0
    busy: float | None = None
    layout: float | None = None


@dataclass
class Deadline:
    what: str
    end: float = field(default_factory=lambda: time.monotonic() + DEADLINE_S)

    def check(self) -> None:
        """Raises RuntimeError when it has passed."""
        if time.monotonic() > self.end:
            raise RuntimeError(
                f"rank {dist.get_rank()}/{dist.get_world_size()}: {self.what}: not over after {DEADLINE_S:.0f} s; "
                "expected some milliseconds; take smaller --sizes or a smaller --gemm, or fewer ranks on a GPU"
            )


Measure = Callable[[Call | None, int, Gemm | None, float], Seen]


def on_cpu(call: Call | None, calls: int, gemm: Gemm | None, gemm_s: float) -> Seen:
    """`calls` of the collective one after the other, beside GEMMs unless `gemm` is None; without a call, `calls`
    GEMMs."""
    deadline = Deadline(describe(call, gemm))
    dist.barrier()
    if call is None:
        assert gemm is not None
        spent = [_seconds(gemm.run) for _ in range(calls)]
        return Seen(gemm=sum(spent) / calls, gemms=calls)
    spent: list[float] = []
    total = layout = 0.0
    cpu = time.process_time()
    for _ in range(calls):
        begin = time.perf_counter()
        layout += _seconds(call.before, time.thread_time)
        work = call.collective(True)
        if gemm is None:
            work.wait()
            total += time.perf_counter() - begin
        else:
            end = _waiter().submit(_end_of, work)
            while not (work.is_completed() or end.done()):
                spent.append(_seconds(gemm.run))
                deadline.check()
            total += min(time.perf_counter(), end.result()) - begin
        begin = time.perf_counter()
        layout += _seconds(call.after, time.thread_time)
        total += time.perf_counter() - begin
    cpu = time.process_time() - cpu
    if gemm is None:
        return Seen(collective=total / calls, busy=cpu / calls, layout=layout / calls)
    if not spent:
        raise RuntimeError(too_short(deadline.what, "began"))
    return Seen(sum(spent) / len(spent), total / calls, len(spent))


@cache
def _waiter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


def _end_of(work: Any) -> float:
    work.wait()
    return time.perf_counter()


def too_short(what: str, did: str) -> str:
    return (
        f"rank {dist.get_rank()}/{dist.get_world_size()}: {what}: got no GEMM that {did} while the collectives ran, "
        "expected several; take a smaller --gemm or larger --sizes"
    )


def _seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    run()
    return clock() - begin


class Feed:
    """GEMMs on the current stream, some of them ahead of the device, each between two events."""

    def __init__(self, gemm: Gemm, gemm_s: float) -> None:
        self.gemm = gemm
        self.ahead = max(4, int(AHEAD_S / gemm_s) + 1)
        self.marks: list[tuple[Any, Any]] = []
        self.over = 0

    def push(self) -> None:
        begin, end = event(), event()
        begin.record()
        self.gemm.run()
        end.record()
        self.marks.append((begin, end))

    def top_up(self) -> None:
        while self.over < len(self.marks) and self.marks[self.over][1].query():
            self.over += 1
        for _ in range(self.ahead - (len(self.marks) - self.over)):
            self.push()

    def between(self, base: Any, first_ms: float, last_ms: float) -> list[float]:
        """Seconds of each GEMM that lies in this span, in milliseconds after `base`."""
        inside = []
        for begin, end in self.marks:
            if base.elapsed_time(begin) >= first_ms and base.elapsed_time(end) <= last_ms:
                inside.append(begin.elapsed_time(end) / 1e3)
        return inside


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class OnGpu:
    """The same on a GPU; an object, for the stream that it keeps."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream(priority=-1)

    def __call__(self, call: Call | None, calls: int, gemm: Gemm | None, gemm_s: float) -> Seen:
        deadline = Deadline(describe(call, gemm))
        feed = Feed(gemm, gemm_s) if gemm is not None else None
        base = event()
        torch.cuda.synchronize()
        dist.barrier()
        base.record()
        if call is None:
            assert feed is not None
            for _ in range(calls):
                feed.push()
            wait_for(feed.marks[-1][1], deadline)
            spent = [begin.elapsed_time(end) / 1e3 for begin, end in feed.marks]
            return Seen(gemm=sum(spent) / calls, gemms=calls)
        self.stream.wait_event(base)
        if feed:
            feed.top_up()
        marks = [event() for _ in range(2)]
        marks[0].record(self.stream)
        for _ in range(calls):
            with torch.cuda.stream(self.stream):
                call.run()
            if feed:
                feed.top_up()
        marks[1].record(self.stream)
        wait_for(marks[1], deadline, feed.top_up if feed else None)
        if feed:
            wait_for(feed.marks[-1][1], deadline)
        first_ms, last_ms = (base.elapsed_time(m) for m in marks)
        collective = (last_ms - first_ms) / 1e3 / calls
        if feed is None:
            return Seen(collective=collective)
        inside = feed.between(base, first_ms, last_ms)
        if not inside:
            raise RuntimeError(too_short(deadline.what, "began and ended"))
        return Seen(sum(inside) / len(inside), collective, len(inside))


def wait_for(mark: Any, deadline: Deadline, meanwhile: Callable[[], None] | None = None) -> None:
    while not mark.query():
        deadline.check()
        if meanwhile:
            meanwhile()
        time.sleep(0.0001)


def describe(call: Call | None, gemm: Gemm | None) -> str:
    if call is None:
        return "GEMMs alone"
    return f"{type(call).__name__} {'beside GEMMs' if gemm is not None else 'alone'}"

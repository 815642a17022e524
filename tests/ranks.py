"""Real rank processes for tests: `run_ranks(world, fn, *args)` calls `fn(rank, world, *args)` on every rank.

Importing torch costs seconds a process, so one pool of ranks per world size lives for the whole session,
forked from a server that has imported torch already. `fn` is a module-level function; arguments and results
travel by pickle (plain Python or numpy, no tensors). A job runs in a process group, kept for the next
job that wants the same one. The verdict is taken over all ranks: whatever rank raised, hung or died fails the
test, with that rank's traceback. A pool in which that happened is killed (its own processes) and replaced.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

# After one rank has failed, how long the others may take to tell what they think of it.
GRACE_S = 5.0
PRELOAD = ["torch.distributed.fsdp", "numpy", "pytest", "rank_process", "tide_backend"]

context = multiprocessing.get_context("forkserver")


class RanksFailed(AssertionError):
    """At least one rank raised, hung or died; the message holds every rank's traceback."""


@dataclass(frozen=True)
class Group:
    """The process group a job runs in. backend None: none, the job makes its own (`rank_process.store()`)."""

    backend: str | None
    timeout_s: float
    generation: int = 0


class RankPool:
    """`world` processes, waiting for jobs."""

    def __init__(self, world: int) -> None:
        import rank_process
        import torch.distributed as dist

        self.world = world
        # The store lives here, so that no rank's death takes it away.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        _start_server()
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_process.serve, args=(theirs, rank, world, self.store.port), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    @property
    def usable(self) -> bool:
        return bool(self.processes) and all(p.is_alive() for p in self.processes)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        group: Group,
        deadline_s: float,
        dies: Collection[int],
    ) -> list[Any]:
        import rank_process

        for pipe in self.pipes:
            pipe.send((fn, args, group))
        answers: dict[int, tuple[str, Any]] = {}
        end = time.monotonic() + deadline_s
        while missing := [r for r in range(self.world) if r not in answers and r not in dies]:
            ready = wait([self.pipes[r] for r in missing], timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for rank in [r for r in missing if self.pipes[r] in ready]:
                try:
                    answers[rank] = self.pipes[rank].recv()
                except (EOFError, OSError):
                    self.processes[rank].join(1)
                    answers[rank] = ("died", f"the process died, exit code {self.processes[rank].exitcode}")
                if answers[rank][0] != "ok":
                    end = min(end, time.monotonic() + GRACE_S)
        for rank in missing:
            stack = rank_process.stack_of(self.processes[rank].pid)
            answers[rank] = ("hung", f"no answer (deadline {deadline_s} s); its stack:\n{stack}")
        if any(kind != "ok" for kind, _ in answers.values()):
            self.close()
            text = "\n".join(
                f"--- rank {r} of {self.world}: {'finished' if kind == 'ok' else what}"
                for r, (kind, what) in sorted(answers.items())
            )
            raise RanksFailed(f"{fn.__module__}.{fn.__name__}\n{text}")
        return [answers[r][1] if r in answers else None for r in range(self.world)]

    def close(self) -> None:
        import rank_process

        for pipe in self.pipes:
            pipe.close()  # the rank's recv ends, and with it the process
        end = time.monotonic() + 1
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()  # SIGKILL also ends a stopped process
                process.join(5)
            rank_process.stack_file(process.pid).unlink(missing_ok=True)
        self.pipes, self.processes = [], []


_pools: dict[int, RankPool] = {}
_generation = 0


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str | None = "tide",
    timeout: float = 60,
    fresh: bool = False,
    group_timeout: float = 30,
    dies: Collection[int] = (),
) -> list[Any]:
    """Call `fn(rank, world, *args)` on `world` ranks and return the results in rank order.

    backend: of the default process group, such as "tide", "gloo" or "cpu:gloo,cuda:tide"; None: no group.
    timeout: deadline of the job in seconds. group_timeout: of the group's collectives.
    fresh: processes of this job alone, for jobs that break their group, kill a rank or look at the process.
    dies: ranks that are not expected to answer (fresh only); their result is None.

    Raises RanksFailed with the traceback of every rank that raised, hung or died.
    """
    global _generation
    if dies and not fresh:
        raise ValueError("dies: a rank that dies needs fresh=True")
    if fresh:
        pool = RankPool(world)
        try:
            return pool.run(fn, args, Group(backend, group_timeout), timeout, dies)
        finally:
            pool.close()
    if world not in _pools or not _pools[world].usable:
        close_pool(world)
        _pools[world] = RankPool(world)
    return _pools[world].run(fn, args, Group(backend, group_timeout, _generation), timeout, ())


def new_groups() -> None:
    """Later jobs get groups of their own instead of a kept one."""
    global _generation
    _generation += 1


def close_pool(world: int) -> None:
    if world in _pools:
        _pools.pop(world).close()


def close_pools() -> None:
    for world in list(_pools):
        close_pool(world)


def _start_server() -> None:
    """The fork server, able to import what the tests import."""
    tests = Path(__file__).resolve().parent
    context.set_forkserver_preload(PRELOAD)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests.parent), *([before] if before else [])])
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


atexit.register(close_pools)

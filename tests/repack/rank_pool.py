"""A pool of ranks that run named test functions; every wait has a deadline.

Processes come from one fork server that has imported torch already, so a rank starts in milliseconds. A
task is `"module:function"`, called as `function(rank, world, *args)` on every rank; the pool reports every
rank's failure.
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = ["torch", "torch.distributed", "torch._dynamo"]
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOAD)


class RanksFailed(AssertionError):
    """At least one rank raised or missed the deadline."""


class RankPool:
    """`world` processes in one group."""

    def __init__(self, world: int, backend: str = "gloo", timeout_s: float = 60):
        import torch.distributed as dist

        self.world = world
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world, backend, self.store.port, timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, task: str, *args: Any, deadline_s: float = 60) -> list[Any]:
        """Results of the task in rank order."""
        for pipe in self.pipes:
            pipe.send((task, args))
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + deadline_s
        while len(answers) < self.world:
            waiting = [self.pipes[r] for r in range(self.world) if r not in answers]
            ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                missing = [r for r in range(self.world) if r not in answers]
                self.close()
                raise RanksFailed(f"{task}: ranks {missing} did not finish in {deadline_s} s; {self._errors(answers)}")
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, "the process died")
        if not all(good for good, _ in answers.values()):
            raise RanksFailed(f"{task}: {self._errors(answers)}")
        return [answers[r][1] for r in range(self.world)]

    @staticmethod
    def _errors(answers: dict[int, tuple[bool, Any]]) -> str:
        return "\n".join(f"rank {r}: {text}" for r, (good, text) in sorted(answers.items()) if not good)

    @property
    def alive(self) -> bool:
        return all(p.is_alive() for p in self.processes)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=1)
            if process.is_alive():
                process.kill()


def _serve(pipe: Connection, rank: int, world: int, backend: str, port: int, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    if backend == "tide":
        importlib.import_module("tide_backend")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    while True:
        try:
            task, args = pipe.recv()
        except EOFError:
            return
        module, function = task.split(":")
        try:
            result = getattr(importlib.import_module(module), function)(rank, world, *args)
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))

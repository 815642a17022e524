"""Rank processes that live for the whole test run: importing torch costs seconds a process on two cores."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint"]

_pools: dict[int, RankPool] = {}


def pool(world: int) -> RankPool:
    """The pool of this size, made at its first use and after a failure."""
    if world not in _pools or not _pools[world].usable:
        _pools[world] = RankPool(world)
        atexit.register(_pools[world].close)
    return _pools[world]


class RankPool:
    """``world`` processes with "tide" as default group; ``fsdp2_cases`` makes the gloo groups beside it."""

    def __init__(self, world: int) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.world = world
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._directory = tempfile.TemporaryDirectory()
        store = os.path.join(self._directory.name, "store")
        self._ranks = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world, store), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """``function(*args)`` on every rank: the results in rank order. Any rank's failure is raised here."""
        for _, pipe in self._ranks:
            pipe.send((function, args))
        results, failures = [], []
        for rank, (_, pipe) in enumerate(self._ranks):
            if not pipe.poll(timeout if not failures else 5.0):
                failures.append(f"rank {rank}: no answer within {timeout} s")
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, "the process died"
            results.append(value)
            if not ok:
                failures.append(f"rank {rank}: {value}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    @property
    def usable(self) -> bool:
        return bool(self._ranks)

    def close(self) -> None:
        """End the ranks; closing twice changes nothing."""
        for process, pipe in self._ranks:
            pipe.close()  # the rank's recv ends, and with it the process
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks = []
        self._directory.cleanup()


def _serve(pipe: Any, rank: int, world: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    import tide_backend  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("tide", init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
    os._exit(0)

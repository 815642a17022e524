"""Rank processes of the benchmark."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

# What a rank sends: a value it yielded, its end, its traceback.
VALUE, END, FAILED = "value", "end", "failed"


class RankFailed(RuntimeError):
    """A rank raised or died; the text is its own."""


def prepare() -> None:
    """Before the first launch: what ranks inherit. They are forked from a server that has imported torch."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch.distributed"])


def launch(
    fn: Callable[..., Iterator[Any]], ranks: int, *args: Any, deadline_s: float | None = None
) -> Iterator[list[Any]]:
    """`fn(rank, ranks, store, *args)`, a generator, in a process per rank; yields the ranks' values together.

    Raises:
        RankFailed: with the traceback of the rank that failed first, or naming the ranks that had not sent their next
            value after `deadline_s`.
    """
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(theirs, fn, rank, ranks, store.port, args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        while row := _next_row(pipes, deadline_s):
            yield row
    finally:
        for process in processes:
            process.join(2)
            if process.is_alive():
                process.kill()


def _next_row(pipes: list[Connection], deadline_s: float | None) -> list[Any]:
    """One value of every rank, in rank order; empty when they have ended."""
    row: dict[int, Any] = {}
    ended: set[int] = set()
    end = None if deadline_s is None else time.monotonic() + deadline_s
    while len(row) + len(ended) < len(pipes):
        missing = [r for r in range(len(pipes)) if r not in row and r not in ended]
        left = None if end is None else max(0.0, end - time.monotonic())
        ready = wait([pipes[r] for r in missing], left)
        if not ready:
            raise RankFailed(f"ranks {missing} of {len(pipes)}: no result within {deadline_s:g} s")
        for rank in (r for r, p in enumerate(pipes) if p in ready):
            try:
                kind, value = pipes[rank].recv()
            except EOFError:
                kind, value = FAILED, "the process died"
            if kind == FAILED:
                raise RankFailed(f"rank {rank}: {value}")
            if kind == END:
                ended.add(rank)
            else:
                row[rank] = value
    return [row[r] for r in range(len(pipes))] if row else []


def _serve(
    pipe: Connection,
    fn: Callable[..., Iterator[Any]],
    rank: int,
    ranks: int,
    port: int,
    args: tuple[Any, ...],
) -> None:
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        for value in fn(rank, ranks, store, *args):
            pipe.send((VALUE, value))
        pipe.send((END, None))
    except BaseException:
        pipe.send((FAILED, traceback.format_exc()))

"""Programs of test_gpu_failure.py, run as processes of their own: `python tasks_failure.py CASE RANK WORLD PORT`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpu_rank import Gathered, Scattered, barrier, enter


def gather(rank: int, device: torch.device) -> None:
    out = Gathered([4096, 77], torch.float32, device)
    out.place(torch.full((4173,), float(rank), device=device))
    out.gather()


def setup(rank: int, world: int, port: int) -> torch.device:
    device, timeout = enter(rank), timedelta(seconds=8)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("tide", store=store, rank=rank, world_size=world, timeout=timeout)
    gather(rank, device)
    barrier(device)
    return device


def dead_peer(rank: int, device: torch.device) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gather(rank, device)
    torch.cuda.synchronize()
    print("went on")


def attempt(call: Callable[[], Any]) -> None:
    try:
        call()
        print("went on")
    except Exception as error:
        print(f"raised: {error}")


def stuck_peer(rank: int, device: torch.device, dies: bool) -> None:
    """Rank 1 has issued its call and its device is busy beyond the timeout; or the process dies before its device gets
    there. Rank 0's device waits."""

    def scatter(rows: int) -> None:
        Scattered([torch.ones(rows, 64, dtype=torch.bfloat16, device=device)], torch.float32).scatter()

    if rank == 1:
        torch.cuda._sleep(40_000_000_000)
    scatter(4096)
    if rank == 1:
        time.sleep(1 if dies else 30)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))

    attempt(go_on)
    attempt(lambda: scatter(64))


CASES = {
    "dead_peer": dead_peer,
    "dead_device": partial(stuck_peer, dies=True),
    "late_device": partial(stuck_peer, dies=False),
}

if __name__ == "__main__":
    case, rank, world, port = sys.argv[1], *map(int, sys.argv[2:5])
    CASES[case](rank, setup(rank, world, port))
    sys.stdout.flush()
    os._exit(0)  # what is tested is over; a device may still be busy

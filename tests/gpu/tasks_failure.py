"""Programs of test_gpu_failure.py, run as processes of their own: `python tasks_failure.py CASE RANK WORLD PORT`."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from gpu_rank import Gathered, Scattered, barrier, enter


def setup(rank: int, world: int, port: int) -> torch.device:
    device = enter(rank)
    dist.init_process_group(
        "tide", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=8)
    )
    out = Gathered([4096, 77], torch.float32, device)
    out.place(torch.full((4173,), float(rank), device=device))
    out.gather()
    barrier(device)
    return device


def dead_peer(rank: int, device: torch.device) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    out = Gathered([4096, 77], torch.float32, device)
    out.place(torch.zeros(4173, device=device))
    out.gather()
    torch.cuda.synchronize()
    print("went on")


def dead_peer_on_the_device(rank: int, device: torch.device) -> None:
    """Rank 1 has issued its call and dies before its device gets there; rank 0's device waits."""
    scattered = Scattered([torch.ones(4096, 64, dtype=torch.bfloat16, device=device)], torch.float32)
    if rank == 1:
        torch.cuda._sleep(20_000_000_000)
    scattered.scatter()
    if rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    torch.cuda.synchronize()
    print("went on")


def late_peer(rank: int, device: torch.device) -> None:
    """Rank 1's device is busy beyond the timeout."""
    scattered = Scattered([torch.ones(4096, 64, dtype=torch.bfloat16, device=device)], torch.float32)
    if rank == 1:
        torch.cuda._sleep(40_000_000_000)
    scattered.scatter()
    if rank == 1:
        time.sleep(30)
    try:
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))
        print("went on")
    except Exception as error:
        print(f"raised: {error}")
    again = Scattered([torch.ones(64, 64, dtype=torch.bfloat16, device=device)], torch.float32)
    try:
        again.scatter()
        print("went on")
    except Exception as error:
        print(f"raised: {error}")


if __name__ == "__main__":
    case, rank, world, port = sys.argv[1], *map(int, sys.argv[2:5])
    globals()[case](rank, setup(rank, world, port))
    sys.stdout.flush()
    os._exit(0)  # what is tested is over; a device may still be busy

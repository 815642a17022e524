"""A job for any launcher: `launch_job.py DIRECTORY [--store FILE] [--die RANK] [--bytes N]`.

Ranks come from the environment (RANK, WORLD_SIZE), as every launcher sets them. Each rank checks one of each
collective, writes what it saw to DIRECTORY/attempt-N-rank-R.json and ends with status 0; with --die, the rank
kills itself in the first attempt, and the others write the error that they get.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tide_backend

CPU = torch.device("cpu")


def memfds() -> int:
    """Descriptors of tide's shared memory that this process holds."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return sum("memfd:tide" in name for name in names)


def check(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    if not torch.equal(got, want):
        raise AssertionError(f"{what}: got {got}, expected {want}")


def collectives(nbytes: int) -> str:
    """One of each; returns how the all-gather into `nbytes` of the group's memory went."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ours = dist.distributed_c10d._get_default_group()._get_backend(CPU)
    slot, _ = ours.slot(nbytes)
    out = torch.empty(nbytes, dtype=torch.uint8) if slot is None else slot
    dist.all_gather_into_tensor(out, torch.full((nbytes // world,), rank, dtype=torch.uint8))
    check(out, torch.arange(world, dtype=torch.uint8).repeat_interleave(nbytes // world), "all_gather")
    path = ours.records()[-1]["path"]
    part = torch.empty(3)
    dist.reduce_scatter_tensor(part, torch.full((3 * world,), rank + 1.0))
    check(part, torch.full((3,), sum(range(world + 1)) * 1.0), "reduce_scatter")
    swapped = torch.empty(world)
    dist.all_to_all_single(swapped, torch.full((world,), float(rank)))
    check(swapped, torch.arange(float(world)), "all_to_all")
    total = torch.ones(1)
    dist.all_reduce(total)
    check(total, torch.full((1,), float(world)), "all_reduce")
    return path


def lose(victim: int) -> dict[str, Any]:
    """The victim dies; on the others, what the next call raises and after how many seconds."""
    dist.barrier()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(9)  # the first process of a pid namespace survives its own signal
    start = time.monotonic()
    try:
        dist.all_gather_into_tensor(torch.empty(dist.get_world_size()), torch.ones(1))
    except tide_backend.TideError as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - start}
    return {"error": "", "seconds": time.monotonic() - start}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--store")
    parser.add_argument("--die", type=int)
    parser.add_argument("--bytes", type=int, default=4096)
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    torch.set_num_threads(1)
    where = {"store": dist.FileStore(args.store, world), "rank": rank, "world_size": world} if args.store else {}
    dist.init_process_group("tide", timeout=timedelta(seconds=20), **where)
    path = collectives(args.bytes)
    said: dict[str, Any] = {
        "path": path,
        "memfds": memfds(),
        "pid": os.getpid(),
        "report": tide_backend.report().to_dict(),
    }
    file = args.directory / f"attempt-{attempt}-rank-{rank}.json"
    file.write_text(json.dumps(said))
    if args.die is not None and attempt == 0:
        said |= lose(args.die)
        file.write_text(json.dumps(said))
        os._exit(1)
    dist.destroy_process_group()
    file.write_text(json.dumps(said | {"memfds_left": memfds()}))


if __name__ == "__main__":
    main()

"""Time from nothing to the first result: init_process_group, then one all-gather; new processes each time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from .launch import launch
from .names import all_gather
from .settings import Settings


def run_rank(rank: int, world: int, store: Any, backend: str, device: str) -> Iterator[dict[str, float]]:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.zeros(1, device=device)  # the CUDA context belongs to neither
    # All start together, whenever their processes came up.
    store.add("here", 1)
    while store.add("here", 0) < world:
        time.sleep(0.001)
    begin = time.perf_counter()
    dist.init_process_group(backend, store=dist.PrefixStore("g", store), rank=rank, world_size=world)
    made = time.perf_counter()
    out = torch.zeros(world, device=device)
    all_gather(out, torch.full((1,), float(rank), device=device))
    if out.tolist() != [float(r) for r in range(world)]:
        raise AssertionError(f"the first all-gather is wrong: {out.tolist()}")
    first = time.perf_counter()
    dist.barrier()
    dist.destroy_process_group()
    yield {
        "init_s": made - begin,
        "first_s": first - made,
        "total_s": first - begin,
    }


def run(settings: Settings) -> list[dict[str, Any]]:
    """One row per backend: medians over the repetitions of the slowest rank's seconds."""
    samples: dict[str, list[dict[str, float]]] = {"tide": [], settings.versus: []}
    for _ in range(settings.repetitions):
        for backend, rounds in samples.items():
            for ranks in launch(run_rank, settings.ranks, backend, settings.device):
                rounds.append({key: max(r[key] for r in ranks) for key in ranks[0]})
    return [
        {"backend": backend, **{key: statistics.median(r[key] for r in rounds) for key in rounds[0]}}
        for backend, rounds in samples.items()
    ]

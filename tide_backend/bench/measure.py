"""Times pairs of calls on one rank, the two backends by turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import all_gather, all_to_all, reduce_scatter
from .call import Call, Pair, Place
from .data import sources_of_all
from .settings import Settings

PAIRS = {
    "all_gather": all_gather.pairs,
    "reduce_scatter": reduce_scatter.pairs,
    "all_to_all": all_to_all.pairs,
}
# Short calls are timed several together, so that the clock and the barrier before them do not show.
TIMED_S, MOST_CALLS = 0.02, 100


def run_rank(rank: int, world: int, store: Any, settings: Settings) -> Iterator[dict[str, Any]]:
    """Called on every rank; yields what this rank saw of each pair."""
    tide_place, stock_place = connect(rank, world, store, settings)
    for number, size in enumerate(settings.sizes):
        for pair in PAIRS[settings.collective](tide_place, stock_place, size, settings.layout):
            yield measure(pair, settings, seed=number)
    dist.destroy_process_group()


def connect(
    rank: int, world: int, store: Any, settings: Settings, timeout: timedelta | None = None
) -> tuple[Place, Place]:
    """tide's group and, as the default one, the stock backend's; on GPUs, ranks take them in turn."""
    torch.set_num_threads(1)
    if settings.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    stock = "cpu:gloo,cuda:nccl" if settings.versus == "nccl" else "gloo"
    dist.init_process_group(stock, store=store, rank=rank, world_size=world, timeout=timeout)
    import tide_backend  # noqa: F401  (registers)

    tide_place = Place(rank, world, settings.device, dist.new_group(backend="tide", timeout=timeout))
    return tide_place, Place(rank, world, settings.device, dist.distributed_c10d._get_default_group())


def measure(pair: Pair, settings: Settings, seed: int) -> dict[str, Any]:
    """Seconds a call of both, one figure per repetition, and how many elements were wrong in the end."""
    calls = {"tide": pair.tide, "stock": pair.stock}
    together = {}
    for side, call in calls.items():
        for _ in range(settings.warmups):
            seconds = once(call, 1)
        together[side] = agreed(min(MOST_CALLS, max(1, int(TIMED_S / max(seconds, 1e-9)))))
    times: dict[str, list[float]] = {"tide": [], "stock": []}
    for repetition in range(settings.repetitions):
        for side in list(calls)[:: 1 if repetition % 2 == 0 else -1]:
            times[side].append(once(calls[side], together[side]))
    wrong, paths = check(pair, seed)
    sample: dict[str, Any] = {k: getattr(pair, k) for k in ("name", "size", "count", "dtype", "redop")}
    for side in calls:
        sample[side] = {"seconds": times[side], "wrong": wrong[side], "path": paths[side]}
    return sample


def check(pair: Pair, seed: int) -> tuple[dict[str, int], dict[str, str]]:
    """Wrong elements on this rank after one call on fresh data, and the path of that call."""
    place = pair.tide.place
    sources = sources_of_all(place, seed, pair.tide.source_numel)
    wrong, paths = {}, {}
    for side, call in {"tide": pair.tide, "stock": pair.stock}.items():
        call.fill(sources[place.rank])
        dist.barrier()
        paths[side] = call.noted_run()
        synchronize(place.device)
        wrong[side] = call.wrong(sources)
    return wrong, paths


def once(call: Call, calls: int) -> float:
    """Seconds a call."""
    synchronize(call.place.device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call.run()
    synchronize(call.place.device)
    return (time.perf_counter() - start) / calls


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def agreed(calls: int) -> int:
    value = torch.tensor([calls])
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value)

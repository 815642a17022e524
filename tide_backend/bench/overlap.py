"""A GEMM and a collective at the same time: how much each slows the other down, tide beside the stock backend."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import tide_backend

from . import all_gather, all_to_all, reduce_scatter, sm_time
from .beside import Measure, OnGpu, on_cpu
from .call import Call, Pair, Place
from .data import sources_of_all
from .gemm import Gemm
from .launch import launch
from .layouts import shard_numels
from .measure import connect, synchronize
from .settings import Settings

ITEM = 2  # bytes of bfloat16
TIMEOUT = timedelta(seconds=300)  # of a collective; the ranks also make and check data meanwhile
ROW_DEADLINE_S = 900.0
SPAN_S = {"cuda": 0.02, "cpu": 0.05}  # of one measurement at least, when nothing is slowed down
MOST_CALLS = {"cuda": 200, "cpu": 30}  # of a collective in one measurement
LEAST_GEMMS = 10
PROFILED_CALLS = 8
SIDES = ("tide", "stock")


def gather_pair(tide: Place, stock: Place, size: int, layout: str) -> Pair:
    numel = max(1, size // ITEM // tide.world)
    shards = shard_numels(layout, numel)
    calls = all_gather.TideFromFp32(tide, shards), all_gather.StockFromFp32(stock, shards)
    return Pair("all_gather", numel * tide.world * ITEM, numel, "bf16", "none", *calls)


def scatter_pair(tide: Place, stock: Place, size: int, layout: str) -> Pair:
    numel = max(1, size // ITEM // tide.world)
    shards = shard_numels(layout, numel)
    calls = reduce_scatter.TidePerParameter(tide, shards), reduce_scatter.StockPerParameter(stock, shards)
    return Pair("reduce_scatter", numel * tide.world * ITEM, numel, "bf16", "avg", *calls)


def exchange_pair(tide: Place, stock: Place, size: int, layout: str) -> Pair:
    numel = max(1, size // ITEM // tide.world)
    calls = all_to_all.IntoGroupMemory(tide, numel), all_to_all.Even(stock, numel)
    return Pair("all_to_all", numel * tide.world * ITEM, numel, "bf16", "none", *calls)


PAIR = {"all_gather": gather_pair, "reduce_scatter": scatter_pair, "all_to_all": exchange_pair}


def run_rank(rank: int, world: int, store: Any, settings: Settings) -> Iterator[dict[str, Any]]:
    """Called on every rank; what this rank saw of each collective and size."""
    tide, stock = connect(rank, world, store, settings, TIMEOUT)
    torch.manual_seed(rank)
    gemm = Gemm(settings.gemm, settings.device)
    measure = OnGpu() if settings.device == "cuda" else on_cpu
    for collective in settings.collectives:
        for number, size in enumerate(settings.sizes):
            pair = PAIR[collective](tide, stock, size, settings.layout)
            yield sample(pair, settings, gemm, measure, number)
            synchronize(settings.device)  # before the buffers go, which two streams have used
            del pair
    dist.barrier()
    dist.destroy_process_group()


def sample(pair: Pair, settings: Settings, gemm: Gemm, measure: Measure, seed: int) -> dict[str, Any]:
    """Seconds per repetition, wrong elements, and what held the SMs, of one pair on this rank."""
    pairs = {side: getattr(pair, side) for side in SIDES}
    gemm_s, calls = calibrate(pairs, settings, gemm, measure)
    turns: dict[tuple[str, str], Callable[[], Any]] = {
        ("gemm", "alone"): partial(measure, None, calls["gemm"], gemm, gemm_s)
    }
    for side, call in pairs.items():
        turns[side, "alone"] = partial(measure, call, calls[side], None, gemm_s)
        turns[side, "beside"] = partial(measure, call, calls[side], gemm, gemm_s)
    seen: dict[tuple[str, str], list[Any]] = {key: [] for key in turns}
    for repetition in range(settings.repetitions):
        for key in list(turns)[:: 1 if repetition % 2 == 0 else -1]:
            seen[key].append(turns[key]())
    result = {k: getattr(pair, k) for k in ("name", "size", "count", "dtype", "redop")}
    result["gemm"] = [s.gemm for s in seen["gemm", "alone"]]
    sources = sources_of_all(pair.tide.place, seed, pair.tide.source_numel)
    for side, call in pairs.items():
        beside, alone = seen[side, "beside"], seen[side, "alone"]
        wrong, path = check(call, turns[side, "beside"], sources)
        result[side] = {
            "path": path,
            "wrong": wrong,
            "alone": [s.collective for s in alone],
            "beside": [s.collective for s in beside],
            "gemm_beside": [s.gemm for s in beside],
            "gemms": sum(s.gemms for s in beside),
            **held(call, measure, alone),
        }
    return result


def calibrate(
    pairs: dict[str, Call], settings: Settings, gemm: Gemm, measure: Measure
) -> tuple[float, dict[str, int]]:
    """Seconds of a GEMM, and how many GEMMs and collectives make one measurement, the same on every rank."""
    for _ in range(settings.warmups):
        gemm_s = slowest(measure(None, LEAST_GEMMS, gemm, 1e-3).gemm)
    most = MOST_CALLS[settings.device]
    span = max(SPAN_S[settings.device], LEAST_GEMMS * gemm_s)
    calls = {"gemm": math.ceil(span / gemm_s)}
    for side, call in pairs.items():
        for _ in range(settings.warmups):
            seconds = slowest(measure(call, 1, None, gemm_s).collective)
        # What the first of several calls costs more than the next is paid again here, so that the span is reached.
        several = min(most, math.ceil(span / 4 / seconds))
        seconds = slowest(measure(call, several, None, gemm_s).collective)
        calls[side] = min(most, math.ceil(span / seconds))
    return gemm_s, calls


def slowest(seconds: float | None) -> float:
    value = torch.tensor([seconds or 0.0], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return max(float(value), 1e-9)


def check(call: Call, beside: Callable[[], Any], sources: list[torch.Tensor]) -> tuple[int, str]:
    """Wrong elements of the last of several calls beside GEMMs, on fresh data, and the path they went."""
    place = call.place
    call.fill(sources[place.rank])
    path = call.noted_run(beside)
    synchronize(place.device)
    return call.wrong(sources), path


def held(call: Call, measure: Measure, alone: list[Any]) -> dict[str, Any]:
    """us of SM time (on CPU ranks: of CPU time) that a collective alone takes, its layout copies apart."""
    if not isinstance(measure, OnGpu):
        layout = statistics.median(s.layout for s in alone) * 1e6
        return {"busy_us": statistics.median(s.busy for s in alone) * 1e6 - layout, "layout_us": layout, "kernels": []}

    def run() -> None:
        with torch.cuda.stream(measure.stream):
            call.run()

    def meet() -> None:
        torch.cuda.synchronize()
        dist.barrier()

    kernels = sm_time.profile(run, PROFILED_CALLS, meet)
    return {
        "busy_us": sum(k.sm_us for k in kernels if k.own),
        "layout_us": sum(k.sm_us for k in kernels if not k.own),
        "kernels": [asdict(k) for k in kernels],
    }


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row per collective and size, as they are measured."""
    for ranks in launch(run_rank, settings.ranks, settings, deadline_s=ROW_DEADLINE_S):
        yield {**merge(ranks), "accumulate_ctas": ctas(), "shared_gpus": shared(settings)}


def ctas() -> int:
    """Most thread blocks of tide's kernels in every rank: Options takes it from the environment, as they do."""
    return tide_backend.Options().accumulate_ctas


def shared(settings: Settings) -> bool:
    """Whether there are more ranks than GPUs."""
    return settings.device == "cuda" and settings.ranks > torch.cuda.device_count()


def merge(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A row from every rank's sample: medians of the slowest rank of each repetition, all ranks' wrong elements, the
    mean of their SM time."""
    row = {k: samples[0][k] for k in ("name", "size", "count", "dtype", "redop")}
    world = len(samples)
    gemm_us = row["gemm_us"] = middle([s["gemm"] for s in samples])
    for side in SIDES:
        mine = [s[side] for s in samples]
        times = {key: middle([m[key] for m in mine]) for key in ("alone", "beside", "gemm_beside")}
        algbw = row["size"] / times["alone"] / 1e3
        row[side] = {
            "path": "+".join(sorted({m["path"] for m in mine})),
            "gemm_beside_us": times["gemm_beside"],
            "gemm_slower": times["gemm_beside"] / gemm_us - 1,
            "alone_us": times["alone"],
            "beside_us": times["beside"],
            "slower": times["beside"] / times["alone"] - 1,
            "algbw": algbw,
            "busbw": algbw * (world - 1) / world,
            "wrong": sum(m["wrong"] for m in mine),
            "gemms": min(m["gemms"] for m in mine),
            "busy_us": statistics.fmean(m["busy_us"] for m in mine),
            "layout_us": statistics.fmean(m["layout_us"] for m in mine),
            "kernels": mine[0]["kernels"],
            "ranks": mine,
        }
    return row


def middle(ranks: list[list[float]]) -> float:
    """Microseconds: the median over the repetitions of the slowest rank."""
    return statistics.median(max(repetition) for repetition in zip(*ranks, strict=True)) * 1e6

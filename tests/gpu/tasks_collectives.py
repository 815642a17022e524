"""Tasks of test_gpu_collectives.py: what each rank does."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from gpu_rank import (
    Gathered,
    Scattered,
    barrier,
    enter,
    last_record,
    own_group,
    random_bits,
    reduce_scatter,
    reference_scatter,
    same,
)

import tide_backend

BUSY = 100_000_000  # device cycles, some 50 ms


def gather(rank: int, world: int, dtype: str, shards: list[int], calls: int) -> dict[str, Any]:
    device, kind = enter(rank), getattr(torch, dtype)
    wrong = []
    for call in range(calls):
        out = Gathered(shards, kind, device)
        sources = [random_bits(call, r, sum(shards), kind, device) for r in range(world)]
        placed = call % 2 == 0
        if placed:
            out.place(sources[rank])
        out.gather(None if placed else sources[rank])
        wrong += out.wrong(sources)
    return {"wrong": wrong, "path": last_record(device, "all_gather")["path"]}


def gradients_of(rank: int, shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int) -> list:
    return [
        random_bits(seed * 100 + i, rank, torch.Size(s).numel(), dtype, device).view(s) for i, s in enumerate(shapes)
    ]


def scatter(
    rank: int, world: int, types: tuple[str, str], op: str, shapes: list[tuple[int, ...]], staging: int
) -> dict[str, Any]:
    device = enter(rank)
    source, target = (getattr(torch, t) for t in types)
    factor = {"sum": 1.0, "avg": 1.0 / world, "premul": 0.3}[op]
    reduction = {
        "sum": dist.ReduceOp.SUM,
        "avg": dist.ReduceOp.AVG,
        "premul": dist._make_nccl_premul_sum(0.3),
    }[op]
    good = []
    with own_group(device, cuda_staging_bytes=staging) if staging else nullcontext() as group:
        for seed in range(3):
            everybody = [gradients_of(r, shapes, source, device, seed) for r in range(world)]
            call = Scattered(everybody[rank], target, group)
            call.scatter(reduction)
            good.append(same(call.output.cpu(), reference_scatter(everybody, rank, target, factor)))
        record = last_record(device, "reduce_scatter", group)
    return {"good": good, "path": record["path"], "reason": record["reason"]}


def plain_widening(rank: int, world: int, numel: int) -> dict[str, Any]:
    """reduce_scatter_tensor(fp32, bf16) of any caller, without a layout."""
    device = enter(rank)
    inputs = [random_bits(5, r, world * numel, torch.bfloat16, device) for r in range(world)]
    out = torch.empty(numel, device=device)
    work = reduce_scatter(out, inputs[rank], async_op=True)
    work.wait()
    total = inputs[0].cpu().float()
    for other in inputs[1:]:
        total = total + other.cpu().float()
    return {
        "good": same(out.cpu(), total[rank * numel : (rank + 1) * numel]),
        "path": last_record(device, "reduce_scatter")["path"],
    }


def not_contiguous(rank: int, world: int) -> dict[str, Any]:
    """Transposed gradients are repaired by a copy, which is counted."""
    device = enter(rank)
    everybody = [gradients_of(r, [(96, 64), (40, 8)], torch.bfloat16, device, 3) for r in range(world)]
    mine = [g.t().contiguous().t() for g in everybody[rank]]
    assert not mine[0].is_contiguous()
    call = Scattered(mine, torch.float32)
    call.scatter()
    good = same(call.output.cpu(), reference_scatter(everybody, rank, torch.float32, 1.0))
    return {"good": good, "repairs": last_record(device, "reduce_scatter")["repair_copies"]}


def uneven_pace(rank: int, world: int) -> list[str]:
    """A rank whose host is late, one whose device is late, and callers on streams of their own."""
    device, wrong = enter(rank), []
    side = torch.cuda.Stream(device)
    for call in range(8):
        with torch.cuda.stream(side if call % 2 else torch.cuda.default_stream(device)):
            out = Gathered([5000, 3, 777], torch.bfloat16, device)
            sources = [random_bits(call, r, 5780, torch.bfloat16, device) for r in range(world)]
            everybody = [gradients_of(r, [(33, 40), (7,)], torch.bfloat16, device, call) for r in range(world)]
            if call % world == rank:
                time.sleep(0.15)
            if (call + 1) % world == rank:
                torch.cuda._sleep(BUSY)  # what follows is computed late
            shard = sources[rank] * 1
            out.place(shard)
            mine = [g * 1 for g in everybody[rank]]
            expected = [s.clone() for s in sources]
            work = out.gather(async_op=call % 3 == 0)
            if work is not None:
                work.wait()
            got = out.memory.clone()  # read at once, on the caller's stream
            out.memory.zero_()
            torch.cuda.current_stream().synchronize()
            out.memory.copy_(got)
            wrong += [f"call {call}: {w}" for w in out.wrong(expected)]
            reduced = Scattered(mine, torch.float32)
            reduced.scatter(dist.ReduceOp.AVG)
            del mine
            reduced.gradients.clear()
            junk = [torch.full_like(g, float("nan")) for g in everybody[rank]]  # into the memory just freed
            result = reduced.output.clone()
            del junk
            if not same(result.cpu(), reference_scatter(everybody, rank, torch.float32, 1.0 / world)):
                wrong.append(f"call {call}: reduce-scatter")
        side.wait_stream(torch.cuda.default_stream(device))
        torch.cuda.default_stream(device).wait_stream(side)
    return wrong


def two_groups(rank: int, world: int) -> list[str]:
    """Calls of two groups of the same ranks, by turns and on two streams."""
    device, wrong = enter(rank), []
    other = dist.new_group(backend="tide")
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    for call in range(12):
        held = []
        for group, stream in zip((None, other), streams, strict=True):
            with torch.cuda.stream(stream):
                out = Gathered([1000 + call, 9], torch.float32, device, group)
                sources = [random_bits(call, r, 1009 + call, torch.float32, device) for r in range(world)]
                if (call + rank) % 3 == 0:
                    torch.cuda._sleep(BUSY // 20)
                out.place(sources[rank])
                out.gather()
                held.append((out, sources))
        torch.cuda.synchronize()
        wrong += [f"call {call}: {w}" for out, sources in held for w in out.wrong(sources)]
    barrier(device)
    dist.destroy_process_group(other)
    return wrong


def different_sizes(rank: int, world: int) -> dict[str, Any]:
    """Every rank raises, and the group goes on."""
    device = enter(rank)
    texts = []
    try:
        Gathered([64 if rank == 1 else 65536], torch.float32, device)
    except tide_backend.UsageError as error:
        texts.append(str(error))
    out = Gathered([4096], torch.float32, device)
    try:
        out.gather(torch.zeros(4096 + (rank == 0), device=device))
    except tide_backend.UsageError as error:
        texts.append(str(error))
    sources = [random_bits(1, r, 4096, torch.float32, device) for r in range(world)]
    out.place(sources[rank])
    out.gather()
    return {"texts": texts, "wrong": out.wrong(sources)}


def device_work(run: Any) -> list[str]:
    """Names of what the device did, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return [e.name for e in profiler.events() if e.device_type == cuda]


def kernels(names: list[str]) -> list[str]:
    quiet = ("Memcpy", "Memset", "Stream", "Event", "Context", "Device")
    return sorted({n for n in names if not n.startswith(quiet)})


def profiled(rank: int, world: int) -> dict[str, Any]:
    device = enter(rank)
    seen = kernels(device_work(lambda: torch.ones(1000, device=device).sin_()))
    out = Gathered([100_000, 7], torch.bfloat16, device)
    placeholder = torch.zeros(1, dtype=torch.bfloat16, device=device).expand(100_007)

    def gather_placed() -> None:
        tide_backend.apply_layout(out.memory, out.layout, placed=True)
        dist.all_gather_into_tensor(out.memory, placeholder)

    barrier(device)
    gathering = device_work(gather_placed)
    gradients = gradients_of(rank, [(512, 300), (40,)], torch.bfloat16, device, 1)
    reduced = Scattered(gradients, torch.float32)
    barrier(device)
    scattering = device_work(lambda: reduced.scatter(dist.ReduceOp.AVG))
    barrier(device)
    return {
        "profiler works": bool(seen),
        "gather": kernels(gathering),
        "gather copies": sum("Memcpy" in n for n in gathering),
        "scatter": kernels(scattering),
    }


def capture(rank: int, world: int) -> dict[str, Any]:
    """Refused in words; nothing breaks. A graph of compute may be captured while a call is under way."""
    device, texts = enter(rank), []
    out = Gathered([2048], torch.float32, device)
    sources = [random_bits(1, r, 2048, torch.float32, device) for r in range(world)]
    out.place(sources[rank])
    out.gather()
    first = out.wrong(sources)
    reduced = Scattered([torch.ones(64, 8, dtype=torch.bfloat16, device=device)], torch.float32)
    barrier(device)
    for call in (out.gather, reduced.scatter, lambda: Gathered([2048], torch.float32, device)):
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                call()
        except tide_backend.UsageError as error:
            texts.append(str(error))
    x, graph = torch.ones(1000, device=device), torch.cuda.CUDAGraph()
    x.add_(1)
    torch.cuda.synchronize()
    if rank == 0:
        torch.cuda._sleep(4 * BUSY)  # the others' watchdogs look at an event for a while
    out.gather(async_op=True)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        graph.capture_begin()
        x.add_(1)
        time.sleep(0.25)
        graph.capture_end()
    torch.cuda.synchronize()
    graph.replay()
    out.place(sources[rank])
    out.gather()
    reduced.scatter()
    return {
        "texts": texts,
        "wrong": first + out.wrong(sources),
        "replayed": float(x[0]),
        "reduced": float(reduced.output[0]),
    }

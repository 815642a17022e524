"""Tasks of test_gpu_connections.py: all of a rank's streams in one hardware queue."""

from __future__ import annotations

import os
from typing import Any

import rank_process
import tasks_collectives
import tasks_fsdp2
import torch
import torch.distributed as dist
from gpu_rank import Gathered, Scattered, backend, barrier, enter
from tasks_collectives import BUSY


def one_connection(rank: int, world: int) -> dict[str, Any]:
    """Collectives and FSDP2 with `CUDA_DEVICE_MAX_CONNECTIONS=1`, which CUDA reads when it starts."""
    assert not torch.cuda.is_initialized()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    rank_process.init("tide", 40)
    device = enter(rank)
    found: dict[str, Any] = {"one queue": streams_share_a_queue(device)}
    found["gather"] = tasks_collectives.gather(rank, world, "bfloat16", [100_003, 1, 65_536], 4)
    found["scatter"] = tasks_collectives.scatter(
        rank, world, ("bfloat16", "float32"), "avg", [(101, 37), (64, 513), (2049, 512)], 1 << 20
    )
    found["pace"] = tasks_collectives.uneven_pace(rank, world)
    found["groups"] = tasks_collectives.two_groups(rank, world)
    found["together"] = all_kinds_together(rank, world, device)
    found["train"] = tasks_fsdp2.train(rank, world, None, ("bfloat16", "float32"), True, 2, prefetched=True)
    barrier(device)
    dist.destroy_process_group()
    return found


def streams_share_a_queue(device: torch.device) -> bool:
    """Whether work of one stream waits behind work of another that it does not depend on."""
    first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)
    x = torch.zeros(1, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(BUSY)
        half = first.record_event()
        torch.cuda._sleep(BUSY)  # held up by the one before, and in one queue so is all that comes behind it
    with torch.cuda.stream(second):
        x.add_(1)
        second.record_event().synchronize()
    shared = half.query()
    torch.cuda.synchronize()
    return shared


def all_kinds_together(rank: int, world: int, device: torch.device) -> list[int]:
    """An all-gather, a reduce-scatter and an all-to-all under way at once, each from a stream of its own, with a rank
    that is late by turns. Elements that are wrong, by kind."""
    rows, ranks = 1 << 15, torch.arange(world, dtype=torch.int32, device=device)
    bad = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(3)]
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    for call in range(12):
        base = call * world * world
        with torch.cuda.stream(streams[0]):
            if call % world == rank:
                torch.cuda._sleep(BUSY // 20)
            out = Gathered([rows, 77], torch.int32, device)
            out.place(torch.full((rows + 77,), base + rank, dtype=torch.int32, device=device))
            gathering = out.gather(async_op=True)
        with torch.cuda.stream(streams[1]):
            if (call + 1) % world == rank:
                torch.cuda._sleep(BUSY // 20)
            gradients = [torch.full((world * rows,), float(call + rank), dtype=torch.bfloat16, device=device)]
            reduced = Scattered(gradients, torch.float32)
            reducing = reduced.scatter(async_op=True)
        with torch.cuda.stream(streams[2]):
            sent = (base + rank * world + ranks)[:, None].expand(world, rows).contiguous()
            got = backend(device).allocate_tensor(world * rows, dtype=torch.int32, device=device)
            exchanging = dist.all_to_all_single(got, sent.view(-1), async_op=True)
        with torch.cuda.stream(streams[2]):
            exchanging.wait()
            bad[2] += (got.view(world, rows) != (base + ranks * world + rank)[:, None]).sum()
            del got
        with torch.cuda.stream(streams[0]):
            gathering.wait()
            bad[0] += sum((out.parameter(i) != (base + ranks)[:, None]).sum() for i in range(2))
            del out
        with torch.cuda.stream(streams[1]):
            reducing.wait()
            bad[1] += (reduced.output != float(sum(call + r for r in range(world)))).sum()
    torch.cuda.synchronize()
    return [int(b) for b in bad]

"""Tasks of test_gpu_all_to_all.py: what each rank does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gpu_rank import Gathered, backend, enter, last_record, own_group, random_bits
from tasks_collectives import BUSY

# splits[r][q]: rows that rank r sends to rank q.
Splits = list[list[int]]
OPTIONS = {"staged": {"cuda_plain_bytes": 0}, "zero_copy": {}}


def exchange(
    rank: int, world: int, way: str, dtype: str, cases: list[tuple[Splits, int]], staging: int
) -> list[dict[str, Any]]:
    """Every case (splits, row width) three times without a pause: bytes that differ, and the path."""
    device, kind, found = enter(rank), getattr(torch, dtype), []
    options = {**OPTIONS[way], **({"cuda_staging_bytes": staging} if staging else {})}
    with own_group(device, **options) as group:
        for i, (splits, width) in enumerate(cases):
            bad = torch.zeros((), dtype=torch.int64, device=device)
            even = len({n for row in splits for n in row}) == 1
            most = max(sum(row[q] for row in splits) for q in range(world))
            for repeat in range(3):
                sources = [random_bits(i * 3 + repeat, r, sum(splits[r]) * width, kind, device) for r in range(world)]
                parts = [s.split([n * width for n in row]) for s, row in zip(sources, splits, strict=True)]
                wanted = torch.cat([part[rank] for part in parts])
                if way == "zero_copy":  # of one size on every rank
                    room = backend(device, group).allocate_tensor(max(most * width, 1), dtype=kind, device=device)
                    out = room[: wanted.numel()]
                else:
                    out = torch.empty_like(wanted)
                out.fill_(7)
                rows = None, None
                if not even or repeat:
                    rows = [row[rank] for row in splits], splits[rank]
                dist.all_to_all_single(out.view(-1, width), sources[rank].view(-1, width), *rows, group=group)
                bad += (out.view(torch.uint8) != wanted.view(torch.uint8)).sum()
            found.append({"bad": int(bad), "path": last_record(device, "all_to_all", group)["path"]})
    return found


def slow_reader(rank: int, world: int, way: str, rounds: int) -> dict[str, Any]:
    """A rank is late behind every all-to-all, before it has read what it got, while its peers are at an all-gather
    that takes the same memory; and then the other way round. Payloads name call, writer and reader."""
    device, rows = enter(rank), 1 << 16
    bad = torch.zeros(2, dtype=torch.int64, device=device)
    ranks = torch.arange(world, dtype=torch.int32, device=device)
    taken_over, paths = 0, set()
    with own_group(device, **OPTIONS[way]) as group:
        for call in range(rounds):
            base = call * world * world
            sent = (base + rank * world + ranks)[:, None].expand(world, rows).contiguous()
            if way == "zero_copy":
                got = backend(device, group).allocate_tensor(world * rows, dtype=torch.int32, device=device)
            else:
                got = torch.empty(world * rows, dtype=torch.int32, device=device)
            dist.all_to_all_single(got, sent.view(-1), group=group)
            paths.add(last_record(device, "all_to_all", group)["path"])
            if call % world == rank:
                torch.cuda._sleep(BUSY // 4)
            bad[0] += (got.view(world, rows) != (base + ranks * world + rank)[:, None]).sum()
            where = got.data_ptr()
            del got, sent

            out = Gathered([rows - 128], torch.int32, device, group)
            taken_over += out.memory.data_ptr() == where
            out.place(torch.full((rows - 128,), base + rank, dtype=torch.int32, device=device))
            out.gather()
            if (call + 1) % world == rank:
                torch.cuda._sleep(BUSY // 4)
            bad[1] += (out.parameter(0) != (base + ranks)[:, None]).sum()
            del out
        found = bad.tolist()
    return {"exchanged": found[0], "gathered": found[1], "taken over": taken_over, "paths": sorted(paths)}

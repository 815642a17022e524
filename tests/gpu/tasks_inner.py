"""Tasks of test_gpu_inner.py: what each rank does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gpu_rank import Scattered, enter, own_group, random_bits, reference_scatter, same
from gpu_rank import all_gather as gather_single
from gpu_rank import reduce_scatter as scatter_single

import tide_backend


def calls(rank: int, world: int, async_op: bool) -> dict[str, Any]:
    """Every kind of call that a group without CUDA transport hands to nccl, with and without a handle."""
    device, good = enter(rank), {}
    tide_backend.report(reset=True)
    with own_group(device, cuda=False) as group:

        def finish(work: Any) -> None:
            if work is None:
                return
            if rank == 0:  # either way
                work.wait()
            else:
                work.get_future().wait()

        shards = [5, 1024, 7]
        sources = [random_bits(1, r, sum(shards), torch.bfloat16, device) for r in range(world)]
        layout = tide_backend.ParameterLayout(world, shards)
        gathered = torch.empty(world * sum(shards), dtype=torch.bfloat16, device=device)
        tide_backend.apply_layout(gathered, layout)
        finish(gather_single(gathered, sources[rank], group=group, async_op=async_op))
        want = torch.cat([part for i in range(len(shards)) for part in [s.split(shards)[i] for s in sources]])
        good["layout"] = same(gathered, want)

        everybody = [[random_bits(i, r, n, torch.bfloat16, device).view(-1, 2) for i, n in enumerate((10, 64))]
                     for r in range(world)]
        scattered = Scattered(everybody[rank], torch.float32, group)
        finish(scattered.scatter(dist.ReduceOp.AVG, async_op=async_op))
        good["gradients"] = same(scattered.output.cpu(), reference_scatter(everybody, rank, torch.float32, 1 / world))

        plain = torch.empty(world * 8, device=device)
        finish(gather_single(plain, torch.full((8,), float(rank), device=device), group=group, async_op=async_op))
        good["gather"] = same(plain, torch.arange(world, device=device).float().repeat_interleave(8))
        reduced = torch.empty(8, device=device)
        finish(scatter_single(reduced, torch.ones(world * 8, device=device), group=group, async_op=async_op))
        good["scatter"] = same(reduced, torch.full((8,), float(world), device=device))

        lists = [torch.empty(3, device=device) for _ in range(world)]
        sent = [torch.full((3,), float(10 * rank + r), device=device) for r in range(world)]
        finish(dist.all_to_all(lists, sent, group=group, async_op=async_op))
        good["lists"] = all(same(got, torch.full((3,), 10.0 * r + rank, device=device)) for r, got in enumerate(lists))

        both = [torch.empty(world, device=device) for _ in range(2)]
        with dist._coalescing_manager(group, device, async_ops=async_op) as manager:
            for i, out in enumerate(both):
                gather_single(out, torch.full((1,), float(rank + i), device=device), group=group)
        if async_op:
            manager.wait()
        good["coalesced"] = all(same(out, torch.arange(world, device=device) + float(i)) for i, out in enumerate(both))
        torch.cuda.synchronize()
        rows = tide_backend.report(group).collectives
    reasons = {row.reason for row in rows if row.device == "cuda"}
    return {"good": good, "paths": sorted({row.path for row in rows}), "reasons": sorted(reasons)}

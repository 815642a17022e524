"""Tasks of test_gpu_bench.py: what each rank does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gpu_rank import enter

from tide_backend.bench import data, reduce_scatter
from tide_backend.bench.call import Place

NUMEL = 3_000_001  # beyond one pass of a GPU's generator


def drawn_and_compared(rank: int, world: int) -> dict[str, Any]:
    """Sums over the bits of every rank's data, weighted by place; how many elements count as wrong as they are and with
    one of them spoilt."""
    device = enter(rank)
    sources = data.sources_of_all(Place(rank, world, device.type, dist.group.WORLD), 3, NUMEL)
    places = torch.arange(NUMEL, device=device)
    spoilt = sources[0].clone()
    spoilt[-1] += 1000
    addends = [source[:100_000] for source in sources]
    average = torch.stack([a.float() for a in addends]).mean(0)
    spoilt_average = average.clone()
    spoilt_average[-1] += 1000
    return {
        "devices": {str(s.device) for s in sources} == {str(device)},
        "sums": [int((s.view(torch.int16).long() * places).sum()) for s in sources],
        "apart": min(data.differing(a, b) for i, a in enumerate(sources) for b in sources[:i]),
        "differing": [data.differing(x, sources[0]) for x in (sources[0].cpu(), spoilt)],
        "wrong": [reduce_scatter.count_wrong(x, addends) for x in (average, spoilt_average)],
    }

"""All-to-all of equal parts: all_to_all_single alone, on both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .call import Call, Pair, Place
from .data import differing, empty_bf16

ITEM = 2  # bytes of bfloat16


class Even(Call):
    def __init__(self, place: Place, numel: int) -> None:
        super().__init__(place)
        self.source_numel = place.world * numel
        self.source = empty_bf16(place, self.source_numel)
        self.out = empty_bf16(place, self.source_numel)

    def fill(self, source: torch.Tensor) -> None:
        self.source.copy_(source)
        self.out.zero_()

    def collective(self, async_op: bool) -> Any:
        return dist.all_to_all_single(self.out, self.source, group=self.place.group, async_op=async_op)

    def wrong(self, sources: list[torch.Tensor]) -> int:
        world, rank = self.place.world, self.place.rank
        received = self.out.view(world, -1)
        return sum(differing(received[r], s.view(world, -1)[rank]) for r, s in enumerate(sources))


class IntoGroupMemory(Even):
    """The output is memory of the group, where tide's peers write straight into it."""

    def __init__(self, place: Place, numel: int) -> None:
        super().__init__(place, numel)
        device = torch.device("cuda", torch.cuda.current_device()) if place.device == "cuda" else torch.device("cpu")
        self.out = place.backend.allocate_tensor(self.source_numel, dtype=torch.bfloat16, device=device)


def pairs(tide: Place, stock: Place, size: int, layout: str) -> list[Pair]:
    numel = max(1, size // ITEM // tide.world)
    size = numel * tide.world * ITEM
    return [Pair("even", size, numel, "bf16", "none", Even(tide, numel), Even(stock, numel))]

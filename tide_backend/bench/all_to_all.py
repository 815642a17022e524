"""All-to-all of equal parts: all_to_all_single alone, on both."""

from __future__ import annotations

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

    def run(self) -> None:
        dist.all_to_all_single(self.out, self.source, group=self.place.group)

    def wrong(self, sources: list[torch.Tensor]) -> int:
        world, rank = self.place.world, self.place.rank
        received = self.out.view(world, -1)
        return sum(differing(received[r], s.view(world, -1)[rank]) for r, s in enumerate(sources))


def pairs(tide: Place, stock: Place, size: int, layout: str) -> list[Pair]:
    numel = max(1, size // ITEM // tide.world)
    size = numel * tide.world * ITEM
    return [Pair("even", size, numel, "bf16", "none", Even(tide, numel), Even(stock, numel))]

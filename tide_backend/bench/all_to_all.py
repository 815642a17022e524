"""All-to-all of equal parts: all_to_all_single alone, on both; or there and back with Ulysses' layouts.

ulysses      [tokens, ranks, heads, dim] to [all tokens, heads, dim], own heads, and back. tide gets the permuted views
             as they are; stock permutes into a contiguous input before the first call and back behind the second.
into-group   the same with tide's outputs in memory of the group.
"""

from __future__ import annotations

import math
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
        self.out = place.backend.allocate_tensor(self.source_numel, dtype=torch.bfloat16, device=place.own_device)


HEADS, DIM = 4, 128  # of a rank: rows of 1 KiB


class Ulysses(Call):
    """views: the calls get permuted views, and nothing is copied. Else as callers of today do it."""

    def __init__(self, place: Place, tokens: int, views: bool, memory: bool = False) -> None:
        super().__init__(place)
        self.views, world = views, place.world
        self.source_numel = tokens * world * HEADS * DIM
        self.source = empty_bf16(place, tokens, world, HEADS, DIM)
        new = self._of_the_group if memory else empty_bf16
        self.whole = new(place, world, tokens, HEADS, DIM)
        self.back = new(place, tokens, world, HEADS, DIM)
        self.packed = None if views else empty_bf16(place, world, tokens, HEADS, DIM)

    @staticmethod
    def _of_the_group(place: Place, *shape: int) -> torch.Tensor:
        numel = math.prod(shape)
        return place.backend.allocate_tensor(numel, dtype=torch.bfloat16, device=place.own_device).view(shape)

    def fill(self, source: torch.Tensor) -> None:
        self.source.copy_(source.view(self.source.shape))
        self.whole.zero_()
        self.back.zero_()

    def before(self) -> None:
        if self.packed is not None:
            self.packed.copy_(self.source.transpose(0, 1))

    def collective(self, async_op: bool) -> Any:
        group = self.place.group
        there = self.source.transpose(0, 1) if self.packed is None else self.packed
        back = self.back.transpose(0, 1) if self.packed is None else self.packed
        dist.all_to_all_single(self.whole, there, group=group)
        return dist.all_to_all_single(back, self.whole, group=group, async_op=async_op)

    def after(self) -> None:
        if self.packed is not None:
            self.back.copy_(self.packed.transpose(0, 1))

    def wrong(self, sources: list[torch.Tensor]) -> int:
        rank = self.place.rank
        parts = [s.view(self.source.shape) for s in sources]
        there = sum(differing(self.whole[r], p[:, rank].contiguous()) for r, p in enumerate(parts))
        return there + differing(self.back, parts[rank])


def ulysses_pairs(tide: Place, stock: Place, size: int) -> list[Pair]:
    row = tide.world * HEADS * DIM
    tokens = max(1, size // ITEM // row)
    stock_call = Ulysses(stock, tokens, views=False)
    return [
        Pair(name, tokens * row * ITEM, tokens * row // tide.world, "bf16", "none", call, stock_call)
        for name, call in (
            ("ulysses", Ulysses(tide, tokens, views=True)),
            ("into-group", Ulysses(tide, tokens, views=True, memory=True)),
        )
    ]


def pairs(tide: Place, stock: Place, size: int, layout: str) -> list[Pair]:
    if layout == "ulysses":
        return ulysses_pairs(tide, stock, size)
    numel = max(1, size // ITEM // tide.world)
    size = numel * tide.world * ITEM
    return [Pair("even", size, numel, "bf16", "none", Even(tide, numel), Even(stock, numel))]

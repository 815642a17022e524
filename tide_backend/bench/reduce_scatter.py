"""Reduce-scatter of per-parameter bf16 gradients into one fp32 shard, averaged.

per-param    stock does what FSDP2 does: torch._chunk_cat packs the gradients, cast, into an fp32 buffer for
             reduce_scatter_tensor. tide: the call takes the list of gradients through a ParameterLayout.
packed       reduce_scatter_tensor alone, fp32 in and out, on both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import tide_backend

from .call import Call, Pair, Place
from .data import empty_bf16
from .layouts import shard_numels
from .names import reduce_scatter

ITEM = 2  # bytes of bfloat16


def count_wrong(got: torch.Tensor, addends: list[torch.Tensor]) -> int:
    """Elements of `got` that are no fp32 average of the addends, in whatever order they were added.

    Adding n numbers in fp32 in any order is off by at most (n - 1) * 2^-24 times the sum of their magnitudes;
    the division adds one more rounding. On the device of the addends.
    """
    exact = torch.zeros(got.numel(), dtype=torch.float64, device=addends[0].device)
    magnitude = torch.zeros_like(exact)
    for addend in addends:
        exact += addend
        magnitude += addend.abs()
    n = len(addends)
    off = got.to(exact.device).double().mul_(n).sub_(exact).abs_()
    return int((off > magnitude.mul_(n * 2.0**-24)).sum())


class Packed(Call):
    def __init__(self, place: Place, numel: int) -> None:
        super().__init__(place)
        self.source_numel = place.world * numel
        self.source = torch.empty(self.source_numel, device=place.device)
        self.out = torch.empty(numel, device=place.device)

    def fill(self, source: torch.Tensor) -> None:
        self.source.copy_(source)
        self.out.zero_()

    def collective(self, async_op: bool) -> Any:
        op = dist.ReduceOp.AVG
        return reduce_scatter(self.out, self.source, op=op, group=self.place.group, async_op=async_op)

    def wrong(self, sources: list[torch.Tensor]) -> int:
        return count_wrong(self.out, [s.view(self.place.world, -1)[self.place.rank] for s in sources])


class PerParameter(Call):
    def __init__(self, place: Place, shards: list[int]) -> None:
        super().__init__(place)
        self.sizes = [place.world * n for n in shards]
        self.source_numel = sum(self.sizes)
        self.gradients = [empty_bf16(place, n) for n in self.sizes]
        self.out = torch.empty(sum(shards), device=place.device)

    def fill(self, source: torch.Tensor) -> None:
        torch._foreach_copy_(self.gradients, list(source.split(self.sizes)))
        self.out.zero_()

    def wrong(self, sources: list[torch.Tensor]) -> int:
        world, rank = self.place.world, self.place.rank
        mine = [torch.cat([g.view(world, -1)[rank] for g in s.split(self.sizes)]) for s in sources]
        return count_wrong(self.out, mine)


class StockPerParameter(PerParameter):
    def __init__(self, place: Place, shards: list[int]) -> None:
        super().__init__(place, shards)
        self.buffer = torch.empty(place.world * sum(shards), device=place.device)

    def before(self) -> None:
        world = self.place.world
        torch._chunk_cat(self.gradients, 0, world, out=self.buffer.view(world, -1))

    def collective(self, async_op: bool) -> Any:
        op = dist.ReduceOp.AVG
        return reduce_scatter(self.out, self.buffer, op=op, group=self.place.group, async_op=async_op)


class TidePerParameter(PerParameter):
    def __init__(self, place: Place, shards: list[int]) -> None:
        super().__init__(place, shards)
        self.layout = tide_backend.ParameterLayout(place.world, shards)
        self.placeholder = empty_bf16(place, 1).zero_().expand(self.source_numel)

    def collective(self, async_op: bool) -> Any:
        op = dist.ReduceOp.AVG
        tide_backend.apply_layout(self.placeholder, self.layout, tensors=self.gradients)
        return reduce_scatter(self.out, self.placeholder, op=op, group=self.place.group, async_op=async_op)


def pairs(tide: Place, stock: Place, size: int, layout: str) -> list[Pair]:
    numel = max(1, size // ITEM // tide.world)
    size = numel * tide.world * ITEM
    shards = shard_numels(layout, numel)
    listed = TidePerParameter(tide, shards), StockPerParameter(stock, shards)
    packed = max(1, numel // 2)  # the same bytes in fp32
    packed_size = packed * tide.world * 4
    return [
        Pair("per-param", size, numel, "bf16", "avg", *listed),
        Pair("packed", packed_size, packed, "fp32", "avg", Packed(tide, packed), Packed(stock, packed)),
    ]

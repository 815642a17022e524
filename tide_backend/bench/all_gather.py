"""All-gather: parameters delivered in place, and the plain call.

per-param    stock does what FSDP2 does: the shards are copied into this rank's part of the buffer,
             all_gather_into_tensor, then split_with_sizes_copy into per-parameter tensors. tide: the shards
             are copied to their places in a slot of the arena; the call with a ParameterLayout does the rest.
rank-major   all_gather_into_tensor alone, from and into ordinary memory, on both.
push         GPUs only: tide's call with the shards already at their places, beside a plain copy of as many bytes to
             the next GPU: what the copy engines can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tide_backend
from tide_backend import _C

from .call import Call, Pair, Place
from .data import differing, empty_bf16
from .layouts import shard_numels
from .names import all_gather

ITEM = 2  # bytes of bfloat16
SLOT_ALIGNMENT = 512  # bytes


class RankMajor(Call):
    def __init__(self, place: Place, numel: int) -> None:
        super().__init__(place)
        self.source_numel = numel
        self.shard = empty_bf16(place, numel)
        self.out = empty_bf16(place, place.world * numel)

    def fill(self, source: torch.Tensor) -> None:
        self.shard.copy_(source)
        self.out.zero_()

    def collective(self, async_op: bool) -> Any:
        return all_gather(self.out, self.shard, group=self.place.group, async_op=async_op)

    def wrong(self, sources: list[torch.Tensor]) -> int:
        return differing(self.out, torch.cat(sources))


class PerParameter(Call):
    """Shards of separate tensors in, whole parameters out."""

    def __init__(self, place: Place, shards: list[int]) -> None:
        super().__init__(place)
        self.source_numel = sum(shards)
        self.numels = shards
        self.shards = [empty_bf16(place, n) for n in shards]
        self.parameters: list[torch.Tensor] = []  # [world, shard] each

    def fill(self, source: torch.Tensor) -> None:
        torch._foreach_copy_(self.shards, list(source.split(self.numels)))
        torch._foreach_zero_(self.parameters)

    def wrong(self, sources: list[torch.Tensor]) -> int:
        count = 0
        for rank, source in enumerate(sources):
            for parameter, want in zip(self.parameters, source.split(self.numels), strict=True):
                count += differing(parameter[rank], want)
        return count


class StockPerParameter(PerParameter):
    def __init__(self, place: Place, shards: list[int]) -> None:
        super().__init__(place, shards)
        self.out = empty_bf16(place, place.world, self.source_numel)
        self.own = self.out[place.rank]
        self.own_parts = list(self.own.split(shards))
        self.parameters = [empty_bf16(place, place.world, n) for n in shards]

    def before(self) -> None:
        torch._foreach_copy_(self.own_parts, self.shards)

    def collective(self, async_op: bool) -> Any:
        return all_gather(self.out.view(-1), self.own, group=self.place.group, async_op=async_op)

    def after(self) -> None:
        torch.split_with_sizes_copy(self.out, self.numels, dim=1, out=self.parameters)


class TidePerParameter(PerParameter):
    def __init__(self, place: Place, shards: list[int]) -> None:
        super().__init__(place, shards)
        self.layout = tide_backend.ParameterLayout(place.world, shards, align=SLOT_ALIGNMENT // ITEM)
        total = self.layout.total_gathered_numel
        slot = place.slot(total * ITEM)
        # Without a slot the call still works; the path column shows it.
        self.out = empty_bf16(place, total) if slot is None else slot.view(torch.bfloat16)
        self.parameters = [
            self.out.narrow(0, start, place.world * n).view(place.world, n)
            for start, n in zip(self.layout.gathered_offsets, shards, strict=False)
        ]
        self.own_parts = [p[place.rank] for p in self.parameters]
        self.placeholder = empty_bf16(place, 1).zero_().expand(self.source_numel)

    def before(self) -> None:
        torch._foreach_copy_(self.own_parts, self.shards)

    def collective(self, async_op: bool) -> Any:
        tide_backend.apply_layout(self.out, self.layout, placed=True)
        return all_gather(self.out, self.placeholder, group=self.place.group, async_op=async_op)


class StockFromFp32(StockPerParameter):
    """As FSDP2 with `param_dtype=torch.bfloat16`: cast into one flat temporary, then as above."""

    def __init__(self, place: Place, shards: list[int]) -> None:
        super().__init__(place, shards)
        self.shards = [torch.empty(n, device=place.device) for n in shards]
        self.cast = list(empty_bf16(place, self.source_numel).split(shards))

    def before(self) -> None:
        torch._foreach_copy_(self.cast, self.shards)
        torch._foreach_copy_(self.own_parts, self.cast)


class TideFromFp32(TidePerParameter):
    """The same through tide's seam: cast straight into the slot, on GPUs by tide's kernel."""

    def __init__(self, place: Place, shards: list[int]) -> None:
        super().__init__(place, shards)
        self.shards = [torch.empty(n, device=place.device) for n in shards]
        self.ctas = place.backend.options.accumulate_ctas

    def before(self) -> None:
        if not _C.cast_into_slot(self.own_parts, self.shards, self.ctas):
            torch._foreach_copy_(self.own_parts, self.shards)


class TidePlaced(TidePerParameter):
    def fill(self, source: torch.Tensor) -> None:
        super().fill(source)
        torch._foreach_copy_(self.own_parts, self.shards)

    def before(self) -> None:
        pass


class RawPush(Call):
    """A copy of one shard to the next GPU; every rank makes one at a time, so both directions are in use."""

    def __init__(self, place: Place, numel: int) -> None:
        super().__init__(place)
        self.source_numel = numel
        self.shard = empty_bf16(place, numel)
        peer = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
        self.out = torch.empty(numel, dtype=torch.bfloat16, device=torch.device("cuda", peer))

    def fill(self, source: torch.Tensor) -> None:
        self.shard.copy_(source)
        self.out.zero_()

    def collective(self, async_op: bool) -> Any:
        self.out.copy_(self.shard, non_blocking=True)

    def noted_run(self, run: Callable[[], object] | None = None) -> str:
        (run or self.run)()
        return "copy"

    def wrong(self, sources: list[torch.Tensor]) -> int:
        return differing(self.out, sources[self.place.rank])


def pairs(tide: Place, stock: Place, size: int, layout: str) -> list[Pair]:
    numel = max(1, size // ITEM // tide.world)
    size = numel * tide.world * ITEM
    shards = shard_numels(layout, numel)
    delivered = TidePerParameter(tide, shards), StockPerParameter(stock, shards)
    found = [
        Pair("per-param", size, numel, "bf16", "none", *delivered),
        Pair("rank-major", size, numel, "bf16", "none", RankMajor(tide, numel), RankMajor(stock, numel)),
    ]
    if tide.device == "cuda" and tide.world == 2 <= torch.cuda.device_count():
        found.append(Pair("push", size, numel, "bf16", "none", TidePlaced(tide, shards), RawPush(stock, numel)))
    return found

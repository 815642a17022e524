"""Tasks of test_gpu_strided.py: what each rank does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpu_rank import backend, enter, last_record, own_group, random_bits, same
from tasks_collectives import device_work, kernels

# inner: no memory of the group, as a program that knows nothing of tide makes the call.
OPTIONS = {"staged": {"cuda_plain_bytes": 0}, "zero_copy": {}, "inner": {}}


@dataclass(frozen=True)
class Case:
    """Rank r holds tokens[r] tokens of world * heads heads. gap: elements between a token's heads and the next
    token's, in attention's layout."""

    tokens: tuple[int, ...]
    heads: int
    dim: int
    dtype: str = "bfloat16"
    gap: int = 0


class Ulysses:
    """Into attention, [all tokens, own heads, dim], and back; written as its callers do, but without contiguous()."""

    def __init__(self, case: Case, way: str, device: torch.device, group: Any) -> None:
        self.case, self.group = case, group
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.dtype, self.row = getattr(torch, case.dtype), case.heads * case.dim
        self.mine = case.tokens[self.rank]
        # Outputs in memory of the group are of one size on every rank.
        most, whole = max(case.tokens) * self.world * self.row, sum(case.tokens) * (self.row + case.gap)

        def empty(numel: int, room: int) -> torch.Tensor:
            if way != "zero_copy":
                return torch.empty(numel, dtype=self.dtype, device=device)
            return backend(device, group).allocate_tensor(max(room, 1), dtype=self.dtype, device=device)[:numel]

        self.memory = empty(whole, whole).view(-1, self.row + case.gap)
        self.whole = self.memory[:, : self.row]
        self.back = empty(self.mine * self.world * self.row, most).view(self.mine, self.world, self.row)

    def enter(self, x: torch.Tensor) -> None:
        """x: [tokens, world, heads * dim]."""
        ones = [1] * self.world
        dist.all_to_all_single(self.whole, x.permute(1, 0, 2), list(self.case.tokens), ones, group=self.group)

    def leave(self) -> None:
        ones = [1] * self.world
        dist.all_to_all_single(self.back.permute(1, 0, 2), self.whole, ones, list(self.case.tokens), group=self.group)


def there_and_back(rank: int, world: int, way: str, cases: list[Case], staging: int = 0) -> list[dict[str, Any]]:
    """Every case twice without a pause: whether every bit is right, how both calls went, and what was copied."""
    device, found = enter(rank), []
    options = {**OPTIONS[way], **({"cuda_staging_bytes": staging} if staging else {})}
    with own_group(device, **options) as group:
        for number, case in enumerate(cases):
            ulysses, good, records = Ulysses(case, way, device, group), [], []
            for repeat in range(2):
                inputs = [
                    random_bits(number * 2 + repeat, r, n * world * ulysses.row, ulysses.dtype, device)
                    for r, n in enumerate(case.tokens)
                ]
                x = inputs[rank].view(-1, world, ulysses.row)
                ulysses.memory.fill_(7)
                ulysses.back.fill_(7)
                ulysses.enter(x)
                records.append(last_record(device, "all_to_all", group))
                whole = ulysses.whole.clone()
                ulysses.leave()
                records.append(last_record(device, "all_to_all", group))
                want = torch.cat([i.view(-1, world, ulysses.row)[:, rank] for i in inputs])
                good += [same(whole, want), same(ulysses.back, x), bool((ulysses.memory[:, ulysses.row :] == 7).all())]
            found.append(
                {
                    "good": good,
                    "paths": sorted({r["path"] for r in records}),
                    "copies": [r["repair_copies"] for r in records],
                    "why": sorted({r["repair_reason"] for r in records}),
                }
            )
            del ulysses
    return found


def profiled(rank: int, world: int, way: str) -> dict[str, Any]:
    """Names of the kernels of both calls."""
    device = enter(rank)
    works = bool(kernels(device_work(lambda: torch.ones(1000, device=device).sin_())))
    with own_group(device, **OPTIONS[way]) as group:
        ulysses = Ulysses(Case((2048,) * world, 4, 128), way, device, group)
        x = random_bits(1, rank, 2048 * world * ulysses.row, ulysses.dtype, device).view(2048, world, -1)
        names = device_work(lambda u=ulysses: (u.enter(x), u.leave()))
        path = last_record(device, "all_to_all", group)["path"]
        del ulysses
    return {
        "profiler works": works,
        "kernels": kernels(names),
        "copies": sum("Memcpy" in n for n in names),
        "path": path,
    }

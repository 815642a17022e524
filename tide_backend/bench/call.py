"""One measured way of doing a collective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """Who runs the call and where."""

    rank: int
    world: int
    device: str
    group: Any

    @property
    def backend(self) -> Any:
        return self.group._get_backend(torch.device(self.device))


class Call(ABC):
    """Buffers are allocated once, on both sides, and are no part of what is timed.

    source_numel: elements of one rank's input, flat and bfloat16, that `fill` takes.
    """

    source_numel: int

    def __init__(self, place: Place) -> None:
        self.place = place

    @abstractmethod
    def fill(self, source: torch.Tensor) -> None:
        """Fresh input; the output is spoilt."""

    @abstractmethod
    def run(self) -> None:
        """What is timed."""

    @abstractmethod
    def wrong(self, sources: list[torch.Tensor]) -> int:
        """Elements of this rank's output that are not what these inputs, one per rank, make of them."""

    @property
    def path(self) -> str:
        """The path that tide took, or the backend's name."""
        records = getattr(self.place.backend, "records", None)
        return records()[-1]["path"] if records else dist.get_backend(self.place.group)


@dataclass(frozen=True)
class Pair:
    """tide and the stock backend doing the same. size: bytes; count: elements per rank, as in nccl-tests."""

    name: str
    size: int
    count: int
    dtype: str
    redop: str
    tide: Call
    stock: Call

"""One measured way of doing a collective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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

    @property
    def own_device(self) -> torch.device:
        """`device` with its index: the current one."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    def slot(self, nbytes: int) -> torch.Tensor | None:
        """uint8[nbytes] in tide's arena, if it has the room. Every rank asks at once."""
        if self.device == "cpu":
            return self.backend.slot(nbytes)[0]
        return self.backend.slot(nbytes, str(self.own_device), torch.cuda.current_stream().cuda_stream)[0]


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

    def before(self) -> None:  # noqa: B027
        """Copies of the input that the collective needs."""

    @abstractmethod
    def collective(self, async_op: bool) -> Any:
        """The collective itself; its handle, when it is asynchronous."""

    def after(self) -> None:  # noqa: B027
        """Copies of the output; the collective is over, or this stream is behind it."""

    def run(self) -> None:
        """What is timed."""
        self.before()
        self.collective(False)
        self.after()

    @abstractmethod
    def wrong(self, sources: list[torch.Tensor]) -> int:
        """Elements of this rank's output that are not what these inputs, one per rank, make of them."""

    def noted_run(self, run: Callable[[], object] | None = None) -> str:
        """One call, or what `run` does with it, and how it went: the path that tide took, "inner" when it handed the
        call on, or the backend."""
        run = run or self.run
        backend = self.place.backend
        if not hasattr(backend, "records"):
            run()
            return "nccl" if self.place.device == "cuda" else dist.get_backend(self.place.group)
        before = self._recorded()
        run()
        if self._recorded() == before:
            return "inner"
        return [record["path"] for record in backend.records() if record["device"] == self.place.device][-1]

    def _recorded(self) -> int:
        return sum(row["calls"] for row in self.place.backend.totals() if row["device"] == self.place.device)


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

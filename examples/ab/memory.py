"""Reads what a process holds in memory, at points that all ranks reach together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .copies import LAYOUT_COPIES

_COLLECTIVES = {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"}


def own_pss() -> int:
    """Proportional set size of this process in bytes: a page that k processes map counts 1/k."""
    with open("/proc/self/smaps_rollup") as lines:
        for line in lines:
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    raise RuntimeError("no Pss line in /proc/self/smaps_rollup; this needs Linux 4.14 or newer")


class MemoryProbe:
    """Samples between two barriers, so that the ranks' values of one point belong together.

    `barrier` must not be a collective of the backend under test.
    """

    def __init__(self, device: str, barrier: Callable[[], None]) -> None:
        self._cuda = device == "cuda"
        self._barrier = barrier
        self.points: list[tuple[str, dict[str, int]]] = []

    def sample(self, point: str) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self._barrier()
        values = {"pss": own_pss()}
        if self._cuda:
            free, total = torch.cuda.mem_get_info()
            values["driver"] = total - free
            values["allocated"] = torch.cuda.memory_allocated()
        self.points.append((point, values))
        self._barrier()

    @contextlib.contextmanager
    def watch(self, blocks: list[nn.Module]) -> Iterator[None]:
        """Samples after every block's forward and backward, every collective and every layout copy."""
        handles = []
        for index, block in enumerate(blocks):
            forward, backward = f"forward {index}", f"backward {index}"
            handles.append(block.register_forward_hook(lambda *_, p=forward: self.sample(p)))
            handles.append(block.register_full_backward_hook(lambda *_, p=backward: self.sample(p)))
        try:
            with _AfterOperators(self):
                yield
        finally:
            for handle in handles:
                handle.remove()


class _AfterOperators(TorchDispatchMode):
    """The moments at which the buffers of a collective all exist."""

    def __init__(self, probe: MemoryProbe) -> None:
        super().__init__()
        self._probe = probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in LAYOUT_COPIES or name in _COLLECTIVES:
            self._probe.sample(name)
        return result

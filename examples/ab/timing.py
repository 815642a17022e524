"""Times FSDP2's collective functions from outside, alike for every backend."""

from __future__ import annotations

import functools
import inspect
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as namespace

# name in FSDP2's namespace -> (row of the table, stream that starts, stream that ends; None: the current one)
_FUNCTIONS = {
    "foreach_all_gather": ("all-gather", "all_gather_copy_in_stream", "all_gather_stream"),
    "foreach_all_gather_copy_out": ("all-gather copy-out", None, None),
    "foreach_reduce": ("reduce-scatter", None, "reduce_scatter_stream"),
}
PHASES = [phase for phase, _, _ in _FUNCTIONS.values()]


class CollectiveTimer:
    """Seconds in each of FSDP2's collective functions, per step.

    Installed after the warm-up, so that it wraps whatever a backend has put there. Safe on the
    autograd thread: FSDP2 never runs two of these functions at once in one process.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._wall: dict[str, float] = defaultdict(float)
        self._cpu = 0.0
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def install(self) -> None:
        for name, (phase, start, end) in _FUNCTIONS.items():
            original = getattr(namespace, name)
            wrap = self._on_streams if self._cuda else self._on_cpu
            setattr(namespace, name, wrap(original, phase, start, end))

    def take(self) -> tuple[dict[str, float], float]:
        """Wall (CPU) or stream (GPU) seconds by phase since the last call, and CPU seconds used meanwhile."""
        for phase, start, end in self._events:
            end.synchronize()
            self._wall[phase] += start.elapsed_time(end) / 1e3
        taken = {phase: self._wall[phase] for phase in PHASES}, self._cpu
        self._wall.clear()
        self._events.clear()
        self._cpu = 0.0
        return taken

    def _on_cpu(self, original: Callable[..., Any], phase: str, _start: Any, _end: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                self._wall[phase] += time.perf_counter() - wall
                self._cpu += time.process_time() - cpu

        return timed

    def _on_streams(
        self, original: Callable[..., Any], phase: str, start: str | None, end: str | None
    ) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            current = torch.cuda.current_stream()
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record(given[start] if start else current)
            cpu = time.process_time()
            result = original(*args, **kwargs)
            self._cpu += time.process_time() - cpu
            events[1].record(given[end] if end else current)
            self._events.append((phase, *events))
            return result

        return timed

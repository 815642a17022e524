"""How long a collective's kernels hold SMs, from a profiler's trace."""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

# Whose kernel it is: the collective's own, by these patterns, or a layout copy's.
OWN = re.compile(r"\btide::|accumulate_kernel|place_kernel|cast_kernel|small_copies_kernel|nccl", re.IGNORECASE)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a collective, per collective. sm_us: the sum over its launches of SMs that it can hold at once
    (its blocks, at most the device's SMs) times duration; of several collectives the median."""

    name: str
    own: bool  # the collective's; else a layout copy
    launches: float
    blocks: int  # of the largest launch
    us: float  # duration, summed over the launches of one collective
    sm_us: float


def kernels(trace: dict[str, Any], sms: int, calls: int) -> list[Kernel]:
    """The kernels of a chrome trace in which nothing but `calls` equal collectives ran, most SM time first.

    Raises:
        ValueError: a kernel without grid or duration.
    """
    by_name: dict[str, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            if "dur" not in event or "grid" not in event.get("args", {}):
                raise ValueError(f"kernel {event.get('name')!r} of a trace: got no grid or no duration, expected both")
            by_name.setdefault(short(event["name"]), []).append(event)
    found = []
    for name, events in by_name.items():
        events.sort(key=lambda e: e["ts"])
        blocks = [prod(e["args"]["grid"]) for e in events]
        us = [float(e["dur"]) for e in events]
        sm_us = [min(b, sms) * t for b, t in zip(blocks, us, strict=True)]
        own = bool(OWN.search(events[0]["name"]))
        launches = len(events) / calls
        found.append(Kernel(name, own, launches, max(blocks), per_call(us, calls), per_call(sm_us, calls)))
    return sorted(found, key=lambda k: -k.sm_us)


def per_call(values: list[float], calls: int) -> float:
    """The median over the calls of their sums, or the mean when the launches do not divide evenly. One call that was
    late on a peer shall not count: a kernel of NCCL's holds its SMs while it waits."""
    each, left = divmod(len(values), calls)
    if left:
        return sum(values) / calls
    return statistics.median(sum(values[i * each : (i + 1) * each]) for i in range(calls))


def short(name: str) -> str:
    """A demangled kernel name without return type, namespaces and arguments; template arguments stay, cut short."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    match = re.match(r"[^<(]*", name)
    head = match[0] if match else name
    template = re.match(r"<(.*?)>\(", name[len(head) :])
    return head.split("::")[-1] + (f"<{template[1][:30]}>" if template else "")


def profile(run: Callable[[], object], calls: int, meet: Callable[[], None]) -> list[Kernel]:
    """The kernels of `run` on this rank's GPU: `calls` times in a row; `meet` waits for the device and the peers. Empty
    when the profiler sees none (no CUPTI, or it may not be used)."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]):  # the first start takes seconds, on each rank its own
        meet()
        run()
        meet()
    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        meet()
        for _ in range(calls):
            run()
        meet()
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        return kernels(json.loads(file.read_text()), sms, calls)

"""Host time per FSDP2 parameter group beside the stock backend's, without and with the collectives."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from .launch import launch
from .settings import Settings

KEYS = ("forward", "copies", "backward", "collective", "whole")
HEAD = (
    "host time per parameter group of FSDP2: medians over all ranks and repetitions, least in brackets",
    "forward:    all-gather and copy-out functions without the collective",
    "copies:     what surrounds the reduce-scatter: its buffers, the copy-in, the call; without the collective",
    "backward:   copies, and what FSDP2 itself does for each sharded gradient",
    "collective: the two collectives; on GPUs until the host goes on",
    "whole:      forward, backward and collective",
)


def run_rank(
    rank: int, world: int, store: Any, settings: Settings
) -> Iterator[dict[str, dict[str, list[float]]]]:
    import tide_backend  # registers the backend, and with it the seam
    from tide_backend.fsdp2.measure import group_seconds

    torch.set_num_threads(1)
    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("tide", store=dist.PrefixStore("g", store), rank=rank, world_size=world)
    groups = {"tide": dist.group.WORLD, settings.versus: dist.new_group(backend=settings.versus)}
    samples: dict[str, dict[str, list[float]]] = {side: {key: [] for key in KEYS} for side in groups}

    def measure(group: dist.ProcessGroup) -> dict[str, list[float]]:
        repetitions = max(settings.repetitions // 3, 1)
        return group_seconds(group, settings.parameters, settings.numel, 20, repetitions, device)

    for _ in range(3):  # by turns
        for side, group in groups.items():
            for key, seconds in measure(group).items():
                samples[side][key] += seconds
    report = tide_backend.report()
    if report.fallbacks:
        raise AssertionError(f"not what is to be measured: {report}")
    yield samples
    dist.destroy_process_group()


def run(settings: Settings) -> list[dict[str, Any]]:
    """A row per backend: median and least microseconds of each time."""
    (samples,) = launch(run_rank, settings.ranks, settings)
    rows = []
    for side in ("tide", settings.versus):
        row: dict[str, Any] = {"backend": side}
        for key in KEYS:
            seconds = [s for rank in samples for s in rank[side][key]]
            row[f"{key}_us"] = statistics.median(seconds) * 1e6
            row[f"{key}_least_us"] = min(seconds) * 1e6
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], settings: Settings) -> str:
    group = f"{settings.parameters} parameters of {settings.numel} elements, {settings.device}"
    lines = [f"# {text}" for text in (group, *HEAD)]
    lines.append(f"# {'backend':>8} " + " ".join(f"{key:>18}" for key in KEYS) + "   (us)")
    for row in rows:
        cells = (f"{row[f'{key}_us']:.1f} ({row[f'{key}_least_us']:.1f})" for key in KEYS)
        lines.append(f"  {row['backend']:>8} " + " ".join(f"{cell:>18}" for cell in cells))
    tide, stock = rows
    ratios = (f"{stock[f'{key}_us'] / tide[f'{key}_us']:.2f}x" for key in KEYS)
    lines.append(f"# {'ratio':>8} " + " ".join(f"{ratio:>18}" for ratio in ratios))
    return "\n".join(lines)

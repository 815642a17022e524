"""Reads the folder of one run back and reduces it over ranks and steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from .copies import COPY_KINDS
from .timing import PHASES


@dataclass
class Run:
    """One backend, its repeats pooled. Times in seconds, sizes in bytes, memory summed over ranks."""

    label: str
    folder: Path  # of the first repeat: the tensors compared
    losses: list[float]
    norms: list[float | None]
    step_seconds: list[float]
    phase_seconds: dict[str, float]
    phases_seconds: float
    phases_cpu_seconds: float
    copy_calls: dict[str, int]
    copy_bytes: dict[str, int]
    packed_fp32_bytes: int
    memory: dict[str, int]
    memory_point: str
    parameters: int
    report: dict[str, Any] | None
    repeats_identical: bool | None = None

    @property
    def step_median(self) -> float:
        return median(self.step_seconds)


def _read(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def read_run(label: str, folders: list[Path], ranks: int) -> Run:
    """Pools the repeats of one backend; losses and tensors are those of the first."""
    repeats = [_read(folder, ranks) for folder in folders]
    first = repeats[0]
    # [repeat and step] -> the ranks' records of that step
    steps = [records for repeat in repeats for records in zip(*(r["steps"] for r in repeat), strict=True)]
    by_phase = {p: median(mean(r["phases"][p] for r in records) for records in steps) for p in PHASES}
    peaks = [_memory_peaks(repeat) for repeat in repeats]
    losses = [_losses(repeat) for repeat in repeats]
    return Run(
        label=label,
        folder=folders[0],
        losses=losses[0],
        norms=first[0]["gradient_norms"],
        step_seconds=[mean(r["seconds"] for r in records) for records in steps],
        phase_seconds=by_phase,
        phases_seconds=median(mean(sum(r["phases"].values()) for r in records) for records in steps),
        phases_cpu_seconds=median(sum(r["phases_cpu_seconds"] for r in records) for records in steps),
        copy_calls={kind: sum(r["copies"]["calls"].get(kind, 0) for r in first) for kind in _copy_kinds(first)},
        copy_bytes={kind: sum(r["copies"]["bytes"].get(kind, 0) for r in first) for kind in _copy_kinds(first)},
        packed_fp32_bytes=sum(r["copies"]["packed_fp32_bytes"] for r in first),
        memory={key: int(median(values[key][0] for values in peaks)) for key in peaks[0]},
        memory_point=peaks[0]["pss"][1],
        parameters=first[0]["parameters"],
        report=first[0].get("report"),
        repeats_identical=all(one == losses[0] for one in losses) if len(losses) > 1 else None,
    )


def _copy_kinds(ranks: list[dict[str, Any]]) -> list[str]:
    seen = {kind for rank in ranks for kind in rank["copies"]["calls"]}
    return sorted(seen | set(COPY_KINDS))


def _losses(ranks: list[dict[str, Any]]) -> list[float]:
    return [mean(values) for values in zip(*(rank["losses"] for rank in ranks), strict=True)]


def _memory_peaks(ranks: list[dict[str, Any]]) -> dict[str, tuple[int, str]]:
    """Per kind: the largest sum over ranks and the point where it stood."""
    sums: dict[str, list[tuple[int, str]]] = {}
    for samples in zip(*(rank["memory"] for rank in ranks), strict=True):
        points = {point for point, _ in samples}
        if len(points) != 1:
            raise RuntimeError(f"the ranks sampled memory at different points: {sorted(points)}")
        for key in samples[0][1]:
            sums.setdefault(key, []).append((sum(values[key] for _, values in samples), samples[0][0]))
    peaks = {key: max(values) for key, values in sums.items()}
    if any(rank["allocator_peak"] for rank in ranks):
        peaks["allocator peak"] = (sum(rank["allocator_peak"] for rank in ranks), "whole run")
    return peaks


def load_gradients(folder: Path, step: int, ranks: int) -> dict[str, list[torch.Tensor]]:
    """Parameter name -> the gradient shards of all ranks at that step."""
    shards: dict[str, list[torch.Tensor]] = {}
    for rank in range(ranks):
        path = folder / f"gradients_step{step}_rank{rank}.pt"
        for name, tensor in torch.load(path, weights_only=True).items():
            shards.setdefault(name, []).append(tensor)
    return shards


def load_parameters(folder: Path) -> dict[str, list[torch.Tensor]]:
    """Parameter name -> the whole parameter after the last step, as a list of one."""
    state = torch.load(folder / "parameters.pt", weights_only=True)
    return {name: [tensor] for name, tensor in state.items()}

"""One rank of one backend: trains, measures, leaves its results in a folder."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from .copies import CopyCounter
from .memory import MemoryProbe
from .models import blocks_of, build_model, shard_model
from .settings import Settings
from .text import Batches, load_text
from .timing import CollectiveTimer


def run_rank(rank: int, settings: Settings, backend: str, label: str, port: int, folder: Path) -> None:
    """Entry point of a rank's process; the parent serves the store at `port`."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(settings.ranks),
    )
    if settings.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
    if backend == "tide" and not _found_by_name(backend):
        import tide_backend  # registers itself
    dist.init_process_group(backend, timeout=timedelta(seconds=settings.timeout))
    try:
        result = _Run(settings, rank, label, folder).train()
        if backend == "tide":
            import tide_backend

            result["report"] = tide_backend.report().to_dict()
        (folder / f"rank{rank}.json").write_text(json.dumps(result))
    finally:
        dist.destroy_process_group()


def _found_by_name(backend: str) -> bool:
    """An installed backend needs no import with torch 2.14 or newer."""
    installed = entry_points(group="torch.distributed.backends", name=backend)
    return bool(installed) and torch.__version__ >= "2.14"


class _Run:
    def __init__(self, settings: Settings, rank: int, label: str, folder: Path) -> None:
        self._settings, self._rank, self._label, self._folder = settings, rank, label, folder
        self._batches = Batches(load_text(), settings.batch, settings.seq, settings.seed, rank)
        # Measuring must not pass through the backend under test: its barriers have a gloo group of their own.
        self._side_group = dist.new_group(backend="gloo")
        self._model = build_model(settings)
        self._parameters = sum(p.numel() for p in self._model.parameters())
        shard_model(self._model, init_device_mesh(settings.device, (settings.ranks,)), settings)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=settings.lr)

    def train(self) -> dict[str, Any]:
        settings = self._settings
        timer = CollectiveTimer(settings.device)
        losses, norms, steps = [], [], []
        for step in range(settings.steps):
            if step == settings.warmup:
                timer.install()
            tokens = self._batches(step).to(settings.device)
            self._barrier()
            start = time.perf_counter()
            loss, norm = self._step(tokens, step if step in settings.compared_steps() else None)
            self._synchronize()
            seconds = time.perf_counter() - start - self._saving_seconds
            losses.append(loss.item())
            norms.append(norm)
            phases, cpu = timer.take()
            if step >= settings.warmup:
                steps.append({"seconds": seconds, "phases": phases, "phases_cpu_seconds": cpu})
            self._progress(step, losses[-1], seconds)
        self._save_parameters()
        copies = self._count_copies()
        points = self._sample_memory()
        return {
            "losses": losses,
            "gradient_norms": norms,
            "steps": steps,
            "copies": copies,
            "memory": points,
            "allocator_peak": torch.cuda.max_memory_allocated() if settings.device == "cuda" else 0,
            "parameters": self._parameters,
        }

    def _step(self, tokens: torch.Tensor, save_as: int | None = None) -> tuple[torch.Tensor, float | None]:
        self._optimizer.zero_grad()
        loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._saving_seconds = self._save_gradients(save_as) if save_as is not None else 0.0
        norm = None
        if self._settings.clip > 0:
            total = nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.clip)
            norm = total.full_tensor().item()
        self._optimizer.step()
        return loss.detach(), norm

    def _barrier(self) -> None:
        dist.barrier(group=self._side_group)

    def _synchronize(self) -> None:
        if self._settings.device == "cuda":
            torch.cuda.synchronize()

    def _save_gradients(self, step: int) -> float:
        """Writes this rank's shards; returns the seconds that took, with the wait for the others."""
        self._synchronize()
        start = time.perf_counter()
        shards = {
            name: parameter.grad.to_local().cpu()
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None
        }
        torch.save(shards, self._folder / f"gradients_step{step}_rank{self._rank}.pt")
        self._barrier()
        return time.perf_counter() - start

    def _save_parameters(self) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self._model, options=options)
        if self._rank == 0:
            torch.save(state, self._folder / "parameters.pt")

    def _count_copies(self) -> dict[str, Any]:
        counter = CopyCounter()
        with counter:
            self._step(self._batches(self._settings.steps).to(self._settings.device))
        return counter.result()

    def _sample_memory(self) -> list[tuple[str, dict[str, int]]]:
        probe = MemoryProbe(self._settings.device, self._barrier)
        tokens = self._batches(self._settings.steps + 1).to(self._settings.device)
        with probe.watch(blocks_of(self._model)):
            self._step(tokens)
        probe.sample("after the step")
        return probe.points

    def _progress(self, step: int, loss: float, seconds: float) -> None:
        if self._rank:
            return
        total = self._settings.steps
        text = f"{self._label}: step {step + 1}/{total}  loss {loss:.4f}  {seconds * 1e3:.0f} ms"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="\n" if step + 1 == total else "", file=sys.stderr, flush=True)
        elif step == 0 or (step + 1) % max(1, total // 4) == 0 or step + 1 == total:
            print(text, file=sys.stderr, flush=True)

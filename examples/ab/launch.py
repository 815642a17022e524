"""Starts the ranks of one backend, waits for all of them, and says which one failed and why."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from .settings import Settings
from .train import run_rank

# Imported once in a server process without threads, from which every rank of every backend is forked.
_PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]


class BackendFailed(RuntimeError):
    """A rank raised or died; the text holds its own error."""


def prepare() -> None:
    """Once, before the first launch: fixes what the ranks' processes inherit."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.set_forkserver_preload(_PRELOAD)


def launch(settings: Settings, backend: str, label: str, folder: Path) -> None:
    """Runs all ranks to the end; results lie in `folder`. Raises BackendFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        mp.start_processes(
            run_rank,
            args=(settings, backend, label, store.port, folder),
            nprocs=settings.ranks,
            start_method="forkserver",
        )
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        raise BackendFailed(f"backend {backend!r} failed: {error}") from error

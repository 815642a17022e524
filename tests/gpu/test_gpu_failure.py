"""Ranks that die or are late: the device's waits end, with names, and never silently."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from test_gpu_collectives import needs_kernels

pytestmark = pytest.mark.gpu

HERE = Path(__file__).resolve().parent


def launch(case: str, seconds: float, **env: str) -> tuple[int, str]:
    """Exit status of rank 0 and what it said."""
    # The store lives here: a port that was free a moment ago may be another test process's by the time a rank listens.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "tasks_failure.py"), case, str(rank), "2", str(store.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **env, "PYTHONPATH": path},
        )
        for rank in range(2)
    ]
    try:
        text, _ = processes[0].communicate(timeout=seconds)
        return processes[0].returncode, text
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_dead_peer_raises(require: Callable, deadline: Callable) -> None:
    require(2)
    status, text = launch("dead_peer", deadline(50))
    assert status != 0 and "went on" not in text, text
    assert "tide[rank 0/2" in text and "rank 1" in text, text


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("dead_device", "tide ends this process: nothing may run on what did not arrive."),
        # Rank 1 finds itself late as well, and may have ended a moment before.
        ("late_device", "not over at its deadline|exited while the device waits"),
    ],
)
def test_absent_peer_ends_the_process(require: Callable, deadline: Callable, case: str, said: str) -> None:
    needs_kernels()
    require(2)
    status, text = launch(case, deadline(50))
    assert status == -signal.SIGABRT, text
    assert "went on" not in text
    assert re.search(said, text) and "rank 1" in text, text


def test_late_peer_poisons_the_group_on_demand(require: Callable, deadline: Callable) -> None:
    needs_kernels()
    require(2)
    status, text = launch("late_device", deadline(50), TIDE_RAISE_ON_TIMEOUT="1")
    assert status == 0, text
    assert text.count("raised: ") >= 1 and "not over at its deadline" in text, text
    # What was synchronized by the device alone cannot raise; the next call of the group does.
    assert text.rstrip().splitlines()[-1].startswith("raised: "), text

"""Processes as users start them: torch.multiprocessing, no clean-up at exit, restarts with the same store."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent


def gather_and_report(rank: int, world: int, directory: str, destroy: bool) -> None:
    import tide_backend  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("tide", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    out = torch.empty(world)
    dist.all_gather_into_tensor(out, torch.full((1,), float(rank)))
    slot, _ = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).slot(100)
    Path(directory, f"rank{rank}").write_text(f"{out.tolist()} {slot is not None}")
    if destroy:
        dist.destroy_process_group()


def check_reports(directory: str, world: int) -> None:
    expected = f"{[float(r) for r in range(world)]} True"
    for rank in range(world):
        got = Path(directory, f"rank{rank}").read_text()
        if got != expected:
            raise AssertionError(f"rank {rank}: {got}")


def start(rank: int, world: int, method: str, destroy: bool) -> None:
    """torch.multiprocessing from within a process of its own, so that nothing here is forked by accident."""
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(
            gather_and_report,
            args=(2, directory, destroy),
            nprocs=2,
            join=True,
            daemon=False,
            start_method=method,
        )
        check_reports(directory, 2)


@pytest.mark.parametrize("destroy", [True, False])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_multiprocessing(method: str, destroy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if method == "fork":
        run_in_undaemonic_process(destroy)
        return
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    start(0, 1, method, destroy)


def run_in_undaemonic_process(destroy: bool) -> None:
    """Fork from a small process: the test process has threads."""
    code = f"import test_processes; test_processes.start(0, 1, 'fork', {destroy})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


RESTART = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
if sys.argv[3] == "import":
    import tide_backend
rank, port = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("tide", store=store, rank=rank, world_size=2,
                        timeout=timedelta(seconds=30))
out = torch.empty(2)
dist.all_gather_into_tensor(out, torch.full((1,), float(rank)))
assert out.tolist() == [0.0, 1.0], out
if sys.argv[4] == "crash":
    os._exit(3)
dist.destroy_process_group()
"""


def run_pair(port: int, how: str, prefix: str) -> list[tuple[int, str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RESTART, str(rank), str(port), how, prefix],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [(p.wait(60), p.stderr.read() if p.stderr else "") for p in processes]


def test_a_restart_does_not_meet_the_past() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert [code for code, _ in run_pair(store.port, "import", "crash")] == [3, 3]
    second = run_pair(store.port, "import", "again")
    assert [code for code, _ in second] == [0, 0], second


def entry_points() -> list[str]:
    from importlib.metadata import entry_points

    return [e.name for e in entry_points(group="torch.distributed.backends")]


FINDS_BACKENDS = tuple(int(v) for v in torch.__version__.split(".")[:2]) >= (2, 14)


@pytest.mark.skipif(not FINDS_BACKENDS, reason="this torch looks for no backends")
@pytest.mark.skipif("tide" not in entry_points(), reason="tide is not installed, only importable")
def test_found_without_an_import() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    done = run_pair(store.port, "no import", "once")
    assert [code for code, _ in done] == [0, 0], done


def modules_after_import(rank: int, world: int) -> dict[str, Any]:
    code = (
        "import tide_backend, sys, torch, torch.distributed as dist\n"
        "print(torch.cuda.is_initialized(), dist.is_initialized())"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return {"out": done.stdout.split(), "err": done.stderr}


def test_import_starts_nothing() -> None:
    (result,) = run_ranks(1, modules_after_import, backend=None)
    assert result["out"] == ["False", "False"], result

"""`python -m tide_backend.check`: true on this machine, and says the remedy when something is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tide_backend
from tide_backend import check, registration

ROOT = Path(__file__).resolve().parent.parent


def run_check(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tide_backend.check", *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def lines_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in json.loads(done.stdout)["lines"]}


def test_this_machine() -> None:
    done = run_check("--json")
    lines = lines_of(done)
    assert lines["extension"]["level"] == lines["gloo"]["level"] == "fine"
    assert lines["shared memory"]["level"] == "fine" and "zero_copy" in lines["shared memory"]["text"]
    assert lines["FSDP2"]["text"] == "the seam fits this torch"
    levels = [line["level"] for line in lines.values()]
    assert done.returncode == (1 if "degraded" in levels else 0)
    assert all(line["remedy"] for line in lines.values() if line["level"] != "fine")


def test_switched_off_shared_memory_is_degraded() -> None:
    done = run_check("--json", TIDE_SHARED_MEMORY="0")
    lines = lines_of(done)
    assert done.returncode == 1
    assert lines["environment"]["level"] == lines["shared memory"]["level"] == "degraded"
    assert "switched off" in lines["shared memory"]["text"]


def test_a_wrong_variable_is_unusable() -> None:
    done = run_check(TIDE_STAGING_BYTES="many")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "unusable  environment" in done.stdout and "TIDE_STAGING_BYTES=many is not allowed" in done.stdout
    assert "-> correct or unset that variable" in done.stdout and "verdict: unusable" in done.stdout


def test_a_missing_extension_is_unusable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise ImportError("tide_backend was built for torch 1 and is imported under torch 2")

    monkeypatch.setattr(registration, "load_extension", missing)
    assert check.main([]) == 2
    out = capsys.readouterr().out
    assert "built for torch 1" in out and "-> build it" in out


def test_little_memory_and_few_files_are_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_read", lambda path: ["MemAvailable: 1024 kB"] if "meminfo" in path else [])
    assert (check.memory().level, check.memory().text[:7]) == (check.DEGRADED, "0.0 GiB")
    monkeypatch.setattr(
        check, "_read", lambda path: {"memory.max": ["5000000000"], "memory.current": ["4000000000"]}.get(path[15:], [])
    )
    assert (check.memory().level, check.memory().text[:7]) == (check.DEGRADED, "0.9 GiB")
    monkeypatch.setattr(check.resource, "getrlimit", lambda which: (256, 256))
    assert check.open_files().level == check.DEGRADED and "256" in check.open_files().text


def gpu_line(monkeypatch: pytest.MonkeyPatch, count: int, **C: Any) -> check.Line:
    fake = {
        "with_cuda_kernels": True,
        "driver_problem": lambda: "",
        "set_nccl_candidates": lambda candidates: None,
        "env": lambda: {"nccl_library": ""},
        "nccl": lambda: ("", 23203, ""),
    }
    monkeypatch.setattr(tide_backend, "_C", SimpleNamespace(**(fake | C)))
    monkeypatch.setattr(check.torch.version, "cuda", "13.0")
    monkeypatch.setattr(check.torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(check.dist, "is_nccl_available", lambda: True)
    return check.gpus()


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_line(monkeypatch, 0).text == "none: CPU ranks only"
    assert gpu_line(monkeypatch, 2).level == "fine"
    bad = {
        "built without": gpu_line(monkeypatch, 2, with_cuda_kernels=False),
        "no driver": gpu_line(monkeypatch, 2, driver_problem=lambda: "no driver"),
        "nccl is too old": gpu_line(monkeypatch, 2, nccl=lambda: ("", 22000, "nccl is too old")),
    }
    for text, line in bad.items():
        assert line.level == "degraded" and text in line.text and line.remedy, line


def test_the_worst_line_decides() -> None:
    def line(level: str) -> check.Line:
        return check.Line("x", level, "")

    assert check.worst([]) == "fine"
    assert check.worst([line("fine"), line("degraded"), line("fine")]) == "degraded"
    assert check.worst([line("degraded"), line("unusable")]) == "unusable"


def test_a_missing_module_is_unusable_in_words(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("_C*", "_build.py", "__pycache__")
    shutil.copytree(ROOT / "tide_backend", tmp_path / "tide_backend", ignore=ignore)
    # An editable installation's finder would still find the built module; this runs behind it.
    forget = 'import sys\nsys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in repr(f)]\n'
    (tmp_path / "sitecustomize.py").write_text(forget)
    done = subprocess.run(
        [sys.executable, "-m", "tide_backend.check"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "unusable  extension" in done.stdout and "-> build it: pip install --no-build-isolation" in done.stdout

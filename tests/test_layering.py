"""The layering check passes on the sources, and finds what is planted."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "ci" / "layering.py"

spec = importlib.util.spec_from_file_location("layering", SCRIPT)
assert spec and spec.loader
layering = importlib.util.module_from_spec(spec)
sys.modules["layering"] = layering
spec.loader.exec_module(layering)


def plant(root: Path, **files: str) -> list[str]:
    """Violations in a tree of these files ("__" stands for "/", the ending comes first: cpp__...)."""
    for name, text in files.items():
        ending, *parts = name.split("__")
        path = root.joinpath(*parts).with_suffix(f".{ending}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return layering.check(root)


SOUND = {
    "h__csrc__kernels__copy": "#pragma once\n",
    "h__csrc__backend__plan": '#include <vector>\n#include "types.h"\n',
    "h__csrc__backend__types": "#pragma once\n",
    "h__csrc__backend__transport": '#include "types.h"\n',
    "cpp__csrc__backend__executor": '#include "plan.h"\n#include "transport.h"\n#include "../kernels/copy.h"\n',
    "h__csrc__backend__executor": "#pragma once\n",
    "cpp__csrc__backend__backend": '#include <torch/extension.h>\n#include "executor.h"\n',
    "cpp__csrc__backend__bindings": "#include <pybind11/stl.h>\n",
    "py__tide_backend__fsdp2__seams": "import torch.distributed.fsdp\n",
    "py__tide_backend__report": "import torch.distributed as dist\nfrom . import fsdp2\n",
}

PLANTED = [
    (
        "cpp__csrc__backend__plan_x",
        '\n#include "transport.h"\n',
        "plan_x.cpp:2: plan includes csrc/backend/transport.h",
    ),
    (
        "cpp__csrc__backend__shm_x",
        '#include "plan.h"\n',
        "shm_x.cpp:1: transport includes csrc/backend/plan.h",
    ),
    ("cpp__csrc__backend__shm_x", '#include "executor.h"\n', "transport includes csrc/backend/executor.h"),
    (
        "cu__csrc__kernels__x",
        '#include "../backend/plan.h"\n',
        "x.cu:1: kernels includes csrc/backend/plan.h",
    ),
    ("cu__csrc__kernels__x", '#include "backend/executor.h"\n', "kernels includes csrc/backend/executor.h"),
    ("cpp__csrc__backend__types_", "", "types_.cpp: is in no layer"),
    (
        "cpp__csrc__backend__engine",
        "#include <ATen/ATen.h>\n",
        "engine includes ATen/ATen.h; only backend and",
    ),
    ("cpp__csrc__backend__executor_x", "# include <c10/util/x.h>\n", "executor includes c10/util/x.h"),
    ("cpp__csrc__backend__plan_x", "#include <torch/torch.h>\n", "plan includes torch/torch.h"),
    (
        "py__tide_backend__bench__x",
        "def f():\n    from torch.distributed.fsdp import FSDPModule\n",
        "bench/x.py:2:",
    ),
    (
        "py__tide_backend__x",
        "from torch.distributed import fsdp\n",
        "tide_backend/x.py:1: imports torch.distributed.fsdp",
    ),
    (
        "py__tide_backend__x",
        "import torch.distributed.fsdp._fully_shard as f\n",
        "only tide_backend/fsdp2 may know FSDP2",
    ),
]


def test_sound_files_pass(tmp_path: Path) -> None:
    assert plant(tmp_path, **SOUND) == []


@pytest.mark.parametrize(("name", "text", "message"), PLANTED)
def test_planted_violation_is_found(tmp_path: Path, name: str, text: str, message: str) -> None:
    found = plant(tmp_path, **SOUND, **{name: text})
    assert len(found) == 1 and message in found[0], found


def test_the_sources_pass() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_exit_code_of_a_violation(tmp_path: Path) -> None:
    plant(tmp_path, py__tide_backend__x="import torch.distributed.fsdp\n")
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "layering: 1 violations" in done.stdout

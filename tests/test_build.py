"""The build: a module of another torch and an isolated build are refused in words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_module_of_another_torch_names_both_versions() -> None:
    done = run(
        "import sys, types\n"
        "stamp = types.ModuleType('tide_backend._build'); stamp.TORCH_VERSION = '2.99.0'\n"
        "sys.modules['tide_backend._build'] = stamp\n"
        "import tide_backend"
    )
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert "built for torch 2.99.0" in message
    assert f"imported under torch {torch.__version__}" in message
    assert "pip install --no-build-isolation -e ." in message


def test_isolated_build_is_refused() -> None:
    done = run(
        "import sys, runpy; sys.argv = ['setup.py', '--version']; sys.path.insert(0, '/tmp/pip-build-env-x/overlay')\n"
        "runpy.run_path('setup.py')"
    )
    assert done.returncode != 0
    assert "refusing an isolated build" in done.stderr
    assert "pip install --no-build-isolation -e ." in done.stderr


def test_bad_cuda_choice_is_refused() -> None:
    done = run("import sys, runpy; sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py')", TIDE_CUDA="maybe")
    assert done.returncode != 0
    assert "TIDE_CUDA=maybe is not allowed; expected auto, 0 or 1" in done.stderr


def test_one_cpp_library_in_the_process() -> None:
    """A second, static one would break the streams of C++."""
    from tide_backend import _C


    def said(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    assert "Shared library: [libstdc++.so.6]" in said("readelf", "-d", _C.__file__)
    assert "std::locale::locale(" not in said("nm", "-D", "-C", "--defined-only", _C.__file__)


def test_import_opens_no_cuda_context_and_no_group() -> None:
    done = run(
        "import tide_backend, torch, torch.distributed as dist\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not dist.is_initialized()\n"
        "import sys\n"
        "assert 'torch.distributed.fsdp' not in sys.modules\n"
        "tide_backend.register(); tide_backend.register()\n"
        "print(dist.Backend.backend_list.count('tide'))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"

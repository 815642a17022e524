"""Builds kernels_alone.cpp with the kernels' objects that setup.py has made, and runs it: alone, and under
compute-sanitizer's memcheck and racecheck where that is on the machine. `python tests/gpu/kernels_alone.py`
exits with 0 if all of them found nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.cpp_extension import CUDA_HOME

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = [ROOT / "tests/gpu/kernels_alone.cpp", ROOT / "csrc/backend/types.cpp", ROOT / "csrc/backend/error.cpp"]
TOOLS = ("memcheck", "racecheck")
# Each tool by itself; the program takes a second without them.
LIMIT_S = 30


def in_cuda(pattern: str) -> list[Path]:
    """Beside torch, whose runtime the extension uses, and in the toolkit."""
    beside = (Path(torch.__file__).resolve().parent.parent / "nvidia").glob("*")
    places = [*beside, Path(CUDA_HOME or "/usr/local/cuda"), Path("/usr/local/cuda")]
    return [found for place in places for found in sorted(place.glob(pattern))]


def kernels() -> list[Path]:
    """The objects of the last build of this Python."""
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    built = [o for o in ROOT.glob("build/temp.*/csrc/kernels/*_cuda.o") if tag in str(o)]
    sources = {source.stem for source in (ROOT / "csrc/kernels").glob("*_cuda.cu")}
    if missing := sources - {o.stem for o in built}:
        raise SystemExit(f"kernels are not built ({', '.join(sorted(missing))}): run setup.py build_ext --inplace")
    return [o for o in built if o.stem in sources]


def build(program: Path) -> dict[str, str]:
    """The environment that the program needs to find the CUDA runtime."""
    name = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
    runtime = in_cuda(f"lib*/{name}")
    if CUDA_HOME is None or not runtime:
        raise SystemExit(f"found no nvcc (CUDA_HOME) or no {name}, neither beside torch nor there")
    # nvcc knows its headers. As the kernels: no fused multiply-add, which would round once where they round twice.
    flags = ["-std=c++17", "-O2", "-g", "-Xcompiler", "-ffp-contract=off", f"-I{ROOT / 'csrc'}"]
    link = ["-cudart", "none", "-Xlinker", "--no-as-needed", "-Xlinker", runtime[0]]
    command = [Path(CUDA_HOME, "bin", "nvcc"), *flags, *SOURCES, *kernels(), *link, "-o", program]
    subprocess.run([str(word) for word in command], check=True)
    return {**os.environ, "LD_LIBRARY_PATH": f"{runtime[0].parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"}


def sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    return found or next((str(p) for p in in_cuda("bin/compute-sanitizer")), None)


def run(name: str, command: list[str], env: dict[str, str]) -> bool:
    start = time.monotonic()
    print(f"-- {name}", flush=True)
    try:
        status = subprocess.run(command, env=env, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        status = f"none after {LIMIT_S} s"
    print(f"-- {name}: status {status}, {time.monotonic() - start:.1f} s", flush=True)
    return status == 0


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "kernels_alone")
        env = build(program)
        good = [run("alone", [str(program)], env)]
        tool = sanitizer()
        if tool is None:
            print("compute-sanitizer is not on this machine: the kernels ran without it")
        else:
            for name in TOOLS:
                command = [tool, "--tool", name, "--error-exitcode", "9", str(program)]
                good.append(run(name, command, env))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())

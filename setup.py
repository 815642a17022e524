"""Builds tide_backend._C against the torch of the running Python.

Build with ``pip install --no-build-isolation -e .``: the extension fits exactly one torch. Build options:

``TIDE_CUDA=auto|0|1``
    auto (default): with CUDA where torch has CUDA and nvcc of the same major version is found; 0: never; 1: fail
    when that is not possible.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
OLDEST = (2, 11)

if "pip-build-env-" in sys.prefix + os.environ.get("PYTHONPATH", "") + "".join(sys.path):
    raise SystemExit(
        "tide: refusing an isolated build: it would compile against a torch of its own, and the result would not "
        "load under yours. Use: pip install --no-build-isolation -e ."
    )

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    raise SystemExit(f"tide: cannot build without torch in this Python ({error}). Install torch first.") from error


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def nvcc_version() -> str | None:
    """Release of the nvcc that cpp_extension would call, such as "13.0"; None without one."""
    home = cpp_extension.CUDA_HOME
    nvcc = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None
    if nvcc is None:
        return None
    out = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+\.\d+)", out)
    return found.group(1) if found else None


def gencode(nvcc: str | None) -> list[str]:
    """nvcc's -gencode flags: every architecture from sm_80 on that it knows, and PTX of the newest."""
    archs = ["80", "90"] + (["100"] if nvcc and float(nvcc) >= 12.8 else [])
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    return [*flags, f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"]


def choose_cuda() -> tuple[bool, str]:
    """Whether to build with CUDA, and why."""
    wanted = os.environ.get("TIDE_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"tide: TIDE_CUDA={wanted} is not allowed; expected auto, 0 or 1")
    if wanted == "0":
        return False, "TIDE_CUDA=0"
    nvcc = nvcc_version()
    if torch.version.cuda is None:
        able, why = False, "this torch has no CUDA"
    elif nvcc is None:
        able, why = False, "no nvcc found (CUDA_HOME)"
    elif nvcc.split(".")[0] != torch.version.cuda.split(".")[0]:
        able, why = False, f"nvcc {nvcc} does not fit torch's CUDA {torch.version.cuda}"
    else:
        able, why = True, f"nvcc {nvcc}, torch CUDA {torch.version.cuda}"
    if wanted == "1" and not able:
        raise SystemExit(f"tide: TIDE_CUDA=1, but {why}")
    return able, why


def cudart() -> Path:
    """The CUDA runtime that torch loads, by its versioned name: pip's packages have no plain libcudart.so."""
    name = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
    site = Path(torch.__file__).resolve().parent.parent / "nvidia"
    places = [*site.glob(f"*/lib/{name}"), *Path(cpp_extension.CUDA_HOME).glob(f"lib*/{name}")]
    if not places:
        raise SystemExit(f"tide: {name} was found neither beside torch nor in {cpp_extension.CUDA_HOME}; TIDE_CUDA=0")
    return places[0]


def runtime_library() -> list[str]:
    """The C++ library that torch has loaded, to be linked before the compiler's own choice.

    A compiler that finds only a static one would put a second copy into the module, whose streams do not work beside
    torch's.
    """
    maps = Path("/proc/self/maps").read_text().split() if sys.platform == "linux" else []
    found = sorted({word for word in maps if "/libstdc++.so.6" in word})
    if len(found) > 1:
        raise SystemExit(f"tide: this Python has loaded several C++ libraries: {', '.join(found)}; remove all but one")
    return found


class BuildAndStamp(cpp_extension.BuildExtension):
    """Leaves the torch version beside the module, so that a mismatch can be told in words before loading it."""

    def run(self) -> None:
        super().run()
        target = ROOT / "tide_backend" if self.inplace else Path(self.build_lib) / "tide_backend"
        (target / "_build.py").write_text(f'TORCH_VERSION = "{torch.__version__}"\n')


def main() -> None:
    if torch_version() < OLDEST:
        raise SystemExit(f"tide: torch {torch.__version__} is too old; expected 2.11 or newer")
    cuda, why = choose_cuda()
    sources = sorted(glob("csrc/backend/**/*.cpp", root_dir=ROOT, recursive=True))
    sources += sorted(glob("csrc/kernels/*.cpp", root_dir=ROOT))
    cxx = ["-std=c++17" if torch_version() < (2, 14) else "-std=c++20", "-O3", "-fvisibility=hidden"]
    cxx += ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]
    # A fused multiply-add rounds once where the numerics contract rounds twice.
    cxx += ["-ffp-contract=off"]
    options = {"include_dirs": [str(ROOT / "csrc")], "extra_compile_args": {"cxx": cxx}}
    options["extra_link_args"] = runtime_library()
    if cuda:
        sources += sorted(glob("csrc/kernels/*.cu", root_dir=ROOT))
        options["define_macros"] = [("TIDE_WITH_CUDA", "1")]
        # Kernels include no torch header.
        options["extra_compile_args"]["nvcc"] = ["-O3", "--fmad=false", "-std=c++17", *gencode(nvcc_version())]
        options["extra_link_args"].append(str(cudart()))
        options["include_dirs"].append(str(Path(cpp_extension.CUDA_HOME) / "include"))
    # Not CUDAExtension: it links torch's CUDA libraries, which tide does not use, and a plain libcudart.
    extension = cpp_extension.CppExtension("tide_backend._C", sources, **options)
    print(
        f"tide: building for torch {torch.__version__}, Python {sys.version.split()[0]}, "
        f"CUDA {'yes' if cuda else 'no'} ({why}), {len(sources)} sources",
        file=sys.stderr,
    )
    setup(
        packages=find_packages(include=["tide_backend", "tide_backend.*"]),
        package_data={"tide_backend.simulate": ["*.json"]},
        ext_modules=[extension],
        cmdclass={"build_ext": BuildAndStamp},
    )


main()

"""What this machine can do: ``python -m tide_backend.check [--json]``.

One line per thing, with its remedy where it is not as it could be. Exit code 0: all fine; 1: tide works, with less
than it could do (degraded); 2: tide does not work here (unusable).
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FINE, DEGRADED, UNUSABLE = "fine", "degraded", "unusable"
EXIT_CODES = {FINE: 0, DEGRADED: 1, UNUSABLE: 2}
FINDS_ENTRY_POINTS = (2, 14)
LITTLE_MEMORY = 2 << 30
FEW_FILES = 1024
TRIAL_S = 30


@dataclass(frozen=True)
class Line:
    """One finding. remedy: what to do about it, empty when fine."""

    name: str
    level: str
    text: str
    remedy: str = ""


def extension() -> Line:
    from .registration import load_extension

    try:
        built = load_extension().torch_version
    except ImportError as error:
        remedy = "build it: pip install --no-build-isolation -e . (or bash ci/quickstart.sh)"
        return Line("extension", UNUSABLE, str(error), remedy)
    return Line("extension", FINE, f"built for torch {built}, runs under torch {torch.__version__}")


def environment() -> Line:
    from . import _C

    try:
        values = _C.env()
    except ValueError as error:
        return Line("environment", UNUSABLE, str(error), "correct or unset that variable")
    if not values["shared_memory"]:
        return Line("environment", DEGRADED, "TIDE_SHARED_MEMORY=0 hands every CPU collective to gloo", "unset it")
    if not values["fsdp2"]:
        return Line("environment", DEGRADED, "TIDE_FSDP2=0 leaves FSDP2 its layout copies", "unset it")
    return Line("environment", FINE, "every TIDE_* variable is known and allowed")


def gloo() -> Line:
    if dist.is_available() and dist.is_gloo_available():
        return Line("gloo", FINE, "there, for what tide does not do itself on CPU tensors")
    return Line("gloo", UNUSABLE, "this torch has no gloo", "install a torch build with torch.distributed and gloo")


def shared_memory() -> Line:
    """Two real ranks try it."""
    from .bench import launch

    launch.prepare()
    # By its full name: in `python -m` this module is __main__, which a rank cannot import.
    ranks = importlib.import_module("tide_backend.check").trial
    try:
        (results,) = list(launch.launch(ranks, 2))
    except launch.RankFailed as error:
        last = str(error).strip().splitlines()[-1]
        return Line(
            "shared memory",
            UNUSABLE,
            f"two ranks could not run: {last}",
            "the text says what failed; TIDE_SHARED_MEMORY=0 leaves the work to gloo",
        )
    shared, reason, path = results[0]
    if not shared:
        remedy = "allow memfd_create, Unix sockets between the ranks and futexes (container seccomp, limits)"
        return Line("shared memory", DEGRADED, f"ranks cannot share memory, gloo does the work: {reason}", remedy)
    return Line("shared memory", FINE, f'two ranks share memory (all-gather into the arena: "{path}")')


def trial(rank: int, world: int, store: Any) -> Iterator[tuple[bool, str, str]]:
    """On each of two ranks: whether memory is shared, why not, and the path of an all-gather into the arena."""
    importlib.import_module("tide_backend")
    from .bench.names import all_gather

    timeout = timedelta(seconds=TRIAL_S)
    dist.init_process_group("tide", store=store, rank=rank, world_size=world, timeout=timeout)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    shared, reason = backend.connect()
    slot, _ = backend.slot(world * 4)
    out = torch.empty(world) if slot is None else slot.view(torch.float32)
    all_gather(out, torch.full((1,), float(rank)))
    if out.tolist() != [float(r) for r in range(world)]:
        raise AssertionError(f"an all-gather gave {out.tolist()}")
    yield shared, reason, backend.records()[-1]["path"]
    del slot, out
    dist.destroy_process_group()


def memory() -> Line:
    bounds = [int(line.split()[1]) * 1024 for line in _read("/proc/meminfo") if line.startswith("MemAvailable")]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = _read(limit), _read(used)
        if most and now and most[0].isdigit():
            bounds.append(max(0, int(most[0]) - int(now[0])))
    if not bounds:
        return Line("memory", FINE, "unknown: neither /proc/meminfo nor a cgroup can be read")
    text = f"{min(bounds) / 2**30:.1f} GiB free for gathered parameters and everything else"
    if min(bounds) < LITTLE_MEMORY:
        return Line("memory", DEGRADED, text, "free memory or raise the cgroup's limit; without it calls go staged")
    return Line("memory", FINE, text)


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def open_files() -> Line:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < FEW_FILES:
        text = f"{limit} open files a process; groups with many ranks need several each per peer"
        return Line("open files", DEGRADED, text, f"ulimit -n {FEW_FILES} or more")
    return Line("open files", FINE, "enough open files a process")


def fsdp2_seam() -> Line:
    from . import fsdp2

    importlib.import_module("torch.distributed.fsdp")
    if fsdp2.install() == "installed":
        return Line("FSDP2", FINE, "the seam fits this torch")
    text = "FSDP2 keeps its own path: " + "; ".join(fsdp2.problems() or [fsdp2.state()])
    return Line("FSDP2", DEGRADED, text, "use a tide release for this torch")


def discovery() -> Line:
    found = any(e.name == "tide" for e in entry_points(group="torch.distributed.backends"))
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found and version >= FINDS_ENTRY_POINTS:
        return Line("discovery", FINE, 'torch finds backend "tide" by itself')
    if not found:
        text = "tide_backend is importable but not installed: programs must import it themselves"
        return Line("discovery", FINE, text, "pip install --no-build-isolation -e . makes torch >= 2.14 find it")
    return Line("discovery", FINE, "this torch finds no backends by itself: import tide_backend in the program")


def gpus() -> Line:
    from . import _C
    from .registration import nccl_candidates

    count = torch.cuda.device_count() if torch.version.cuda else 0
    if count == 0:
        return Line("GPUs", FINE, "none: CPU ranks only")
    name = f"{count} ({'built with' if _C.with_cuda_kernels else 'built without'} CUDA kernels)"
    if not dist.is_nccl_available():
        return Line("GPUs", DEGRADED, f"{name}: this torch has no nccl", "install a torch build with nccl")
    if not _C.with_cuda_kernels:
        remedy = "install the CUDA toolkit of torch's CUDA version and build again with TIDE_CUDA=1"
        return Line("GPUs", DEGRADED, f"{name}: nccl does the work on CUDA tensors", remedy)
    if problem := _C.driver_problem():
        return Line("GPUs", DEGRADED, f"{name}: {problem}", "update the NVIDIA driver")
    _C.set_nccl_candidates(nccl_candidates(_C.env()["nccl_library"]))
    library, version, problem = _C.nccl()
    if problem:
        remedy = "pip install 'nvidia-nccl-cu13>=2.31' (cu12 for CUDA 12), or set TIDE_NCCL_LIBRARY"
        return Line("GPUs", DEGRADED, f"{name}: {problem}", remedy)
    return Line("GPUs", FINE, f"{name}, nccl {version} ({library or 'of torch'})")


# Without the first ones, the others cannot be asked.
NEEDED: tuple[Callable[[], Line], ...] = (extension, environment, gloo)
FURTHER: tuple[Callable[[], Line], ...] = (shared_memory, memory, open_files, fsdp2_seam, discovery, gpus)


def run() -> list[Line]:
    """Every line; only the first ones when tide is unusable."""
    lines = []
    for check in NEEDED:
        lines.append(check())
        if lines[-1].level == UNUSABLE:
            return lines
    return lines + [check() for check in FURTHER]


def worst(lines: Sequence[Line]) -> str:
    return max((line.level for line in lines), key=EXIT_CODES.__getitem__, default=FINE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tide_backend.check", description="what tide can do here")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    lines = run()
    if given.json:
        print(json.dumps({"verdict": worst(lines), "lines": [asdict(line) for line in lines]}, indent=1))
    else:
        for line in lines:
            print(f"{line.level:>8}  {line.name:<14} {line.text}")
            if line.remedy:
                print(f"{'':>8}  {'':<14} -> {line.remedy}")
        print(f"verdict: {worst(lines)}")
    return EXIT_CODES[worst(lines)]


if __name__ == "__main__":
    sys.exit(main())

"""Builds the C++ tests of the shm transport with plain g++ (no torch) and runs each case with a deadline."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "cpp"
CSRC = Path(__file__).parent.parent / "csrc"
PARTS = ("types", "error", "fork_guard", "memory_limit", "range_allocator")
SOURCES = [
    *(CSRC / "backend" / f"{name}.cpp" for name in PARTS),
    *sorted((CSRC / "backend").glob("shm_*.cpp")),
    CSRC / "kernels" / "accumulate.cpp",
    CSRC / "kernels" / "copy.cpp",
]
PROGRAMS = {
    "test_shm": [
        "copies",
        "exchange",
        "forked_child",
        "nothing_left",
        "out_of_memory",
        "ping_pong",
        "random_arrival",
        "threads",
    ],
    "test_shm_connect": [
        "address_space",
        "killed_in_the_handshake",
        "late_rank",
        "missing_rank",
        "network_namespace",
        "stranger",
        "unable_rank",
    ],
    "test_shm_peers": [
        "aborting_rank",
        "early_leaver",
        "killed_rank",
        "stopped_rank",
        "wrong_sequence",
    ],
}
CASES = [(program, case) for program, cases in PROGRAMS.items() for case in cases]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def _build(folder: Path, flags: tuple[str, ...]) -> None:
    common = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    objects = []
    for source in SOURCES:
        target = folder / f"{source.stem}.o"
        command = [*common, "-c", str(source), "-o", str(target)]
        if source.stem == "accumulate":
            # Its functions that choose a clone run before the thread sanitizer is ready.
            command.append("-fno-sanitize=thread")
        subprocess.run(command, check=True, timeout=200)
        objects.append(str(target))
    for name in [*PROGRAMS, "test_arena"]:
        command = [*common, str(TESTS / f"{name}.cpp"), *objects, "-o", str(folder / name)]
        subprocess.run(command, check=True, timeout=200)


def _run(folder: Path, *command: str) -> str:
    arguments = [str(folder / command[0]), *command[1:]]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shm")
    _build(folder, ("-O2",))
    return folder


@pytest.mark.parametrize(("program", "case"), CASES)
def test_shm(plain: Path, program: str, case: str) -> None:
    _run(plain, program, case)


@pytest.mark.parametrize(("program", "cases"), PROGRAMS.items())
def test_cases_are_complete(plain: Path, program: str, cases: list[str]) -> None:
    assert _run(plain, program, "--list").split() == cases


def test_arena(plain: Path) -> None:
    _run(plain, "test_arena")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitized(tmp_path: Path, sanitizer: str) -> None:
    # The vptr check opens pipes, which fails in the case that leaves no descriptor. gcc warns (tsan) that the
    # thread sanitizer does not model fences.
    quiet = ("-fno-sanitize=vptr", "-fno-sanitize-recover=all", "-Wno-tsan")
    _build(tmp_path, ("-O1", "-g", f"-fsanitize={sanitizer}", *quiet))
    _run(tmp_path, "test_arena")
    # Under the thread sanitizer only ranks that are threads of one process are of interest; sanitizers reserve more
    # address space than the case about its limit leaves.
    for program, case in CASES:
        if case == "threads" if sanitizer == "thread" else case != "address_space":
            _run(tmp_path, program, case)

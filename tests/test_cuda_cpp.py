"""Builds the C++ tests of the CUDA transport with plain g++ and fake devices, and runs each case with a deadline."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "cpp"
CSRC = Path(__file__).parent.parent / "csrc"
PARTS = (
    "agreement engine env error executor fork_guard lane layout meeting memory_limit plan plan_all_gather "
    "plan_all_to_all plan_reduce_scatter range_allocator recorder select strided types"
)
SOURCES = [
    *(CSRC / "backend" / f"{name}.cpp" for name in PARTS.split()),
    *sorted((CSRC / "backend").glob("shm_*.cpp")),
    *sorted((CSRC / "backend" / "cuda").glob("*.cpp")),
    CSRC / "kernels" / "accumulate.cpp",
    CSRC / "kernels" / "copy.cpp",
]
COLLECTIVES = [
    "all_gather",
    "all_gather_in_one_queue",
    "all_to_all",
    "all_to_all_in_one_queue",
    "all_to_all_of_other_splits",
    "all_to_all_without_kernels",
    "all_to_all_without_staging",
    "reduce_scatter",
    "reduce_scatter_in_one_queue",
    "tiny_parameters",
    "tiny_parameters_in_one_queue",
    "tiny_parameters_without_kernels",
]
PLAIN = [
    "plain_bytes_differ",
    "plain_calls",
]
SLOTS = [
    "no_memory_for_a_second_slot",
    "one_group_of_parameters_has_one_slot",
    "slot_on_the_default_stream",
    "slot_reuse",
    "slot_reuse_behind_a_reader",
    "slot_reuse_differs",
    "slots_take_turns",
    "slots_take_turns_behind_one_rank",
    "storage_outlives_group",
    "uneven_free_lists",
]
GROUP = [
    "bad_call_of_one_rank",
    "capture_elsewhere",
    "forked_child",
    "overlap",
    "overlap_with_slot_reuse",
    "two_groups",
]
REFUSALS = [
    "connect_refused",
    "growth_after_making_room",
    "growth_refused",
    "one_rank_declines",
    "windows_refused",
]
PEERS = [
    "dead_peer",
    "early_leaver",
    "nothing_runs_on_garbage",
    "stuck_peer",
    "stuck_peer_and_blocked_host",
    "stuck_peer_with_multicast",
]
FAILURE = [
    "aborted_during_a_call",
    "caller_aborts",
    "destroyed_while_stuck",
    "device_lost",
    "driver_error_in_a_plan",
    "interrupted_slot",
]
MULTICAST = [
    "all_gather",
    "all_gather_in_one_queue",
    "asked_by_some",
    "library_without_it",
    "not_asked_for",
    "other_offsets",
    "refused_by_environment",
    "segments_without_it",
    "two_ranks",
    "while_a_slot_is_read",
]
STRIDED = [
    "exchange",
    "exchange_in_one_queue",
    "exchange_without_kernels",
    "one_copy_a_part",
    "refused_copy",
    "rows_that_do_not_fit",
]
TABLES = [
    "candidates",
    "contexts",
    "driver_errors",
    "nccl_errors",
    "nothing_there",
    "real_driver",
    "second_library",
    "table_of_the_process",
    "versions",
]
PROGRAMS = {
    "test_cuda_collectives": COLLECTIVES,
    "test_cuda_plain": PLAIN,
    "test_cuda_slots": SLOTS,
    "test_cuda_group": GROUP,
    "test_cuda_refusals": REFUSALS,
    "test_cuda_peers": PEERS,
    "test_cuda_failure": FAILURE,
    "test_cuda_multicast": MULTICAST,
    "test_cuda_strided": STRIDED,
}
CASES = [(program, case) for program, cases in PROGRAMS.items() for case in cases]

# Stand-ins for libnccl.so.2: only what load_nccl() asks of them.
NCCL = """
#include <stdlib.h>
int ncclGetVersion(int* version) { *version = %(version)d; return 0; }
int tideTestGeneration(void) { return %(generation)d; }
const char* ncclGetErrorString(int code) { return "error"; }
const char* ncclGetLastError(void* comm) { return ""; }
int ncclGetUniqueId(char* id) { id[0] = tideTestGeneration(); return 0; }
int ncclCommInitRank() { return 0; }
int ncclCommAbort(void* comm) { return 0; }
int ncclMemAlloc(void** memory, size_t bytes) { *memory = malloc(bytes); return 0; }
int ncclMemFree(void* memory) { free(memory); return 0; }
int ncclCommWindowRegister() { return 0; }
int ncclCommWindowDeregister() { return 0; }
"""
NEW = NCCL % {"version": 23203, "generation": 2}
GOOD = NEW + "int ncclGetPeerDevicePointer() { return 0; }\n"
LIBRARIES = {
    "old": NCCL % {"version": 22809, "generation": 1},
    "incomplete": NEW,
    "good": GOOD,
    "multicast": GOOD + "int ncclGetLsaMultimemDevicePointer() { return 0; }\n",
    "wrong": "int other(void) { return 0; }\n",
}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def _build(folder: Path, flags: tuple[str, ...]) -> None:
    common = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread", *flags]

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        command = [*common, "-c", str(source), "-o", str(target)]
        if source.stem == "accumulate":
            # Its functions that choose a clone run before the thread sanitizer is ready.
            command.append("-fno-sanitize=thread")
        subprocess.run(command, check=True, timeout=200)
        return str(target)

    names = [*PROGRAMS, "test_cuda_tables"]
    with ThreadPoolExecutor(2) as pool:
        tests = list(pool.map(compile_one, [TESTS / f"{name}.cpp" for name in names]))
        objects = list(pool.map(compile_one, SOURCES))
    own = [o for o in objects if Path(o).stem in ("driver", "nccl", "error", "types")]
    for test, name in zip(tests, names, strict=True):
        used = own if name == "test_cuda_tables" else objects
        subprocess.run([*common, test, *used, "-ldl", "-o", str(folder / name)], check=True, timeout=200)
    for name, text in LIBRARIES.items():
        source = folder / f"{name}.c"
        source.write_text(text)
        subprocess.run(["gcc", "-w", "-shared", "-fPIC", str(source), "-o", str(folder / f"lib{name}.so")], check=True)


def _run(folder: Path, *command: str, environment: dict[str, str] | None = None) -> str:
    arguments = [str(folder / command[0]), *command[1:]]
    environment = {**os.environ, **(environment or {})}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    _build(folder, ("-O1",))
    return folder


@pytest.mark.parametrize(("program", "case"), CASES)
def test_cuda(plain: Path, program: str, case: str) -> None:
    _run(plain, program, case)


@pytest.mark.parametrize("case", TABLES)
def test_tables(plain: Path, case: str) -> None:
    _run(plain, "test_cuda_tables", case, str(plain))


@pytest.mark.parametrize(("program", "cases"), [*PROGRAMS.items(), ("test_cuda_tables", TABLES)])
def test_cases_are_complete(plain: Path, program: str, cases: list[str]) -> None:
    assert _run(plain, program, "--list").split() == cases


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitized(tmp_path: Path, sanitizer: str) -> None:
    # gcc warns (tsan) that the thread sanitizer does not model fences.
    quiet = ("-fno-sanitize=vptr", "-fno-sanitize-recover=all", "-Wno-tsan")
    _build(tmp_path, ("-O1", "-g", f"-fsanitize={sanitizer}", *quiet))
    # A fork of a process with threads is what the forked child's case is about.
    environment = {"TSAN_OPTIONS": "die_after_fork=0 halt_on_error=1 exitcode=66"}
    for program, case in CASES:
        if sanitizer == "thread" and case == "forked_child":
            continue
        _run(tmp_path, program, case, environment=environment)
    for case in TABLES:
        _run(tmp_path, "test_cuda_tables", case, str(tmp_path))

"""Jobs as users launch them: torchrun, restarts, notebooks, two jobs on a host, containers.

torch.multiprocessing (spawn, fork) and a restart in one store are in test_processes.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import rank_process
import torch
import torch.distributed as dist
from kernel import Kernel
from rank_data import error_of
from ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "tests/launch_job.py"
DEADLINE_S = 90


def environment(**more: str) -> dict[str, str]:
    outer = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return outer | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"} | more


def said(directory: Path, rank: int, attempt: int = 0) -> dict[str, Any]:
    return json.loads((directory / f"attempt-{attempt}-rank-{rank}.json").read_text())


def torchrun(directory: Path, *job: str, restarts: int = 0) -> tuple[subprocess.CompletedProcess, str]:
    """The finished launcher, and a word that its processes have in their environment."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", str(JOB), str(directory), *job]
    done = subprocess.run(
        command, env=environment(LAUNCH_MARK=mark), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    return done, mark


def alive(mark: str) -> list[int]:
    """Processes with this word in their environment. tide's memory is anonymous: it goes with the last of them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # gone, or another user's
            continue
    return found


def tide_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "tide" in name}


def test_torchrun(tmp_path: Path) -> None:
    done, mark = torchrun(tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        answer = said(tmp_path, rank)
        assert answer["path"] == "zero_copy" and answer["memfds_left"] == 0, answer
    assert alive(mark) == []


def test_torchrun_restarts_after_a_killed_rank(tmp_path: Path) -> None:
    """The second attempt has the first one's store, host and launcher, and meets nothing of it."""
    files = tide_files()
    done, mark = torchrun(tmp_path, "--die", "1", restarts=1)
    assert done.returncode == 0, done.stderr
    # It names whom it saw first: the rank that was killed, or the other one, which raised.
    assert re.search(r"Signal 9 \(SIGKILL\)|exitcode: (-9|1)\)", done.stderr), done.stderr
    first, second = ([said(tmp_path, rank, attempt) for rank in range(2)] for attempt in range(2))
    assert {a["pid"] for a in first}.isdisjoint({a["pid"] for a in second})
    for before, after in zip(first, second, strict=True):
        assert before["path"] == after["path"] == "zero_copy"
        assert after["memfds"] == before["memfds"] and after["memfds_left"] == 0, (before, after)
    assert alive(mark) == []
    assert tide_files() <= files


def calls_for_a_second(rank: int, world: int, number: int, dies: bool) -> tuple[int, str]:
    """How many all-gathers were right, and the error that ended them early. With `dies`, rank 1 kills itself."""
    rank_process.init("tide", timeout_s=20)
    end, out, stop = time.monotonic() + 1, torch.empty(world * 1000), torch.zeros(1)
    for call in range(1_000_000):
        if dies and rank == 1 and time.monotonic() > end - 0.7:
            os.kill(os.getpid(), signal.SIGKILL)
        base = 10.0 * call + number
        kind, text = error_of(dist.all_gather_into_tensor, out, torch.full((1000,), base + rank))
        if kind:
            return call, f"{kind}: {text}"
        want = (torch.arange(float(world)) + base).repeat_interleave(1000)
        if not torch.equal(out, want):
            raise AssertionError(f"job {number}, call {call}: {out}")
        stop.fill_(float(time.monotonic() > end))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            return call + 1, ""
    raise AssertionError("the clock stands still")


def test_two_jobs_side_by_side() -> None:
    """Groups of the same name, ranks and sizes on one host; the death of one job is not the other's."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(
                run_ranks, 2, calls_for_a_second, number, number == 1, backend=None, fresh=True, dies=[1] * number
            )
            for number in range(2)
        ]
        lives, broken = (job.result(DEADLINE_S) for job in jobs)
    assert lives[0] == lives[1] and lives[0][0] > 10 and lives[0][1] == "", lives
    assert broken[0][0] > 0 and broken[0][1].startswith("PeerError") and "rank 1" in broken[0][1], broken


SETUP = """
import sys, time, warnings, torch, torch.distributed as dist, tide_backend
warnings.simplefilter("ignore", FutureWarning)
torch.set_num_threads(1)
def begin(store, rank=0, world=1):
    dist.init_process_group("tide", store=dist.FileStore(store, world), rank=rank, world_size=world)
def gather():
    out = torch.empty(2 * dist.get_world_size())
    dist.all_gather_into_tensor(out, torch.full((2,), dist.get_rank() + 5.0))
    print(out.tolist())
"""


@pytest.fixture
def kernels() -> Iterator[list[Kernel]]:
    both = [Kernel(environment()) for _ in range(2)]
    for kernel in both:
        kernel.start(SETUP)
    yield both
    for kernel in both:
        kernel.close()


def test_notebook_kernels(kernels: list[Kernel], tmp_path: Path) -> None:
    """One process: cells that fail, groups made again. Two: a cell that waits is stopped, then a new group works."""
    first = kernels[0]
    assert [kernel.result(DEADLINE_S) for kernel in kernels] == ["", ""]
    for n in range(2):
        assert first.run(f"begin('{tmp_path}/one{n}'); gather()") == "[5.0, 5.0]\n"
        shown = first.run("dist.all_gather_into_tensor(torch.empty(5), torch.ones(2))")
        assert "UsageError: tide[rank 0/1" in shown and "sizes do not fit" in shown, shown
        assert "trying to initialize the default process group twice" in first.run(f"begin('{tmp_path}/twice')")
        assert first.run("gather(); print(tide_backend.report().collectives[0].path)") == "[5.0, 5.0]\nlocal\n"
        assert first.run("dist.destroy_process_group()") == ""
    assert "Default process group has not been initialized" in first.run("gather()")

    for n in range(2):
        for rank, kernel in enumerate(kernels):
            kernel.start(f"begin('{tmp_path}/two{n}', {rank}, 2); gather()")
        assert [kernel.result() for kernel in kernels] == ["[5.0, 5.0, 6.0, 6.0]\n"] * 2
        if n == 0:
            first.start("print('waits', flush=True); gather()")
            time.sleep(0.5)
            shown, seconds = first.interrupt()
            assert "KeyboardInterrupt" in shown and seconds < 2, (shown, seconds)
            shown = kernels[1].run("gather()")
            assert "PeerError" in shown and "interrupted" in shown, shown
        for kernel in kernels:
            kernel.start("dist.destroy_process_group()")
        assert [kernel.result() for kernel in kernels] == ["", ""]
    assert [kernel.close() for kernel in kernels] == [0, 0]


# A container of one rank: its own /proc, /dev/shm of 64 MB and first process; $LINK: its own network as well.
CONTAINER = """
set -e
mount --make-rprivate /
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -t proc proc /proc
if [ -n "$LINK" ]; then
    ip link set lo up
    until ip link show "$LINK" >/dev/null 2>&1; do sleep 0.05; done
    ip addr add "10.231.77.$((RANK + 1))/24" dev "$LINK"
    ip link set "$LINK" up
fi
exec "$@"
"""


def containers_work() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", "mount -t proc proc /proc && mount -t tmpfs x /mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def run_in_containers(directory: Path, *job: str, link: str = "") -> list[int]:
    """Two ranks, each in a container of its own; `link`: joined by this pair of interfaces. Exit statuses."""
    network = ["--net"] if link else []
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *network, "sh", "-c", CONTAINER, "container"]
    command = [sys.executable, str(JOB), str(directory), "--store", str(directory / "store"), *job]
    ranks = [
        subprocess.Popen(
            [*enter, *command],
            env=environment(RANK=str(rank), WORLD_SIZE="2", LINK=link and f"{link}{rank}")
            | ({"GLOO_SOCKET_IFNAME": f"{link}{rank}"} if link else {}),
        )
        for rank in range(2)
    ]
    try:
        if link:
            ip("link", "add", f"{link}0", "type", "veth", "peer", "name", f"{link}1")
            for rank, process in enumerate(ranks):
                wait_for_network(process.pid)
                ip("link", "set", f"{link}{rank}", "netns", str(process.pid))
        return [process.wait(DEADLINE_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10)


def wait_for_network(pid: int) -> None:
    """Until unshare has left this process's network namespace."""
    end = time.monotonic() + 10
    while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        if time.monotonic() > end:
            raise TimeoutError("unshare makes no network namespace")
        time.sleep(0.02)


ISOLATED = pytest.mark.skipif(not containers_work(), reason="no right to make mount and pid namespaces here")


@ISOLATED
def test_containers_on_one_network_share_memory(tmp_path: Path) -> None:
    """Descriptors travel through sockets, so /dev/shm and /proc matter to nothing; 80 MB go through 64 MB of it."""
    assert run_in_containers(tmp_path, "--bytes", "80000000", "--die", "1") == [1, 9]
    for rank in range(2):
        answer = said(tmp_path, rank)
        assert answer["pid"] == 1 and answer["path"] == "zero_copy", answer
        assert {row["path"] for row in answer["report"]["collectives"]} == {"zero_copy", "staged"}, answer
    lost = said(tmp_path, 0)
    assert lost["error"].startswith("PeerError") and "rank 1 (pid 1" in lost["error"] and lost["seconds"] < 2, lost


@ISOLATED
@pytest.mark.skipif(shutil.which("ip") is None, reason="no program ip")
def test_containers_on_two_networks_use_gloo_and_say_so(tmp_path: Path) -> None:
    """The sockets that carry descriptors end at the network namespace, as between hosts."""
    assert run_in_containers(tmp_path, link=f"tide{os.getpid() % 100_000}") == [0, 0]
    for rank in range(2):
        answer = said(tmp_path, rank)
        assert answer["path"] == "inner", answer
        rows = answer["report"]["collectives"]
        assert {row["op"] for row in rows} == {"all_gather", "reduce_scatter", "all_to_all"}
        assert all(row["path"] == "inner" and "network namespace" in row["reason"] for row in rows), rows

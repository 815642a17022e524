"""Calls at the edges: memory that overlaps, splits that wrap, modes of the caller's thread, ends without farewell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import rank_process
import torch
import torch.distributed as dist
from rank_data import backend, error_of
from ranks import run_ranks

import tide_backend

ROOT = Path(__file__).resolve().parent.parent


def in_memory_of_the_group(rank: int, world: int) -> None:
    """Input and output are one piece of memory that peers write."""
    rows = 50_000
    memory = backend().slot(4 * world * rows)[0].view(torch.float32)
    mine = torch.arange(float(world * rows)) + rank * 10.0**7
    memory.copy_(mine)
    dist.all_to_all_single(memory, memory)
    want = torch.cat([torch.arange(float(rows)) + rank * rows + peer * 10.0**7 for peer in range(world)])
    assert torch.equal(memory, want), "all-to-all in place"
    # From the last rank's place and from across two places: right for no rank but one, or for none.
    for start in ((world - 1) * rows, 7):
        memory.copy_(mine)
        dist.all_gather_into_tensor(memory, memory[start : start + rows])
        part = torch.arange(float(world * rows))[start : start + rows]
        assert torch.equal(memory, torch.cat([part + peer * 10.0**7 for peer in range(world)])), f"from {start}"


@pytest.mark.parametrize("world", [2, 3])
def test_overlapping_memory_of_the_group(world: int) -> None:
    run_ranks(world, in_memory_of_the_group)


def sums_over_summands(rank: int, world: int) -> None:
    """The output lies in the input: at this rank's part, at another's, across two; also wider than they are."""
    n = 200_000
    for start in (rank * n, (rank + 1) % world * n, n // 2):
        memory = torch.arange(float(world * n)) + rank
        want = world * torch.arange(float(n)) + world * rank * n + sum(range(world))
        out = memory[start : start + n]
        dist.reduce_scatter_tensor(out, memory)
        assert torch.equal(out, want), f"from {start}"
        copies = backend().records()[-1]["repair_copies"]
        assert copies == int(start != rank * n), f"from {start}: {copies} copies"
    memory = torch.empty(world * n, dtype=torch.bfloat16)
    memory.copy_(torch.arange(world * n) % 64 + rank)
    want = world * (torch.arange(world * n) % 64).float()[rank * n : (rank + 1) * n] + sum(range(world))
    out = memory[: 2 * n].view(torch.float32)
    dist.reduce_scatter_tensor(out, memory)
    assert torch.equal(out, want), "bfloat16 into float32"


@pytest.mark.parametrize("world", [2, 3])
def test_a_reduce_scatter_into_its_input(world: int) -> None:
    run_ranks(world, sums_over_summands)


def wrapping_splits(rank: int, world: int) -> list[tuple[str, str]]:
    empty = torch.empty(0, dtype=torch.uint8)
    huge = [1 << 62] * 4
    found = [error_of(dist.all_to_all_single, empty, empty, huge, huge)]
    out = torch.empty(world)
    dist.all_to_all_single(out, torch.arange(float(world)))
    assert torch.equal(out, torch.full((world,), float(rank))), "the group goes on"
    return found


def test_splits_whose_sum_wraps() -> None:
    for ((kind, text),) in run_ranks(4, wrapping_splits):
        assert kind == "UsageError", text
        assert "4 sizes beyond what 64 bits hold" in text and "expected 4 sizes" in text, text


def callers_modes(rank: int, world: int) -> None:
    x = torch.arange(6.0) + rank
    want = torch.cat([torch.arange(6.0) + r for r in range(world)])
    parameter = torch.empty(6, world, requires_grad=True)
    with torch.no_grad():
        dist.all_gather_into_tensor(parameter.t(), x, async_op=True).wait()
    assert torch.equal(parameter.detach().t().reshape(-1), want), "a leaf without gradients"
    with torch.inference_mode():
        out = torch.empty(6, world).t()
        dist.all_gather_into_tensor(out, x, async_op=True).wait()
        assert torch.equal(out.reshape(-1), want), "inference mode"


def test_the_callers_modes_hold_on_the_lanes_thread() -> None:
    run_ranks(2, callers_modes)


def switched_off(rank: int, world: int) -> tuple[float, str]:
    options = tide_backend.Options()
    options.shared_memory = rank != 0
    rank_process.init("tide", pg_options=options)
    out = torch.empty(world)
    dist.all_gather_into_tensor(out, torch.full((1,), float(rank)))
    (row,) = tide_backend.report().collectives
    assert row.path == "inner", row
    return float(out.sum()), row.reason


def test_shared_memory_switched_off_on_one_rank() -> None:
    for total, reason in run_ranks(2, switched_off, backend=None):
        assert total == 1.0
        assert "shared memory is switched off (TIDE_SHARED_MEMORY=0 or Options.shared_memory)" in reason


def interrupted_first_call(rank: int, world: int) -> float:
    dist.barrier()
    if rank == 1:
        time.sleep(4)
        return 0.0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started this with SIGINT ignored
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        dist.all_gather_into_tensor(torch.empty(2 * world), torch.ones(2))
    kind, text = error_of(dist.all_gather_into_tensor, torch.empty(2 * world), torch.ones(2))
    assert kind == "PeerError" and "the group cannot be used any more" in text, text
    return time.monotonic() - begin


def test_ctrl_c_ends_the_first_call_and_the_group() -> None:
    seconds = run_ranks(2, interrupted_first_call, fresh=True, group_timeout=20, timeout=40)[0]
    assert seconds < 3


def other_memory(rank: int, world: int) -> None:
    """Tensors get other memory while rank 1 still keeps the calls from being over; the old one is soon used again."""
    n = 1 << 20
    for call in ("all_gather", "all_to_all", "rows", "reduce_scatter", "output"):
        source, out = torch.full((n,), float(rank)), torch.empty(n)
        dist.barrier()
        if rank == 1:
            time.sleep(0.2)
        if call == "all_gather":
            out = torch.empty(world * n)
            work = dist.all_gather_into_tensor(out, source, async_op=True)
        elif call == "reduce_scatter":
            out = torch.empty(n // world)
            work = dist.reduce_scatter_tensor(out, source, async_op=True)
        elif call == "rows":
            source = torch.full((n // 64, 96), float(rank))[:, :64]
            work = dist.all_to_all_single(out.view(-1, 64), source, async_op=True)
        else:
            work = dist.all_to_all_single(out, source, async_op=True)
        if call == "output":
            out.data = torch.zeros(n)
        source.data = torch.empty(0)
        others = [torch.full((n,), -1.0) for _ in range(3)]
        work.wait()
        if call == "output":
            assert not out.any(), "the result belongs to the memory that the call was given"
        elif call == "reduce_scatter":
            assert bool((out == sum(range(world))).all()), call
        else:
            assert all(bool((part == r).all()) for r, part in enumerate(out.chunk(world))), call
        assert all(bool((other == -1).all()) for other in others), call


def test_tensors_may_get_other_memory_before_a_call_is_over() -> None:
    run_ranks(2, other_memory)


ENDS = {
    "calls under way": ("works = [dist.all_gather_into_tensor(out, x, async_op=True) for _ in range(30)]", 0),
    "an error of the program": (
        "work = dist.all_gather_into_tensor(out, x, async_op=True); raise ValueError('of the program')",
        1,
    ),
    "a callback": (
        "work = dist.all_gather_into_tensor(out, x, async_op=True)\n"
        "work.get_future().then(lambda f: time.sleep(0.5))\n"
        "work.wait(); dist.destroy_process_group()",
        0,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_with_its_own_status(end: str, tmp_path: Path) -> None:
    """Not by an abort of threads that still want the interpreter."""
    code, status = ENDS[end]
    program = (
        "import sys, time, torch, torch.distributed as dist, tide_backend\n"
        "rank = int(sys.argv[1])\n"
        f"dist.init_process_group('tide', init_method='file://{tmp_path}/store', rank=rank, world_size=2)\n"
        "out, x = torch.empty(400000), torch.ones(200000)\n"
        "dist.all_gather_into_tensor(out, x)\n" + code
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(rank)], stderr=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    for process in processes:
        _, text = process.communicate(timeout=60)
        assert process.returncode == status, text
        assert "terminate called" not in text


def test_a_forked_child_ends_at_once() -> None:
    """A callback that runs while the process forks does not run in the child, which must not wait for it."""
    program = (
        "import os, sys, time, torch, torch.distributed as dist, tide_backend\n"
        "dist.init_process_group('tide', store=dist.HashStore(), rank=0, world_size=1)\n"
        "work = dist.all_gather_into_tensor(torch.empty(4), torch.ones(4), async_op=True)\n"
        "tide_backend._C._finish_callbacks = lambda longest: print('waited', flush=True)\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print('parent', flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["parent", "waited"]

"""What runs inside one rank of `ranks.RankPool`. A job is over well only if every fallback in it has a reason."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fallback_kinds import unexplained

PR_SET_PDEATHSIG = 1

_state: dict[str, Any] = {"rank": 0, "world": 1, "store": None, "group": None, "made": 0}


def serve(pipe: Connection, rank: int, world: int, port: int) -> None:
    """Run jobs until the pipe is closed."""
    # The fork server is the parent; it ends with the test session, and no rank outlives that.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    stacks = stack_file(os.getpid()).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _state.update(rank=rank, world=world, store=dist.TCPStore("127.0.0.1", port, is_master=False))
    while True:
        try:
            fn, args, group = pipe.recv()
        except (EOFError, OSError):
            break
        except Exception:  # a job whose module does not import here
            pipe.send(("raised", traceback.format_exc()))
            continue
        try:
            _enter(group)
            answer = "ok", fn(rank, world, *args)
            _expect_explained()
        except BaseException:
            answer = "raised", traceback.format_exc()
        try:
            pipe.send(answer)
        except (BrokenPipeError, OSError):
            break
        except Exception:  # a result that does not pickle
            pipe.send(("raised", traceback.format_exc()))
    # Without destroy: peers may be gone, and a destructor that waits for them must not keep this process.
    os._exit(0)


def store() -> Any:
    """A store of this job's own, the same on every rank that asks as often; for jobs with backend=None."""
    import torch.distributed as dist

    _state["made"] += 1
    return dist.PrefixStore(f"job-{_state['made']}/", _state["store"])


def init(backend: str | None = "tide", timeout_s: float = 30, **more: Any) -> None:
    """init_process_group in a store of its own."""
    import torch.distributed as dist

    if backend is not None and "tide" in backend:
        import tide_backend  # noqa: F401  (registers "tide"; torch before 2.14 does not find it by itself)
    dist.init_process_group(
        backend,
        store=store(),
        rank=_state["rank"],
        world_size=_state["world"],
        timeout=timedelta(seconds=timeout_s),
        **more,
    )


def _enter(group: Any) -> None:
    """Make `group` the default process group, unless it is already."""
    import torch.distributed as dist

    if dist.is_initialized() and _state["group"] == group:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    _state["group"] = None
    if group.backend is not None:
        init(group.backend, group.timeout_s)
        _state["group"] = group


def _expect_explained() -> None:
    """Raise AssertionError if a call of this process fell back without a reason, or for one of an unknown kind."""
    tide = sys.modules.get("tide_backend")
    if tide is not None and (rows := unexplained(tide.report())):
        raise AssertionError("fallbacks that explain nothing:\n" + "\n".join(rows))


def stack_file(pid: int) -> Path:
    return Path(tempfile.gettempdir(), f"tide-test-stack-{pid}")


def stack_of(pid: int) -> str:
    """The Python stack of a rank that does not answer (called by the test process)."""
    path = stack_file(pid)
    try:
        os.kill(pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.05)
            if path.stat().st_size:
                break
        return path.read_text() or "(the process does not run)"
    except OSError as error:
        return f"(none: {error})"

"""Registers backend "tide" and makes one for each process group."""

from __future__ import annotations

import atexit
import copy
import importlib
import importlib.util
import os
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .generation import agree

DEVICES = ["cpu", "cuda"]


def load_extension() -> ModuleType:
    """The compiled module.

    Raises:
        ImportError: it is not built, or was built for another torch; says both versions and the remedy.
    """
    remedy = "build it with: pip install --no-build-isolation -e . (or: bash ci/quickstart.sh)"
    try:
        from . import _build
    except ImportError:
        _build = None  # a module built without setup.py's stamp; TORCH_VERSION below still tells
    built = getattr(_build, "TORCH_VERSION", None)
    if built is not None and built != torch.__version__:
        raise ImportError(
            f"tide_backend was built for torch {built} and is imported under torch {torch.__version__}; "
            f"each build fits exactly one torch: {remedy}"
        )
    try:
        return importlib.import_module("tide_backend._C")
    except ImportError as error:
        raise ImportError(
            f"tide_backend's compiled module does not load under torch {torch.__version__}: {error}; {remedy}"
        ) from error


_live: weakref.WeakSet[Any] = weakref.WeakSet()
_owner = os.getpid()


@atexit.register
def _leave() -> None:
    """Before the interpreter goes: tide's threads may still need it. A forked child has none of them."""
    if os.getpid() != _owner:
        return
    for backend in list(_live):  # groups that nobody destroyed
        backend._leave()
    module = sys.modules.get("tide_backend._C")
    if module is not None:
        module._finish_callbacks(timedelta(seconds=10))


def register() -> None:
    """Register "tide" with ``torch.distributed``; calling it again changes nothing."""
    if hasattr(dist.Backend, "TIDE"):
        return
    dist.Backend.register_backend("tide", _create, extended_api=True, devices=list(DEVICES))


def nccl_candidates(preferred: str) -> list[str]:
    """Where an NCCL for device windows may be, in order: torch's own (""), `preferred`, an installed package."""
    candidates = ["", preferred]
    for package in ("nvidia.nccl", "nvidia.cu13.nccl"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or []) if spec else []:
            candidates.append(str(Path(folder) / "lib" / "libnccl.so.2"))
    return [c for i, c in enumerate(candidates) if i == 0 or (c and c not in candidates[:i])]


def _create(opts: Any, pg_options: Any) -> Any:
    """Called by torch.distributed, once per process group.

    Args:
        opts: store, group_rank, group_size, timeout, group_id and global_ranks_in_group of the group.
        pg_options: a :class:`tide_backend.Options` or None (defaults: the environment, see README).

    Raises:
        TypeError: options of another backend.
    """
    from . import _C, fsdp2

    if pg_options is None:
        pg_options = _C.Options()
    elif not isinstance(pg_options, _C.Options):
        raise TypeError(
            f'pg_options of backend "tide": got {type(pg_options).__name__}, expected tide_backend.Options; '
            "pass that, or none"
        )
    pg_options = copy.copy(pg_options)  # the caller may make other groups with it
    pg_options.group_name = str(opts.group_id)
    pg_options.global_ranks_in_group = list(opts.global_ranks_in_group)
    pg_options._timeout = opts.timeout

    # Each group has keys of its own in the store, so that a restart or a second group never meets them.
    store = dist.PrefixStore("tide/", opts.store)
    word = agree(store, opts.group_rank, opts.group_size, opts.timeout, pg_options.group_name)
    store = dist.PrefixStore(f"{word}/", store)
    backend = _C.TideBackend(store, opts.group_rank, opts.group_size, pg_options, _inner_backend)
    # gloo connects all pairs when it is made, so that happens here, where every rank is: a first use by two ranks
    # of four (send and recv) could not make it.
    backend.connect_inner("cpu")
    _live.add(backend)
    env = _C.env()
    _C.set_nccl_candidates(nccl_candidates(env["nccl_library"]))
    if env["fsdp2"]:
        fsdp2.install()
    return backend


def _inner_backend(device: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """The backend of `device` tensors for what tide does not do itself."""
    store = dist.PrefixStore(f"tide-inner-{device}/", store)
    if device == "cpu":
        if not dist.is_gloo_available():
            raise RuntimeError("tide needs gloo for CPU tensors, and this torch has none")
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if device == "cuda":
        if not dist.is_nccl_available():
            raise RuntimeError("tide hands CUDA tensors to nccl, and this torch has none")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    raise RuntimeError(f'tide has no inner backend for "{device}" tensors; expected cpu or cuda')

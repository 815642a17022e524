"""Puts the seam into FSDP2, now or as soon as FSDP2 is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from .journal import Reason, journal

_PACKAGE = "torch.distributed.fsdp._fully_shard"
_TARGET = f"{_PACKAGE}._fsdp_param_group"


class _State:
    def __init__(self) -> None:
        self.word = "not installed"
        self.problems: list[str] = []
        self.finder: _ImportHook | None = None
        self.undo: list[tuple[Any, str, Any]] = []  # owner, name, original


_state = _State()


def install() -> str:
    """Install the seam; idempotent, cheap, and never imports FSDP2 itself.

    Returns ``"installed"``, ``"waiting for FSDP2's import"`` or ``"refused"`` (this PyTorch's FSDP2 is not
    the one the seam knows: a warning says what differs, and FSDP2 keeps its own path).
    """
    if _state.word in ("installed", "refused"):
        return _state.word
    module = sys.modules.get(_TARGET)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _patch_imported()
    elif _state.finder is None:
        _state.finder = _ImportHook()
        sys.meta_path.insert(0, _state.finder)
        _state.word = "waiting for FSDP2's import"
    return _state.word


def uninstall() -> None:
    """Give FSDP2 its own functions back, for models that run their first forward afterwards."""
    for owner, name, original in reversed(_state.undo):
        setattr(owner, name, original)
    if _state.finder in sys.meta_path:
        sys.meta_path.remove(_state.finder)
    _state.__init__()
    journal.install_problem = None


def state() -> str:
    """``"not installed"``, or what ``install()`` returned last."""
    return _state.word


def problems() -> list[str]:
    """Why the seam was refused; empty otherwise."""
    return list(_state.problems)


def install_into(param_group: Any, collectives: Any, param: Any) -> str:
    """Check FSDP2's three modules and patch them; nothing is touched if anything is unexpected."""
    from .contract import contract_problems

    found = contract_problems(param_group, collectives, param)
    if found:
        _refuse(found)
        return _state.word
    # These import from FSDP2, so not before it is there and known.
    from .all_gather import AllGatherSeam
    from .reduce_scatter import copy_in_seam
    from .seams import lazy_init_seam

    gather = AllGatherSeam(param_group, collectives, param)
    group_class = param_group.FSDPParamGroup
    _set(param_group, "foreach_all_gather", gather.foreach_all_gather)
    _set(param_group, "foreach_all_gather_copy_out", gather.foreach_all_gather_copy_out)
    copy_in = copy_in_seam(collectives.foreach_reduce_scatter_copy_in)
    _set(collectives, "foreach_reduce_scatter_copy_in", copy_in)
    _set(group_class, "lazy_init", lazy_init_seam(group_class.lazy_init))
    _state.word = "installed"
    return _state.word


def _patch_imported() -> None:
    names = ("_fsdp_param_group", "_fsdp_collectives", "_fsdp_param")
    install_into(*(sys.modules[f"{_PACKAGE}.{name}"] for name in names))


def _refuse(found: list[str]) -> None:
    _state.word = "refused"
    _state.problems = found
    text = "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
    journal.install_problem = Reason("unknown_fsdp2", text)
    journal.warn(
        "unknown_fsdp2",
        "tide: this PyTorch's FSDP2 differs from what tide's seam knows, so FSDP2 models keep PyTorch's own "
        f"path (right results, no copies avoided): {text}. Use a tide release for this PyTorch version.",
    )


def _set(owner: Any, name: str, value: Any) -> None:
    _state.undo.append((owner, name, owner.__dict__[name]))
    setattr(owner, name, value)


class _ImportHook(importlib.abc.MetaPathFinder):
    """Waits for one module, lets Python's own loader run it, patches, and leaves ``sys.meta_path``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TARGET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        # The loader object stays the original one (inspect and linecache ask it for the source).
        run = spec.loader.exec_module

        def run_then_patch(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                try:
                    _patch_imported()
                except Exception as error:  # importing FSDP2 must work without the seam
                    _refuse([f"installing the seam raised {type(error).__name__}: {error}"])

        spec.loader.exec_module = run_then_patch  # type: ignore[method-assign]
        return spec

"""What the seam keeps about one FSDP2 parameter group: its label, its plans, and which backend serves it."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from .. import _C
from .journal import ALL_GATHER, REDUCE_SCATTER, Reason, Row, journal

WORLD_SIZE_1 = Reason("world_size_1", "the group has one rank, so FSDP2 issues no collective")
CUSTOM_REDUCE_SCATTER = "custom_reduce_scatter"


_numbers = itertools.count(1)


class GroupSeam:
    """tide's side of one ``FSDPParamGroup``. Lives as long as the group's first ``FSDPParam``.

    ``all_gather_plans`` and ``reduce_scatter_plans`` are caches: whatever can change a plan is in its key,
    or is settled by the group's first ``lazy_init``, which clears them.
    """

    def __init__(self, fsdp_params: list[Any]) -> None:
        self.number = next(_numbers)
        self._first = weakref.ref(fsdp_params[0])
        self._param_group: weakref.ref[Any] | None = None
        self._backends: dict[Any, Any] = {}
        self._rows: dict[Any, Row] = {}
        self._foreign_comm: Any = None
        self._own_comm: Any = None
        self.refused_extension: Reason | None = None  # what its extensions gather is not served
        self.all_gather_plans: dict[Any, Any] = {}
        self.last_plan: Any = None
        self.reduce_scatter_plans: dict[Any, Any] = {}

    @property
    def param_group(self) -> Any | None:
        return self._param_group() if self._param_group is not None else None

    @property
    def name(self) -> str | None:
        """The wrapped module's name in the root module; FSDP2 sets it in the root's first forward."""
        return getattr(self.param_group, "_module_fqn", None)

    @property
    def label(self) -> str:
        """The name; for the root, which has none, its class."""
        group = self.param_group
        if self.name:
            return self.name
        if group is not None:
            kind = type(group.modules[0]).__name__.removeprefix("FSDP")
            return f"{kind} (root)" if self.name == "" else kind
        return str(getattr(self._first(), "_param_fqn", None) or "unnamed")

    def adopt(self, param_group: Any) -> None:
        """Know the FSDP2 group itself; what was planned before then is dropped."""
        if self.param_group is param_group:
            return
        self._param_group = weakref.ref(param_group)
        self.all_gather_plans.clear()
        self.last_plan = None
        self.refused_extension = None
        self.reduce_scatter_plans.clear()

    def backend(self, group: dist.ProcessGroup, device: torch.device) -> Any | None:
        """The tide backend behind ``group`` for ``device``; None if another backend serves it."""
        key = (group, device)
        try:
            return self._backends[key]
        except KeyError:
            return self._backends.setdefault(key, find_backend(group, device))

    def row(self, group: dist.ProcessGroup, op: str) -> Row:
        """The journal's row for tide's own path."""
        return journal.row(group.group_name, self.label, op)

    def fall_back(self, group: dist.ProcessGroup, op: str, reason: Reason, nbytes: int = 0) -> None:
        """Count a call on PyTorch's path; the first for a reason goes through the journal, which warns."""
        key = (group, self.name, op, reason)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = journal.fall_back(group.group_name, self.label, op, reason, nbytes)
            return
        row.calls += 1
        row.bytes += nbytes

    def check_reduce_scatter(self) -> None:
        """Give the group tide's reduce-scatter object if it holds PyTorch's default one, and only then."""
        param_group = self.param_group
        if param_group is None:
            return
        comm = param_group._reduce_scatter_comm
        if comm is self._own_comm:
            return
        from .reduce_scatter import TideReduceScatter

        if type(comm) is DefaultReduceScatter:
            self._own_comm = param_group._reduce_scatter_comm = TideReduceScatter(self)
            return
        # Its calls do not pass through the seam, so they are noted once, not counted.
        if comm is self._foreign_comm:
            return
        self._foreign_comm = comm
        name = type(comm).__name__
        reason = Reason(CUSTOM_REDUCE_SCATTER, f"the module has its own reduce-scatter object, {name}")
        self.fall_back(param_group._reduce_scatter_process_group, REDUCE_SCATTER, reason)


_seams: weakref.WeakKeyDictionary[Any, GroupSeam] = weakref.WeakKeyDictionary()


def seam_of(fsdp_params: list[Any]) -> GroupSeam:
    """The seam of the parameter group that owns ``fsdp_params`` (not empty)."""
    seam = _seams.get(fsdp_params[0])
    if seam is None:
        seam = _seams[fsdp_params[0]] = GroupSeam(fsdp_params)
    return seam


def find_backend(group: dist.ProcessGroup, device: torch.device) -> Any | None:
    """The tide backend for ``device`` in ``group``, looked for behind a debug wrapper too; or None."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # the group has no backend for this device
        return None
    backend = getattr(backend, "wrapped_pg", backend)
    return backend if isinstance(backend, _C.TideBackend) else None


def lazy_init_seam(original: Callable[..., Any]) -> Callable[..., Any]:
    """``FSDPParamGroup.lazy_init`` that also prepares tide's side, for groups on tide."""

    @functools.wraps(original)
    def lazy_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not self.fsdp_params or not isinstance(self.mesh_info, FSDPMeshInfo):
            return result
        group = self.mesh_info.shard_process_group
        seam = seam_of(self.fsdp_params)
        if seam.backend(group, self.device) is not None:
            seam.adopt(self)
            seam.check_reduce_scatter()
            if group.size() == 1:
                # FSDP2 calls no all-gather at all here, so there is no call to count later.
                seam.fall_back(group, ALL_GATHER, WORLD_SIZE_1)
        return result

    return lazy_init

"""Whether this PyTorch's FSDP2 is the one the seam knows: by signatures and a trial, not by version."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from .. import _C

ALL_GATHER_PARAMETERS = [
    "fsdp_params",
    "group",
    "async_op",
    "all_gather_copy_in_stream",
    "all_gather_stream",
    "device",
    "all_gather_comm",
]
COPY_OUT_PARAMETERS = ["all_gather_result", "fsdp_params", "group"]
COPY_IN_PARAMETERS = ["unsharded_grads", "reduce_scatter_input", "world_size"]
RESULT_FIELDS = [
    "all_gather_output",
    "all_gather_event",
    "all_gather_work",
    "param_all_gather_input_dtypes",
    "param_all_gather_input_numels",
    "all_gather_input_split_sizes",
]
# Attributes that FSDPParam sets on itself or its class, and that the seam reads.
PARAM_ATTRIBUTES = [
    "_module_info",
    "_orig_size",
    "_sharded_local_tensor",
    "_sharded_param_data",
    "_sharded_post_forward_param_data",
    "all_gather_inputs",
    "all_gather_outputs",
    "fsdp_placement",
    "offload_to_cpu",
    "param_dtype",
    "sharded_state",
]


def contract_problems(param_group: Any, collectives: Any, param: Any) -> list[str]:
    """What is not as expected in FSDP2's three modules ``_fsdp_param_group``, ``_fsdp_collectives`` and
    ``_fsdp_param``; empty if the seam fits. Never raises."""
    problems: list[str] = []

    def check(ok: Callable[[], bool], what: str) -> None:
        try:
            if not ok():
                problems.append(what)
        except Exception as error:
            problems.append(f"{what} ({type(error).__name__}: {error})")

    def takes(owner: Any, name: str, expected: list[str]) -> None:
        check(
            lambda: _positional(getattr(owner, name)) == expected,
            f"{owner.__name__.rsplit('.', 1)[-1]}.{name} takes other parameters than {expected}",
        )

    for owner in (param_group, collectives):
        takes(owner, "foreach_all_gather", ALL_GATHER_PARAMETERS)
        takes(owner, "foreach_all_gather_copy_out", COPY_OUT_PARAMETERS)
    takes(collectives, "foreach_reduce_scatter_copy_in", COPY_IN_PARAMETERS)
    for name in ("foreach_all_gather", "foreach_all_gather_copy_out"):
        check(
            lambda name=name: getattr(param_group, name) is getattr(collectives, name),
            f"_fsdp_param_group.{name} was already replaced by someone else",
        )
    check(
        lambda: list(collectives.AllGatherResult._fields) == RESULT_FIELDS,
        f"AllGatherResult has other fields than {RESULT_FIELDS}",
    )

    def group_class() -> Any:  # may be missing, so looked up inside check
        return param_group.FSDPParamGroup

    check(
        lambda: "foreach_all_gather" in _names(group_class().unshard),
        "unshard does not call foreach_all_gather",
    )
    check(
        lambda: "foreach_all_gather_copy_out" in _names(group_class().wait_for_unshard),
        "wait_for_unshard does not call foreach_all_gather_copy_out",
    )
    check(
        lambda: _positional(group_class().lazy_init) == ["self"], "FSDPParamGroup.lazy_init takes parameters"
    )
    check(
        lambda: (
            {"_all_gather_comm", "_reduce_scatter_comm", "fsdp_params", "mesh_info"}
            <= _names(group_class().__init__)
        ),
        "FSDPParamGroup does not set _all_gather_comm, _reduce_scatter_comm, fsdp_params and mesh_info",
    )
    check(
        lambda: {"foreach_reduce_scatter_copy_in", "allocate"} <= _names(collectives.foreach_reduce),
        "foreach_reduce does not call allocate and foreach_reduce_scatter_copy_in by name",
    )
    for name, call in (
        ("DefaultAllGather", ["self", "output_tensor", "input_tensor", "group", "async_op"]),
        ("DefaultReduceScatter", ["self", "output_tensor", "input_tensor", "group", "op", "async_op"]),
    ):
        check(
            lambda name=name, call=call: _positional(getattr(collectives, name).__call__) == call,
            f"{name} is called with other parameters than {call}",
        )
        check(
            lambda name=name: _positional(getattr(collectives, name).allocate) == ["self", "size"],
            f"{name}.allocate takes other parameters than size",
        )

    for attribute in PARAM_ATTRIBUTES:
        check(lambda name=attribute: name in _attributes(param.FSDPParam), f"FSDPParam has no {attribute}")
    check(lambda: hasattr(param.ShardedState, "SHARDED"), "ShardedState.SHARDED is missing")
    if not problems:
        check(lambda: _repoint_works(param), "re-pointing a storage and freeing it as FSDP2 does failed")
    return problems


def _positional(function: Any) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [p.name for p in parameters if p.kind in kinds]


def _names(function: Any) -> set[str]:
    """Global and attribute names in a function's code, nested functions included."""
    names: set[str] = set()
    pending: list[CodeType] = [inspect.unwrap(function).__code__]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending.extend(c for c in code.co_consts if isinstance(c, CodeType))
    return names


def _attributes(cls: type) -> set[str]:
    names = set(vars(cls)) | set(inspect.get_annotations(cls))
    for value in vars(cls).values():
        if inspect.isfunction(value):
            names |= _names(value)
    return names


def _repoint_works(param: Any) -> bool:
    """One storage through its life: empty, in a slot, freed by FSDP2's own function, allocated anew."""
    base = torch.arange(512, dtype=torch.float32)
    gathered = torch.empty(0, dtype=torch.float32)
    _C.repoint(gathered, base, 128 * 4, 64 * 4)
    gathered.set_(gathered.untyped_storage(), 0, (64,), (1,))
    view = torch.as_strided(gathered, (7, 9), (9, 1), storage_offset=0)
    in_slot = torch.equal(view, base[128:191].view(7, 9)) and gathered.data_ptr() == base[128:].data_ptr()
    param.free_storage(gathered)
    freed = gathered.untyped_storage().size() == 0
    param.alloc_storage(gathered)
    gathered.fill_(1.0)
    own = torch.equal(view, torch.ones(7, 9)) and base[128].item() == 128.0
    _C.repoint(gathered, base, 0, 64 * 4)
    return in_slot and freed and own and view[0, 1].item() == 1.0 and view[0, 2].item() == 2.0

"""When tide serves an all-gather of a parameter group, and the reason when it does not.

Every answer depends only on facts that are the same on all ranks of the group: one rank must never gather in
tide's layout while another uses PyTorch's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .. import _C
from .journal import Reason

DEVICE = Reason("device", "tide has paths for CPU and CUDA tensors; tensors on {} go to the inner backend")
NO_KERNELS = Reason("no_cuda_kernels", "this build of tide has no CUDA kernels; build it where nvcc is found")
# Of a row of a parameter that is not sharded on dim 0. Each is one copy per peer and a step of about 100 bytes in the
# plan, so that shorter parts make plans as large as parameters. Faster than the cat from 64 bytes on (2 ranks).
SMALLEST_PART_BYTES = 1024
FUNCTORCH = Reason("functorch", "a functorch transform is active")
COMPILED_AUTOGRAD = Reason("compiled_autograd", "compiled autograd records FSDP2's own operators")


def refuse_call() -> Reason | None:
    """Conditions of the moment, asked at every call."""
    if torch._C._are_functorch_transforms_active():
        return FUNCTORCH
    return COMPILED_AUTOGRAD if compiled_autograd_enabled() else None


def compiled_autograd_enabled() -> bool:
    """Whether a compiled-autograd region is being traced (without importing dynamo)."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is None:
        return False
    names = ("compiled_autograd_enabled", "in_compiled_autograd_region")
    return any(getattr(module, name, False) for name in names)


def refuse_moving(fsdp_params: Sequence[Any]) -> Reason | None:
    """PyTorch 2.15 can pin the unsharded storages (CUDA graphs read them by address); asked at every call."""
    if not hasattr(fsdp_params[0], "keep_unsharded_storage"):
        return None
    for p in fsdp_params:
        if p.keep_unsharded_storage:
            return Reason("keep_unsharded_storage", f"the storage of {_name(p)} must not move")
    return None


def refuse_device(device: torch.device) -> Reason | None:
    if device.type in ("cpu", "cuda"):
        return None
    return Reason(DEVICE.kind, DEVICE.text.format(device.type))


def refuse_kernels(device: torch.device) -> Reason | None:
    """Whether this build can add gradients on the device."""
    return NO_KERNELS if device.type == "cuda" and not _C.with_cuda_kernels else None


def refuse_memory(backend: Any, device: torch.device) -> Reason | None:
    """Whether the group's ranks share memory; agreed in the group, and collective at its first call."""
    shared, why = backend.connect(str(device))
    return None if shared else Reason("no_shared_memory", f"the group's ranks share no memory: {why}")


def is_extended(p: Any) -> bool:
    """Whether the parameter chooses itself what is gathered."""
    return hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather")


def refuse_all_gather(
    fsdp_params: Sequence[Any], sources: Sequence[Sequence[torch.Tensor]], device: torch.device
) -> Reason | None:
    """Test the parameters and what this rank contributes for each: its local shard, or what its extension gave."""
    for p, own in zip(fsdp_params, sources, strict=True):
        reason = _refuse_parameter(p, device)
        for source in own:
            reason = reason or _refuse_source(p, source, device)
        if reason is not None:
            return reason
    return None


def refuse_outputs(
    fsdp_params: Sequence[Any], expected: Sequence[Sequence[tuple[int, torch.dtype]]]
) -> Reason | None:
    """Whether outputs that exist already are other ones than expected (elements and dtype, per parameter)."""
    for p, want in zip(fsdp_params, expected, strict=True):
        got = [(t.numel(), t.dtype) for t in p.all_gather_outputs]
        if got and got != want:
            return Reason("changed_parameter", f"{_name(p)} was gathered as {got} before and is {want} now")
    return None


def _refuse_parameter(p: Any, device: torch.device) -> Reason | None:
    name = _name(p)
    if p.offload_to_cpu:
        return Reason("cpu_offload", f"{name} is offloaded to the CPU")
    if getattr(p, "is_spmd_types", False):  # PyTorch 2.14 and later
        return Reason("spmd_types", f"{name} carries spmd_types annotations")
    dim = p.fsdp_placement.dim
    if dim == 0:
        return None
    if is_extended(p):
        return Reason("extension", f"{name} has an fsdp_pre_all_gather extension and is sharded on dim {dim}")
    if device.type != "cpu":
        return Reason("shard_dim", f"{name} is sharded on dim {dim}, which would be one copy per row on a GPU")
    if p.sharded_state.name != "SHARDED":
        return Reason("shard_dim", f"{name} is sharded on dim {dim} and was resharded to a smaller group")
    rows = math.prod(p._orig_size[:dim])
    part = p._sharded_param_data.numel() // rows * (p.param_dtype or p._sharded_param_data.dtype).itemsize
    if part < SMALLEST_PART_BYTES:
        what = f"{name} is sharded on dim {dim}, {part} bytes in each of {rows} rows, fewer than {SMALLEST_PART_BYTES}"
        return Reason("shard_dim", what)
    return None


def _refuse_source(p: Any, source: Any, device: torch.device) -> Reason | None:
    """``type(...) is``: what a subclass does when it is copied is not known here."""
    what = f"what {_name(p)} gathers" if is_extended(p) else f"the local shard of {_name(p)}"
    if type(source) is not torch.Tensor:
        return Reason("tensor_subclass", f"{what} is a {type(source).__name__}")
    if source.device != device:
        return Reason("shard_device", f"{what} lies on {source.device}")
    if source.numel() == 0 or source.dim() != 1 or not source.is_contiguous():
        return Reason("odd_shard", f"{what} is not a non-empty contiguous 1-D tensor")
    return None


def _name(p: Any) -> str:
    return str(p._param_fqn or p._module_info.param_name)

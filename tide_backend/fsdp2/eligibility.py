"""When tide serves an all-gather of a parameter group, and the reason when it does not.

Every answer depends only on facts that are the same on all ranks of the group: one rank must never gather in
tide's layout while another uses PyTorch's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from .. import _C
from .journal import Reason

DEVICE = Reason("device", "tide has paths for CPU and CUDA tensors; tensors on {} go to the inner backend")
NO_KERNELS = Reason("no_cuda_kernels", "this build of tide has no CUDA kernels; build it where nvcc is found")
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


def refuse_all_gather(
    fsdp_params: Sequence[Any], sources: Sequence[torch.Tensor], device: torch.device, world: int
) -> tuple[Reason | None, torch.dtype]:
    """Test the parameters themselves; ``sources`` are their local shards. Also returns the gathered dtype.

    Conditions: every parameter is one plain tensor, sharded on dim 0, without all-gather extension
    or offload, and all gathered values have one dtype.
    """
    dtype = fsdp_params[0].param_dtype or sources[0].dtype
    for p, source in zip(fsdp_params, sources, strict=True):
        reason = _refuse_parameter(p, source, device)
        if reason is not None:
            return reason, dtype
        own = p.param_dtype or source.dtype
        if own != dtype:
            return Reason("mixed_dtype", f"parameters gather as {dtype} and as {own}"), dtype
        outputs = p.all_gather_outputs
        if outputs:
            expected, got = (source.numel() * world, dtype), (outputs[0].numel(), outputs[0].dtype)
            if len(outputs) != 1 or got != expected:
                what = f"{_name(p)} was gathered as {got} before and is {expected} now"
                return Reason("changed_parameter", what), dtype
    return None, dtype


def _refuse_parameter(p: Any, source: Any, device: torch.device) -> Reason | None:
    name = _name(p)
    if p.offload_to_cpu:
        return Reason("cpu_offload", f"{name} is offloaded to the CPU")
    if hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather"):
        return Reason("extension", f"{name} has an fsdp_pre_all_gather extension")
    # The second and third exist from PyTorch 2.14 on.
    spec = getattr(p, "_unsharded_dtensor_spec", None)
    if p.is_dtensor or getattr(p, "is_spmd_types", False) or spec is not None:
        return Reason("dtensor", f"{name} is a DTensor before FSDP2 shards it")
    if p.fsdp_placement.dim != 0:
        return Reason("shard_dim", f"{name} is sharded on dim {p.fsdp_placement.dim}")
    if type(source) is not torch.Tensor:
        return Reason("tensor_subclass", f"the local shard of {name} is a {type(source).__name__}")
    if source.device != device:
        return Reason("shard_device", f"the local shard of {name} lies on {source.device}")
    if source.numel() == 0 or source.dim() != 1 or not source.is_contiguous():
        return Reason("odd_shard", f"the local shard of {name} is not a non-empty contiguous 1-D tensor")
    return None


def _name(p: Any) -> str:
    return str(p._param_fqn or p._module_info.param_name)

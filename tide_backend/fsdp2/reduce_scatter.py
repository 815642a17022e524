"""FSDP2's reduce-scatter on tide: gradients are reduced from where autograd left them, with no packed buffer.

FSDP2 asks its reduce-scatter object for an input buffer, fills it (copy-in), asks for an output and calls the
object. Here the first buffer is a one-element stand-in, copy-in leaves the list of gradients on it, and the
call hands that list to the collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from .. import ParameterLayout, apply_layout
from .eligibility import refuse_call, refuse_device, refuse_kernels, refuse_memory
from .journal import REDUCE_SCATTER, Reason, Row
from .seams import WORLD_SIZE_1, GroupSeam

_ATTRIBUTE = "_tide_pending"  # on the stand-in tensor: dies with it, unlike a table keyed by its address
_HELD = "_tide_held"  # the gradients of a call that is under way on the device
_MAX_PLANS = 64  # unused parameters make the list vary from call to call


@dataclass(slots=True)
class Plan:
    """One list of gradients over one process group.

    ``avoided``: ``chunk_cat`` writes a packed buffer of ``world * padded shard`` elements in the reduce
    dtype, casting on the way; this path writes none of it. ``payload``: the bytes such a buffer would have.
    """

    layout: Any
    payload: int
    avoided: int
    row: Row


@dataclass(slots=True)
class Pending:
    """One reduction between FSDP2's request for an input buffer and its call of the collective."""

    seam: GroupSeam
    group: dist.ProcessGroup
    world: int
    numel: int
    filled: bool = False  # copy-in is done (or the buffer is an ordinary one): the next buffer is the output
    plan: Plan | None = None
    gradients: list[torch.Tensor] | None = None


class TideReduceScatter(DefaultReduceScatter):
    """Reduce-scatter object of one parameter group; FSDP2's own checks ask for a ``DefaultReduceScatter``."""

    def __init__(self, seam: GroupSeam) -> None:
        super().__init__()
        self._seam = seam
        self._pending: Pending | None = None
        self._refusals: dict[Any, Reason | None] = {}  # by what cannot change for a group
        self._zeros: dict[Any, torch.Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """First the input of a reduction, then its output; one that was given up in between is forgotten."""
        numel = math.prod(size)
        pending, self._pending = self._pending, None
        if pending is not None and pending.filled and numel * pending.world == pending.numel:
            return super().allocate(size, dtype=dtype, device=device)
        group, reason = self._refuse(dtype, device)
        if group is None:  # the group is gone or not tide's: not ours to count
            return super().allocate(size, dtype=dtype, device=device)
        self._pending = Pending(self._seam, group, group.size(), numel, filled=reason is not None)
        if reason is not None:
            self._seam.fall_back(group, REDUCE_SCATTER, reason, numel * dtype.itemsize)
            return super().allocate(size, dtype=dtype, device=device)
        # Zero, because NaN checkers read it. FSDP2 keeps this tensor until a later group's backward.
        zero = self._zeros.get((dtype, device))
        if zero is None:
            zero = self._zeros[dtype, device] = torch.zeros(1, dtype=dtype, device=device)
        placeholder = zero.expand(numel)
        setattr(placeholder, _ATTRIBUTE, self._pending)
        return placeholder

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Issue PyTorch's public reduce-scatter, with the gradients in place of a packed input."""
        self._pending = None
        pending: Pending | None = getattr(input_tensor, _ATTRIBUTE, None)
        if pending is None:
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        delattr(input_tensor, _ATTRIBUTE)
        plan, gradients = pending.plan, pending.gradients
        pending.gradients = None
        if plan is None or gradients is None:
            raise RuntimeError(
                f"tide: FSDP2 calls the reduce-scatter of {pending.seam.label} without its copy-in; got a "
                f"stand-in for {pending.numel} elements, expected the gradients. This PyTorch's FSDP2 works "
                "in another order than the seam knows: run with TIDE_FSDP2=0"
            )
        if input_tensor.is_cuda:
            # As long as FSDP2 keeps its input buffer: until the compute stream is behind this reduction.
            setattr(input_tensor, _HELD, gradients)
        apply_layout(input_tensor, plan.layout, tensors=gradients, label=pending.seam.label)
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        row = plan.row
        row.calls += 1
        row.bytes += plan.payload
        row.copies_avoided += plan.avoided
        return work

    def _refuse(
        self, dtype: torch.dtype, device: torch.device
    ) -> tuple[dist.ProcessGroup | None, Reason | None]:
        param_group = self._seam.param_group
        if param_group is None:
            return None, None
        group = param_group._reduce_scatter_process_group
        backend = self._seam.backend(group, device)
        if backend is None:
            return None, None
        reason = refuse_call()
        if reason is not None:
            return group, reason
        key = (group, dtype, device)
        if key not in self._refusals:
            self._refusals[key] = _refuse_group(group, backend, dtype, device)
        return group, self._refusals[key]


def _refuse_group(group: dist.ProcessGroup, backend: Any, dtype: torch.dtype, device: torch.device) -> Reason | None:
    if group.size() == 1:
        return WORLD_SIZE_1
    reason = refuse_device(device) or refuse_kernels(device) or refuse_memory(backend, device)
    if reason is None and dtype not in (torch.float32, torch.bfloat16):
        reason = Reason("reduce_dtype", f"gradients are reduced in {dtype}; tide reduces float32 and bfloat16")
    return reason


def copy_in_seam(stock_copy_in: Callable[..., None]) -> Callable[..., None]:
    """FSDP2's copy-in that leaves the gradients on tide's stand-in; it fills any other buffer as usual."""

    def foreach_reduce_scatter_copy_in(
        unsharded_grads: list[torch.Tensor], reduce_scatter_input: torch.Tensor, world_size: int
    ) -> None:
        pending: Pending | None = getattr(reduce_scatter_input, _ATTRIBUTE, None)
        if pending is None:
            return stock_copy_in(unsharded_grads, reduce_scatter_input, world_size)
        pending.filled = True
        reason = _refuse_gradients(unsharded_grads, reduce_scatter_input)
        if reason is None:
            pending.plan = _plan(pending, unsharded_grads, reduce_scatter_input.dtype)
            # FSDP2 clears its own list right after this call.
            pending.gradients = list(unsharded_grads)
            return None
        # Too late to ask for another buffer: the stand-in becomes a real one.
        delattr(reduce_scatter_input, _ATTRIBUTE)
        itemsize = reduce_scatter_input.dtype.itemsize
        pending.seam.fall_back(pending.group, REDUCE_SCATTER, reason, pending.numel * itemsize)
        buffer = torch.empty(
            pending.numel, dtype=reduce_scatter_input.dtype, device=reduce_scatter_input.device
        )
        reduce_scatter_input.set_(buffer)
        return stock_copy_in(unsharded_grads, reduce_scatter_input, world_size)

    return foreach_reduce_scatter_copy_in


def _refuse_gradients(gradients: list[torch.Tensor], buffer: torch.Tensor) -> Reason | None:
    """Only by facts that are the same on every rank: strides are not (the backend repairs them by a copy).

    Nor, from PyTorch 2.15 on, is which gradients are bf16 and which fp32: FSDP2 leaves each in the dtype in which
    autograd made or accumulated it. The backend reduces such lists as they are, and sees where ranks differ.
    """
    for gradient in gradients:
        dtype = gradient.dtype
        if dtype != buffer.dtype and not (dtype == torch.bfloat16 and buffer.dtype == torch.float32):
            return Reason("gradient_dtype", f"gradients are {dtype} and reduced in {buffer.dtype}")
        if type(gradient) is not torch.Tensor or gradient.layout != torch.strided:
            what = f"{type(gradient).__name__} with layout {gradient.layout}"
            return Reason("gradient_kind", f"a gradient is a {what}")
        if gradient.dim() == 0 or gradient.device != buffer.device:
            what = f"has {gradient.dim()} dimensions and lies on {gradient.device}"
            return Reason("gradient_kind", f"a gradient {what}")
    return None


def _plan(pending: Pending, gradients: list[torch.Tensor], dtype: torch.dtype) -> Plan:
    plans = pending.seam.reduce_scatter_plans
    key = (pending.group, pending.seam.name, dtype, *(g.shape for g in gradients))
    plan = plans.get(key)
    if plan is not None:
        return plan
    world = pending.world
    shards, numels = [], []
    for gradient in gradients:
        rows = gradient.size(0)
        row_numel = gradient.numel() // rows if rows else math.prod(gradient.shape[1:])
        shards.append(-(-rows // world) * row_numel)
        numels.append(gradient.numel())
    layout = ParameterLayout(world, shards, numels, 1)
    payload = world * sum(shards) * dtype.itemsize
    plan = Plan(layout, payload, payload, pending.seam.row(pending.group, REDUCE_SCATTER))
    if len(plans) >= _MAX_PLANS:
        plans.clear()
    plans[key] = plan
    return plan

"""FSDP2's all-gather on tide: shards are placed in a slot, gathered there, and the parameters point into it.

Slot: parameter-contiguous, every parameter from a multiple of 512 bytes on. Parameter i takes
``world * shard_i`` elements (dim 0 padded, as FSDP2 pads it); an unevenly sharded one is a prefix of its
part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult, DefaultAllGather

from .. import _C, ParameterLayout, apply_layout
from .eligibility import refuse_all_gather, refuse_call, refuse_device, refuse_memory, refuse_moving
from .journal import ALL_GATHER, Reason, Row
from .seams import WORLD_SIZE_1, GroupSeam, seam_of

SLOT_ALIGN = 512  # bytes: a 3-element shard must not misalign the parameters behind it


@dataclass(slots=True)
class Plan:
    """How one parameter group is gathered over one process group.

    ``avoided``: bytes that FSDP2's own path writes per call and this one does not. Its path writes, for S
    shard elements of b bytes on W ranks, ``S*b`` (cast into a flat temporary, only with a ``param_dtype``),
    ``S*b`` (copy-in) and ``W*S*b`` (``split_with_sizes_copy``); this one writes ``S*b``. So ``W*S*b``, plus
    ``S*b`` with a cast. ``payload``: bytes of the gathered parameters, without the gaps between them.
    """

    group: dist.ProcessGroup
    backend: Any
    layout: Any
    dtype: torch.dtype
    device: torch.device
    nbytes: int  # of the slot
    split: list[int]  # elements: gap, shard, gap, shard, ..., gap; this rank's places in the slot
    places: list[tuple[int, int, int]]  # per parameter: byte offset, bytes, elements
    placeholder: torch.Tensor
    label: str
    input_dtypes: list[list[torch.dtype]]
    input_numels: list[list[int]]
    input_sizes: list[int]
    payload: int
    avoided: int
    row: Row


class TideAllGatherResult(AllGatherResult):
    """What ``foreach_all_gather`` hands to copy-out.

    The tuple's ``all_gather_output`` is a one-element stand-in, because FSDP2 keeps the tuple until the next
    group's copy-out and the slot shall be free as soon as this group's parameters are. ``gathered`` is the
    slot.
    """

    plan: Plan
    gathered: torch.Tensor | None


class AllGatherSeam:
    """FSDP2's two all-gather functions, with the originals for everything that tide does not serve."""

    def __init__(self, param_group: Any, collectives: Any, param: Any) -> None:
        self._stock_gather = param_group.foreach_all_gather
        self._stock_copy_out = param_group.foreach_all_gather_copy_out
        # PyTorch 2.15: a group may replace the function that fills the outputs.
        self._default_output_fn = getattr(collectives, "_default_all_gather_output_fn", None)
        self._sharded = param.ShardedState.SHARDED
        self._post_forward = param.ShardedState.SHARDED_POST_FORWARD

    @torch.no_grad()
    def foreach_all_gather(
        self,
        fsdp_params: list[Any],
        group: dist.ProcessGroup,
        async_op: bool,
        all_gather_copy_in_stream: Any,
        all_gather_stream: Any,
        device: torch.device,
        all_gather_comm: Any,
    ) -> Any:
        """Cast and place the local shards in a slot and gather them there."""
        streams = all_gather_copy_in_stream, all_gather_stream
        seam = seam_of(fsdp_params)
        backend = seam.backend(group, device)
        if backend is not None:
            seam.check_reduce_scatter()
            plan, sources = self._plan(seam, fsdp_params, group, device, backend, all_gather_comm)
            if type(plan) is Plan:
                return _gather(plan, sources, async_op, *streams, all_gather_comm)
            seam.fall_back(group, ALL_GATHER, plan)
        return self._stock_gather(fsdp_params, group, async_op, *streams, device, all_gather_comm)

    def foreach_all_gather_copy_out(
        self, all_gather_result: Any, fsdp_params: list[Any], group: dist.ProcessGroup, **kwargs: Any
    ) -> None:
        """Wait for the gather and point every parameter's storage into the slot."""
        if type(all_gather_result) is not TideAllGatherResult:
            return self._stock_copy_out(all_gather_result, fsdp_params, group, **kwargs)
        plan = all_gather_result.plan
        if all_gather_result.all_gather_event is not None:  # synchronous
            stream = _get_device_handle(plan.device.type).current_stream()
            stream.wait_event(all_gather_result.all_gather_event)
        if isinstance(all_gather_result.all_gather_work, dist.Work):  # asynchronous
            all_gather_result.all_gather_work.wait()
        gathered = all_gather_result.gathered
        if gathered is None:
            raise RuntimeError(f"tide: copy-out of {plan.label} without an all-gather; unshard it first")
        if plan.device.type == "cuda":
            # Where there was no slot it is the caching allocator's, made on the copy-in stream and read on this one.
            gathered.record_stream(torch.cuda.current_stream(plan.device))
        repoint = _C.repoint
        for p, (offset, nbytes, numel) in zip(fsdp_params, plan.places, strict=True):
            if p.all_gather_outputs:
                repoint(p.all_gather_outputs[0], gathered, offset, nbytes)
            else:
                p.all_gather_outputs = [_first_output(plan, gathered, offset, nbytes, numel)]
        all_gather_result.gathered = None  # from here on the parameters' storages hold the slot
        return None

    def _plan(
        self,
        seam: GroupSeam,
        fsdp_params: list[Any],
        group: dist.ProcessGroup,
        device: torch.device,
        backend: Any,
        comm: Any,
    ) -> tuple[Plan | Reason, list[torch.Tensor]]:
        """The plan, with the shards to place; or the reason why PyTorch's own path serves this call."""
        reason = refuse_call() or refuse_moving(fsdp_params)
        if reason is not None:
            return reason, []
        if type(comm) is not DefaultAllGather:
            name = type(comm).__name__
            return Reason("custom_all_gather", f"the module has its own all-gather object, {name}"), []
        hook = getattr(seam.param_group, "_all_gather_output_fn", None)
        if hook is not None and hook is not self._default_output_fn:
            return Reason("output_hook", "the parameter group has its own all-gather output function"), []
        state = fsdp_params[0].sharded_state
        if state is self._sharded:
            sources = [p._sharded_param_data for p in fsdp_params]
        elif state is self._post_forward:
            sources = [p._sharded_post_forward_param_data for p in fsdp_params]
        else:
            return Reason("sharded_state", f"the parameters are in state {state}"), []
        key = (group, seam.name, state, device, *((t.dtype, t.numel(), type(t)) for t in sources))
        plan = seam.all_gather_plans.get(key)
        if plan is None:
            plan = make_plan(seam, fsdp_params, sources, group, device, backend)
            seam.all_gather_plans[key] = plan
        return plan, sources


def _gather(
    plan: Plan, sources: list[torch.Tensor], async_op: bool, copy_in_stream: Any, stream: Any, comm: Any
) -> TideAllGatherResult:
    device_handle = _get_device_handle(plan.device.type)
    with device_handle.stream(copy_in_stream):
        slot, _ = plan.backend.slot(plan.nbytes, str(plan.device), stream_handle(plan.device))
        if slot is None:  # ordinary memory in the same layout: the whole call goes through staging
            slot = torch.empty(plan.nbytes, dtype=torch.uint8, device=plan.device)
        gathered = slot.view(plan.dtype)
        torch._foreach_copy_(gathered.split_with_sizes(plan.split)[1::2], sources)  # casts on the way
    stream.wait_stream(copy_in_stream)
    with device_handle.stream(stream):
        apply_layout(gathered, plan.layout, placed=True, label=plan.label)
        # FSDP2's own object issues the public collective, which tools and tests count or patch.
        work = comm(
            output_tensor=gathered, input_tensor=plan.placeholder, group=plan.group, async_op=async_op
        )
        event = stream.record_event()
    row = plan.row
    row.calls += 1
    row.bytes += plan.payload
    row.copies_avoided += plan.avoided
    result = TideAllGatherResult(
        plan.placeholder, event, work, plan.input_dtypes, plan.input_numels, plan.input_sizes
    )
    result.plan, result.gathered = plan, gathered
    return result


def make_plan(
    seam: GroupSeam,
    fsdp_params: list[Any],
    sources: list[torch.Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
    backend: Any,
) -> Plan | Reason:
    """The plan for these parameters, or why PyTorch's own path serves them."""
    world, rank = group.size(), group.rank()
    if world == 1:
        return WORLD_SIZE_1
    reason = refuse_device(device) or refuse_memory(backend, device)
    if reason is not None:
        return reason
    reason, dtype = refuse_all_gather(fsdp_params, sources, device, world)
    if reason is not None:
        return reason
    shards = [t.numel() for t in sources]
    itemsize = dtype.itemsize
    layout = ParameterLayout(world, shards, None, SLOT_ALIGN // itemsize)
    starts = list(layout.gathered_offsets)[: len(shards)]
    total = layout.total_gathered_numel
    split, end = [], 0
    for start, shard in zip(starts, shards, strict=True):
        mine = start + rank * shard
        split += [mine - end, shard]
        end = mine + shard
    split.append(total - end)
    shard_bytes = sum(shards) * itemsize
    cast = any(p.param_dtype is not None for p in fsdp_params)
    return Plan(
        group=group,
        backend=backend,
        layout=layout,
        dtype=dtype,
        device=device,
        nbytes=total * itemsize,
        split=split,
        places=[(o * itemsize, s * world * itemsize, s * world) for o, s in zip(starts, shards, strict=True)],
        placeholder=torch.zeros(1, dtype=dtype, device=device).expand(sum(shards)),
        label=seam.label,
        input_dtypes=[[dtype] for _ in shards],
        input_numels=[[s] for s in shards],
        input_sizes=shards,
        payload=world * shard_bytes,
        avoided=world * shard_bytes + (shard_bytes if cast else 0),
        row=seam.row(group, ALL_GATHER),
    )


def stream_handle(device: torch.device) -> int:
    """The current stream as the driver knows it; 0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _first_output(plan: Plan, gathered: torch.Tensor, offset: int, nbytes: int, numel: int) -> torch.Tensor:
    """A parameter's all-gather output, of the size FSDP2 would allocate but without ever allocating it."""
    output = torch.empty(0, dtype=plan.dtype, device=plan.device)
    _C.repoint(output, gathered, offset, nbytes)
    # Not resize_: under deterministic algorithms it may fill what it takes for fresh memory.
    output.set_(output.untyped_storage(), 0, (numel,), (1,))
    return output

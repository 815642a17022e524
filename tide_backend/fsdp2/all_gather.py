"""FSDP2's all-gather on tide: shards are placed in a slot, gathered there, and the parameters point into it.

``gather_plan`` says where everything lies.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult, DefaultAllGather

from .. import apply_layout
from .eligibility import is_extended, refuse_call, refuse_moving
from .gather_plan import Plan, make_plan, repoint, storage_in
from .journal import ALL_GATHER, Reason
from .seams import GroupSeam, seam_of

EXTENDED = object()  # in the place of a plan: it depends on what the extensions give


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
            plan, sources = self._plan(
                seam, fsdp_params, group, device, backend, all_gather_comm, all_gather_copy_in_stream
            )
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
        for p, places in zip(fsdp_params, plan.places, strict=True):
            if p.all_gather_outputs:
                for output, (offset, nbytes, _, _) in zip(p.all_gather_outputs, places, strict=True):
                    repoint(output, gathered, offset, nbytes)
            else:
                p.all_gather_outputs = [storage_in(gathered, *place) for place in places]
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
        copy_in_stream: Any,
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
        # The same shards as last time, as nearly always: no need to look at each of them.
        name = seam.name
        last = seam.last_plan
        if last is not None:
            plan, *where, references = last
            same = where == [group, name, state, device]
            if same and all(r() is t for r, t in zip(references, sources, strict=True)):
                return plan, sources
        key = (group, name, state, device, *((t.dtype, t.numel(), type(t)) for t in sources))
        plan = seam.all_gather_plans.get(key)
        if plan is None:
            if any(map(is_extended, fsdp_params)):
                plan = EXTENDED
            else:
                plan = make_plan(seam, fsdp_params, [[t] for t in sources], group, device, backend)
            seam.all_gather_plans[key] = plan
        if plan is EXTENDED:
            if seam.refused_extension is not None:
                # Without asking the extensions: PyTorch's own path asks them.
                return seam.refused_extension, []
            with _get_device_handle(device.type).stream(copy_in_stream):
                inputs = [
                    p.all_gather_inputs if is_extended(p) else [t] for p, t in zip(fsdp_params, sources, strict=True)
                ]
            return _plan_extended(key, seam, fsdp_params, inputs, group, device, backend)
        if type(plan) is Plan and state is self._sharded:
            seam.last_plan = (plan, group, name, state, device, [weakref.ref(t) for t in sources])
        return plan, sources


def _plan_extended(
    key: Any,
    seam: GroupSeam,
    fsdp_params: list[Any],
    inputs: list[list[torch.Tensor]],
    group: dist.ProcessGroup,
    device: torch.device,
    backend: Any,
) -> tuple[Plan | Reason, list[torch.Tensor]]:
    """With ``fsdp_pre_all_gather`` extensions, which choose anew at every call what is gathered."""
    key = (*key, *(tuple((t.dtype, t.numel(), type(t)) for t in own) for own in inputs))
    plan = seam.all_gather_plans.get(key)
    if plan is None:
        plan = seam.all_gather_plans[key] = make_plan(seam, fsdp_params, inputs, group, device, backend)
        if type(plan) is Reason:
            seam.refused_extension = plan
    return plan, [t for own in inputs for t in own]


def _gather(
    plan: Plan, sources: list[torch.Tensor], async_op: bool, copy_in_stream: Any, stream: Any, comm: Any
) -> TideAllGatherResult:
    event = None
    if plan.device.type == "cpu":  # its streams and events are empty names, but not free to use
        gathered = _place(plan, sources)
        work = _call(plan, gathered, async_op, comm)
    else:
        device_handle = _get_device_handle(plan.device.type)
        with device_handle.stream(copy_in_stream):
            gathered = _place(plan, sources)
        stream.wait_stream(copy_in_stream)
        with device_handle.stream(stream):
            work = _call(plan, gathered, async_op, comm)
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


def _place(plan: Plan, sources: list[torch.Tensor]) -> torch.Tensor:
    """The slot, with this rank's shards in it."""
    slot, _ = plan.backend.slot(plan.nbytes, plan.device_text, stream_handle(plan.device), plan.parameter_group)
    if slot is None:  # ordinary memory in the same layout: the whole call goes through staging
        slot = torch.empty(plan.nbytes, dtype=torch.uint8, device=plan.device)
    plan.place(slot, sources)
    return slot.view(plan.dtype)


def _call(plan: Plan, gathered: torch.Tensor, async_op: bool, comm: Any) -> Any:
    apply_layout(gathered, plan.layout, placed=True, label=plan.label)
    # FSDP2's own object issues the public collective, which tools and tests count or patch.
    return comm(output_tensor=gathered, input_tensor=plan.placeholder, group=plan.group, async_op=async_op)


def stream_handle(device: torch.device) -> int:
    """The current stream as the driver knows it; 0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0

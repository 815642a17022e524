"""What the seam leaves to PyTorch: each set-up must train as on gloo, say why, and warn once."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from fsdp2_cases import close, mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.tensor import Shard

import tide_backend
from tide_backend import fsdp2
from tide_backend.fsdp2.journal import journal

WIDTH = 8  # divides by both world sizes in use: Shard(1) and extensions want that; its rows are 32 bytes


class OwnAllGather(_fsdp_collectives.DefaultAllGather):
    pass


class OwnReduceScatter(_fsdp_collectives.DefaultReduceScatter):
    pass


def _model(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, width), nn.Sequential(nn.Tanh(), nn.Linear(width, width)))


def _shard(model: nn.Sequential, on: DeviceMesh, **options: Any) -> None:
    for module in (model[1], model):
        fully_shard(module, mesh=on, **options)


def _offload(model: nn.Sequential, on: DeviceMesh) -> None:
    _shard(model, on, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _precision(parameter: torch.dtype, reduce: torch.dtype) -> Callable[[nn.Sequential, DeviceMesh], None]:
    def shard(model: nn.Sequential, on: DeviceMesh) -> None:
        _shard(model, on, mp_policy=MixedPrecisionPolicy(param_dtype=parameter, reduce_dtype=reduce))

    return shard


def _shard_short_rows(model: nn.Sequential, on: DeviceMesh) -> None:
    _shard(model, on, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)


def _own_comms(model: nn.Sequential, on: DeviceMesh) -> None:
    _shard(model, on)
    for module in (model[1], model):
        module.set_custom_all_gather(OwnAllGather())
        module.set_custom_reduce_scatter(OwnReduceScatter())


def _halve(local: torch.Tensor, mesh: DeviceMesh) -> Any:
    return (local / 2, local.new_empty(0)), None


def _extension(model: nn.Sequential, on: DeviceMesh) -> None:
    """Gather halves, and nothing, and double the halves: a plain gather would be wrong."""
    _shard(model, on)

    def post(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Any:
        half, _ = outputs
        if out is None:
            whole = half * 2
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            torch.mul(half, 2, out=out)
        return None

    for parameter in model.parameters():
        local = parameter._local_tensor
        local.fsdp_pre_all_gather = MethodType(_halve, local)
        local.fsdp_post_all_gather = post


# name -> (how to shard, {call: kind of reason}, calls that stay on tide)
SETUPS: dict[str, tuple[Callable[[nn.Sequential, DeviceMesh], None], dict[str, str], set[str]]] = {
    "cpu-offload": (_offload, {"all_gather": "cpu_offload"}, {"reduce_scatter"}),
    "fp16-reduction": (
        _precision(torch.bfloat16, torch.float16),
        {"reduce_scatter": "reduce_dtype"},
        {"all_gather"},
    ),
    "fp16-gradients": (
        _precision(torch.float16, torch.float32),
        {"reduce_scatter": "gradient_dtype"},
        {"all_gather"},
    ),
    "short-rows": (_shard_short_rows, {"all_gather": "shard_dim"}, {"reduce_scatter"}),
    "own-comms": (
        _own_comms,
        {"all_gather": "custom_all_gather", "reduce_scatter": "custom_reduce_scatter"},
        set(),
    ),
    "extension": (_extension, {"all_gather": "odd_shard"}, {"reduce_scatter"}),
}


def _train(model: nn.Sequential, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    seen = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * dist.get_rank() + step)
        inputs = torch.randn(4, model[0].in_features, generator=generator)
        loss = model(inputs).float().square().mean()
        loss.backward()
        seen += [p.grad.full_tensor().detach().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _tide_run(
    shard: Callable[[nn.Sequential], None], width: int = WIDTH
) -> tuple[list[torch.Tensor], list[str], Any]:
    """Gradients, tide's warnings and the report of one training on tide."""
    tide_backend.report(reset=True)
    journal._warned.clear()  # the process lives for many tests; each counts its own warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = _model(width)
        shard(model)
        gradients = _train(model)
    messages = [str(w.message) for w in caught if str(w.message).startswith("tide:")]
    return gradients, messages, tide_backend.report()


def fall_back(rank: int, world: int, name: str) -> None:
    """One set-up on tide and on gloo; asserts numbers, reasons, and one warning per kind."""
    shard, kinds, on_tide = SETUPS[name]
    gradients, messages, report = _tide_run(lambda model: shard(model, mesh("tide")))
    model = _model()
    shard(model, mesh("gloo"))
    for ours, theirs in zip(gradients, _train(model), strict=True):
        close(ours, theirs, 1e-6, "gradient")
    assert {(r.op, r.kind) for r in report.fallbacks} == set(kinds.items()), report
    assert {r.module for r in report.fallbacks} == {"1", "Sequential (root)"}, report
    for row in report.fallbacks:
        assert row.path == "stock" and row.calls == row.fallbacks > 0 and row.copies_avoided == 0, row
        assert len(row.reason) > 10 and row.reason in str(report), row
    assert {r.op for r in report.rows if r.path == "tide"} == on_tide, report
    assert len(messages) == len(set(kinds.values())), messages
    reasons = {r.reason for r in report.fallbacks}
    assert all(any(reason in message for reason in reasons) for message in messages), messages


def one_rank(rank: int, world: int) -> None:
    """A group of one rank per process."""
    alone = [dist.new_group([r], backend="tide") for r in range(world)][rank]
    on = DeviceMesh.from_group(alone, "cpu")
    gradients, messages, report = _tide_run(lambda model: _shard(model, on))
    model = _model()
    for ours, theirs in zip(gradients, _plain(model), strict=True):
        close(ours, theirs, 1e-6, "gradient")
    assert {(r.op, r.kind) for r in report.rows} == {
        ("all_gather", "world_size_1"),
        ("reduce_scatter", "world_size_1"),
    }, report
    assert len(messages) == 1 and "one rank" in messages[0], messages


def _plain(model: nn.Sequential, steps: int = 3) -> list[torch.Tensor]:
    seen = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * dist.get_rank() + step)
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        for parameter in model.parameters():
            seen.append(parameter.grad.clone())
            with torch.no_grad():
                parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None
    return seen


def unknown_fsdp2(rank: int, world: int) -> None:
    """An FSDP2 whose all-gather takes one more parameter: PyTorch's path, one warning, right numbers."""
    fsdp2.uninstall()
    known = _fsdp_collectives.foreach_all_gather

    def newer(
        fsdp_params: Any,
        group: Any,
        async_op: Any,
        all_gather_copy_in_stream: Any,
        all_gather_stream: Any,
        device: Any,
        all_gather_comm: Any,
        layout: Any = None,
    ) -> Any:
        streams = all_gather_copy_in_stream, all_gather_stream
        return known(fsdp_params, group, async_op, *streams, device, all_gather_comm)

    modules = (_fsdp_collectives, _fsdp_param_group)
    try:
        for module in modules:
            module.foreach_all_gather = newer

        def shard(model: nn.Sequential) -> None:
            assert fsdp2.install() == "refused" and fsdp2.install() == "refused"
            _shard(model, mesh("tide"))

        gradients, messages, report = _tide_run(shard)
        assert _fsdp_param_group.foreach_all_gather is newer
        assert report.rows == [] and report.fsdp2.startswith("refused: "), report
        assert len(messages) == 1 and "foreach_all_gather" in messages[0], messages
    finally:
        for module in modules:
            module.foreach_all_gather = known
        fsdp2.uninstall()
        assert fsdp2.install() == "installed"
    model = _model()
    _shard(model, mesh("gloo"))
    for ours, theirs in zip(gradients, _train(model), strict=True):
        close(ours, theirs, 1e-6, "gradient")


def comm_objects_are_kept(rank: int, world: int) -> None:
    """tide's reduce-scatter object passes FSDP2's own checks and never takes the place of a user's."""
    model = _model()
    _shard(model, mesh("tide"))
    own = OwnReduceScatter()
    model.set_custom_reduce_scatter(own)
    _train(model, steps=1)
    groups = [m._get_fsdp_state()._fsdp_param_group for m in (model, model[1]) if isinstance(m, FSDPModule)]
    assert groups[0]._reduce_scatter_comm is own
    assert type(groups[1]._reduce_scatter_comm).__name__ == "TideReduceScatter"
    model[1].set_allocate_memory_from_process_group_for_comm(True)  # asserts a default object


def _group_with(**options: Any) -> DeviceMesh:
    made = tide_backend.Options()
    for name, value in options.items():
        setattr(made, name, value)
    return DeviceMesh.from_group(dist.new_group(backend="tide", pg_options=made), "cpu")


def _compare(on: DeviceMesh, width: int = WIDTH) -> Any:
    """Train on this group and on gloo, in bf16 reduced in fp32; the report of the first."""
    shard = _precision(torch.bfloat16, torch.float32)
    gradients, messages, report = _tide_run(lambda model: shard(model, on), width)
    model = _model(width)
    shard(model, mesh("gloo"))
    for ours, theirs in zip(gradients, _train(model), strict=True):
        close(ours, theirs, 1e-6, "gradient")
    return messages, report


def no_shared_memory(rank: int, world: int) -> None:
    """Ranks that cannot share memory gain nothing from the layout: PyTorch's path, over the inner group."""
    messages, report = _compare(_group_with(shared_memory=False))
    assert {(r.op, r.kind) for r in report.rows} == {
        ("all_gather", "no_shared_memory"),
        ("reduce_scatter", "no_shared_memory"),
    }, report
    assert len(messages) == 1 and "no memory" in messages[0], messages


def no_slot(rank: int, world: int) -> None:
    """An arena too small for a slot: the same layout in ordinary memory, carried through staging."""
    messages, report = _compare(_group_with(arena_bytes=80 << 10, staging_bytes=64 << 10), width=256)
    assert messages == [] and report.fallbacks == [], report
    assert {(r.op, r.path, r.backend_path) for r in report.rows} == {
        ("all_gather", "tide", "staged"),
        ("reduce_scatter", "tide", "staged"),
    }, report


def slots_come_back(rank: int, world: int) -> None:
    """A slot is in use exactly while parameters are gathered, and none is left when the model is gone."""
    on = mesh("tide")
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    model = _model()
    _shard(model, on)
    in_forward = []
    model[1].register_forward_hook(lambda *_: in_forward.append(backend.arena_bytes()[0]))
    for _ in range(3):
        _train(model, steps=1)
        assert backend.arena_bytes()[0] == 0, "the slots of a finished step are still held"
    assert len(set(in_forward)) == 1 and in_forward[0] > 0, in_forward
    model.unshard()
    held = backend.arena_bytes()[0]
    assert held > 0
    for parameter in model[0].parameters():
        assert backend.in_arena(parameter.detach())
    weight = model[0].weight.detach()
    expected = weight.clone()
    _train(_shard_new(on), steps=1)  # other slots come and go
    assert torch.equal(weight, expected)
    assert backend.arena_bytes()[0] == held
    del model, weight, parameter
    gc.collect()
    assert backend.arena_bytes()[0] == 0


def _shard_new(on: DeviceMesh) -> nn.Sequential:
    model = _model()
    _shard(model, on)
    return model

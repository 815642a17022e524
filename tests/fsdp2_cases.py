"""What each rank runs for one FSDP2 case: the same training on tide and on gloo, traced and compared."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_models import Case, build, loss_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode

import tide_backend

STEPS = 5
# From PyTorch 2.15 on FSDP2 reduces every gradient in the dtype in which autograd made it, so that a group may have
# bf16 and fp32 side by side: an RMSNorm on CPU computes in fp32 and gives its bf16 weight an fp32 gradient. Before,
# autograd rounded that to the parameter's dtype first.
KEEPS_AUTOGRADS_DTYPES = hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes")
FACTORIES = ("empty", "zeros", "new_empty", "new_zeros", "empty_like", "zeros_like")
_groups: dict[Any, Any] = {}  # made beside the default group (tide), and only good with it


def gloo_group() -> dist.ProcessGroup:
    """All ranks on gloo; made by all of them at the same time."""
    if _groups.get("default") is not dist.group.WORLD:
        _groups.clear()
        _groups.update(default=dist.group.WORLD, gloo=dist.new_group(backend="gloo"))
    return _groups["gloo"]


def mesh(backend: str, hsdp: bool = False) -> DeviceMesh:
    """All ranks in one dimension, or replicate 2 x shard world/2."""
    gloo_group()
    if (backend, hsdp) not in _groups:
        if not hsdp:
            group = dist.group.WORLD if backend == "tide" else gloo_group()
            _groups[backend, hsdp] = DeviceMesh.from_group(group, "cpu")
        else:
            grid = torch.arange(dist.get_world_size()).view(2, -1)
            replicate, shard = [], []
            for ranks in grid.t().tolist():
                replicate.append((ranks, dist.new_group(ranks, backend=backend)))
            for ranks in grid.tolist():
                shard.append((ranks, dist.new_group(ranks, backend=backend)))
            mine = [next(g for ranks, g in part if dist.get_rank() in ranks) for part in (replicate, shard)]
            _groups[backend, hsdp] = DeviceMesh.from_group(
                mine, "cpu", mesh=grid, mesh_dim_names=("replicate", "shard")
            )
    return _groups[backend, hsdp]


class Trace(TorchDispatchMode):
    """Operators that ran, sizes that ``chunk_cat`` packed, and one-dimensional float32 buffers allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.packed: set[int] = set()
        self.buffers: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1] if str(func).startswith("aten.") else str(func).rsplit(".", 1)[0]
        self.operators[name] += 1
        if "chunk_cat" in name:
            self.packed.add(kwargs["out"].numel())
        if name in FACTORIES and out.dim() == 1 and out.dtype == torch.float32:
            self.buffers.add(out.numel())
        return out

    def count(self, word: str) -> int:
        return sum(n for name, n in self.operators.items() if word in name)


def shard(model: torch.nn.Module, case: Case, backend: str) -> None:
    policy = MixedPrecisionPolicy()
    if case.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = dict(mesh=mesh(backend, case.hsdp), mp_policy=policy, reshard_after_forward=case.reshard)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if case.prefetch:
        blocks = list(model.blocks)
        for here, following in itertools.pairwise(blocks):
            here.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([here])
    if case.divide is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(case.divide)


def gathered_bits_are_right(model: torch.nn.Module, case: Case, async_op: bool) -> None:
    """The unsharded parameters against the unsharded model itself, bit by bit."""
    expected = dict(build(case).named_parameters())
    for prefix, module in [*((f"blocks.{i}.", b) for i, b in enumerate(model.blocks)), ("", model)]:
        handle = module.unshard(async_op=async_op)
        if handle is not None:
            handle.wait()
        for name, parameter in module.named_parameters(prefix=prefix.rstrip(".")):
            if prefix == "" and name.startswith("blocks."):
                continue
            want = expected[name].detach()
            if case.precision == "bf16":
                want = want.to(torch.bfloat16)
            assert parameter.dtype == want.dtype and parameter.shape == want.shape, name
            bits = torch.int16 if case.precision == "bf16" else torch.int32
            assert torch.equal(parameter.detach().view(bits), want.view(bits)), f"{name} was gathered wrongly"
        module.reshard()


def train(case: Case, backend: str) -> dict[str, Any]:
    """Five AdamW steps. Returns losses, gradients of the first step, parameters and the trace."""
    rank = dist.get_rank()
    model = build(case)
    shard(model, case, backend)
    gathered_bits_are_right(model, case, case.async_unshard)
    if backend == "tide":  # FSDP2 has not named its modules yet, so these calls have rows of their own
        early = tide_backend.report(reset=True)
        assert len(early.rows) >= 2 and early.fallbacks == [], early
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    micro = 2 if case.accumulate else 1
    losses, gradients, extra, trace = [], {}, [], Trace()
    for step in range(STEPS):
        if case.moe:
            model.blocks[1].turn = step
        with trace if step in (0, 2) else contextlib.nullcontext():
            for part in range(micro):
                if case.accumulate == "no_sync":
                    model.set_requires_gradient_sync(part == micro - 1)
                if case.accumulate == "no_reshard":
                    model.set_reshard_after_backward(part == micro - 1)
                loss = loss_of(model, rank, step * micro + part)
                loss.backward()
                losses.append(loss.item())
        if step == 0:
            gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        if case.evaluate:
            with torch.no_grad():
                extra.append(loss_of(model, rank, 99).item())
            with torch.inference_mode():
                extra.append(loss_of(model, rank, 98).item())
        if case.state_dict and step == 2:
            state = model.state_dict()
            extra += [state[name].full_tensor().clone() for name in sorted(state)]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation without reshard_after_forward leaves them gathered
    parameters = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
    return dict(losses=losses, gradients=gradients, extra=extra, parameters=parameters, trace=trace)


def close(got: Any, want: Any, tolerance: float, what: str) -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64) for x in (got, want))
    assert got.shape == want.shape, f"{what}: shapes {got.shape} and {want.shape}"
    if got.numel():
        error = (got - want).abs().max().item()
        assert error <= tolerance * max(want.abs().max().item(), 1e-30), f"{what}: differs by {error}"


def assert_served_by_tide(case: Case, group: dist.ProcessGroup) -> None:
    report = tide_backend.report(group)
    modules = {row.module for row in report.rows}
    assert modules == {"blocks.0", "blocks.1", "blocks.2", "Net (root)"}, modules
    for row in report.rows:
        assert row.path == "tide" and row.fallbacks == 0 and row.calls > 0 and row.copies_avoided > 0, row
        expected = {"all_gather": "zero_copy", "reduce_scatter": "staged"}[row.op]
        assert row.backend_path == expected, row
    assert report.fallbacks == [], report.fallbacks
    assert json.loads(json.dumps(report.to_dict()))["rows"][0]["module"] in modules
    reducing = {row.module for row in report.rows if row.op == "reduce_scatter"}
    assert reducing == (modules - {"blocks.2"} if case.frozen else modules), reducing


def compare_with_gloo(rank: int, world: int, case: Case) -> float:
    """Run the case on both backends; every rank asserts. Returns the largest difference of parameters."""
    group = mesh("tide", case.hsdp).get_group("shard") if case.hsdp else dist.group.WORLD
    torch.use_deterministic_algorithms(case.deterministic)
    try:
        tide_backend.report(reset=True)
        tide = train(case, "tide")
        assert_served_by_tide(case, group)
        gloo = train(case, "gloo")
        assert_served_by_tide(case, group)  # gloo's training left no row
    finally:
        torch.use_deterministic_algorithms(False)
    for word in ("split_with_sizes_copy", "chunk_cat", "all_gather_copy_in"):
        assert gloo["trace"].count(word) > 0, f"the trace does not see {word} on gloo, so it proves nothing"
        assert tide["trace"].count(word) == 0, f"{word} ran on tide"
    packed = gloo["trace"].packed
    assert packed and packed <= gloo["trace"].buffers, "the trace does not see gloo's packed buffers"
    assert not packed & tide["trace"].buffers, "a packed float32 buffer was allocated on tide"

    close(tide["losses"][0], gloo["losses"][0], 0.0, "first loss")
    assert tide["gradients"].keys() == gloo["gradients"].keys() and tide["gradients"]
    for name, gradient in tide["gradients"].items():
        assert gradient.dtype == torch.float32
        close(gradient, gloo["gradients"][name], 1e-6, f"gradient of {name}")
    tolerance = 1e-6 if case.precision == "fp32" else 1e-4
    for name, parameter in tide["parameters"].items():
        close(parameter, gloo["parameters"][name], tolerance, f"{name} after {STEPS} steps")
    close(tide["losses"], gloo["losses"], tolerance, "losses")
    assert len(tide["extra"]) == len(gloo["extra"])
    for ours, theirs in zip(tide["extra"], gloo["extra"], strict=True):
        close(ours, theirs, tolerance, "evaluation or state dict")
    differences = [
        (parameter - gloo["parameters"][name]).abs().max().item()
        for name, parameter in tide["parameters"].items()
        if parameter.numel()
    ]
    return max(differences)


def in_bf16(plain: torch.nn.Module) -> None:
    """Gives an unsharded model bf16 parameters, and gradients of the dtypes that FSDP2 reduces in fp32."""
    plain.to(torch.bfloat16)
    if KEEPS_AUTOGRADS_DTYPES:
        for p in plain.parameters():
            p.grad_dtype = None


def gradients_match_float64(rank: int, world: int, case: Case) -> None:
    """The reduced gradients against every rank's own ones on an unsharded model, summed in float64."""
    plain = build(case)
    if case.precision == "bf16":
        in_bf16(plain)
    loss_of(plain, rank, 0).backward()
    model = build(case)
    shard(model, case, "tide")
    loss_of(model, rank, 0).backward()
    parameters = dict(model.named_parameters())
    for name, p in plain.named_parameters():
        total = p.grad.double()
        dist.all_reduce(total, group=gloo_group())
        want = total / (case.divide or world)
        close(parameters[name].grad.full_tensor(), want, 1e-6, f"gradient of {name}")

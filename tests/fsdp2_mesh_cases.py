"""What each rank runs for FSDP2's meshes: replicas, tensor parallelism, several meshes, other shard dims."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from fsdp2_both import Result, assert_on_tide, full, on_both
from fsdp2_cases import Trace, close, gloo_group, in_bf16, mesh
from fsdp2_contract_cases import adam, run_steps
from fsdp2_models import Case, Net, build, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef

import tide_backend

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16-reduced-in-bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


def _sharded(backend: str, hsdp: bool, precision: str, each: Callable[[FSDPModule], None] = lambda m: None) -> Net:
    model = build(Case("mesh"))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh(backend, hsdp), mp_policy=POLICIES[precision])
    for module in (*model.blocks, model):
        each(module)
    return model


def _oracle(precision: str, factor: float) -> dict[str, torch.Tensor]:
    """All ranks' gradients of an unsharded model, added in float64 and divided."""
    plain = build(Case("plain"))
    if precision != "fp32":
        in_bf16(plain)
    loss_of(plain, dist.get_rank(), 0).backward()
    sums = {}
    for name, p in plain.named_parameters():
        sums[name] = p.grad.double()
        dist.all_reduce(sums[name], group=gloo_group())
        sums[name] /= factor
    return sums


def divided(rank: int, world: int, precision: str, factor: float | None, forced_sum: bool = False) -> None:
    """1-D, 2 x 2 and float64 agree on what a gradient divide factor does; gloo knows no PREMUL_SUM."""

    def configure(module: FSDPModule) -> None:
        if factor is not None:
            module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(forced_sum)

    oracle = _oracle(precision, factor or world)
    # A bf16 reduction rounds its sum once per mesh dim and, with a sum forced, the quotient.
    tolerance = {"fp32": 1e-6, "bf16": 1e-6, "bf16-reduced-in-bf16": 2.0**-7}[precision]
    for hsdp in (False, True):
        tide_backend.report(reset=True)
        model = _sharded("tide", hsdp, precision, configure)
        loss_of(model, rank, 0).backward()
        assert_on_tide(tide_backend.report())
        for name, p in model.named_parameters():
            want = oracle[name]
            assert want.abs().max() > 0
            close(p.grad.full_tensor(), want, tolerance, f"gradient of {name} on {'2 x 2' if hsdp else '1-D'}")


def forced_sum_as_on_gloo(rank: int, world: int) -> None:
    def train(backend: str) -> Result:
        model = _sharded(backend, False, "bf16", lambda m: m.set_force_sum_reduction_for_comms(True))
        return {**run_steps(model, adam(model), range(3)), **full(model)}

    on_both(train, tolerance=1e-4)


def slow_all_reduce(rank: int, world: int, precision: str = "bf16") -> None:
    """Replicas that are late: no layer's gradients may appear in another's (PyTorch #180889, which took a reduction in
    another dtype than the parameters')."""
    real = dist.all_reduce

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02 * (rank % 3))
        torch.full((4096,), float("nan"))  # pressure: a buffer freed too early would be written over
        return real(*args, **kwargs)

    def train(backend: str) -> Result:
        model = _sharded(backend, True, precision)
        for part in range(3):
            model.set_requires_all_reduce(part == 2)  # the first two stay partial sums
            loss_of(model, rank, part).backward()
        return full(model)

    dist.all_reduce = late
    try:
        ours, _ = on_both(train, tolerance=1e-6 if precision == "bf16" else 2.0**-6)
    finally:
        dist.all_reduce = real
    flat = _sharded("tide", False, precision)
    for part in range(3):
        loss_of(flat, rank, part).backward()
    # In bf16 each of the sums is rounded, and in another order.
    for name, value in full(flat).items():
        close(ours[name], value, 1e-6 if precision == "bf16" else 2.0**-6, f"{name} in two dimensions and in one")
    ups = [ours[f"gradient blocks.{i}.up.weight"] for i in range(3)]
    assert not any(torch.equal(a, b) for i, a in enumerate(ups) for b in ups[:i])


def buffers_of_the_all_reduce(rank: int, world: int) -> None:
    """PyTorch #179443: bf16 parameters reduced in fp32 leave one fp32 buffer a layer until the backward is over. tide
    keeps no more of them than gloo, and none beyond the model."""
    real, most, left = dist.all_reduce, {}, {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for backend in ("gloo", "tide"):
        buffers: list[StorageWeakRef] = []
        alive: list[int] = []

        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert tensor.dtype == torch.float32
            buffers.append(StorageWeakRef(tensor.untyped_storage()))  # noqa: B023
            alive.append(sum(not b.expired() for b in buffers))  # noqa: B023
            return real(tensor, *args, **kwargs)

        model = build(Case("mesh")).bfloat16()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh(backend, True), mp_policy=policy)
        for step in range(2):
            dist.all_reduce = counted
            try:
                loss_of(model, rank, step).backward()
            finally:
                dist.all_reduce = real
        most[backend] = max(alive)
        assert len(alive) == 2 * (len(model.blocks) + 1)
        del model
        gc.collect()
        left[backend] = sum(not b.expired() for b in buffers)
    assert most["tide"] <= most["gloo"], most
    assert left == {"gloo": 0, "tide": 0}


def tensor_parallel(rank: int, world: int) -> None:
    """Parameters that are DTensors before FSDP2 shards them, 2 x 2: only their local part is gathered."""
    width = 8
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def build_plain() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, width))

    def loss(model: nn.Module, replica: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(replica)
        return model(torch.randn(3, width, generator=generator).to(dtype)).square().sum()

    model = parallelize_module(build_plain(), grid["tp"], plan)
    local = sum(p._local_tensor.numel() for p in model.parameters())
    fully_shard(model, mesh=grid["dp"])
    plain = build_plain().double()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    tide_backend.report(reset=True)
    with Trace() as trace:
        for _ in range(3):
            loss(model, grid.get_coordinate()[0]).backward()
            for replica in range(2):
                (loss(plain, replica, torch.float64) / 2).backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                close(ours.grad.full_tensor(), theirs.grad, 1e-5, "gradient")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    report = tide_backend.report(grid["dp"].get_group())
    assert_on_tide(report)
    assert trace.count("split_with_sizes_copy") == trace.count("chunk_cat") == 0
    gathered = next(row for row in report.rows if row.op == "all_gather")
    assert gathered.bytes == gathered.calls * 4 * local, (gathered, local)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close(ours.full_tensor(), theirs, 1e-5, "parameter")


def several_meshes(rank: int, world: int) -> None:
    """A block on a 2 x 2 mesh inside a model that is sharded over all ranks."""

    def train(backend: str) -> Result:
        model = build(Case("meshes", moe=True))
        policy = POLICIES["bf16"]
        for i, block in enumerate(model.blocks):
            fully_shard(block, mesh=mesh(backend, hsdp=i == 1), mp_policy=policy)
        fully_shard(model, mesh=mesh(backend), mp_policy=policy)
        return {**run_steps(model, adam(model), range(3)), **full(model)}

    _, report = on_both(train, tolerance=1e-4)
    groups = {row.module: row.group for row in report.rows if row.op == "all_gather"}
    assert len(set(groups.values())) == 2 and groups["blocks.1"] != groups["blocks.0"] == groups["blocks.2"], groups


class Wide(nn.Module):
    """Expert weights [3, 8, 256] and [3, 256, 8], a matrix [4, 2048], and parameters for Shard(0) between them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3))
        self.up = nn.Parameter(torch.randn(3, 8, 256) / 4)
        self.scale = nn.Parameter(torch.randn(5))
        self.down = nn.Parameter(torch.randn(3, 256, 8) / 16)
        self.matrix = nn.Parameter(torch.randn(4, 2048) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.bmm(torch.bmm(x, self.up.to(x.dtype)).tanh(), self.down.to(x.dtype))
        y = y * self.bias[:, None, None] + self.scale.sum()
        return y.square().mean() + (self.matrix * self.matrix.detach().roll(1, 1)).sum()


def other_shard_dims(rank: int, world: int, precision: str) -> None:
    """Shard(1) in three and in two dimensions: gathered side by side, with no temporary and no cat."""

    def placement(p: nn.Parameter) -> Shard | None:
        return Shard(1) if p.dim() > 1 else None

    def start(backend: str) -> Wide:
        torch.manual_seed(6)
        return fully_shard(
            Wide(), mesh=mesh(backend), mp_policy=POLICIES[precision], shard_placement_fn=placement
        )

    plain = start("gloo")
    names = [name for name, _ in plain.named_parameters()]
    torch.manual_seed(6)
    want = dict(Wide().named_parameters())
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    models = {backend: start(backend) for backend in ("tide", "gloo")}
    traces = {}
    for backend, model in models.items():
        with Trace() as traces[backend]:
            model.unshard()
        for name in names:
            got = dict(model.named_parameters())[name].detach()
            assert torch.equal(got, want[name].detach().to(dtype)), f"{name} was gathered wrongly on {backend}"
            assert got.data_ptr() % 64 == 0
        model.reshard()
    assert traces["gloo"].count("cat") > 0 and traces["tide"].count("cat") == 0

    def train(backend: str) -> Result:
        model = start(backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        result: Result = {}
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * rank + step)
            loss = model(torch.randn(3, 2, 8, generator=generator).to(dtype)).float()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result[f"loss {step}"] = loss.item()
        return {**result, **full(model)}

    on_both(train, tolerance=1e-6 if precision == "fp32" else 1e-4)

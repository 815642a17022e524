"""What each rank runs for parameters that choose themselves what is gathered, and for groups of several dtypes."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn as nn
from fsdp2_both import Result, full, on_both
from fsdp2_cases import mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

ROWS, COLUMNS = 12, 7  # 7 bytes a row in float8: what lies behind must still be aligned


def _float8(local: torch.Tensor, mesh: DeviceMesh) -> Any:
    """The shard in float8, and its scale: two tensors of different dtypes."""
    scale = local.abs().max().clamp(min=1e-12).reshape(1) / 448.0
    return ((local / scale).to(torch.float8_e4m3fn), scale), local.shape


def _from_float8(
    outputs: Any, shape: torch.Size, dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> Any:
    data, scales = outputs
    assert data.data_ptr() % 16 == 0 and scales.data_ptr() % 16 == 0, "an output is not aligned"
    whole = (data.float().view(scales.numel(), *shape) * scales.view(-1, *[1] * len(shape))).flatten(0, 1).to(dtype)
    if out is None:
        return whole, (whole,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(whole)
    return None


def _halves(
    local: torch.Tensor, mesh: DeviceMesh, size: Any, stride: Any, module: nn.Module, policy: Any
) -> Any:
    """PyTorch's longer signature; one tensor, gathered in bfloat16."""
    assert size == (ROWS, COLUMNS) and isinstance(module, nn.Linear)
    return ((local / 2).bfloat16(),), None


def _aliased(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Any:
    """The parameter is the gathered tensor itself, in place, as quantised weights are."""
    (half,) = outputs
    if out is None:
        return half, ()
    assert out.untyped_storage().data_ptr() == half.untyped_storage().data_ptr(), "the storage was replaced"
    return None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(COLUMNS, ROWS)
        self.second = nn.Linear(COLUMNS, ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.first.bias.dtype)
        return (self.first(x).tanh().float() * self.second(x).float()).square().mean()


def _train(model: nn.Module, rank: int) -> Result:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    result: Result = {}
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * rank + step)
        loss = model(torch.randn(4, COLUMNS, generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result[f"loss {step}"] = loss.item()
    return {**result, **full(model)}


def extensions(rank: int, world: int) -> None:
    """Two extensions of different kinds beside plain parameters, all in one group."""
    asked = []

    def start(backend: str) -> nn.Module:
        torch.manual_seed(8)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = fully_shard(Net(), mesh=mesh(backend), mp_policy=policy)
        pairs = (model.first, _float8, _from_float8), (model.second, _halves, _aliased)
        for linear, before, after in pairs:
            local = linear.weight._local_tensor
            local.fsdp_pre_all_gather = MethodType(before, local)
            local.fsdp_post_all_gather = after
        return model

    def train(backend: str) -> Result:
        asked.clear()
        inputs = _fsdp_param_group.FSDPParam.all_gather_inputs
        model = start(backend)

        def counted(p: Any) -> Any:
            asked.append(p)
            return inputs.fget(p)

        _fsdp_param_group.FSDPParam.all_gather_inputs = property(counted)
        try:
            result = _train(model, rank)
        finally:
            _fsdp_param_group.FSDPParam.all_gather_inputs = inputs
        assert len(asked) == 2 * 3, "an extension was not asked exactly once per all-gather"
        return result

    _, report = on_both(train)
    gathered = next(row for row in report.rows if row.op == "all_gather")
    shard = ROWS // world
    per_rank = shard * COLUMNS * (1 + 2) + 4 + 2 * shard * 2  # float8, bfloat16, a float32 scale, two bf16 biases
    assert gathered.bytes == gathered.calls * world * per_rank, gathered


def several_dtypes(rank: int, world: int) -> None:
    """Frozen bfloat16 and integer parameters between float32 ones."""

    def train(backend: str) -> Result:
        torch.manual_seed(8)
        model = Net()
        model.first.register_parameter("frozen", nn.Parameter(torch.ones(5, dtype=torch.bfloat16), False))
        model.second.register_parameter("table", nn.Parameter(torch.arange(11), False))
        model.second.register_forward_hook(lambda m, args, out: out + m.table.sum() / 55 + model.first.frozen.sum())
        return _train(fully_shard(model, mesh=mesh(backend)), rank)

    on_both(train)

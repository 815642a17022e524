"""What runs inside a rank of a GPU test: the device, slots, layouts, and data that every rank can make for every other.

Nothing here comes from the code under test but the calls themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tide_backend

SLOT_ALIGN = 512  # bytes
_meshes = count()

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def enter(rank: int) -> torch.device:
    """This rank's GPU, made current. Every task begins here."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device, group: Any = None) -> Any:
    found = (group or dist.group.WORLD)._get_backend(device)
    return getattr(found, "wrapped_pg", found)


def barrier(device: torch.device) -> None:
    """After it every rank's device has nothing left to do."""
    torch.cuda.synchronize()
    dist.barrier(device_ids=[device.index])
    torch.cuda.synchronize()


@contextmanager
def own_group(device: torch.device, **options: Any) -> Iterator[Any]:
    """A tide group of all ranks with these `Options`, destroyed when every rank's device is done with it."""
    wanted = tide_backend.Options()
    for name, value in options.items():
        setattr(wanted, name, value)
    group = dist.new_group(backend="tide", pg_options=wanted)
    yield group
    barrier(device)
    dist.destroy_process_group(group)


def mesh_of(groups: Any, device: torch.device, *dims: str, **more: Any) -> DeviceMesh:
    """DTensor keeps what it planned for a mesh, with its groups, for every mesh that is equal: so none is."""
    names = tuple(f"{dim}{next(_meshes)}" for dim in dims)
    return DeviceMesh.from_group(groups, device.type, mesh_dim_names=names, **more)


@contextmanager
def grid(backend_name: str, device: torch.device) -> Iterator[DeviceMesh]:
    """Replicate 2 x shard world/2, for HSDP, on groups of this backend."""
    ranks = torch.arange(dist.get_world_size()).view(2, -1)
    mine = []
    for members in (*ranks.t().tolist(), *ranks.tolist()):
        group = dist.new_group(members, backend=backend_name)
        if dist.get_rank() in members:
            mine.append(group)
    yield mesh_of(mine, device, "replicate", "shard", mesh=ranks)
    barrier(device)
    for group in mine:
        dist.destroy_process_group(group)


def slot(nbytes: int, device: torch.device, group: Any = None) -> torch.Tensor:
    """uint8[nbytes] in the arena."""
    stream = torch.cuda.current_stream(device).cuda_stream
    tensor, why = backend(device, group).slot(nbytes, str(device), stream)
    assert tensor is not None, why
    return tensor


def last_record(device: torch.device, op: str, group: Any = None) -> dict[str, Any]:
    return next(r for r in reversed(backend(device, group).records()) if r["op"] == op and r["device"] == "cuda")


def random_bits(seed: int, rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """dtype[numel], the same on every rank that asks; floats are finite, of either sign, 2^-8 to 2^8 in magnitude."""
    generator = torch.Generator(device).manual_seed(seed * 1009 + rank)
    if not dtype.is_floating_point:
        high = min(torch.iinfo(dtype).max, 1 << 40)
        return torch.randint(0, high, (numel,), generator=generator, dtype=dtype, device=device)
    mantissa = torch.rand(numel, generator=generator, device=device) + 1
    exponent = torch.randint(-8, 8, (numel,), generator=generator, device=device)
    sign = torch.randint(0, 2, (numel,), generator=generator, device=device) * 2 - 1
    return (mantissa * sign * torch.exp2(exponent.float())).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal in every bit."""
    return torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).contiguous().view(torch.uint8))


class Gathered:
    """A slot for parameters with these shards, in the layout that FSDP2 uses."""

    def __init__(self, shards: list[int], dtype: torch.dtype, device: torch.device, group: Any = None) -> None:
        self.shards, self.device, self.group = shards, device, group
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.layout = tide_backend.ParameterLayout(self.world, shards, None, SLOT_ALIGN // dtype.itemsize)
        self.memory = slot(self.layout.total_gathered_numel * dtype.itemsize, device, group).view(dtype)

    def parameter(self, i: int) -> torch.Tensor:
        """[world, shard] of parameter i."""
        start, shard = list(self.layout.gathered_offsets)[i], self.shards[i]
        return self.memory.narrow(0, start, self.world * shard).view(self.world, shard)

    def place(self, shard: torch.Tensor) -> None:
        for i, part in enumerate(shard.split(self.shards)):
            self.parameter(i)[self.rank].copy_(part)

    def gather(self, shard: torch.Tensor | None = None, async_op: bool = False) -> Any:
        """The call; without `shard` it is in place already."""
        source = shard
        if source is None:
            source = torch.zeros(1, dtype=self.memory.dtype, device=self.device).expand(sum(self.shards))
        tide_backend.apply_layout(self.memory, self.layout, placed=shard is None)
        return all_gather(self.memory, source, group=self.group, async_op=async_op)

    def wrong(self, shards: list[torch.Tensor]) -> list[str]:
        """Which parts are not what these shards, one per rank, make of them."""
        return [
            f"parameter {i} of rank {r}"
            for r, shard in enumerate(shards)
            for i, part in enumerate(shard.split(self.shards))
            if not same(self.parameter(i)[r], part)
        ]


def reference_scatter(
    gradients: list[list[torch.Tensor]], owner: int, dtype: torch.dtype, scale: float
) -> torch.Tensor:
    """What `owner` must get: (sum over ranks, in rank order, in fp32) * scale, rounded once. gradients[rank][i].

    Parameter i has world shards of ceil(rows / world) rows; what lies behind its end is zero. On the CPU, with
    separate operations, so that nothing is fused.
    """
    world, parts = len(gradients), []
    for i in range(len(gradients[0])):
        total = None
        for r in range(world):
            flat = gradients[r][i].cpu().reshape(-1).float()
            total = flat if total is None else total + flat
        rows = gradients[0][i].size(0)
        shard = -(-rows // world) * (total.numel() // rows)
        padded = torch.zeros(world * shard)
        padded[: total.numel()] = total * torch.tensor(scale, dtype=torch.float32) if scale != 1.0 else total
        parts.append(padded[owner * shard : (owner + 1) * shard])
    return torch.cat(parts).to(dtype)


class Scattered:
    """A reduce-scatter of a list of gradients, as FSDP2 issues it."""

    def __init__(self, gradients: list[torch.Tensor], dtype: torch.dtype, group: Any = None) -> None:
        world = dist.get_world_size(group)
        shards = [-(-g.size(0) // world) * (g.numel() // g.size(0)) for g in gradients]
        self.group, self.gradients = group, gradients
        self.layout = tide_backend.ParameterLayout(world, shards, [g.numel() for g in gradients], 1)
        device = gradients[0].device
        self.output = torch.empty(sum(shards), dtype=dtype, device=device)
        self.placeholder = torch.zeros(1, dtype=dtype, device=device).expand(world * sum(shards))

    def scatter(self, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> Any:
        tide_backend.apply_layout(self.placeholder, self.layout, tensors=self.gradients)
        return reduce_scatter(self.output, self.placeholder, op=op, group=self.group, async_op=async_op)

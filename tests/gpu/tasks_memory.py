"""Tasks of test_gpu_memory.py: what each rank does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from gpu_rank import backend, barrier, enter, grid, mesh_of, own_group
from tasks_collectives import BUSY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tide_backend.bench.llama import Blocks, Shape

SHAPE = Shape(width=1024, heads=8, key_value_heads=8, hidden=4096)
TOKENS = 16  # activations are nothing beside gradients
STAGING = 16 << 20


@contextmanager
def mesh_on(name: str, device: torch.device, hsdp: bool) -> Iterator[DeviceMesh]:
    if hsdp:
        with grid(name, device) as mesh:
            yield mesh
    elif name == "tide":
        with own_group(device, cuda_staging_bytes=STAGING) as group:
            yield mesh_of(group, device, "shard")
    else:
        group = dist.new_group(backend=name)
        yield mesh_of(group, device, "shard")
        barrier(device)
        dist.destroy_process_group(group)


def late_in_backward(model: Blocks) -> None:
    """Each block's backward begins with a pause of the device."""

    def pause(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: torch.cuda._sleep(BUSY // 5))

    for block in model.blocks:
        block.register_forward_hook(pause)


def backward_peaks(rank: int, world: int, layers: list[int], hsdp: bool, stored: str) -> dict[str, dict[int, int]]:
    """By backend and number of layers: how many bytes of PyTorch's allocator a backward with fp32 reduction takes at
    most beyond those that were in use before it, blocks included that a stream has yet to let go. Rank 1's device is
    late at every layer, so that the others' reductions are not over while their host goes on. "arena": what tide holds
    beside that."""
    device = enter(rank)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    peaks: dict[str, dict[int, int]] = {"tide": {}, "nccl": {}, "arena": {}}
    for name in ("tide", "nccl"):
        for count in layers:
            with mesh_on(name, device, hsdp) as mesh:
                torch.manual_seed(0)
                with device:
                    model = Blocks(SHAPE, count).to(getattr(torch, stored))
                for block in model.blocks:
                    fully_shard(block, mesh=mesh, mp_policy=policy)
                fully_shard(model, mesh=mesh, mp_policy=policy)
                if rank == 1:
                    late_in_backward(model)
                x = torch.randn(1, TOKENS, SHAPE.width, device=device, dtype=torch.bfloat16)
                for _ in range(2):  # the first one makes slots, streams and workspaces
                    model.zero_grad(set_to_none=True)
                    barrier(device)
                    torch.cuda.empty_cache()
                    loss = model(x)
                    torch.cuda.synchronize()
                    before = torch.cuda.memory_stats(device)["active_bytes.all.current"]
                    torch.cuda.reset_peak_memory_stats(device)
                    loss.backward()
                    torch.cuda.synchronize()
                    peak = torch.cuda.memory_stats(device)["active_bytes.all.peak"] - before
                if name == "tide":
                    held = [backend(device, group).arena_bytes("cuda")[1] for group in mesh.get_all_groups()]
                    peaks["arena"][count] = sum(held)
                peaks[name][count] = peak
                del model, loss, x
    torch.cuda.empty_cache()
    return peaks

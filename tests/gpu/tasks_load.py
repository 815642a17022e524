"""Tasks of test_gpu_load.py: what each rank does."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from gpu_load import Load
from gpu_rank import Gathered, Scattered, backend, enter, mesh_of, own_group
from tasks_fsdp2 import prefetch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import tide_backend
from tide_backend.bench.llama import SHAPES, Blocks


def stress(rank: int, world: int, seconds: float) -> dict[str, Any]:
    """Data against flags: payloads that name rank and call, slots reused at once, no synchronization between calls,
    and the device busy with other work."""
    device = enter(rank)
    bad = torch.zeros(2, dtype=torch.int64, device=device)
    host = torch.Generator().manual_seed(11)  # the same on every rank
    rounds: deque[torch.cuda.Event] = deque()
    end, calls = time.monotonic() + seconds, 0
    stop = torch.zeros(1, dtype=torch.int32)
    with Load(device) as load:
        while not stop.item():
            for _ in range(20):
                calls += 1
                bad += stress_call(rank, world, calls, host, device)
            # The device may be two rounds behind, not the whole test.
            rounds.append(torch.cuda.current_stream(device).record_event())
            if len(rounds) > 2:
                rounds.popleft().synchronize()
            stop[0] = time.monotonic() > end
            dist.all_reduce(stop, dist.ReduceOp.MAX)  # on the CPU: all stop after the same call
        gathered, reduced = bad.tolist()
    arena = backend(device).arena_bytes("cuda")
    return {"gathered": gathered, "reduced": reduced, "calls": calls, "arena": arena, "bursts": load.bursts}


def stress_call(rank: int, world: int, call: int, host: torch.Generator, device: torch.device) -> torch.Tensor:
    """One all-gather and one reduce-scatter; how many elements are wrong in each."""
    sizes = [1 << int(torch.randint(0, 19, (1,), generator=host)) for _ in range(3)]
    slow = int(torch.randint(0, 4 * world, (1,), generator=host))
    if slow == rank:
        torch.cuda._sleep(2_000_000)
    out = Gathered(sizes, torch.int32, device)
    out.place(torch.full((sum(sizes),), call * world + rank, dtype=torch.int32, device=device))
    out.gather()
    wanted = torch.arange(world, dtype=torch.int32, device=device) + call * world
    gathered = sum((out.parameter(i) != wanted[:, None]).sum() for i in range(len(sizes)))
    del out
    value = float((call * 7 + rank) % 128)
    gradients = [torch.full((world * s,), value, dtype=torch.bfloat16, device=device) for s in sizes]
    reduced = Scattered(gradients, torch.float32)
    reduced.scatter()
    del gradients
    reduced.gradients.clear()
    total = sum((call * 7 + r) % 128 for r in range(world))
    return torch.stack([gathered, (reduced.output != float(total)).sum()])


def blocks_on(group: Any, device: torch.device, shape: str, layers: int) -> Blocks:
    """bf16 with fp32 reduction; each block prefetches the next one in either direction."""
    torch.manual_seed(0)
    with device:
        model = Blocks(SHAPES[shape], layers)
    mesh = mesh_of(group, device, "shard")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    prefetch(model.blocks)
    return model


def gradients_beside_gemms(
    rank: int, world: int, shape: str, layers: int, steps: int, microbatches: int, tokens: int
) -> dict[str, Any]:
    """Elements of the gradients that differ between tide and nccl, per step and parameter, and as a control between two
    runs of nccl. Nothing waits for the device before the end."""
    device, width = enter(rank), SHAPES[shape].width
    stock = dist.new_group(backend="nccl")
    tide_backend.report(reset=True)
    # The other kernels of attention add in an order of their own at every run.
    with own_group(device) as group, sdpa_kernel(SDPBackend.MATH):
        models = {name: blocks_on(g, device, shape, layers) for name, g in (("tide", group), ("nccl", stock))}
        names = [name for name, _ in models["nccl"].named_parameters()]
        wrong = torch.zeros(2, steps, len(names), dtype=torch.int64, device=device)
        losses = torch.zeros(2, steps, device=device)

        def gradients(name: str, step: int) -> list[torch.Tensor]:
            model, generator = models[name], torch.Generator(device).manual_seed(step * world + rank)
            for _ in range(microbatches):  # each is reduced, so that additions run beside the next one's GEMMs too
                x = torch.randn(2, tokens // 2, width, dtype=torch.bfloat16, device=device, generator=generator)
                loss = model(x)
                loss.backward()
                losses[int(name == "tide"), step] += loss.detach()
            found = [p.grad.to_local() for p in model.parameters()]
            model.zero_grad(set_to_none=True)
            return found

        with Load(device) as load:
            for step in range(steps):
                wanted = gradients("nccl", step)
                for i, (a, b) in enumerate(zip(gradients("tide", step), wanted, strict=True)):
                    wrong[0, step, i] = (a != b).sum()
                if step < 2:
                    losses_before = losses[0, step].clone()
                    for i, (a, b) in enumerate(zip(gradients("nccl", step), wanted, strict=True)):
                        wrong[1, step, i] = (a != b).sum()
                    losses[0, step] = losses_before
                # What an all-gather left behind from the step before must not pass.
                with torch.no_grad():
                    for model in models.values():
                        torch._foreach_mul_([p.to_local() for p in model.parameters()], 1.01)
            counts = wrong.tolist()
        report = tide_backend.report()
        answer = {
            "tide": [[(names[i], n) for i, n in enumerate(row) if n] for row in counts[0]],
            "control": [[(names[i], n) for i, n in enumerate(row) if n] for row in counts[1]],
            "zero": [name for name, gradient in zip(names, wanted, strict=True) if not gradient.any()],
            "losses": losses.tolist(),
            "paths": sorted({(row.op, row.backend_path or row.path) for row in report.rows}),
            "fallbacks": [(row.op, row.reason) for row in report.fallbacks],
            "bursts": load.bursts,
            "peak": torch.cuda.max_memory_allocated(device),
        }
        models.clear()
        del wanted, a, b
    dist.destroy_process_group(stock)
    torch.cuda.empty_cache()
    return answer

"""A training step of FSDP2, the backends beside each other: the same blocks, one set of processes per side.

Sides: tide; the stock backends nccl and gloo; nccl-symm: nccl with FSDP2's all-gather output in symmetric memory and
copy engines in place of thread blocks (`NCCL_CTA_POLICY_ZERO`); compute: one rank's compute without any sharding,
the floor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .launch import launch
from .llama import SHAPES, Blocks
from .settings import Settings

SIDES = ("tide", "nccl", "nccl-symm", "gloo", "compute")
WARMUPS = 3
# Losses are means over the same tokens; bf16 compute is the same on both sides, the order of the sums is not.
TOLERANCE = 1e-3


def run_rank(rank: int, world: int, store: Any, side: str, settings: Settings) -> Iterator[dict[str, Any]]:
    """Called on every rank; a sample per number of tokens."""
    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    before = used_bytes(device)
    options = None
    if side == "nccl-symm":
        options = dist.ProcessGroupNCCL.Options()
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    backend = {"nccl-symm": "nccl", "compute": "nccl" if device.type == "cuda" else "gloo"}.get(side, side)
    if backend == "tide":
        import tide_backend  # noqa: F401  (registers)
    bound = {"device_id": device} if device.type == "cuda" and world <= torch.cuda.device_count() else {}
    store = dist.PrefixStore("g", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, pg_options=options, **bound)
    for tokens in settings.tokens:
        sample = step_times(side, settings, device, tokens)
        sample["used_bytes"] = used_bytes(device) - before
        sample["reserved_bytes"] = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        sample["arena_bytes"] = arena_bytes(device) if side == "tide" else 0
        yield sample
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def used_bytes(device: torch.device) -> int:
    """What the driver has given out on this GPU, to every process; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def arena_bytes(device: torch.device) -> int:
    """Memory of tide's arena on this rank, which PyTorch's statistics do not see."""
    return dist.group.WORLD._get_backend(device).arena_bytes(device.type)[1]


def shard(model: Blocks, side: str) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
        if side == "nccl-symm":
            from ..fsdp2.symmetric import SymmetricAllGather

            block.set_custom_all_gather(SymmetricAllGather())
    fully_shard(model, mp_policy=policy)


def step_times(side: str, settings: Settings, device: torch.device, tokens: int) -> dict[str, Any]:
    shape = SHAPES[settings.model]
    torch.manual_seed(0)
    with device:
        model = Blocks(shape, settings.layers)
        x = torch.randn(1, tokens, shape.width, dtype=torch.bfloat16)
    if side == "compute":
        model.bfloat16()
    else:
        shard(model, side)

    def step() -> torch.Tensor:
        loss = model(x)
        loss.backward()
        return loss.detach()

    seconds = []
    for _ in range(WARMUPS + settings.repetitions):
        model.zero_grad()
        meet(device)
        begin = time.perf_counter()
        loss = step()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    norm = gradient_norm(model, side)
    sample = {
        "tokens": tokens,
        "seconds": seconds[WARMUPS:],
        "loss": float(loss),
        "norm": norm,
        "path": path(side),
    }
    if settings.profile and device.type == "cuda":
        sample["kernels"] = profile(step)
    return sample


def gradient_norm(model: Blocks, side: str) -> float:
    """Of the whole gradient, over all ranks."""
    total = torch.zeros((), dtype=torch.float64)
    for p in model.parameters():
        grad = p.grad if side == "compute" else p.grad.to_local()
        total += torch.linalg.vector_norm(grad, dtype=torch.float32).double().cpu() ** 2
    if side != "compute":
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, float(total))
        total = torch.tensor(sum(parts), dtype=torch.float64)
    return float(total.sqrt())


def path(side: str) -> str:
    """How the parameter groups' collectives went."""
    if side != "tide":
        return side
    import tide_backend

    report = tide_backend.report(reset=True)
    ways = {f"{row.op}:{row.backend_path or row.path}" for row in report.rows}
    reasons = {row.reason for row in report.fallbacks}
    return ", ".join(sorted(ways)) + (f" FALLBACKS: {'; '.join(sorted(reasons))}" if reasons else "")


def profile(step: Any) -> list[tuple[str, float, int]]:
    """(kernel or copy, milliseconds, calls) of one step on this GPU, the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    rows = [(e.key, e.self_device_time_total / 1e3, e.count) for e in seen.key_averages()]
    return sorted(rows, key=lambda row: -row[1])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def meet(device: torch.device) -> None:
    synchronize(device)
    dist.barrier()
    synchronize(device)


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row per side, round and number of tokens, as they are measured; the sides of a round one after the other."""
    sides = ["tide", *settings.versus.split(",")]
    for turn in range(settings.rounds):
        for side in sides:
            for ranks in launch(run_rank, settings.ranks, side, settings):
                slowest = [max(s) for s in zip(*(r["seconds"] for r in ranks), strict=True)]
                yield {
                    "side": side,
                    "round": turn,
                    "tokens": ranks[0]["tokens"],
                    "step_ms": statistics.median(slowest) * 1e3,
                    "least_ms": min(slowest) * 1e3,
                    "used_bytes": max(r["used_bytes"] for r in ranks),
                    "reserved_bytes": max(r["reserved_bytes"] for r in ranks),
                    "arena_bytes": max(r["arena_bytes"] for r in ranks),
                    "loss": statistics.fmean(r["loss"] for r in ranks),
                    "norm": ranks[0]["norm"],
                    "path": ranks[0]["path"],
                    "kernels": ranks[0].get("kernels", []),
                    "repetitions_ms": [s * 1e3 for s in slowest],
                }


HEAD = f"#{'tokens':>7} {'side':>10} {'step':>8} {'least':>8} {'used':>7} {'loss':>11} {'grad norm':>11}  path"
UNITS = f"#{'':>7} {'':>10} {'(ms)':>8} {'(ms)':>8} {'(GiB)':>7} {'':>11} {'':>11}"


def header(settings: Settings, machine: str) -> str:
    shape = SHAPES[settings.model]
    lines = (
        f"fsdp2, {settings.layers} blocks of {settings.model} ({shape.parameters:,} parameters each), bf16 "
        f"with fp32 reduction, {settings.ranks} ranks, {machine}",
        f"forward and backward without optimizer: median of {settings.repetitions} steps, slowest rank; every side in "
        "processes of its own",
        "used: memory that the driver gave out on one GPU since the start (GPUs only)",
    )
    return "\n".join([*(f"# {text}" for text in lines), HEAD, UNITS])


def line(row: dict[str, Any]) -> str:
    text = (
        f"{row['tokens']:>8} {row['side']:>10} {row['step_ms']:>8.1f} {row['least_ms']:>8.1f} "
        f"{row['used_bytes'] / 2**30:>7.1f} {row['loss']:>11.7f} {row['norm']:>11.5f}  {row['path']}"
    )
    kernels = (f"#{'':>18} {ms:>9.3f} ms {calls:>5} x {name[:90]}" for name, ms, calls in row["kernels"][:16])
    return "\n".join([text, *kernels])


def differing(rows: list[dict[str, Any]]) -> list[str]:
    """Where tide's loss or gradient norm is not the stock backends'. Compute alone has no sharded gradient."""
    found = []
    for tokens in {row["tokens"] for row in rows}:
        same = [row for row in rows if row["tokens"] == tokens and row["side"] != "compute"]
        for row in same:
            for key in ("loss", "norm"):
                if not abs(row[key] - same[0][key]) <= TOLERANCE * abs(same[0][key]):
                    found.append(
                        f"{tokens} tokens: {key} of {row['side']} is {row[key]}, of {same[0]['side']} {same[0][key]}"
                    )
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    """tide's step against each other side's, medians over the rounds."""
    lines = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        steps: dict[str, list[float]] = {}
        for row in rows:
            if row["tokens"] == tokens:
                steps.setdefault(row["side"], []).append(row["step_ms"])
                if row["step_ms"] > 2 * row["least_ms"]:
                    lines.append(f"# {tokens} tokens, {row['side']}: half of the steps took more than twice the least; "
                                 "the machine was busy, and these figures are noise")
        tide = statistics.median(steps.pop("tide"))
        for side, values in steps.items():
            other = statistics.median(values)
            change = f"{1 - tide / other:.1%} less" if tide <= other else f"{tide / other:.2f} times as long"
            lines.append(f"# {tokens} tokens: tide {tide:.1f} ms, {change} than {side}, {other:.1f} ms")
    return "\n".join(lines)

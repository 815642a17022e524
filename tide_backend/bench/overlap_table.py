"""What `bench overlap` prints: a line per side, and on GPUs one per kernel."""

from __future__ import annotations

from typing import Any

import torch

from .overlap import ctas, shared
from .settings import Settings

LEFT = f"#{'size':>11} {'count':>11} {'type':>5} {'redop':>5} {'collective':>14}"
LEFT_UNITS = f"#{'(B)':>11} {'(elements)':>11} {'':>5} {'':>5} {'':>14}"
GEMM = f"{'GEMM':>9} {'beside':>9} {'slower':>8}"
TIMES = f"{'time':>10} {'beside':>10} {'slower':>8} {'algbw':>7} {'busbw':>7} {'#wrong':>6}"
GEMM_UNITS = f"{'(us)':>9} {'(us)':>9} {'':>8}"
TIMES_UNITS = f"{'(us)':>10} {'(us)':>10} {'':>8} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6}"
METHOD = (
    "medians of {repetitions} repetitions, everything by turns in one run, slowest rank; GEMM, time: each alone;",
    "beside: at the same time; algbw, busbw: of the collective alone; #wrong: over all ranks, of the last call of",
    "several beside GEMMs, on fresh random data",
    "all_gather:     fp32 shards to whole bf16 parameters. {stock}: as FSDP2: cast, copied into the buffer,",
    "                all_gather_into_tensor, split_with_sizes_copy. tide: cast into the slot, ParameterLayout",
    "reduce_scatter: bf16 gradients to an fp32 shard. {stock}: as FSDP2: torch._chunk_cat into fp32 and",
    "                reduce_scatter_tensor. tide: the list of gradients through ParameterLayout",
    "all_to_all:     all_to_all_single of equal parts; tide: into memory of the group",
)
ON_GPUS = (
    "on GPUs the collective with its copies runs on a stream of high priority, the GEMMs on the current one",
    "SM time: blocks (at most the GPU's SMs) x duration of the collective's own kernels, per collective alone, mean of",
    "the ranks, from torch.profiler; tide's cast is its own. copies: the same of PyTorch's copy kernels around them",
    "tide's kernels have at most {ctas} thread blocks each (TIDE_ACCUMULATE_CTAS)",
)
ON_CPUS = (
    "on CPU ranks the main thread multiplies while the collective is under way, and then makes the layout copies",
    "CPU time: of all threads of a rank, per collective alone, mean of the ranks; copies: of the layout, not in it",
)
SHARED = "RANKS SHARE GPUS ({ranks} on {gpus}): their contexts take turns, so these times mean little, ratios too"


def header(settings: Settings, machine: str) -> str:
    m, n, k = settings.gemm
    on_gpus = settings.device == "cuda"
    lines = [
        f"overlap, {settings.ranks} ranks, {machine}",
        f"GEMM: [{m}, {k}] @ [{k}, {n}], {'bf16' if on_gpus else 'fp32, one thread'}, on every rank",
        *(text.format(repetitions=settings.repetitions, stock=settings.versus) for text in METHOD),
        *(text.format(ctas=ctas()) for text in (ON_GPUS if on_gpus else ON_CPUS)),
    ]
    if shared(settings):
        lines.append(SHARED.format(ranks=settings.ranks, gpus=torch.cuda.device_count()))
    held = f"{'SM time' if on_gpus else 'CPU time':>10} {'copies':>10}"
    columns = [
        f"{LEFT} | {'side':>5} {'path':>10} | {GEMM} | {TIMES} | {held}",
        f"{LEFT_UNITS} | {'':>5} {'':>10} | {GEMM_UNITS} | {TIMES_UNITS} | {'(us)':>10} {'(us)':>10}",
    ]
    return "\n".join([*(f"# {text}" for text in lines), *columns])


def lines(row: dict[str, Any], settings: Settings) -> str:
    left = f"{row['size']:>12} {row['count']:>11} {row['dtype']:>5} {row['redop']:>5} {row['name']:>14}"
    found = []
    for side, title in (("tide", "tide"), ("stock", settings.versus)):
        s = row[side]
        found.append(
            f"{left} | {title:>5} {s['path']:>10} "
            f"| {row['gemm_us']:>9.1f} {s['gemm_beside_us']:>9.1f} {s['gemm_slower']:>+8.1%} "
            f"| {s['alone_us']:>10.1f} {s['beside_us']:>10.1f} {s['slower']:>+8.1%} {s['algbw']:>7.2f} "
            f"{s['busbw']:>7.2f} {s['wrong']:>6} | {s['busy_us']:>10.1f} {s['layout_us']:>10.1f}"
        )
    if settings.device == "cuda":
        for side, title in (("tide", "tide"), ("stock", settings.versus)):
            found += kernel_lines(row[side]["kernels"], title)
    return "\n".join(found)


def kernel_lines(kernels: list[dict[str, Any]], title: str) -> list[str]:
    if not kernels:
        return [f"#{'':>8} {title:>5}: the profiler saw no kernel (none was launched, or it may not look at this GPU)"]
    return [
        f"#{'':>8} {title:>5}: {k['launches']:>5.1f} x {k['blocks']:>4} blocks {k['us']:>9.1f} us "
        f"{k['sm_us']:>10.1f} us of SMs  {'' if k['own'] else '(copy) '}{k['name']}"
        for k in kernels
    ]

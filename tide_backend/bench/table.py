"""The columns of nccl-tests, tide and the stock backend side by side."""

from __future__ import annotations

import statistics
from typing import Any

from .settings import Settings

LEFT = f"#{'size':>11} {'count':>11} {'type':>5} {'redop':>5} {'what':>10}"
LEFT_UNITS = f"#{'(B)':>11} {'(elements)':>11} {'':>5} {'':>5} {'':>10}"
SIDE = f"{'path':>10} {'time':>10} {'algbw':>7} {'busbw':>7} {'#wrong':>6}"
SIDE_UNITS = f"{'':>10} {'(us)':>10} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6}"
METHOD = (
    "medians of {repetitions} repetitions, the two backends by turns, slowest rank;",
    "buffers are allocated beforehand on both sides; #wrong: over all ranks, on fresh random data",
)
NOTES = {
    "all_gather": (
        "per-param:  {stock}: as FSDP2: shards copied into the buffer, all_gather_into_tensor, and",
        "            split_with_sizes_copy into per-parameter tensors",
        "            tide: shards copied to their place, the same tensors delivered through ParameterLayout",
        "rank-major: all_gather_into_tensor into ordinary memory, without any copies around it, on both",
        "push:       two GPUs: tide's call with the shards in place, beside a plain copy of a shard to the other GPU",
    ),
    "reduce_scatter": (
        "per-param:  {stock}: as FSDP2: torch._chunk_cat of bf16 gradients into an fp32 buffer,",
        "            and reduce_scatter_tensor",
        "            tide: the list of bf16 gradients to the fp32 shard through ParameterLayout",
        "packed:     reduce_scatter_tensor of fp32 alone, on both",
    ),
    "all_to_all": (
        "even: all_to_all_single of equal parts, on both",
        "ulysses: [tokens, heads, dim] to own heads of all tokens, and back; {stock}: permutes before and behind;",
        "         tide: permuted views; into-group: and outputs in memory of the group",
    ),
}


def merge(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A row from every rank's sample: the slowest rank of each repetition, all ranks' wrong elements."""
    row = {k: samples[0][k] for k in ("name", "size", "count", "dtype", "redop")}
    world = len(samples)
    for side in ("tide", "stock"):
        slowest = [max(s) for s in zip(*(r[side]["seconds"] for r in samples), strict=True)]
        seconds = statistics.median(slowest)
        algbw = row["size"] / seconds / 1e9
        row[side] = {
            "path": "+".join(sorted({r[side]["path"] for r in samples})),
            "time_us": seconds * 1e6,
            "algbw": algbw,
            "busbw": algbw * (world - 1) / world,
            "wrong": sum(r[side]["wrong"] for r in samples),
            "repetitions_us": [s * 1e6 for s in slowest],
        }
    row["ratio"] = row["stock"]["time_us"] / row["tide"]["time_us"]
    return row


def header(settings: Settings, machine: str) -> str:
    stock = settings.versus
    lines = [
        f"{settings.collective}, {settings.ranks} ranks, {machine}",
        *(m.format(repetitions=settings.repetitions) for m in METHOD),
        *(note.format(stock=stock) for note in NOTES[settings.collective]),
    ]
    columns = [
        f"#{'':>46} | {'tide':^44} | {stock:^44} | {stock} time",
        f"{LEFT} | {SIDE} | {SIDE} | over",
        f"{LEFT_UNITS} | {SIDE_UNITS} | {SIDE_UNITS} | tide's",
    ]
    return "\n".join([f"# {text}" for text in lines] + columns)


def line(row: dict[str, Any]) -> str:
    left = f"{row['size']:>12} {row['count']:>11} {row['dtype']:>5} {row['redop']:>5} {row['name']:>10}"
    sides = [
        f"{s['path']:>10} {s['time_us']:>10.1f} {s['algbw']:>7.2f} {s['busbw']:>7.2f} {s['wrong']:>6}"
        for s in (row["tide"], row["stock"])
    ]
    return f"{left} | {sides[0]} | {sides[1]} | {row['ratio']:.2f}x"


def init_table(rows: list[dict[str, Any]]) -> str:
    keys, titles = ("init_s", "first_s", "total_s"), ("init", "first", "init+first")
    text = [f"# {'backend':>8} " + " ".join(f"{t:>10}" for t in titles) + "   (s)"]
    for row in rows:
        text.append(f"  {row['backend']:>8} " + " ".join(f"{row[key]:>10.3f}" for key in keys))
    tide, stock = rows
    text.append(f"# tide - {stock['backend']}: {tide['total_s'] - stock['total_s']:+.3f} s")
    return "\n".join(text)

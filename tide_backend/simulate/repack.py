"""Layerwise repacking in a large job: time and MFU, repacking alone and with the solver.

Steps of a job are drawn from a length distribution. Those with the longest samples run with wide parents;
only they are looked at, as in the paper's table. The baseline spreads samples over parents by work (longest
first) and splits every parent's tokens evenly. "repacking alone" keeps those parents and gives them
node-local children; "with the solver" also chooses the parents. Time is that of the cost model of
tide_backend.repack: one period of one full-attention and three sparse layers, forward and backward, no
overlap.

Calibrated: k (exchange inside a node over linear time, per row) on one workload, so that repacking alone
    gives the paper's figure there; the ratio of exchange between nodes and inside one, and the baseline
    MFU, from the paper's abstract. Predicted: the solver's part on that workload and everything on all
    others, with the same k.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tide_backend.repack.cost import CostModel
from tide_backend.simulate.repack_job import Job, Outcome, fit_ratio, play, wide_steps
from tide_backend.simulate.repack_table import render
from tide_backend.simulate.workloads import Workload, catalogue

# The paper's abstract: change of end-to-end time, and of MFU in percentage points.
PAPER = {"alone": -0.0595, "solver": -0.0761, "alone_mfu": 3.75, "solver_mfu": 4.83}

# Distributions that are predicted beside the calibrated one, and by how much their lengths are multiplied.
OTHERS = (
    ("lognormal_8.3_1.5", 1),
    ("lognormal_9.0_1.2", 1),
    ("prolong", 1),
    ("magi", 1),
    ("longalign", 2),
    ("video_buckets", 1),
    ("wlbllm", 2),
)

# Where repacking without a guard goes wrong: one sample holds much of its parent's tokens.
REGIMES = (
    ("lognormal_8.3_1.5", 2, 16384, 262144),
    ("lognormal_9.0_1.2", 2, 16384, 262144),
    ("prolong", 2, 65536, 262144),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workload", default="wlbllm", choices=sorted(catalogue()), help="distribution k is fitted on")
    add("--elongate", type=float, default=2, help="factor on its lengths (default 2)")
    add("--gpus", type=int, default=256, help="ranks in nodes of 8 (default 256)")
    add("--parent", type=int, default=32, help="width of the wide parents (default 32)")
    add("--steps", type=int, default=200, help="steps drawn per workload (default 200)")
    add("--share", type=float, default=0.11, help="share of steps that need wide parents (default 0.11)")
    add("--tokens-per-rank", type=int, default=65536, help="mean tokens per rank and step (default 65536)")
    add("--sync", choices=("layer", "step"), default="layer", help="where parents meet (default layer)")
    add("--slowdown", type=float, default=7.0, help="exchange between nodes over inside one (default 7)")
    add("--target", type=float, default=PAPER["alone"], help="change k is fitted to (default -0.0595)")
    add("--k", type=float, help="use this k instead of fitting it")
    add("--mfu", type=float, default=59.0, help="baseline MFU in percent (default 59)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write every number")
    add("--png", type=Path, metavar="FILE", help="draw the loads of all ranks before and after (matplotlib)")


def run(args: argparse.Namespace) -> int:
    try:
        job = Job(args.gpus, args.parent, args.tokens_per_rank, args.steps, args.share, args.sync, args.seed)
        if args.png:
            from tide_backend.simulate import repack_figure  # says at once when matplotlib is missing

        calibrated = Workload(args.workload, args.elongate)
        steps = wide_steps(calibrated, job)
        k = args.k
        if k is None:
            k = fit_ratio(steps, job, CostModel(), args.slowdown, args.target)
        model = CostModel.from_ratio(k, slowdown=args.slowdown)
        result = evaluate(calibrated, job, model, args.mfu, fitted=args.k is None)
        result.update(k=k, slowdown=args.slowdown, target=args.target)
    except (ValueError, ImportError) as error:
        print(f"repack: {error}", file=sys.stderr)
        return 2
    print(render(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"\nnumbers: {args.json}")
    if args.png:
        repack_figure.draw(steps[0], model, job, calibrated.label, args.png)
        print(f"figure: {args.png}")
    return 0


def evaluate(calibrated: Workload, job: Job, model: CostModel, mfu: float, fitted: bool) -> dict[str, Any]:
    """All rows of the output as plain data."""
    rows = []
    for width in sorted({16, 32, job.parent}, key=lambda w: (w != job.parent, w)):
        for workload in [calibrated, *(Workload(name, factor) for name, factor in OTHERS)]:
            if rows and workload == calibrated and width == job.parent:
                continue
            if job.gpus % width == 0:
                other = Job(**{**asdict(job), "parent": width})
                row = _row(workload, other, model, mfu)
                row["calibrated"] = fitted and not rows
                if row not in rows:
                    rows.append(row)
    regimes = []
    for sync in ("layer", "step"):
        for name, factor, tokens, longer_than in REGIMES:
            other = Job(**{**asdict(job), "sync": sync, "tokens_per_rank": tokens, "share": 1.0})
            row = _row(Workload(name, factor, cap=524288), other, model, mfu, longer_than)
            if row["steps"]:
                regimes.append({**row, "sync": sync, "tokens_per_rank": tokens, "longer_than": longer_than})
    return {
        "paper": PAPER,
        "job": asdict(job),
        "model": asdict(model),
        "mfu_baseline": mfu,
        "rows": rows,
        "regimes": regimes,
    }


def _row(workload: Workload, job: Job, model: CostModel, mfu: float, longer_than: int = 0) -> dict[str, Any]:
    steps = wide_steps(workload, job, longer_than)
    row: dict[str, Any] = {"workload": workload.label, "source": workload.source, "parent": job.parent}
    if not steps:
        return {**row, "steps": 0}
    outcome: Outcome = play(steps, model, job)
    gained = {f"{name}_mfu": mfu * (1 / (1 + getattr(outcome, name)) - 1) for name in ("alone", "solver")}
    return {**row, **asdict(outcome), **gained, "longest": max(map(max, steps))}

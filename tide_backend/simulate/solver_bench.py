"""Quality and speed of the repacking solver: distance to the lower bound, milliseconds on one core.

Parents: every case is solved for parents that meet at the optimizer step and for parents that meet at every
layer, without guard, so that the bound speaks about repacking itself. gap: cost over lower bound, children as
wide as a node, mean and worst over the seeds; core: C++ alone; total: with the conversion to Python; medians
over the seeds of the fastest of --repeat runs. Children: fullest rank over its lower bound, as balanced over
the nodes and as built (narrower children may add up to 0.5 % of rows).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from tide_backend.repack.cost import CostModel
from tide_backend.repack.solve import pack_children, solve
from tide_backend.simulate.workloads import Workload

# Distribution, factor on lengths, samples, parents, width of parents.
PARENTS = (
    ("wlbllm", 2, 1000, 8, 32),
    ("lognormal_8.3_1.5", 1, 1000, 8, 32),
    ("prolong", 2, 1000, 8, 16),
    ("longalign", 1, 1000, 16, 16),
    ("wlbllm", 2, 1000, 16, 16),
    ("lognormal_9.0_1.2", 1, 1000, 16, 16),
    ("magi", 2, 4000, 8, 32),
    ("prolong", 1, 4000, 16, 16),
    ("wlbllm", 4, 10000, 16, 32),
    ("megatron_varlen", 1, 10000, 32, 16),
    ("lognormal_8.3_1.5", 1, 10000, 64, 16),
)

# Samples and nodes of one parent; lengths are log-normal (10, 1).
CHILDREN = ((6, 2), (10, 4), (16, 2), (16, 4), (24, 4), (40, 4), (80, 4))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=10, help="batches per case (default 10)")
    parser.add_argument(
        "--repeat", type=int, default=5, help="runs of each batch, the fastest counts (default 5)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number")


def run(args: argparse.Namespace) -> int:
    model = CostModel.from_ratio(0.005)
    parents = [_parents(*case, sync, model, args) for case in PARENTS for sync in ("step", "layer")]
    children = [_children(samples, nodes, args.seeds * 20) for samples, nodes in CHILDREN]
    print("Parents, no guard          samples  parents  meet at  gap mean   worst   core ms  total ms")
    for row in parents:
        print(
            f"{row['workload']:<24}{row['samples']:>10}{row['parents']:>9}{row['sync']:>9}"
            f"{row['gap']:>10.3%}{row['worst']:>8.2%}{row['core_ms']:>10.2f}{row['total_ms']:>10.2f}"
        )
    print("\nChildren    samples  nodes  balanced mean   worst  built mean   worst  core ms")
    for row in children:
        print(
            f"{row['samples']:>19}{row['nodes']:>7}{row['balanced']:>15.4f}{row['balanced_worst']:>8.4f}"
            f"{row['built']:>12.4f}{row['built_worst']:>8.4f}{row['core_ms']:>9.3f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"parents": parents, "children": children}, indent=1) + "\n", "utf-8")
    return 0


def _parents(
    name: str,
    factor: float,
    samples: int,
    count: int,
    width: int,
    sync: str,
    model: CostModel,
    args: argparse.Namespace,
) -> dict[str, Any]:
    workload = Workload(name, factor)
    draw = workload.sampler()
    gaps, core, total = [], [], []
    for seed in range(args.seeds):
        rng = random.Random(f"{name}/{samples}/{seed}")
        lengths = [int(draw(rng)) for _ in range(samples)]
        stats = [
            solve(lengths, parents=[(count, width)], sync=sync, cost_model=model, guard=False).stats
            for _ in range(args.repeat)
        ]
        gaps.append(stats[0]["gap"])
        core.append(min(s["core_ms"] for s in stats))
        total.append(min(s["solve_ms"] for s in stats))
    return {
        "workload": workload.label,
        "samples": samples,
        "parents": f"{count}x{width}",
        "sync": sync,
        "gap": statistics.mean(gaps),
        "worst": max(gaps),
        "core_ms": statistics.median(core),
        "total_ms": statistics.median(total),
    }


def _children(samples: int, nodes: int, batches: int) -> dict[str, Any]:
    balanced, built, core = [], [], []
    for seed in range(batches):
        rng = random.Random(f"children/{samples}/{nodes}/{seed}")
        lengths = [max(64, min(262144, round(rng.lognormvariate(10, 1)))) for _ in range(samples)]
        stats = pack_children(lengths, 8 * nodes).stats
        facts = stats["parents"][0]
        balanced.append(facts["balanced_rows"] / facts["bound_rows"])
        built.append(facts["max_rows"] / facts["bound_rows"])
        core.append(stats["core_ms"])
    return {
        "samples": samples,
        "nodes": nodes,
        "balanced": statistics.mean(balanced),
        "balanced_worst": max(balanced),
        "built": statistics.mean(built),
        "built_worst": max(built),
        "core_ms": statistics.median(core),
    }

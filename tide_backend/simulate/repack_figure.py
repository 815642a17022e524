"""Loads of all ranks in one step: no repacking, repacking alone, with the solver. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tide_backend.repack.assignment import Assignment
from tide_backend.repack.cost import CostModel
from tide_backend.simulate.repack_job import Job, assign

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError as error:
    raise ImportError(
        f"--png needs matplotlib ({error}); install it, or leave --png out: table and --json do not need it"
    ) from error


@dataclass(frozen=True)
class Loads:
    """Per rank, in rank order: rows held in the sparse layers, ms of attention and of everything else."""

    name: str
    rows: list[float]
    attention_ms: list[float]
    other_ms: list[float]

    def time_ms(self, sync: str) -> float:
        """One period of the job: the slowest rank, or phase by phase when parents meet at every layer."""
        if sync == "layer":
            return max(self.attention_ms) + max(self.other_ms)
        return max(a + o for a, o in zip(self.attention_ms, self.other_ms, strict=True))


def loads(name: str, assignment: Assignment, model: CostModel, repacked: bool) -> Loads:
    """Loads of an assignment, or of the same parents with even splits when not ``repacked``."""
    rows: list[float] = []
    attention: list[float] = []
    other: list[float] = []
    node = assignment.ranks_per_node
    for parent, facts in zip(assignment.parents, assignment.stats["parents"], strict=True):
        full, wide = model.full_row_us(parent.width, node), model.sparse_row_us(parent.width, node)
        ranks = [[facts["tokens"] / parent.width * (not repacked), wide] for _ in range(parent.width)]
        for child in parent.children if repacked else ():
            for rank in range(child.first_rank, child.first_rank + child.width):
                ranks[rank] = [child.max_rows(assignment.lengths), model.sparse_row_us(child.width, node)]
        rows += [held for held, _ in ranks]
        other += [held * (full + sparse) / 1e3 for held, sparse in ranks]
        attention += [facts["attention_us"] / 1e3] * parent.width
    return Loads(name, rows, attention, other)


def draw(lengths: Sequence[int], model: CostModel, job: Job, label: str, path: Path) -> None:
    """Write a PNG with rows, attention and the remaining time of every rank for the three ways."""
    work = assign(lengths, model, job, membership="work")
    solved = assign(lengths, model, job)
    ways = (
        loads("no repacking", work, model, repacked=False),
        loads("repacking alone", work, model, repacked=True),
        loads("with the solver", solved, model, repacked=True),
    )
    base = ways[0].time_ms(job.sync)
    panels = (
        ("rows per rank (thousands)", lambda way: [value / 1e3 for value in way.rows]),
        ("attention (ms)", lambda way: way.attention_ms),
        ("linear and exchange (ms)", lambda way: way.other_ms),
    )
    figure, axes = pyplot.subplots(
        len(panels), len(ways), figsize=(13, 8), sharex=True, sharey="row", layout="constrained"
    )
    for column, way in enumerate(ways):
        change = f", {way.time_ms(job.sync) / base - 1:+.1%}" if column else ""
        axes[0][column].set_title(f"{way.name}: {way.time_ms(job.sync):,.0f} ms a period{change}")
        axes[-1][column].set_xlabel("rank")
        for row, (title, values) in enumerate(panels):
            axis, heights = axes[row][column], values(way)
            axis.step(range(len(heights)), heights, where="mid", color=f"C{row}", linewidth=1.3)
            axis.axhline(max(heights), color="black", linewidth=0.9)
            axis.axhline(sum(heights) / len(heights), color="black", linewidth=0.9, linestyle=":")
            axis.margins(x=0)
            if column == 0:
                axis.set_ylabel(title)
    figure.suptitle(
        f"{label}, {job.gpus} ranks, parents of {job.parent} that meet at every {job.sync} (simulated; "
        "black: fullest rank, dotted: mean; axes do not start at 0)"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

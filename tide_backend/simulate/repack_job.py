"""A training job with repacking, step by step, under the cost model: what `repack` tabulates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tide_backend.repack.assignment import Assignment
from tide_backend.repack.cost import CostModel
from tide_backend.repack.solve import solve
from tide_backend.simulate.workloads import Workload


@dataclass(frozen=True)
class Job:
    """``gpus`` in nodes of 8, all in parents of one width during the steps looked at."""

    gpus: int = 256
    parent: int = 32
    tokens_per_rank: int = 65536
    steps: int = 200
    share: float = 0.11
    sync: str = "layer"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.parent < 1 or self.gpus % self.parent:
            raise ValueError(f"gpus: got {self.gpus}, expected a multiple of the parent width {self.parent}")
        if self.steps < 1 or not 0 < self.share <= 1 or self.tokens_per_rank < 1:
            raise ValueError(
                f"got {self.steps} steps, share {self.share}, {self.tokens_per_rank} tokens per rank; "
                "expected at least 1 step, a share in (0, 1] and at least 1 token"
            )


@dataclass(frozen=True)
class Outcome:
    """Relative change of the time of the steps, against no repacking with samples spread by work."""

    alone: float  # same parents, children, guard on
    solver: float  # parents chosen by the solver, children, guard on
    alone_unguarded: float
    solver_unguarded: float
    solver_spill: float  # guard on, long samples may stay parent-wide
    kept: float  # share of parents the guard left alone in `solver`
    gap: float  # mean distance of the solver to its lower bound
    steps: int


def wide_steps(workload: Workload, job: Job, longer_than: int = 0) -> list[list[int]]:
    """Lengths of the steps that need wide parents: the ``share`` of steps with the longest samples.

    With ``longer_than``, of these only the steps that hold a sample of more tokens than that.
    """
    steps = _longest_steps(workload, job.gpus * job.tokens_per_rank, job.steps, job.share, job.seed)
    return [lengths for lengths in steps if max(lengths) > longer_than]


@lru_cache(maxsize=32)
def _longest_steps(workload: Workload, tokens: int, steps: int, share: float, seed: int) -> list[list[int]]:
    batches = [workload.batch(tokens, seed * steps + step) for step in range(steps)]
    batches = [lengths for lengths in batches if lengths]
    longest_first = sorted(range(len(batches)), key=lambda i: (-max(batches[i]), i))
    return [batches[i] for i in sorted(longest_first[: max(1, round(steps * share))])]


def assign(lengths: Sequence[int], model: CostModel, job: Job, **options: object) -> Assignment:
    return solve(
        lengths,
        world_size=job.gpus,
        parent_width=job.parent,
        cost_model=model,
        sync=job.sync,
        **options,  # type: ignore[arg-type]
    )


def change(steps: Sequence[Sequence[int]], model: CostModel, job: Job, **options: object) -> float:
    """Relative change of the summed time of ``steps`` for one way of solving."""
    cost = base = 0.0
    for lengths in steps:
        stats = assign(lengths, model, job, **options).stats
        cost += stats["cost_us"]
        base += stats["work_us"]
    return cost / base - 1


def play(steps: Sequence[Sequence[int]], model: CostModel, job: Job) -> Outcome:
    """All ways of solving on the same steps."""
    stats = [assign(lengths, model, job).stats for lengths in steps]
    parents = len(steps) * (job.gpus // job.parent)
    return Outcome(
        alone=change(steps, model, job, membership="work"),
        solver=sum(s["cost_us"] for s in stats) / sum(s["work_us"] for s in stats) - 1,
        alone_unguarded=change(steps, model, job, membership="work", guard=False),
        solver_unguarded=change(steps, model, job, guard=False),
        solver_spill=change(steps, model, job, spill=True),
        kept=1 - sum(s["repacked"] for s in stats) / parents,
        gap=sum(s["gap"] for s in stats) / len(stats),
        steps=len(steps),
    )


def fit_ratio(
    steps: Sequence[Sequence[int]], job: Job, model: CostModel, slowdown: float, target: float
) -> float:
    """The ``k = intra_us / linear_us`` at which repacking alone changes the time by ``target``; bisection.

    ``ValueError`` when no k up to 0.1 reaches it.
    """

    def with_ratio(k: float) -> float:
        ratio = CostModel.from_ratio(
            k, slowdown=slowdown, attention_us=model.attention_us, linear_us=model.linear_us
        )
        return change(steps, ratio, job, membership="work")

    low, high = 0.0, 0.1
    if with_ratio(high) > target:
        raise ValueError(f"no k up to {high} makes repacking alone change the time by {target:.2%}")
    while high - low > 1e-6:
        middle = (low + high) / 2
        if with_ratio(middle) > target:
            low = middle
        else:
            high = middle
    return high

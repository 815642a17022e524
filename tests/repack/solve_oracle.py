"""What an assignment costs, the best there is at tiny sizes, and MILPs, in plain float64 Python.

Nothing here calls the product except to read an assignment's fields and a cost model's parameters.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from tide_backend.repack import Assignment, CostModel, Parent


def lognormal(
    seed: int, samples: int, mu: float, sigma: float, low: int = 64, high: int = 262144
) -> list[int]:
    rng = random.Random(seed)
    return [max(low, min(high, round(rng.lognormvariate(mu, sigma)))) for _ in range(samples)]


def exchange(model: CostModel, width: int, node: int) -> float:
    """us per row of one layer's exchange over `width` ranks, without replicated heads."""
    if width == 1:
        return 0.0
    return model.inter_us if width > node else model.intra_us * (1 - 1 / width) * 8 / 7


def row_prices(model: CostModel, parent: int, child: int, node: int) -> tuple[float, float]:
    """us per row of the full and of the sparse layers of a period."""
    layers = model.full_layers + model.sparse_layers
    full = model.linear_us * model.full_layers / layers + model.full_layers * exchange(model, parent, node)
    sparse = model.linear_us * model.sparse_layers / layers + model.sparse_layers * exchange(
        model, child, node
    )
    return full, sparse


def parent_phases(parent: Parent, lengths: Sequence[int], model: CostModel, node: int) -> tuple[float, ...]:
    """(attention, full layers, sparse layers, both) in us, the last three each of its slowest rank."""
    squares = sum(lengths[s] ** 2 for child in parent.children for s in child.samples)
    rows, sparse = [0] * parent.width, [0.0] * parent.width
    for child in parent.children:
        held = math.ceil(sum(lengths[s] for s in child.samples) / child.width)
        for rank in range(child.first_rank, child.first_rank + child.width):
            rows[rank] += held
            sparse[rank] += held * row_prices(model, parent.width, child.width, node)[1]
    full = row_prices(model, parent.width, parent.width, node)[0]
    both = max(full * r + s for r, s in zip(rows, sparse, strict=True))
    return model.attention_us * squares / parent.width, full * max(rows), max(sparse), both


def total(phases: Sequence[tuple[float, ...]], sync: str) -> float:
    if sync == "step":
        return max(attention + both for attention, _, _, both in phases)
    return sum(max(p[i] for p in phases) for i in range(3))


def cost(assignment: Assignment, model: CostModel, sync: str) -> float:
    return total(
        [parent_phases(p, assignment.lengths, model, assignment.ranks_per_node) for p in assignment.parents],
        sync,
    )


def unrepacked(
    members: Sequence[Sequence[int]], width: int, lengths: Sequence[int], model: CostModel, node: int
):
    """Phases of parents that hold these samples parent-wide."""
    full, sparse = row_prices(model, width, width, node)
    phases = []
    for held in members:
        rows = math.ceil(sum(lengths[s] for s in held) / width)
        squares = sum(lengths[s] ** 2 for s in held)
        phases.append(
            (model.attention_us * squares / width, full * rows, sparse * rows, (full + sparse) * rows)
        )
    return phases


def spread_by_work(
    lengths: Sequence[int], count: int, width: int, model: CostModel, node: int
) -> list[list[int]]:
    """Longest first, each to the parent with the least work so far."""
    price = sum(row_prices(model, width, width, node))
    work, members = [0.0] * count, [[] for _ in range(count)]
    for s in sorted(range(len(lengths)), key=lambda s: (-lengths[s], s)):
        g = min(range(count), key=lambda g: work[g])
        members[g].append(s)
        work[g] += (model.attention_us * lengths[s] ** 2 + price * lengths[s]) / width
    return members


def best_split(lengths: Sequence[int], bins: int) -> int:
    """Fullest bin of the best split, by trying all of them."""
    best = sum(lengths)
    for choice in itertools.product(range(bins), repeat=max(0, len(lengths) - 1)):
        loads = [0] * bins
        for length, b in zip(lengths, (0, *choice), strict=True):
            loads[b] += length
        best = min(best, max(loads))
    return best


def balanced_total(
    nodes: Sequence[int], lengths: Sequence[int], count: int, width: int, model: CostModel, sync: str
) -> float:
    """Cost when sample s lies in node `nodes[s]`, one child per node of 8; rows not rounded."""
    per_parent = width // 8
    loads, squares = [0.0] * (count * per_parent), [0.0] * count
    for s, n in enumerate(nodes):
        loads[n] += lengths[s]
        squares[n // per_parent] += lengths[s] ** 2
    row = sum(row_prices(model, width, 8, 8))
    attention = [model.attention_us * q / width for q in squares]
    rows = [row * max(loads[g * per_parent : (g + 1) * per_parent]) / 8 for g in range(count)]
    if sync == "step":
        return max(a + r for a, r in zip(attention, rows, strict=True))
    return max(attention) + max(rows)


def best_total(lengths: Sequence[int], count: int, width: int, model: CostModel, sync: str) -> float:
    nodes = count * width // 8
    return min(
        balanced_total((0, *choice), lengths, count, width, model, sync)
        for choice in itertools.product(range(nodes), repeat=len(lengths) - 1)
    )


def solve_milp(
    objective: np.ndarray, rows: list[tuple[np.ndarray, float, float]], binaries: int, seconds: float
):
    """(incumbent, proven lower bound) of min objective @ x; the first `binaries` variables are 0 or 1."""
    size = len(objective)
    upper = np.full(size, np.inf)
    upper[:binaries] = 1
    result = milp(
        objective,
        constraints=LinearConstraint(
            np.array([r for r, _, _ in rows]), [low for _, low, _ in rows], [high for _, _, high in rows]
        ),
        integrality=np.array([1] * binaries + [0] * (size - binaries)),
        bounds=Bounds(np.zeros(size), upper),
        options={"time_limit": seconds, "mip_rel_gap": 1e-4},
    )
    assert result.x is not None, result.message
    return result.fun, result.mip_dual_bound


def milp_split(lengths: Sequence[int], bins: int, seconds: float = 5.0) -> tuple[float, float]:
    """Fullest bin of a split: (best found, proven bound)."""
    n = len(lengths)
    size = n * bins + 1
    rows = []
    for s in range(n):
        row = np.zeros(size)
        row[s * bins : (s + 1) * bins] = 1
        rows.append((row, 1, 1))
    for b in range(bins):
        row = np.zeros(size)
        row[[s * bins + b for s in range(n)]] = lengths
        row[-1] = -1
        rows.append((row, -np.inf, 0))
    objective = np.zeros(size)
    objective[-1] = 1
    return solve_milp(objective, rows, n * bins, seconds)


def milp_parents(
    lengths: Sequence[int], count: int, width: int, model: CostModel, sync: str, seconds: float = 5.0
) -> tuple[float, float]:
    """Best total with one child per node of 8, in us: (best found, proven bound)."""
    n, per_parent = len(lengths), width // 8
    nodes = count * per_parent
    # Variables: sample in node; rows cost of each parent; two maxima: of rows and attention, or 0 and all.
    size = n * nodes + count + 2
    row_price = sum(row_prices(model, width, 8, 8))
    rows = []
    for s in range(n):
        row = np.zeros(size)
        row[s * nodes : (s + 1) * nodes] = 1
        rows.append((row, 1, 1))
    for node in range(nodes):
        row = np.zeros(size)
        row[[s * nodes + node for s in range(n)]] = np.array(lengths) * row_price / 8
        row[n * nodes + node // per_parent] = -1
        rows.append((row, -np.inf, 0))
    for g in range(count):
        attention = np.zeros(size)
        for node in range(g * per_parent, (g + 1) * per_parent):
            for s in range(n):
                attention[s * nodes + node] = model.attention_us * lengths[s] ** 2 / width
        own_rows = np.zeros(size)
        own_rows[n * nodes + g] = 1
        last = np.zeros(size)
        last[-1] = 1
        before = np.zeros(size)
        before[-2] = 1
        if sync == "step":
            rows.append((attention + own_rows - last, -np.inf, 0))
        else:
            rows.append((attention - last, -np.inf, 0))
            rows.append((own_rows - before, -np.inf, 0))
    objective = np.zeros(size)
    objective[-2:] = 1
    return solve_milp(objective, rows, n * nodes, seconds)

"""Who goes where: samples to parents, and inside a parent to node-local children.

The solver is deterministic and runs on one thread in C++. Every rank may solve for itself from the same
lengths, or one rank solves and the others receive the result.

Method. Children: the samples of a parent are balanced over its nodes (best of longest-first, largest
differencing and first fit into a searched capacity, then moves and swaps), and each node is cut into children
as narrow as balance allows, since narrow children exchange less. Parents that meet at the optimizer step:
longest first to the parent that is cheapest with the sample, then repair of the slowest. Parents that meet at
every layer: squares and tokens balance separately; samples above a threshold go by squares, the others level
the tokens under a budget of squares. Largest differencing: Karmarkar and Karp, 1982. First fit into a
searched capacity (MultiFit): Coffman, Garey and Johnson, 1978.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tide_backend.repack import core
from tide_backend.repack.assignment import Assignment, Child, Parent
from tide_backend.repack.cost import MAX_CHILD_WIDTH, CostModel, unit_width

_CHILD_WIDTHS = (1, 2, 4, MAX_CHILD_WIDTH)
_NO_LIMIT = 1 << 48  # tokens; larger caps are no caps
# Fullest rank over mean: as built, at best, and with every node one child.
_PHI = (("phi", "max_rows"), ("bound_phi", "bound_rows"), ("balanced_phi", "balanced_rows"))


def solve(
    lengths: Iterable[int],
    *,
    world_size: int | None = None,
    parent_width: int | None = None,
    parents: Sequence[tuple[int, int]] | None = None,
    sample_widths: Sequence[int] | None = None,
    members: Sequence[Sequence[int]] | None = None,
    first_rank: int = 0,
    ranks_per_node: int = 8,
    cost_model: CostModel | None = None,
    sync: str = "step",
    guard: bool = True,
    spill: bool = False,
    membership: str = "solve",
    max_rows: int | None = None,
    max_parent_tokens: int | None = None,
    slack: float = 0.005,
) -> Assignment:
    """Assign every sample of one micro-batch to a parent and a child.

    Parents are given either as ``world_size`` and ``parent_width``, or as ``parents=[(count, width), ...]``,
    placed on consecutive ranks from ``first_rank``. Widths and ``ranks_per_node`` are powers of two.

    Args:
        lengths: tokens of every sample, at least 1.
        sample_widths: parent width of every sample, needed when there are parents of several widths.
        members: samples of every parent, in parent order; children and guard are then all that is decided.
        cost_model: see `CostModel`; the decisions are as good as it is.
        sync: ``"step"`` if parents wait for each other at the optimizer step, ``"layer"`` if at every layer.
        guard: leave a parent alone where its repacking would cost time under the model. With it the result is
            never slower than no repacking, neither of these parents nor of samples spread by work.
        spill: allow long samples to stay parent-wide beside the children. A rank then holds two pieces.
        membership: ``"solve"``, or ``"work"`` for what jobs do without this solver: longest first, each to
            the parent with the least work.
        max_rows: most rows (tokens of hidden states) one rank can hold.
        max_parent_tokens: most tokens one parent can hold (in full attention every rank sees all of them).
        slack: rows above the lower bound that narrower children may add, as a fraction.

    Returns:
        The assignment. ``stats`` has ``rule`` (what won: the spread for ``"step"``, for ``"layer"``, by
        ``"work"``, or ``"fixed"`` members), ``cost_us``, ``baseline_us`` (same parents, none repacked),
        ``work_us`` (none repacked, spread by work), ``bound_us``, ``gap`` (to the bound, with children as
        wide as a node, as the bound assumes), ``repacked`` (parents), ``solve_ms``, ``core_ms`` and per
        parent ``phi`` (fullest rank over mean), ``bound_phi``, ``form`` and costs.

    Raises:
        ValueError: bad arguments, or samples that no parent can hold; names the sample or the parent.
    """
    start = time.perf_counter()
    model = cost_model if cost_model is not None else CostModel()
    sizes = _lengths(lengths)
    shapes = _shapes(world_size, parent_width, parents, ranks_per_node)
    _positive("max_rows", max_rows)
    _positive("max_parent_tokens", max_parent_tokens)
    if not 0 <= slack < 1:
        raise ValueError(f"slack: got {slack}, expected a fraction in [0, 1)")
    if members is not None:
        membership = "fixed"
        _check_members(members, shapes, len(sizes))
    elif membership not in ("solve", "work"):
        raise ValueError(f'membership: got "{membership}", expected "solve" or "work"')
    result = core.load().solve(
        sizes,
        _classes(sizes, shapes, sample_widths, members, model, ranks_per_node),
        sync,
        membership,
        guard,
        spill,
        slack,
        min(max_rows or 0, _NO_LIMIT),
        min(max_parent_tokens or 0, _NO_LIMIT),
    )
    built, numbers = _build(result["parents"], shapes, first_rank, guard)
    stats: dict[str, Any] = {
        "sync": sync,
        "rule": result["rule"],
        **{key: result[key] for key in ("cost_us", "baseline_us", "work_us", "bound_us", "core_ms")},
        "gap": result["balance_us"] / result["bound_us"] - 1 if result["bound_us"] > 0 else 0.0,
        "repacked": sum(parent.repacked for parent in built),
        "parents": numbers,
    }
    assignment = Assignment(tuple(sizes), ranks_per_node, built, stats)
    if members is not None:
        assignment.validate()
    else:
        assignment.check_parent_blocks()
    stats["solve_ms"] = (time.perf_counter() - start) * 1e3
    return assignment


def pack_children(
    lengths: Iterable[int],
    width: int,
    *,
    first_rank: int = 0,
    ranks_per_node: int = 8,
    cost_model: CostModel | None = None,
    guard: bool = False,
    spill: bool = False,
    max_rows: int | None = None,
    slack: float = 0.005,
) -> Assignment:
    """Children of one parent of ``width`` ranks that holds all samples; arguments as in `solve`."""
    sizes = _lengths(lengths)
    return solve(
        sizes,
        parents=[(1, width)],
        members=[range(len(sizes))],
        first_rank=first_rank,
        ranks_per_node=ranks_per_node,
        cost_model=cost_model,
        guard=guard,
        spill=spill,
        max_rows=max_rows,
        slack=slack,
    )


def _lengths(lengths: Iterable[int]) -> list[int]:
    values = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    sizes = list(map(operator.index, values))
    if not sizes:
        return sizes
    if min(sizes) < 1:
        sample = next(s for s, length in enumerate(sizes) if length < 1)
        raise ValueError(f"sample {sample} has length {sizes[sample]}, expected at least 1; drop it")
    longest = max(sizes)
    if longest**2 * len(sizes) >= 1 << 62:  # sums of squares are 64-bit integers in the core
        raise ValueError(
            f"sample {sizes.index(longest)} has length {longest}: too long for {len(sizes)} samples to be "
            f"solved together, expected fewer than {math.isqrt((1 << 62) // len(sizes))} tokens"
        )
    return sizes


def _positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name}: got {value}, expected at least 1, or None for no limit")


def _shapes(
    world_size: int | None,
    parent_width: int | None,
    parents: Sequence[tuple[int, int]] | None,
    ranks_per_node: int,
) -> list[tuple[int, int]]:
    if parents is None:
        if world_size is None or parent_width is None:
            raise ValueError("parents: got none, expected world_size and parent_width, or [(count, width)]")
        if parent_width < 1 or world_size < 1 or world_size % parent_width:
            raise ValueError(
                f"world_size: got {world_size}, expected a multiple of parent_width {parent_width}"
            )
        parents = [(world_size // parent_width, parent_width)]
    elif parent_width is not None:
        raise ValueError("parent_width: got it beside parents, expected one of the two")
    for count, width in parents:
        if count < 1:
            raise ValueError(f"parents: got {count} parents of width {width}, expected at least 1")
        unit_width(width, ranks_per_node)
    ranks = sum(count * width for count, width in parents)
    if not parents or (world_size is not None and ranks != world_size):
        raise ValueError(f"parents: got {ranks} ranks in all, expected world_size {world_size}")
    return [(count, width) for count, width in parents]


def _check_members(members: Sequence[Sequence[int]], shapes: list[tuple[int, int]], samples: int) -> None:
    expected = sum(count for count, _ in shapes)
    if len(members) != expected:
        raise ValueError(f"members: got {len(members)} lists, expected one for each of {expected} parents")
    seen: dict[int, int] = {}
    for parent, held in enumerate(members):
        for s in held:
            if not 0 <= s < samples:
                raise ValueError(f"members: parent {parent} has sample {s}, expected 0..{samples - 1}")
            if s in seen:
                raise ValueError(f"members: sample {s} is in parents {seen[s]} and {parent}, expected one")
            seen[s] = parent


def _classes(
    sizes: list[int],
    shapes: list[tuple[int, int]],
    sample_widths: Sequence[int] | None,
    members: Sequence[Sequence[int]] | None,
    model: CostModel,
    ranks_per_node: int,
) -> list[tuple[Any, ...]]:
    """One tuple per entry of ``shapes``, as the core takes them."""
    if sample_widths is not None and len(sample_widths) != len(sizes):
        raise ValueError(f"sample_widths: got {len(sample_widths)}, expected one for each of {len(sizes)}")
    widths = [width for _, width in shapes]
    if members is None and sample_widths is None and len(widths) > 1:
        raise ValueError(f"parents of widths {widths}: say with sample_widths which width each sample needs")
    if len(set(widths)) != len(widths) and members is None:
        raise ValueError(f"parents of widths {widths}: give every width once, with its total count")
    if sample_widths is not None:
        for s, width in enumerate(sample_widths):
            if width not in widths:
                raise ValueError(f"sample_widths: sample {s} needs width {width}, expected one of {widths}")
    classes, next_parent = [], 0
    for count, width in shapes:
        fixed = (
            [list(held) for held in members[next_parent : next_parent + count]] if members is not None else []
        )
        samples: list[int] | None = None  # all
        if members is not None:
            samples = []
        elif sample_widths is not None:
            samples = [s for s, needed in enumerate(sample_widths) if needed == width]
        unit = unit_width(width, ranks_per_node)
        sparse = [model.sparse_row_us(min(w, unit), ranks_per_node) for w in _CHILD_WIDTHS]
        full = model.full_row_us(width, ranks_per_node)
        spread = model.sparse_row_us(width, ranks_per_node)
        classes.append((count, width, unit, model.attention_us, full, sparse, spread, samples, fixed))
        next_parent += count
    return classes


def _build(
    results: list[tuple[str, list[tuple[int, int, tuple[int, ...]]], dict[str, Any]]],
    shapes: list[tuple[int, int]],
    first_rank: int,
    guard: bool,
) -> tuple[tuple[Parent, ...], tuple[dict[str, Any], ...]]:
    parents, numbers = [], []
    widths = [width for count, width in shapes for _ in range(count)]
    for width, (form, children, facts) in zip(widths, results, strict=True):
        mean = facts["tokens"] / width
        facts["form"] = form
        for name, rows in _PHI:
            facts[name] = facts[rows] / mean if mean else 1.0
        built = tuple(Child(*child) for child in children)
        repacked = len(built) > 1
        parents.append(Parent(first_rank, width, built, repacked, _reason(facts, repacked, guard)))
        numbers.append(facts)
        first_rank += width
    return tuple(parents), tuple(numbers)


def _reason(facts: dict[str, Any], repacked: bool, guard: bool) -> str:
    if not facts["tokens"]:
        return "empty parent"
    alone, packed = facts["baseline_rows_us"], facts["partition_rows_us"]
    if not repacked:
        if packed == math.inf:
            return "left alone: children inside a node would exceed the memory limits"
        fullest = f"fullest rank {facts['balanced_phi']:.3f} of the mean"
        return f"left alone: children would cost {_against(packed, alone)}, {fullest}"
    how = f"fullest rank {facts['phi']:.3f} of the mean"
    if facts["form"] == "spill":
        how += ", long samples stay parent-wide"
    if alone == math.inf:
        return f"repacked: the parent-wide layout would exceed the memory limits; {how}"
    guarded = "" if guard else ", guard off"
    return f"repacked: {_against(facts['rows_us'], alone)} against no repacking, {how}{guarded}"


def _against(cost: float, reference: float) -> str:
    return f"{cost / reference - 1:+.2%}" if reference else "nothing either way"

"""Figures of a plan: balance, pads, traffic by link class; and the plan as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .heads import HeadMap

if TYPE_CHECKING:
    from .plan import Plan

LINKS = ("same_rank", "same_node", "other_node")


def stats(plan: Plan) -> dict[str, Any]:
    """Balance and pad figures, tokens and rows.

    `phi` is the fullest rank's rows over the mean; `pad_rows` what the envelope adds over all ranks.
    """
    mean = plan.tokens / plan.width
    physical = plan.row_cap * plan.width
    return {
        "ranks": plan.width,
        "children": len(plan.children),
        "samples": len(plan.samples),
        "tokens": plan.tokens,
        "rows_min": min(plan.rows),
        "rows_max": max(plan.rows),
        "rows_mean": mean,
        "phi": max(plan.rows) / mean if mean else 1.0,
        "row_cap": plan.row_cap,
        "pad_rows": physical - plan.tokens,
        "pad_fraction": (physical - plan.tokens) / physical if physical else 0.0,
        "empty_ranks": sum(r == 0 for r in plan.rows),
        "segments": sum(len(plan.segments(r)) for r in range(plan.width)),
        "repacked": plan.repacked,
        "reason": plan.reason,
        "hash": plan.hash,
    }


def traffic(
    plan: Plan, heads: HeadMap, head_dim: int, v_head_dim: int | None = None
) -> dict[str, dict[str, int]]:
    """Elements that one enter (Q, K and V) and one exit move, by link class.

    Keys `"enter"`, `"exit"`, and `"even"`: an enter of the same tokens split evenly over the parent. Each
    maps `same_rank`, `same_node` and `other_node` to elements; K and V are counted once per replica, as sent.
    """
    v_dim = head_dim if v_head_dim is None else v_head_dim
    q = [end - first for first, end in heads.q_ranges]
    kv = [end - first for first, end in heads.kv_ranges]
    row = [q[p] * head_dim + kv[p] * (head_dim + v_dim) for p in range(plan.width)]
    even = [plan.tokens * (p + 1) // plan.width - plan.tokens * p // plan.width for p in range(plan.width)]
    return {
        "enter": _by_link(plan, plan.rows, row),
        "exit": _by_link(plan, plan.rows, [n * v_dim for n in q]),
        "even": _by_link(plan, even, row),
    }


def _by_link(plan: Plan, rows: tuple[int, ...] | list[int], row_elements: list[int]) -> dict[str, int]:
    total = dict.fromkeys(LINKS, 0)
    for source in range(plan.width):
        for target in range(plan.width):
            total[_link(plan, source, target)] += rows[source] * row_elements[target]
    return total


def _link(plan: Plan, a: int, b: int) -> str:
    if a == b:
        return "same_rank"
    same = plan.ranks[a] // plan.ranks_per_node == plan.ranks[b] // plan.ranks_per_node
    return "same_node" if same else "other_node"


def describe(plan: Plan) -> str:
    """A few lines for people: sizes, balance, each child with its samples and rows."""
    s = stats(plan)
    kind = "repacked" if plan.repacked else "not repacked"
    reason = f": {plan.reason.removeprefix(kind + ': ')}" if plan.reason else ""
    lines = [
        f"parent of {plan.width} ranks (global {_runs(plan.ranks)}), {kind}{reason}",
        f"  {s['samples']} samples, {s['tokens']} tokens; cut {plan.cut}, order {plan.order}, "
        f"hash {plan.hash[:12]}",
        f"  rows a rank: {s['rows_min']} to {s['rows_max']}, mean {s['rows_mean']:.1f}, phi {s['phi']:.3f}; "
        f"envelope of {s['row_cap']} rows, {s['pad_rows']} pad rows ({100 * s['pad_fraction']:.1f} %)",
    ]
    for number, (child, cut) in enumerate(zip(plan.children, plan.cuts, strict=True)):
        block = range(child.first_rank, child.first_rank + child.width)
        lines.append(
            f"  child {number}: ranks {_runs(block)}, rows {' '.join(map(str, cut))}, "
            f"{sum(cut)} tokens, samples {_short(child.samples)}"
        )
    return "\n".join(lines)


def _runs(ranks: range | tuple[int, ...]) -> str:
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}..{ranks[-1]}"
    return " ".join(map(str, ranks))


def _short(samples: tuple[int, ...]) -> str:
    shown = " ".join(map(str, samples[:12])) or "none"
    return shown + (f" ... ({len(samples)} in all)" if len(samples) > 12 else "")

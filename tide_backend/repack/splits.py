"""Split sizes for callers that exchange heads with `all_to_all_single` themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import bad
from .heads import HeadMap

if TYPE_CHECKING:
    from .plan import Plan


def split_sizes(
    plan: Plan, direction: str, side: str, rank: int, heads: HeadMap | None, head_dim: int
) -> list[int]:
    """Sizes `rank` passes on the `"in"` or `"out"` side of `"enter"` or `"exit"`; see `Plan.in_splits`."""
    if direction not in ("enter", "exit"):
        raise bad("plan", "unknown direction", got=repr(direction), expected="'enter' or 'exit'")
    # The child side of a message holds this rank's rows with the peer's heads, the parent side the reverse.
    child_side = (direction == "enter") == (side == "in")
    rows = [plan.rows[rank]] * plan.width if child_side else list(plan.rows)
    if heads is None:
        return rows
    if heads.width != plan.width:
        raise bad("plan", "head map of another width", got=heads.width, expected=f"{plan.width} ranks")
    count = [end - first for first, end in heads.q_ranges]
    return [n * count[peer if child_side else rank] * head_dim for peer, n in enumerate(rows)]

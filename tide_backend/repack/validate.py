"""What a plan must satisfy, checked when it is made or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .assignment import Assignment
from .errors import bad
from .layout import is_partition, nested_or_disjoint

if TYPE_CHECKING:
    from .plan import Plan

CUTS = ("envelope", "balanced")
ORDERS = ("rank-major", "canonical")


def check_plan(plan: Plan) -> None:
    """Raise `RepackError` naming the first field, block or sample that is wrong."""
    _check_options(plan)
    _check_blocks(plan)
    _check_samples(plan)


def _check_options(plan: Plan) -> None:
    for name, value, allowed in (("cut", plan.cut, CUTS), ("order", plan.order, ORDERS)):
        if value not in allowed:
            raise bad("plan", f"unknown {name}", got=repr(value), expected=" or ".join(allowed))
    for name, number in (("row_multiple", plan.row_multiple), ("ranks_per_node", plan.ranks_per_node)):
        if number < 1:
            raise bad("plan", name, got=number, expected="at least 1")
    if plan.min_row_cap < 0:
        raise bad("plan", "min_row_cap", got=plan.min_row_cap, expected="at least 0")
    if not plan.ranks or len(set(plan.ranks)) != len(plan.ranks) or min(plan.ranks) < 0:
        raise bad("plan", "ranks of the parent", got=plan.ranks, expected="distinct global ranks")
    if is_partition(plan.children):
        return
    if plan.cut == "envelope" or plan.order == "rank-major":
        raise bad(
            "plan",
            "a rank is in two children, which tears samples apart in rank-major order",
            got=f"cut {plan.cut}, order {plan.order}",
            expected="cut balanced, order canonical",
        )


def _check_blocks(plan: Plan) -> None:
    width = len(plan.ranks)
    for number, child in enumerate(plan.children):
        if child.width < 1 or child.first_rank < 0 or child.first_rank + child.width > width:
            raise bad(
                "plan",
                f"child {number} lies outside its parent",
                got=f"ranks {child.first_rank}..{child.first_rank + child.width - 1}",
                expected=f"parent-local 0..{width - 1}",
            )
    torn = nested_or_disjoint(plan.children)
    if torn is not None:
        raise bad(
            "plan",
            f"children {torn[0]} and {torn[1]} overlap",
            expected="disjoint blocks, or one inside the other",
        )
    if list(plan.children) != sorted(plan.children, key=lambda c: (c.first_rank, -c.width)):
        raise bad("plan", "children are not sorted by first rank", do="build plans with Plan.of")


def _check_samples(plan: Plan) -> None:
    if not len(plan.samples) == len(plan.lengths) == len(plan.bases):
        raise bad(
            "plan",
            "samples, lengths and bases differ in number",
            got=(len(plan.samples), len(plan.lengths), len(plan.bases)),
        )
    holder: dict[int, int] = {}
    for number, child in enumerate(plan.children):
        for sample in child.samples:
            if sample in holder:
                raise bad("plan", f"sample {sample} is held twice: by children {holder[sample]} and {number}")
            holder[sample] = number
    if sorted(holder) != list(plan.samples):
        odd = sorted(set(holder) ^ set(plan.samples))
        raise bad(
            "plan",
            "the children's samples are not the parent's",
            got=f"samples {odd[:8]} in only one of both",
        )
    for sample, length in zip(plan.samples, plan.lengths, strict=True):
        if length < 1:
            raise bad(
                "plan", f"sample {sample} is empty", got=length, expected="at least one token", do="drop it"
            )


def check_assignment(assignment: Assignment) -> None:
    """`Assignment.validate` with the errors of this package."""
    try:
        assignment.validate()
    except ValueError as error:
        raise bad("plans", str(error)) from error


def check_rows(plan: Plan, number: int, max_rows: int | None) -> None:
    """Raise when a rank would hold more than `max_rows` rows, naming the child and its longest sample."""
    if max_rows is None or plan.row_cap <= max_rows:
        return
    rank = max(range(plan.width), key=lambda r: plan.rows[r])
    held = [plan.children[c] for c in plan.children_of(rank)]
    longest = max((s for c in held for s in c.samples), key=lambda s: plan.length_of[s])
    raise bad(
        "plans",
        f"parent {number} (global ranks {plan.ranks[0]}..{plan.ranks[-1]}) does not fit on its ranks",
        got=f"{plan.row_cap} rows a rank, longest sample {longest} with {plan.length_of[longest]} tokens",
        expected=f"at most {max_rows}",
        do="give the sample a wider child or parent",
    )

"""A plan as JSON, and its hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .assignment import Child
from .errors import bad

if TYPE_CHECKING:
    from .plan import Plan

FORMAT = "tide-repack-plan-1"


def layout_fields(plan: Plan) -> dict[str, Any]:
    """Everything that decides where an element goes; integers, strings and lists only."""
    return {
        "format": FORMAT,
        "ranks": list(plan.ranks),
        "children": [[c.first_rank, c.width, list(c.samples)] for c in plan.children],
        "samples": list(plan.samples),
        "lengths": list(plan.lengths),
        "bases": list(plan.bases),
        "cut": plan.cut,
        "order": plan.order,
        "row_multiple": plan.row_multiple,
        "min_row_cap": plan.min_row_cap,
    }


def digest(value: Any) -> str:
    """SHA-256 (hex) of `value` as compact JSON with sorted keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def plan_hash(plan: Plan) -> str:
    return digest(layout_fields(plan))


def plan_to_json(plan: Plan) -> dict[str, Any]:
    return {
        **layout_fields(plan),
        "ranks_per_node": plan.ranks_per_node,
        "repacked": plan.repacked,
        "reason": plan.reason,
        "hash": plan.hash,
    }


def plan_from_json(path: Path) -> dict[str, Any]:
    """Arguments of `Plan` read from `path`, its hash verified."""

    def damaged(what: str, **facts: object) -> ValueError:
        return bad(f"plan file {path}", what, do="write it again with plan.save", **facts)

    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise damaged(f"not JSON ({error})") from error
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        got = read.get("format") if isinstance(read, dict) else type(read).__name__
        raise damaged("unknown format", got=got, expected=FORMAT)
    stored = read.pop("hash", None)
    extra = {name: read.pop(name, None) for name in ("ranks_per_node", "repacked", "reason")}
    if digest(read) != stored:
        raise damaged("content and hash differ", got=stored or "no hash", expected=digest(read))
    read.pop("format")
    try:
        read["children"] = tuple(
            Child(first, width, tuple(samples)) for first, width, samples in read["children"]
        )
        tuples = {name: tuple(read.pop(name)) for name in ("ranks", "samples", "lengths", "bases")}
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(f"field missing or of another shape ({error})") from error
    return {**tuples, **read, **extra}

"""Do all ranks of a group mean the same thing? Compared through the group's store, with a deadline.

The store is used, not a collective, because a collective of ranks that disagree is what hangs. Every rank
writes its facts under a key of the round, waits until all are there or the deadline passes, and comes to
the same verdict.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .errors import AgreementError, bad, message, rank_list
from .serial import digest, layout_fields

if TYPE_CHECKING:
    from .plan import Plan

_PREFIX = "tide/repack/round"
_SLICE_S = 0.5  # longest uninterrupted wait, so that Ctrl-C is heard
_rounds: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def plan_facts(plan: Plan) -> dict[str, str]:
    """Short digests by name of what must be equal on all ranks."""
    fields = layout_fields(plan)
    long = ("children", "samples", "lengths", "bases")
    facts = {name: digest(value)[:12] if name in long else str(value) for name, value in fields.items()}
    return {**facts, "hash": plan.hash}


def agree_on_plan(plan: Plan, group: dist.ProcessGroup | None, *, deadline_s: float) -> None:
    """Collective: `AgreementError` on every rank unless all ranks of `group` hold `plan`."""
    agree(group, "plan", plan_facts(plan), deadline_s=deadline_s)


def agree(
    group: dist.ProcessGroup | None,
    what: str,
    facts: dict[str, str],
    *,
    failure: str | None = None,
    deadline_s: float = 60.0,
) -> None:
    """Collective over `group`: return when every rank brought equal `facts`.

    Args:
        what: what is compared, for the message ("plan", "call").
        facts: name -> value; on a difference the message says which names differ and both values.
        failure: set when this rank cannot take part. It tells the others and returns at once (its caller
            raises).
        deadline_s: seconds to wait for the slowest rank.

    Raises:
        AgreementError: ranks differ, failed, or are missing at the deadline; the same verdict on every rank
        that saw all answers.
    """
    group = resolve_group(group)
    rank, world, store = group.rank(), group.size(), _store(group)
    number = _rounds.get(group, 0)
    _rounds[group] = number + 1
    keys = [f"{_PREFIX}/{number}/{r}" for r in range(world)]
    store.set(keys[rank], json.dumps({"what": what, "facts": facts, "failure": failure}))
    if number > 1:
        # Every rank has written round number-1, so every rank has read number-2.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            store.delete_key(f"{_PREFIX}/{number - 2}/{rank}")
    if failure is not None:
        return
    where = f'rank {rank}/{world}, group "{group.group_name}", {what} agreement'
    missing = _wait(store, keys, deadline_s)
    if missing:
        raise AgreementError(
            message(
                where,
                f"no answer from {rank_list(missing)}",
                got=f"{world - len(missing)} of {world} ranks in {deadline_s:g} s",
                do="see why they do not make this call",
            ),
            missing,
        )
    _judge(where, what, [json.loads(store.get(key)) for key in keys])


def _wait(store: dist.Store, keys: list[str], deadline_s: float) -> list[int]:
    """Ranks whose key is not there at the deadline."""
    end = time.monotonic() + deadline_s
    while not store.check(keys):
        left = end - time.monotonic()
        if left <= 0:
            return [r for r, key in enumerate(keys) if not store.check([key])]
        with contextlib.suppress(dist.DistError, RuntimeError):
            store.wait(keys, timedelta(seconds=min(left, _SLICE_S)))
    return []


def _judge(where: str, what: str, answers: list[dict[str, Any]]) -> None:
    failed = {r: a["failure"] for r, a in enumerate(answers) if a["failure"] is not None}
    if failed:
        first = min(failed)
        text = f"{rank_list(list(failed))} cannot take part; rank {first} says: {failed[first]}"
        raise AgreementError(message(where, text), list(failed))
    camps: dict[str, list[int]] = {}
    for r, answer in enumerate(answers):
        camps.setdefault(json.dumps([answer["what"], answer["facts"]], sort_keys=True), []).append(r)
    if len(camps) == 1:
        return
    most = max(camps.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    odd = sorted(set(range(len(answers))) - set(most))
    mine, theirs = answers[most[0]], answers[odd[0]]
    raise AgreementError(
        message(
            where,
            f"{rank_list(odd)} brought another {what} than {rank_list(most)}",
            got=f"on rank {odd[0]} {_differences(theirs, mine)}",
            expected=f"as on rank {most[0]} {_differences(mine, theirs)}",
            do="give every rank of the group the same plan and make the same calls in the same order",
        ),
        odd,
    )


def _differences(mine: dict[str, Any], other: dict[str, Any]) -> str:
    a, b = ({"what": x["what"], **x["facts"]} for x in (mine, other))
    return ", ".join(f"{name}={a.get(name, '-')}" for name in sorted(a | b) if a.get(name) != b.get(name))


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the default group; raises when this process is not in it."""
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise bad("repack", "torch.distributed is not initialized", do="call init_process_group first")
    if not isinstance(group, dist.ProcessGroup):
        raise bad(
            "repack",
            "not a process group this process belongs to",
            got=type(group).__name__ if not isinstance(group, int) else "a group without this rank",
            expected="torch.distributed.ProcessGroup",
        )
    return group


def _store(group: dist.ProcessGroup) -> dist.Store:
    getter = getattr(group, "get_group_store", None)  # missing in older versions: c10d keeps it in a table
    if getter is not None:
        return getter()
    return dist.distributed_c10d._world.pg_map[group][1]

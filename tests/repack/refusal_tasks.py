"""Ranks that disagree: each returns what it was told and how long that took."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tide_backend.repack import AgreementError, Assignment, Child, HeadMap, Parent, Plan, RepackError, plans
from tide_backend.repack.exchange import BoundPlan

Told = tuple[str, str, tuple[int, ...], float]


def plan_of(world: int, **options) -> Plan:
    children = (Child(0, world // 2, (0, 2)), Child(world // 2, world // 2, (1,)))
    assignment = Assignment((8, 6, 4), world // 2, (Parent(0, world, children, True, "a test"),))
    return plans(assignment, **options)[0]


def told(call: Callable[[], object]) -> Told:
    """(class, message, ranks named, seconds) of what `call` raises; ("", ...) when it raises nothing."""
    start = time.monotonic()
    try:
        call()
    except (RepackError, AgreementError) as error:
        named = getattr(error, "ranks", ())
        return type(error).__name__, str(error), named, time.monotonic() - start
    return "", "", (), time.monotonic() - start


def another_plan(rank: int, world: int, odd: list[int]) -> Told:
    plan = plan_of(world, order="canonical" if rank in odd else "rank-major")
    return told(lambda: plan.check_agreement(deadline_s=20))


def another_plan_at_bind(rank: int, world: int) -> Told:
    plan = plan_of(world, row_multiple=2 if rank == 1 else 1)
    return told(lambda: plan.bind(q_heads=world, deadline_s=20))


def other_heads_at_bind(rank: int, world: int) -> Told:
    return told(lambda: plan_of(world).bind(q_heads=2 * world, kv_heads=1 if rank == 0 else 2, deadline_s=20))


def impossible_heads_on_one_rank(rank: int, world: int) -> Told:
    kv = 3 if rank == world - 1 else 2
    return told(lambda: plan_of(world).bind(q_heads=4, kv_heads=kv, deadline_s=20))


def late_rank(rank: int, world: int) -> Told:
    """The last rank calls only after the others gave up; afterwards the group agrees again."""
    if rank == world - 1:
        time.sleep(1.5)
    answer = told(lambda: plan_of(world).check_agreement(deadline_s=0.7))
    dist.barrier()
    plan_of(world).check_agreement()
    return answer


def plan_of_another_group(rank: int, world: int) -> Told:
    """A plan for ranks world..2*world-1 on this group, on one rank only."""
    children = (Child(0, world, (0,)),)
    there = plans(Assignment((8,), world, (Parent(world, world, children),)))[0]
    plan = there if rank == 0 else plan_of(world)
    return told(lambda: plan.bind(q_heads=world, deadline_s=20))


def other_head_map(rank: int, world: int) -> Told:
    heads = HeadMap.balanced(world, world, 2 * world)
    return told(lambda: plan_of(world).bind(q_heads=world, heads=heads, deadline_s=20))


def call(rank: int, world: int, case: str, verify: str) -> Told:
    """One rank's call does not match; all ranks are bound to one plan."""
    bound = plan_of(world).bind(q_heads=2 * world, kv_heads=world, verify=verify, deadline_s=20)
    odd, rows = rank == 1, bound.rows[rank]
    q, kv = torch.zeros(rows, 2 * world, 4), torch.zeros(rows, world, 4)
    o = torch.zeros(bound.tokens, 2, 4)
    good = lambda: bound.enter_qkv(q, kv, kv)  # noqa: E731
    wrong = {
        "rows": lambda: bound.enter_qkv(q[:-1], kv[:-1], kv[:-1]),
        "rows of v": lambda: bound.enter_qkv(q, kv, kv[:-1]),
        "heads": lambda: bound.enter_qkv(q[:, :-1], kv, kv),
        "kv heads": lambda: bound.enter_qkv(q, q, kv),
        "dtype of k": lambda: bound.enter_qkv(q, kv.double(), kv),
        "dtype": lambda: bound.enter_qkv(q.double(), kv.double(), kv.double()),
        "head dimension": lambda: bound.enter_qkv(q, kv, torch.zeros(rows, world, 5)),
        "operation": lambda: bound.exit(o),
        "dimensions": lambda: bound.enter_qkv(q, kv, kv[:, 0, 0]),
        "parent rows": lambda: bound.exit(o[:-1]),
        "parent heads": lambda: bound.exit(o[:, :1]),
    }
    if case.startswith("parent"):
        good = lambda: bound.exit(o)  # noqa: E731
    answer = told(wrong[case] if odd else good)
    dist.barrier()
    return answer


def later_call(rank: int, world: int) -> Told:
    """With verify="always" a mismatch in the tenth call is an error on every rank too."""
    bound: BoundPlan = plan_of(world).bind(q_heads=world, verify="always", deadline_s=20)
    x = torch.zeros(bound.rows[rank], world, 2)
    for _ in range(9):
        bound.enter(x)
    answer = told(lambda: bound.enter(x[1:] if rank == 0 else x))
    dist.barrier()
    return answer


def many_rounds(rank: int, world: int, times: int) -> int:
    """Old answers are deleted: the store does not grow with the number of comparisons."""
    store = dist.group.WORLD.get_group_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(times):
        plan_of(world).check_agreement()
    dist.barrier()
    grown = store.num_keys() - before
    dist.barrier()
    return grown


def not_a_member(rank: int, world: int) -> Told:
    group = dist.new_group([0])
    if rank == 0:
        return told(lambda: plan_of(2).bind(group, q_heads=2, verify="never"))
    return told(lambda: plan_of(2).bind(group, q_heads=2))


def stays_usable(rank: int, world: int) -> None:
    """After refusals on all ranks the group goes on with the next plan."""
    bound = plan_of(world).bind(q_heads=world)
    x = torch.ones(bound.rows[rank], world, 1)
    assert torch.equal(bound.exit(bound.enter(x)), x)

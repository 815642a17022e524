"""Identity of a plan, its file, and what is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from plan_oracle import random_assignment

from tide_backend.repack import Assignment, Child, Parent, Plan, RepackError, plans

LENGTHS = (10, 7, 3, 20, 5)
CHILDREN = (Child(0, 2, (3,)), Child(2, 1, (0, 1)), Child(3, 1, (4, 2)))
GOOD = Assignment(LENGTHS, 2, (Parent(0, 4, CHILDREN, True, "a test"),))


def good() -> Plan:
    return plans(GOOD)[0]


def test_hash_is_a_constant_of_the_layout() -> None:
    text = (
        '{"bases":[0,10,17,20,40],"children":[[0,2,[3]],[2,1,[0,1]],[3,1,[4,2]]],"cut":"envelope",'
        '"format":"tide-repack-plan-1","lengths":[10,7,3,20,5],"min_row_cap":0,"order":"rank-major","ranks":[0,1,2,3],'
        '"row_multiple":1,"samples":[0,1,2,3,4]}'
    )
    assert good().hash == hashlib.sha256(text.encode()).hexdigest()


def test_hash_does_not_depend_on_the_order_of_children_or_on_the_reason() -> None:
    other = Plan.of(Parent(0, 4, CHILDREN[::-1], False, "other words"), LENGTHS, ranks_per_node=8)
    assert other.hash == good().hash


def test_hash_sees_everything_that_moves_an_element() -> None:
    changed = [
        Plan.of(Parent(4, 4, CHILDREN), LENGTHS),
        Plan.of(Parent(0, 4, (Child(0, 2, (3,)), Child(2, 1, (1, 0)), Child(3, 1, (4, 2)))), LENGTHS),
        Plan.of(Parent(0, 4, CHILDREN), (10, 7, 3, 20, 6)),
        Plan.of(Parent(0, 4, CHILDREN), LENGTHS, cut="balanced"),
        Plan.of(Parent(0, 4, CHILDREN), LENGTHS, order="canonical"),
        Plan.of(Parent(0, 4, CHILDREN), LENGTHS, row_multiple=2),
        Plan.of(Parent(0, 4, CHILDREN), LENGTHS, min_row_cap=17),
        Plan.of(Parent(0, 4, CHILDREN), LENGTHS, ranks=(0, 2, 4, 6)),
        Plan.of(Parent(0, 4, (*CHILDREN[:2], Child(3, 1, (4, 3)), Child(0, 2, (2,)))[1:]), LENGTHS),
        replace(good(), bases=tuple(b + 1 for b in good().bases)),
    ]
    assert len({p.hash for p in [good(), *changed]}) == len(changed) + 1


def test_file_round_trip(tmp_path: Path) -> None:
    for seed in range(50):
        for plan in plans(random_assignment(seed)):
            plan.save(tmp_path / "plan.json")
            read = Plan.load(tmp_path / "plan.json")
            assert read == plan and read.hash == plan.hash
            assert (read.reason, read.repacked) == (plan.reason, plan.repacked)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: d["lengths"].__setitem__(0, 11), "content and hash differ"),
        (lambda d: d.update(format="tide-repack-plan-0"), "unknown format; got tide-repack-plan-0"),
        (lambda d: d.pop("hash"), "content and hash differ; got no hash"),
        (lambda d: d.update(extra=1), "content and hash differ"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage, says: str) -> None:
    path = tmp_path / "plan.json"
    good().save(path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(RepackError, match=says):
        Plan.load(path)


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(RepackError, match="not JSON"):
        Plan.load(tmp_path / "plan.json")


def assignment(*children: Child, lengths: tuple[int, ...] = LENGTHS, node: int = 2) -> Assignment:
    return Assignment(lengths, node, (Parent(0, 4, children),))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (assignment(Child(0, 2, (3, 0)), *CHILDREN[1:]), "sample 0 is assigned twice"),
        (assignment(Child(0, 2, ()), *CHILDREN[1:]), "1 of 5 samples are in no child: 3"),
        (assignment(Child(0, 2, (9,)), *CHILDREN[1:]), "sample 9 does not exist"),
        (assignment(*CHILDREN[:2], Child(2, 2, (4, 2))), "children 1 and 2 overlap"),
        (assignment(*CHILDREN[:2], Child(3, 2, (4, 2))), "outside the parent"),
        (assignment(*CHILDREN, lengths=(10, 7, 3, 20, 0)), "sample 4 has length 0"),
    ],
)
def test_bad_assignments_are_refused(bad: Assignment, says: str) -> None:
    with pytest.raises(RepackError, match=says):
        plans(bad)


@pytest.mark.parametrize(
    ("parent", "options", "says"),
    [
        (Parent(0, 4, (Child(0, 2, (3, 9)),)), {}, "sample 9 does not exist; expected 0..4"),
        (
            Parent(0, 4, (Child(0, 2, (3,)), Child(2, 2, (3,)))),
            {},
            "sample 3 is held twice: by children 0 and 1",
        ),
        (Parent(0, 4, (Child(0, 3, (3,)), Child(2, 2, ()))), {}, "children 0 and 1 overlap"),
        (Parent(0, 4, (Child(3, 2, (3,)),)), {}, "child 0 lies outside its parent; got ranks 3..4"),
        (Parent(0, 4, CHILDREN), {"cut": "even"}, "unknown cut; got 'even', expected envelope or balanced"),
        (Parent(0, 4, CHILDREN), {"order": "zigzag"}, "unknown order"),
        (Parent(0, 4, CHILDREN), {"row_multiple": 0}, "row_multiple; got 0"),
        (Parent(0, 4, CHILDREN), {"min_row_cap": -1}, "min_row_cap; got -1"),
        (Parent(0, 4, CHILDREN), {"ranks": (0, 1, 1, 2)}, "ranks of the parent"),
        (Parent(0, 4, CHILDREN), {"ranks": (0, 1)}, "child 1 lies outside its parent"),
        (
            Parent(0, 4, (Child(0, 4, (0,)), Child(0, 4, (1,)))),
            {"order": "rank-major"},
            "a rank is in two children",
        ),
        (
            Parent(0, 4, (Child(0, 4, (0,)), Child(0, 4, (1,)))),
            {"cut": "envelope"},
            "a rank is in two children",
        ),
    ],
)
def test_bad_parents_and_options_are_refused(parent: Parent, options: dict, says: str) -> None:
    with pytest.raises(RepackError, match=says):
        Plan.of(parent, LENGTHS, **options)


def test_rows_that_do_not_fit_name_parent_and_sample() -> None:
    assert plans(GOOD, max_rows=17)[0].row_cap == 17
    with pytest.raises(
        RepackError, match=r"parent 0 \(global ranks 0..3\) does not fit .* got 17 rows a rank, .*at most 16"
    ):
        plans(GOOD, max_rows=16)


def test_arguments_are_checked() -> None:
    plan = good()
    for call, says in [
        (lambda: plan.local_index(), "no rank given"),
        (lambda: plan.local_index(4), "rank outside the parent; got 4, expected parent-local 0..3"),
        (lambda: plan.child_rows(0, 2), "rank 2 is not in child 0; expected one of"),
        (lambda: plan.cu_seqlens(child=3), "no such child; got 3, expected 0..2"),
        (lambda: plan.cu_seqlens(child=0, rank=0), "at once"),
        (lambda: plan.in_splits("out", 0), "unknown direction; got 'out'"),
    ]:
        with pytest.raises(RepackError, match=says):
            call()
    with pytest.raises(AttributeError, match="enter needs a process group"):
        getattr(plan, "enter")  # noqa: B009

"""Assignments name what is wrong with them."""

from __future__ import annotations

import pytest

from tide_backend.repack import Assignment, Child, Parent


def one_parent(*children: Child, width: int = 16, first_rank: int = 0) -> tuple[Parent, ...]:
    return (Parent(first_rank, width, children),)


PARTITION = (Child(0, 8, (0,)), Child(8, 4, (1,)), Child(12, 4, (2,)))


def test_forms():
    def form(*children: Child) -> str:
        return Assignment((9, 8, 7), 8, one_parent(*children)).validate().parents[0].form

    assert form(Child(0, 16, (0, 1, 2))) == "baseline"
    assert form(*PARTITION) == "partition"
    assert form(Child(0, 16, (0,)), Child(0, 8, (1,)), Child(8, 8, (2,))) == "spill"


def test_rows_of_every_rank():
    parent = Parent(0, 16, (Child(0, 16, (0,)), Child(0, 8, (1,)), Child(8, 8, (2,))))
    assert parent.rank_rows((17, 9, 8)) == (4,) * 8 + (3,) * 8
    assert parent.spill == Child(0, 16, (0,))
    assert parent.samples == (0, 1, 2)


def test_lookup_by_rank():
    assignment = Assignment((5,), 8, (Parent(8, 8, (Child(0, 8, (0,)),)), Parent(16, 8, (Child(0, 8, ()),))))
    assert assignment.validate().world_size == 24
    assert assignment.parent_of(15) is assignment.parents[0]
    with pytest.raises(ValueError, match="rank 3 is in no parent"):
        assignment.parent_of(3)


def test_stats_are_not_compared():
    a = Assignment((1,), 8, one_parent(Child(0, 16, (0,))), stats={"cost_us": 1.0})
    assert a == Assignment((1,), 8, one_parent(Child(0, 16, (0,))))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (Assignment((5, 0), 8, one_parent(Child(0, 16, (0, 1)))), "sample 1 has length 0"),
        (Assignment((5,), 6, one_parent(Child(0, 16, (0,)))), "ranks_per_node: got 6"),
        (Assignment((5,), 8, ()), "no parents"),
        (Assignment((5,), 8, one_parent()), "parent 0 has no children"),
        (Assignment((5,), 8, one_parent(Child(0, 12, (0,)), width=12)), "parent 0: width 12"),
        (Assignment((5,), 8, one_parent(Child(0, 16, (0,)), first_rank=4)), "first rank 4 is not aligned"),
        (
            Assignment((5,), 8, (Parent(0, 16, (Child(0, 16, (0,)),)), Parent(8, 8, (Child(0, 8, ()),)))),
            "parents 0 and 1 overlap: rank 8",
        ),
        (Assignment((5, 6, 7), 8, one_parent(*PARTITION[:2])), "parent 0: rank 12 is in no child"),
        (
            Assignment((5, 6, 7), 8, one_parent(*PARTITION, Child(8, 2, ()))),
            "children 1 and 3 overlap on rank 8",
        ),
        (
            Assignment((5, 6, 7), 4, one_parent(*PARTITION)),
            "parent 0, child 0: ranks 0..7 cross a node of 4 ranks",
        ),
        (
            Assignment((5,), 8, one_parent(Child(0, 2, (0,)), Child(2, 4, ()), Child(6, 2, ()), width=8)),
            "parent 0, child 1: ranks 2..5 are not aligned to the width 4",
        ),
        (
            Assignment((5,), 8, one_parent(Child(0, 3, (0,)), Child(3, 1, ()), width=4)),
            "parent 0, child 0: width 3",
        ),
        (Assignment((5,), 8, one_parent(Child(8, 16, (0,)), *PARTITION)), "lie outside the parent's 0..15"),
        (
            Assignment((5,), 8, one_parent(Child(0, 8, (0,)), Child(0, 8, ()), width=8)),
            "only a parent wider than a node can spill",
        ),
        (
            Assignment((5, 6), 8, one_parent(Child(0, 8, (0, 1)), Child(8, 8, (1,)))),
            "sample 1 is assigned twice: to parent 0, child 0 and to parent 0, child 1",
        ),
        (Assignment((5,), 8, one_parent(Child(0, 8, (0,)), Child(8, 8, (3,)))), "sample 3 does not exist"),
        (Assignment((5, 6, 7), 8, one_parent(Child(0, 16, (1,)))), "2 of 3 samples are in no child: 0, 2"),
    ],
)
def test_what_is_wrong_is_named(assignment, message):
    with pytest.raises(ValueError) as caught:
        assignment.validate()
    assert message in str(caught.value)

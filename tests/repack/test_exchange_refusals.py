"""Bad input: an error that says which, on every rank, and never a hang."""

from __future__ import annotations

import pytest

WORLD = 4


@pytest.fixture
def run(ranks):
    """Run a task of refusal_tasks; every rank answers fast, and the group works afterwards."""

    def call(task: str, *args, world: int = WORLD, limit_s: float = 5):
        answers = ranks(world).run(f"refusal_tasks:{task}", *args)
        assert all(seconds < limit_s for *_, seconds in answers)
        ranks(world).run("refusal_tasks:stays_usable")
        return answers

    return call


def all_name(answers, *odd: int) -> None:
    assert [(name, ranks) for name, _, ranks, _ in answers] == [("AgreementError", odd)] * len(answers)


@pytest.mark.parametrize(("world", "odd"), [(2, [1]), (4, [2]), (8, [0, 5])])
def test_another_plan_is_named_on_every_rank(run, world: int, odd: list[int]) -> None:
    answers = run("another_plan", odd, world=world)
    all_name(answers, *odd)
    for rank, (_, text, _, _) in enumerate(answers):
        assert text.startswith(f"tide[rank {rank}/{world}, group")
        assert "order=canonical" in text and "order=rank-major" in text and "cut" not in text
        listed = "rank 1" if odd == [1] else "rank 2" if odd == [2] else "ranks 0, 5"
        assert f"{listed} brought another plan than rank" in text


def test_another_plan_at_bind(run) -> None:
    answers = run("another_plan_at_bind")
    all_name(answers, 1)
    assert all("row_multiple=2" in text and "row_multiple=1" in text for _, text, _, _ in answers)


def test_other_heads_at_bind(run) -> None:
    answers = run("other_heads_at_bind")
    all_name(answers, 0)
    assert all("heads=8q/1kv" in text and "heads=8q/2kv" in text for _, text, _, _ in answers)


def test_impossible_heads_on_one_rank(run) -> None:
    answers = run("impossible_heads_on_one_rank")
    all_name(answers[:3], 3)
    assert answers[3][0] == "RepackError" and "not a multiple" in answers[3][1]
    assert all(
        "rank 3 says: " in text and "got 4 query and 3 KV heads" in text for _, text, _, _ in answers[:3]
    )


def test_a_rank_that_does_not_call_is_named_at_the_deadline(run) -> None:
    answers = run("late_rank")
    all_name(answers[:3], 3)
    assert all("no answer from rank 3; got 3 of 4 ranks in 0.7 s" in text for _, text, _, _ in answers[:3])
    assert all(0.6 < seconds < 1.4 for *_, seconds in answers[:3])
    assert answers[3][0] == ""  # it found all answers


def test_a_plan_of_another_group(run) -> None:
    answers = run("plan_of_another_group")
    assert answers[0][0] == "RepackError"
    assert (
        "the plan is for another group; got global ranks [0, 1, 2, 3], expected [4, 5, 6, 7]" in answers[0][1]
    )
    all_name(answers[1:], 0)
    assert all("rank 0 says: " in text and "another group" in text for _, text, _, _ in answers[1:])


def test_a_head_map_of_another_width_on_all_ranks(run) -> None:
    for name, text, _, _ in run("other_head_map"):
        assert name == "RepackError" and "over 8 ranks, expected 4 query and 4 KV heads over 4 ranks" in text


LOCAL = {
    "rows": "q has another number of rows than the plan; got 5, expected 6",
    "rows of v": "v has another number of rows than the plan",
    "heads": "q has another number of heads than the plan was bound with; got 7, expected 8",
    "kv heads": "k has another number of heads than the plan was bound with; got 8, expected 4",
    "dtype of k": "k differs from q in dtype or device; got torch.float64 on cpu",
    "dimensions": "v is no [rows, heads, ...] tensor; got shape [6]",
    "parent rows": "o has another number of rows than the plan; got 17, expected 18",
    "parent heads": "o has another number of heads than the plan was bound with; got 1, expected 2",
}


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("case", LOCAL)
def test_tensors_of_one_rank_that_do_not_match(run, case: str, verify: str) -> None:
    answers = run("call", case, verify)
    assert answers[1][0] == "RepackError" and LOCAL[case] in answers[1][1]
    others = [a for r, a in enumerate(answers) if r != 1]
    all_name(others, 1)
    assert all("rank 1 cannot take part" in text and LOCAL[case] in text for _, text, _, _ in others)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("dtype", "dtype=torch.float64"),
        ("head dimension", "4x[5]"),
        ("operation", "operation=exit"),
    ],
)
def test_calls_that_only_the_comparison_can_tell_apart(run, case: str, says: str) -> None:
    answers = run("call", case, "first")
    all_name(answers, 1)
    assert all("rank 1 brought another call than ranks 0, 2, 3" in t and says in t for _, t, _, _ in answers)


def test_a_later_call_with_verify_always(run) -> None:
    answers = run("later_call")
    assert answers[0][0] == "RepackError" and "x has another number of rows" in answers[0][1]
    all_name(answers[1:], 0)


def test_a_process_outside_the_group(run) -> None:
    answers = run("not_a_member", world=2)
    assert answers[0][0] == "RepackError" and "the plan is for another group" in answers[0][1]
    assert answers[1][0] == "RepackError" and "not a process group this process belongs to" in answers[1][1]


def test_the_store_does_not_grow(ranks) -> None:
    assert all(grown <= 2 * WORLD for grown in ranks(WORLD).run("refusal_tasks:many_rounds", 60))

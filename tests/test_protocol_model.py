"""The flag protocol, verified on the product's own plans, and evidence that the verification would notice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model import causal, interleaving
from model.calls import Call
from model.machine import Violation
from model.mutations import Mutation, mutations
from model.programs import Issue, Setup, build
from model.scenarios import packed, scenarios, small, staged

MODES = [
    pytest.param({"merged": merged, "device": device}, id=f"{device}-{order}")
    for merged, order in ((False, "channels"), (True, "fifo"))
    for device in ("cpu", "cuda")
]
MUTATIONS = [pytest.param(m, id=m.name) for m in mutations()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", scenarios(2))
@pytest.mark.parametrize("world", [2, 3])
def test_plans_finish_and_are_right(world: int, name: str, mode: dict) -> None:
    if name == "a rank without a slot" and mode["device"] == "cuda":
        pytest.skip("handed to the inner backend there")
    if name == "multicast all-gather" and (world == 2 or mode["device"] == "cpu"):
        pytest.skip("copied to each peer there")
    result = causal.explore(build(scenarios(world)[name], Setup(world, **mode)))
    assert result.ends >= 1


# A GPU's streams beside each other have too many orders for these; `causal` covers them.
MANY_ORDERS = {"zero-copy all-gather", "two channels", "one way"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", small(2))
def test_plans_are_right_in_literally_every_order(name: str, mode: dict) -> None:
    if mode == {"merged": False, "device": "cuda"} and name in MANY_ORDERS:
        pytest.skip("too many orders")
    program = build(small(2)[name], Setup(2, **mode))
    states = interleaving.explore(program).states
    assert states > causal.explore(program).states


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mistakes_are_found(mutation: Mutation) -> None:
    with pytest.raises(Violation) as found:
        causal.explore(build(mutation.program, mutation.setup))
    assert found.value.kind in mutation.kinds, found.value
    assert found.value.trace


@pytest.mark.parametrize("mutation", [p for p in MUTATIONS if p.values[0].every_order])
def test_mistakes_are_found_by_running_every_order(mutation: Mutation) -> None:
    with pytest.raises(Violation) as found:
        interleaving.explore(build(mutation.program, mutation.setup))
    assert found.value.kind in mutation.kinds, found.value


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if not isinstance(m.values[0].program[0], list)])
def test_the_same_programs_pass_without_the_mistake(mutation: Mutation) -> None:
    causal.explore(build(mutation.program, mutation.repaired))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("engine", [causal, interleaving])
@pytest.mark.parametrize("ours, theirs", [
    (staged("a", (10, 30)), staged("a", (30, 10))),
    (packed("g", 40), replace(packed("g", 40), chunk=20)),
], ids=["another layout", "other chunks"])  # fmt: skip
def test_ranks_that_disagree_hear_of_it_before_a_byte_moves(ours: Call, theirs: Call, engine, device: str) -> None:
    ranks = [[Issue(ours)], [Issue(theirs)]]
    with pytest.raises(Violation) as found:
        engine.explore(build(ranks, Setup(2, device)))
    assert found.value.kind == "mismatch"
    assert not [line for line in found.value.trace if "copy" in line]


def test_where_ranks_may_differ_in_the_order_of_calls() -> None:
    """On a CPU, two channels' calls; not where the channels are one FIFO, and not on a GPU, whose host thread
    meets its peers call by call."""
    a, g = Issue(staged("a")), Issue(packed("g", 40))
    ranks = [[a, g], [g, a]]
    causal.explore(build(ranks, Setup(2)))
    for setup in (Setup(2, merged=True), Setup(2, "cuda")):
        with pytest.raises(Violation) as found:
            causal.explore(build(ranks, setup))
        assert found.value.kind == "deadlock"
        assert "read record 1 of rank 1" in found.value.what


def test_a_counterexample_can_be_read() -> None:
    mutation = next(m for m in mutations() if m.name == "cpu, reduce-scatter: missing credit wait")
    with pytest.raises(Violation) as found:
        causal.explore(build(mutation.program, mutation.setup))
    text = str(found.value)
    assert "race: " in text and "nothing orders it after the" in text
    assert "rank 0 reduce_scatter  g: signal ('data', 'reduce_scatter', '0->1') = 1:1" in text

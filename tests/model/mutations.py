"""Mistakes in plans, programs and rules that the checker has to find, each on a small program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from model.calls import Call
from model.ops import Await, Move, Op, Release
from model.programs import Compute, Issue, Item, Reshard, Setup
from model.rules import Rules
from model.scenarios import SHARDS, exchanged, gathered, packed, reduced, staged


@dataclass(frozen=True)
class Mutation:
    """`setup` differs from Setup(world) by the mistake alone; the same program passes without it."""

    name: str
    program: Sequence[Item] | Sequence[Sequence[Item]]
    setup: Setup
    kinds: tuple[str, ...]  # how it may show
    every_order: bool = True  # small enough to be run in every order too


# --- edits of a plan's steps ----------------------------------------------------------------------


def is_flag(step: dict, kind: str, flag: str) -> bool:
    return step["kind"] == kind and step["flag"] == flag


def without(kind: str, flag: str) -> Callable:
    def edit(steps: list[dict], call: Call, rank: int) -> list[dict]:
        return [s for s in steps if not is_flag(s, kind, flag)]

    return edit


def without_last(kind: str, flag: str) -> Callable:
    def edit(steps: list[dict], call: Call, rank: int) -> list[dict]:
        last = max((s["value"] for s in steps if is_flag(s, kind, flag)), default=0)
        return [s for s in steps if not (is_flag(s, kind, flag) and s["value"] == last)]

    return edit


def signal_first(flag: str) -> Callable:
    """Every signal of `flag` moves in front of what it announces."""

    def edit(steps: list[dict], call: Call, rank: int) -> list[dict]:
        out: list[dict] = []
        for step in steps:
            at = len(out)
            if is_flag(step, "signal", flag):
                while at and out[at - 1]["kind"] not in ("signal", "wait"):
                    at -= 1
            out.insert(at, step)
        return out

    return edit


def one_buffer(steps: list[dict], call: Call, rank: int) -> list[dict]:
    """Credits as for two buffers, but the second lies on the first."""

    def folded(address: tuple[str, int, int]) -> tuple[str, int, int]:
        space, index, offset = address
        return (space, index, offset % (call.chunk * 4)) if space == "window" else address

    return [{**s, "to": folded(s["to"]), "from": folded(s["from"])} for s in steps]


def blind_meeting(steps: list[dict], call: Call, rank: int) -> list[dict]:
    return [{**s, "kind": "meet_without_waiting"} if is_flag(s, "wait", "ready") else s for s in steps]


def read_before_publishing(steps: list[dict], call: Call, rank: int) -> list[dict]:
    """Every rank waits for its peers' chunk before it shows its own."""
    meeting = [s for s in steps if s["flag"] == "ready" and s["kind"] in ("signal", "wait")]
    rest = [s for s in steps if s not in meeting]
    waits = [s for s in rest if is_flag(s, "wait", "data")]
    return meeting + waits + [s for s in rest if s not in waits]


def send_all_then_receive(steps: list[dict], call: Call, rank: int) -> list[dict]:
    """A rotation that needs more buffers than there are: no chunk is added before all are sent."""
    receiving = [
        s
        for s in steps
        if is_flag(s, "wait", "data") or is_flag(s, "signal", "credit") or s["kind"] == "accumulate"
    ]
    return [s for s in steps if s not in receiving] + receiving


def swapped_peers(steps: list[dict], call: Call, rank: int) -> list[dict]:
    """Rank 0 writes for rank 1 into rank 2's window, and the other way round."""
    swap = {1: 2, 2: 1}

    def other(address: tuple[str, int, int]) -> tuple[str, int, int]:
        space, index, offset = address
        return (space, swap.get(index, index), offset) if space == "window" and rank == 0 else address

    return [{**s, "to": other(s["to"])} for s in steps]


def neighbours_slice(steps: list[dict], call: Call, rank: int) -> list[dict]:
    """Rank 0 takes the slice of the window that belongs to another writer."""
    stride = 2 * call.chunk * 4

    def moved(address: tuple[str, int, int]) -> tuple[str, int, int]:
        space, index, offset = address
        if space != "window" or rank != 0:
            return address
        return (space, index, (offset + stride) % (2 * stride))

    return [{**s, "to": moved(s["to"])} for s in steps]


def lost_copy(steps: list[dict], call: Call, rank: int) -> list[dict]:
    last = max(i for i, s in enumerate(steps) if s["kind"] == "copy")
    return steps[:last] + steps[last + 1 :] if rank == 0 else steps


def placed_in_the_batch(steps: list[dict], call: Call, rank: int) -> list[dict]:
    """The own shard is placed after the meeting: in one batch, unordered, with the copies that read it."""
    own = [s for s in steps if s["kind"] == "copy" and s["from"][0] == "input"]
    rest = [s for s in steps if s not in own]
    meeting = 1 + max(i for i, s in enumerate(rest) if s["flag"] == "ready" and s["kind"] == "wait")
    return rest[:meeting] + own + rest[meeting:]


# --- edits of operations --------------------------------------------------------------------------


def released_early(ops: list[Op], call: Call, rank: int) -> list[Op]:
    """The staging goes back before the last addition has read it."""
    release = next((op for op in ops if isinstance(op, Release)), None)
    if release is None or call.op != "reduce_scatter":
        return ops
    last = max(i for i, op in enumerate(ops) if isinstance(op, Move) and len(op.sources) > 1)
    rest = [op for op in ops if op is not release]
    return [*rest[:last], release, *rest[last:]]


def reshard_in_flight(ops: list[Op], call: Call, rank: int) -> list[Op]:
    """The slot goes back while the call still runs."""
    if call.op == "all_gather" and len(ops) == 2 and isinstance(ops[1], Release):
        return [Await(call.name, f"issued {call.name}"), ops[1]]
    return ops


def added_backwards(ops: list[Op], call: Call, rank: int) -> list[Op]:
    return [replace(op, sources=op.sources[::-1]) if isinstance(op, Move) else op for op in ops]


# --- the list -------------------------------------------------------------------------------------

LONG = (40,)  # three chunks
LOST = ("race", "wrong data", "out of bounds")


def mutations() -> list[Mutation]:
    two = Setup(2)
    zero = [Issue(gathered("a", 2, (5,))), Issue(gathered("b", 2, (5,)))]
    ag, rs = [Issue(staged("a", LONG))], [Issue(packed("g", 40))]
    a2a = [Issue(exchanged("s", [0, 40], [40, 0]))]
    beside = [Issue(gathered("x", 2, (5,))), Issue(packed("g", 12))]
    vacated = [Issue(gathered("x", 2, (5,))), Reshard(gathered("x", 2, (5,))), Issue(packed("g", 12))]
    one_way = [Issue(exchanged(name, [0, 9], [0, 0])) for name in "st"]
    quiet = [Issue(exchanged(name, [0, 0], [0, 0])) for name in "st"]
    other_layout = [[Issue(gathered("a", 2, (8, 16)))], [Issue(gathered("a", 2, (16, 8)))]]
    other_chunks = [[Issue(packed("g", 40))], [Issue(replace(packed("g", 40), chunk=20))]]
    odd_pools = [
        *(Issue(gathered(n, 2, (5,))) for n in "ab"),
        *(item(gathered(n, 2, (5,))) for n in "ab" for item in (Compute, Reshard)),
        Issue(gathered("c", 2, (5,))),
        Issue(gathered("d", 2, (5,))),
    ]

    def rules(**changed) -> Setup:
        return replace(two, rules=Rules(**changed))

    def steps(edit: Callable, base: Setup = two) -> Setup:
        return replace(base, edit_steps=edit)

    def ops(edit: Callable) -> Setup:
        return replace(two, edit_ops=edit)

    return [
        Mutation("all-gather: missing credit wait", ag, steps(without("wait", "credit")), LOST),
        Mutation("reduce-scatter: missing credit wait", rs, steps(without("wait", "credit")), LOST),
        Mutation("all-to-all: missing credit wait", a2a, steps(without("wait", "credit")), LOST),
        Mutation("all-gather: missing data wait", ag, steps(without("wait", "data")), LOST),
        Mutation("reduce-scatter: missing data wait", rs, steps(without("wait", "data")), LOST),
        Mutation("zero-copy: missing data wait", zero[:1], steps(without("wait", "data")), LOST),
        Mutation("missing ready wait", zero[:1], steps(blind_meeting), LOST),
        Mutation("all-gather: data flag before the data", ag, steps(signal_first("data")), LOST),
        Mutation("reduce-scatter: data flag before the data", rs, steps(signal_first("data")), LOST),
        Mutation("zero-copy: data flag before the data", zero[:1], steps(signal_first("data")), LOST),
        Mutation("all-gather: credit before the read", ag, steps(signal_first("credit")), LOST),
        Mutation("reduce-scatter: credit before the addition", rs, steps(signal_first("credit")), LOST),
        Mutation("all-to-all: credit before the read", a2a, steps(signal_first("credit")), LOST),
        Mutation("all-gather: one buffer too few", ag, steps(one_buffer), LOST),
        Mutation("all-to-all: one buffer too few", a2a, steps(one_buffer), LOST),
        Mutation("flag values start again with every call", [*ag, Issue(staged("b", LONG))],
                 rules(values_carry_sequence=False), LOST),
        Mutation("channels share flag words", beside, rules(words_per_channel=False), (*LOST, "deadlock")),
        Mutation("window of the call before", zero, rules(window_of_this_call=False), LOST),
        Mutation("offsets taken to be the same on every rank", odd_pools,
                 replace(rules(window_of_its_owner=False), merged=True, pools=("last", "first")), LOST),
        Mutation("one record instead of two", one_way, rules(record_buffers=1), LOST),
        Mutation("one ready word awaited by equality", quiet, rules(ready_words=1), ("race", "deadlock")),
        Mutation("ready awaited as at least, another layout", other_layout,
                 rules(ready_by_equality=False), LOST),
        Mutation("staging released before the last addition", beside[::-1], ops(released_early), LOST),
        Mutation("window released before the last reader's credit",
                 [Issue(staged("a", (12,))), Issue(packed("g", 12))],
                 steps(without_last("wait", "credit")), LOST, every_order=False),
        Mutation("slot released while peers push", vacated, ops(reshard_in_flight), LOST),
        Mutation("all-gather: waits before it publishes", ag, steps(read_before_publishing), ("deadlock",)),
        Mutation("reduce-scatter: sends all before it receives", rs, steps(send_all_then_receive),
                 ("deadlock",)),
        Mutation("zero-copy: another peer's window", [Issue(gathered("a", 3, (5,)))],
                 steps(swapped_peers, replace(Setup(3), merged=True)), LOST),
        Mutation("reduce-scatter: another writer's slice", [Issue(packed("g", 12))],
                 steps(neighbours_slice, replace(Setup(3), merged=True)), LOST),
        Mutation("a copy is lost", ag, steps(lost_copy), LOST),
        Mutation("own shard placed in the batch that sends it", zero[:1], steps(placed_in_the_batch), LOST),
        Mutation("added in another order", [Issue(reduced("g", 2, SHARDS[1:]))], ops(added_backwards),
                 ("wrong data",)),
        Mutation("ranks cut chunks differently", other_chunks, two, (*LOST, "deadlock")),
    ]  # fmt: skip

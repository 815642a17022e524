"""Mistakes in plans, programs and rules that the checker has to find, each on a small program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from model.calls import Call
from model.ops import Await, Claim, Move, Op, Release, Retire
from model.programs import Compute, Issue, Item, Overwrite, Reshard, Setup
from model.rules import Rules
from model.scenarios import SHARDS, exchanged, gathered, packed, reduced, staged, straight


@dataclass(frozen=True)
class Mutation:
    """`setup` holds the mistake; `repaired` is the same without it, and passes."""

    name: str
    program: Sequence[Item] | Sequence[Sequence[Item]]
    setup: Setup
    kinds: tuple[str, ...]  # how it may show
    every_order: bool = True  # small enough to be run in every order too

    @property
    def repaired(self) -> Setup:
        s = self.setup
        return Setup(s.world, s.device, s.merged, pools=s.pools)


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


def first_place(steps: list[dict], call: Call, rank: int) -> list[dict]:
    """Rank 1 writes to the beginning of its peers' outputs, as if nobody came before it."""

    def moved(address: tuple[str, int, int]) -> tuple[str, int, int]:
        space, index, _ = address
        return (space, index, 0) if space == "window" and rank == 1 else address

    return [{**s, "to": moved(s["to"])} for s in steps]


def spread_elsewhere(steps: list[dict], call: Call, rank: int) -> list[dict]:
    """Every rank multicasts to the place of rank 0."""
    return [{**s, "to": ("multicast", 0, 0)} if s["to"][0] == "multicast" else s for s in steps]


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
    release = next((op for op in ops if isinstance(op, (Release, Retire))), None)
    if release is None or call.op != "reduce_scatter":
        return ops
    last = max(i for i, op in enumerate(ops) if isinstance(op, Move) and len(op.sources) > 1)
    rest = [op for op in ops if op is not release]
    return [*rest[:last], release, *rest[last:]]


def reshard_in_flight(ops: list[Op], call: Call, rank: int) -> list[Op]:
    """The slot goes back without a look at whether the call is over."""
    return ops[1:] if len(ops) == 2 and isinstance(ops[1], (Release, Retire)) else ops


def unclaimed(ops: list[Op], call: Call, rank: int) -> list[Op]:
    """Streams use a window without waiting for the work that used it last."""
    return [op for op in ops if not isinstance(op, Claim)]


def pushes_do_not_follow(ops: list[Op], call: Call, rank: int) -> list[Op]:
    """Pushes start when the host gives them, whatever the caller's stream has come to."""
    begun, given = Await(call.name, f"begun {call.name}"), Await(call.name, f"enqueued {call.name}")
    return [given if op == begun else op for op in ops]


def pushes_not_joined(ops: list[Op], call: Call, rank: int) -> list[Op]:
    """The call is over on its channel's stream while its pushes still read the caller's memory."""
    return [op for op in ops if op != Await(call.name, f"pushed {call.name}")]


def added_backwards(ops: list[Op], call: Call, rank: int) -> list[Op]:
    return [replace(op, sources=op.sources[::-1]) if isinstance(op, Move) else op for op in ops]


# --- the list -------------------------------------------------------------------------------------

LONG = (40,)  # three chunks
LOST = ("race", "wrong data", "out of bounds")


def mutations() -> list[Mutation]:
    cpu, gpu = Setup(2), Setup(2, "cuda")
    x, y = gathered("x", 2, (5,)), gathered("y", 2, (5,))
    zero, twice = [Issue(x)], [Issue(x), Issue(y)]
    ag, rs = [Issue(staged("a", LONG))], [Issue(packed("g", 40))]
    a2a = [Issue(exchanged("s", [0, 40], [40, 0]))]
    u, v = straight("u", 2, 3), straight("v", 2, 3)
    there, again = [Issue(u)], [Issue(u), Compute(u), Reshard(u), Issue(v)]
    beside = [Issue(packed("g", 12)), Issue(x)]
    sent = [[Issue(call), Overwrite(call)] for call in (packed("g", 12), straight("u", 2, 3))]
    vacated = [Issue(x), Reshard(x), Issue(packed("g", 12))]
    reused = [Issue(x), Compute(x), Reshard(x), Issue(y)]
    one_way = [Issue(exchanged(name, [0, 9], [0, 0])) for name in "st"]
    quiet = [Issue(exchanged(name, [0, 0], [0, 0])) for name in "st"]
    other_layout = [[Issue(gathered("a", 2, (8, 16)))], [Issue(gathered("a", 2, (16, 8)))]]

    def in_odd_pools(world: int, **more) -> list[Item]:
        """Where ranks take freed windows in different orders, c and d lie at different places."""
        a, b, c, d = (gathered(name, world, (5,), **more) for name in "abcd")
        return [*map(Issue, (a, b)), *(item(x) for x in (a, b) for item in (Compute, Reshard)), *map(Issue, (c, d))]

    odd_pools, odd_multicast = in_odd_pools(2), in_odd_pools(3, multicast=True)
    p, q = (gathered(name, 3, (5,), multicast=True, placed=True) for name in "pq")
    spread, spread_twice = [Issue(p)], [Issue(p), Compute(p), Reshard(p), Issue(q)]

    def rules(base: Setup, **changed) -> Setup:
        return replace(base, rules=Rules(**changed))

    def steps(base: Setup, edit: Callable) -> Setup:
        return replace(base, edit_steps=edit)

    def ops(base: Setup, edit: Callable) -> Setup:
        return replace(base, edit_ops=edit)

    common = [
        (name, steps(base, edit), program, kinds)
        for base in (cpu, gpu)
        for name, edit, program, kinds in (
            ("all-gather: missing credit wait", without("wait", "credit"), ag, LOST),
            ("reduce-scatter: missing credit wait", without("wait", "credit"), rs, LOST),
            ("all-to-all: missing credit wait", without("wait", "credit"), a2a, LOST),
            ("all-gather: missing data wait", without("wait", "data"), ag, LOST),
            ("reduce-scatter: missing data wait", without("wait", "data"), rs, LOST),
            ("zero-copy: missing data wait", without("wait", "data"), zero, LOST),
            ("all-gather: data flag before the data", signal_first("data"), ag, LOST),
            ("reduce-scatter: data flag before the data", signal_first("data"), rs, LOST),
            ("zero-copy: data flag before the data", signal_first("data"), zero, LOST),
            ("all-gather: credit before the read", signal_first("credit"), ag, LOST),
            ("reduce-scatter: credit before the addition", signal_first("credit"), rs, LOST),
            ("all-to-all: credit before the read", signal_first("credit"), a2a, LOST),
            ("all-gather: one buffer too few", one_buffer, ag, LOST),
            ("all-to-all: one buffer too few", one_buffer, a2a, LOST),
            ("zero-copy all-to-all: missing data wait", without("wait", "data"), there, LOST),
            ("zero-copy all-to-all: data flag before the data", signal_first("data"), there, LOST),
            ("zero-copy all-to-all: another rank's place", first_place, there, LOST),
            ("all-gather: waits before it publishes", read_before_publishing, ag, ("deadlock",)),
            ("a copy is lost", lost_copy, ag, LOST),
        )
    ]
    fifo_of_three, gpus = Setup(3, merged=True), Setup(3, "cuda")
    return [
        *(Mutation(f"{base.device}, {name}", program, base, kinds) for name, base, program, kinds in common),
        # A GPU sends on a stream of its own; where its streams are one FIFO the order counts there too.
        *(
            Mutation(f"{base.device}, reduce-scatter: sends all before it receives", rs,
                     steps(base, send_all_then_receive), ("deadlock",))
            for base in (cpu, Setup(2, "cuda", merged=True))
        ),
        Mutation("flag values start again with every call", [*ag, Issue(staged("b", LONG))],
                 rules(cpu, values_carry_sequence=False), LOST),
        Mutation("channels share flag words", beside,
                 rules(cpu, words_per_channel=False), (*LOST, "deadlock")),
        Mutation("window of the call before", twice, rules(cpu, window_of_this_call=False), LOST),
        Mutation("offsets taken to be the same on every rank", odd_pools,
                 replace(rules(cpu, window_of_its_owner=False), merged=True, pools=("last", "first")), LOST),
        Mutation("multicast: offsets taken to be the same on every rank", odd_multicast,
                 replace(rules(gpus, multicast_at_equal_offsets=False), merged=True, pools=("last", "first")), LOST,
                 every_order=False),
        Mutation("multicast: data flag before the copy", spread, steps(gpus, signal_first("data")), LOST),
        Mutation("multicast: missing data wait", spread, steps(gpus, without("wait", "data")), LOST),
        Mutation("multicast: missing ready wait", spread_twice, steps(gpus, without("wait", "ready")), LOST),
        Mutation("multicast: another rank's place", spread, steps(gpus, spread_elsewhere), LOST),
        Mutation("one record instead of two", one_way,
                 rules(gpu, record_buffers=1, record_words=1), (*LOST, "deadlock")),
        Mutation("records not awaited", zero, rules(cpu, records_awaited=False), LOST),
        Mutation("records awaited as at least, another layout", other_layout,
                 rules(cpu, records_by_equality=False), LOST),
        Mutation("one ready word awaited by equality", quiet,
                 rules(gpu, ready_by_equality=True), ("race", "deadlock")),
        Mutation("missing ready wait", reused, steps(gpu, without("wait", "ready")), LOST),
        Mutation("all-to-all: missing ready wait", again, steps(gpu, without("wait", "ready")), LOST),
        Mutation("an all-to-all's window not claimed by the next gather", [*again[:3], Issue(y)],
                 ops(gpu, unclaimed), LOST),
        Mutation("window not claimed from its last use", reused, ops(gpu, unclaimed), LOST),
        Mutation("own shard placed in the batch that sends it", zero, steps(gpu, placed_in_the_batch), LOST),
        *(
            Mutation(f"{program[0].call.op}: {name}", program, ops(gpu, edit), LOST)
            for program in sent
            for name, edit in (
                ("pushes do not follow the caller", pushes_do_not_follow),
                ("pushes not joined at the end", pushes_not_joined),
            )
        ),
        Mutation("cpu, staging released before the last addition", beside, ops(cpu, released_early), LOST),
        Mutation("cuda, staging released before the last addition", beside, ops(gpu, released_early), LOST),
        Mutation("cpu, slot released while peers push", vacated, ops(cpu, reshard_in_flight), LOST),
        Mutation("cuda, slot released while peers push", vacated, ops(gpu, reshard_in_flight), LOST),
        Mutation("window released before the last reader's credit",
                 [Issue(staged("a", (12,))), Issue(packed("g", 12))],
                 steps(cpu, without_last("wait", "credit")), LOST, every_order=False),
        Mutation("zero-copy: another peer's window", [Issue(gathered("a", 3, (5,)))],
                 steps(fifo_of_three, swapped_peers), LOST),
        Mutation("reduce-scatter: another writer's slice", [Issue(packed("g", 12))],
                 steps(fifo_of_three, neighbours_slice), LOST),
        Mutation("added in another order", [Issue(reduced("g", 2, SHARDS[1:]))],
                 ops(cpu, added_backwards), ("wrong data",)),
    ]  # fmt: skip

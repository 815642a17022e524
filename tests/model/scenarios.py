"""The programs on which the product's plans are verified. Sizes are in float32 elements; a chunk holds 16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from model.calls import Call
from model.programs import Compute, Issue, Item, Reshard

SHARDS = (20, 3, 17)  # three chunks, of which each cuts a parameter or ends one


def staged(name: str, shards: tuple[int, ...] = SHARDS, **more) -> Call:
    return Call("all_gather", name, shards, **more)


def gathered(name: str, world: int, shards: tuple[int, ...] = SHARDS, **more) -> Call:
    """An all-gather into a slot on every rank."""
    return Call("all_gather", name, shards, align=8, slots=tuple(range(world)), **more)


def reduced(name: str, world: int, shards: tuple[int, ...] = SHARDS, **more) -> Call:
    """A reduce-scatter of separate gradients whose last rank's shard is mostly padding."""
    numels = tuple(max(0, world * s - s * 2 // 3) for s in shards)
    return Call("reduce_scatter", name, shards, numels, separate=True, **more)


def packed(name: str, numel: int) -> Call:
    return Call("reduce_scatter", name, (numel,), layout=False)


def exchanged(name: str, *splits: Sequence[int], **more) -> Call:
    return Call("all_to_all", name, splits=tuple(map(tuple, splits)), **more)


def straight(name: str, world: int, rows: int = 0) -> Call:
    """An all-to-all into slots: uneven, and nothing to the last rank, which has none; or `rows` for every pair."""
    if rows:
        return exchanged(name, *[[rows] * world] * world, slots=tuple(range(world)))
    return replace(uneven(name, world), slots=tuple(range(world - 1)))


def uneven(name: str, world: int) -> Call:
    """Between 0 and 3 chunks a pair, and nothing at all to the last rank."""
    rows = [[(7 * r + 20 * q + 40) % 48 for q in range(world - 1)] + [0] for r in range(world)]
    return exchanged(name, *rows)


def scenarios(world: int) -> dict[str, list[Item]]:
    a, b, c = (gathered(name, world) for name in "abc")
    placed = gathered("placed", world, placed=True)
    some = Call("all_gather", "some", SHARDS, slots=tuple(range(world - 1)))
    plain = staged("c", layout=False)
    g, h, i = reduced("g", world), packed("h", 40), reduced("i", world)
    s, t = uneven("s", world), uneven("t", world)
    u, v, w = straight("u", world), straight("v", world, 3), straight("w", world)
    half = exchanged("half", *[[20] * world] * world, slots=tuple(range(world - 1)))
    nothing = [Issue(exchanged(f"nothing {i}", *[[0] * world] * world)) for i in range(3)]
    one_way = exchanged("one way", *[[0] * r + [9] * (world - r) for r in range(world)])
    m, n, o = (gathered(name, world, (20, 3), multicast=True, placed=name == "n") for name in "mno")
    # What pools may do grows fast with ranks, so three ranks get by with one reduce-scatter less.
    more = [Issue(h)] if world == 2 else []
    third = Issue(staged("d")) if world == 2 else Issue(b)
    return {
        "staged all-gather": [Issue(staged("a")), Issue(staged("b", placed=True)), Issue(plain)],
        "zero-copy all-gather": [
            *(Issue(a), Issue(placed), Compute(a), Reshard(a), Issue(c)),
            *(Compute(placed), Reshard(placed), Compute(c)),
        ],
        "multicast all-gather": [
            *(Issue(m), Issue(n), Compute(m), Reshard(m), Issue(o)),
            *(Compute(n), Reshard(n), Compute(o)),
        ],
        "reduce-scatter": [Issue(g), Issue(h), Issue(i)],
        "all-to-all": [Issue(s), Issue(t)],
        # The second goes where the first was, and the gather where the second was.
        "zero-copy all-to-all": [
            *(Issue(u), Issue(v), Compute(u), Reshard(u), Issue(w), Compute(v), Reshard(v)),
            *(Issue(a), Compute(w), Compute(a)),
        ],
        "an all-to-all with a rank without a slot": [
            *(Issue(half), Compute(half), Reshard(half), Issue(v), Compute(v), Reshard(v), Issue(t)),
        ],
        "calls that move nothing": [*nothing, Issue(one_way), Issue(s)],
        "a rank without a slot": [Issue(some), Compute(some), Reshard(some), Issue(b), Compute(b)],
        # The staging of g and h takes slots that a and b vacated; c takes what staging vacated.
        "slot reuse": [
            *(Issue(a), Issue(b), Compute(a), Reshard(a), Issue(g), Compute(b), Reshard(b)),
            *(*more, Issue(c), Compute(c), Reshard(c)),
        ],
        "three channels": [third, Issue(g), Issue(s)],
    }


def small(world: int) -> dict[str, list[Item]]:
    """Small enough to be run in every order there is."""
    a, b = gathered("a", world, (5, 3)), gathered("b", world, (5, 3))
    x = gathered("x", world, (5,))
    u, v = straight("u", world, 3), straight("v", world, 4)
    return {
        "staged all-gather": [Issue(staged("a", (20, 18)))],
        "two staged all-gathers": [Issue(staged("a", (9,))), Issue(staged("b", (9,)))],
        "zero-copy all-gather": [Issue(a), Compute(a), Reshard(a), Issue(b), Compute(b)],
        "reduce-scatter": [Issue(reduced("g", world, (20, 18)))],
        "all-to-all": [Issue(exchanged("s", *[[20, 40, 0][:world]] * world))],
        "zero-copy all-to-all": [Issue(u), Compute(u), Reshard(u), Issue(v), Compute(v)],
        "one way": [Issue(exchanged(n, *[[0] * r + [9] * (world - r) for r in range(world)])) for n in "st"],
        "slot reuse": [Issue(x), Compute(x), Reshard(x), Issue(packed("g", 12))],
        "two channels": [Issue(x), Issue(packed("g", 12)), Reshard(x)],
    }

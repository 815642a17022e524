"""What a plan must say, token by token in plain Python, and random assignments to say it about."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tide_backend.repack.assignment import Assignment, Child, Parent

Token = tuple[int, int]  # (sample, position)


def child_tokens(child: Child, lengths: Sequence[int]) -> list[Token]:
    return [(s, i) for s in child.samples for i in range(lengths[s])]


def held_tokens(parent: Parent, lengths: Sequence[int], cut: str, multiple: int = 1) -> list[list[Token]]:
    """Tokens of each rank of the parent in local row order."""
    children = sorted(parent.children, key=lambda c: (c.first_rank, -c.width))
    cap = 0
    for child in children:
        n = len(child_tokens(child, lengths))
        while cap * child.width < n or cap % multiple:
            cap += 1
    held: list[list[Token]] = [[] for _ in range(parent.width)]
    for child in children:
        tokens = child_tokens(child, lengths)
        for j in range(child.width):
            if cut == "envelope":
                part = tokens[j * cap : (j + 1) * cap]
            else:
                part = tokens[len(tokens) * j // child.width : len(tokens) * (j + 1) // child.width]
            held[child.first_rank + j] += part
    return held


def parent_tokens(held: list[list[Token]], order: str) -> list[Token]:
    """Tokens of the parent layout in row order."""
    flat = [t for tokens in held for t in tokens]
    return sorted(flat) if order == "canonical" else flat


def head_of(q_heads: int, width: int) -> list[list[int]]:
    """Query heads of each rank: head h is on the rank p with floor(H p / W) <= h < floor(H (p+1) / W)."""
    owner: list[list[int]] = [[] for _ in range(width)]
    for h in range(q_heads):
        for p in range(width):
            if q_heads * p // width <= h < q_heads * (p + 1) // width:
                owner[p].append(h)
    return owner


def random_children(rng: random.Random, width: int, node: int, samples: list[int]) -> tuple[Child, ...]:
    """A random aligned partition of `width` ranks into node-local children that hold `samples`."""
    blocks: list[tuple[int, int]] = []

    def split(first: int, size: int) -> None:
        if size > node or (size > 1 and rng.random() < 0.5):
            split(first, size // 2)
            split(first + size // 2, size // 2)
        else:
            blocks.append((first, size))

    split(0, width)
    members: list[list[int]] = [[] for _ in blocks]
    for s in samples:
        members[rng.randrange(len(blocks))].append(s)
    return tuple(Child(f, w, tuple(m)) for (f, w), m in zip(blocks, members, strict=True))


def random_parent(rng: random.Random, first: int, width: int, node: int, samples: list[int]) -> Parent:
    form = rng.choice(["partition", "partition", "baseline", "spill"])
    samples = rng.sample(samples, len(samples))
    if form == "baseline":
        return Parent(first, width, (Child(0, width, tuple(samples)),), False, "baseline")
    if form == "spill" and width > node:
        cut = rng.randrange(len(samples) + 1)
        wide = Child(0, width, tuple(samples[:cut]))
        return Parent(first, width, (wide, *random_children(rng, width, node, samples[cut:])), True, "spill")
    return Parent(first, width, random_children(rng, width, node, samples), True, "partition")


def random_assignment(
    seed: int, width: int | None = None, parents: int | None = None, longest: int = 40
) -> Assignment:
    """`parents` parents of one random width, random samples (some very short), sometimes empty parents."""
    rng = random.Random(seed)
    width = width or 2 ** rng.randrange(6)
    node = 2 ** rng.randrange(4)
    count = parents or rng.choice([1, 1, 2])
    n = rng.randrange(0, 4 * count + 1) if rng.random() < 0.3 else rng.randrange(1, 12 * count)
    lengths = tuple(1 if rng.random() < 0.15 else rng.randint(1, longest) for _ in range(n))
    members: list[list[int]] = [[] for _ in range(count)]
    for s in range(n):
        members[rng.randrange(count)].append(s)
    made = tuple(random_parent(rng, p * width, width, node, members[p]) for p in range(count))
    return Assignment(lengths, node, made)

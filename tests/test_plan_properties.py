"""Random shapes: plans run in plain Python in a random order of ranks, against the oracle, bit for bit."""

from __future__ import annotations

import random

import numpy as np
import oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_simulator import POISON, Simulator

from tide_backend import _C

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

worlds = st.integers(1, 5)
sizes = st.lists(st.integers(0, 90), min_size=1, max_size=4)
staging = st.fixed_dictionaries(
    {
        "budget": st.sampled_from([1, 20_000, 4 << 20]),
        "depth": st.integers(2, 4),
        "smallest_chunk": st.sampled_from([16, 64, 200]),
    }
)
examples = settings(max_examples=60, deadline=None, derandomize=True)


def poisoned(numel: int, itemsize: int) -> bytearray:
    return bytearray([POISON]) * (numel * itemsize)


def words(data: np.random.Generator, numel: int, itemsize: int) -> np.ndarray:
    return data.integers(0, 256, numel * itemsize, dtype=np.uint8).view(WORDS[itemsize])


def layouts(world: int, shards: list[int], numels: list[int] | None, align: int, rank_major: bool) -> tuple:
    """The product's layout and the oracle's."""
    if rank_major:
        return None, None
    ours = oracle.Layout(world, shards, numels or (), align)
    theirs = _C.ParameterLayout(world, shards, numels, align)
    assert theirs.total_shard_numel == ours.shard_numel
    assert theirs.total_gathered_numel == ours.gathered_numel
    assert theirs.shard_offsets == ours.shard_offsets
    assert theirs.gathered_offsets == ours.gathered_offsets
    return theirs, ours


@examples
@given(
    worlds,
    sizes,
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 3, 8]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    staging,
    st.integers(0, 1 << 30),
)
def test_all_gather(
    world: int,
    shards: list[int],
    itemsize: int,
    align: int,
    rank_major: bool,
    in_arena: bool,
    placed: bool,
    multicast: bool,
    stage: dict,
    seed: int,
) -> None:
    theirs, ours = layouts(world, shards, None, align, rank_major)
    data = np.random.default_rng(seed)
    numel = sum(shards)
    inputs = [words(data, numel, itemsize) for _ in range(world)]
    gathered = ours.gathered_numel if ours else world * numel
    outputs = [poisoned(gathered, itemsize) for _ in range(world)]
    if placed:
        for rank, (output, shard) in enumerate(zip(outputs, inputs, strict=True)):
            view = np.frombuffer(output, WORDS[itemsize])
            where = ours.gathered_index(rank) if ours else rank * numel + np.arange(numel)
            view[where] = shard
    more = {"in_arena": in_arena, "placed": placed, "multicast": in_arena and multicast}
    plans = [_C.plan("all_gather", r, world, itemsize, numel, theirs, **more, **stage) for r in range(world)]
    # A placed shard's input is a placeholder: any read of it must fail.
    given_inputs = [[b"" if placed else x.tobytes()] for x in inputs]
    Simulator(plans, given_inputs, outputs).run(random.Random(seed))
    fill = int.from_bytes(bytes([POISON]) * itemsize, "little")
    expected = oracle.all_gather(inputs, ours, fill)
    for output in outputs:
        assert output == expected.tobytes()


@examples
@given(
    worlds,
    sizes,
    st.sampled_from(["float32", "float64", "bfloat16", "int32", "int64"]),
    st.booleans(),
    st.sampled_from(["rank-major", "packed", "separate"]),
    st.sampled_from([1.0, 0.5, 1 / 3, -2.0]),
    st.sampled_from([1, 8]),
    st.data(),
    staging,
    st.integers(0, 1 << 30),
)
def test_reduce_scatter(
    world: int,
    shards: list[int],
    kind: str,
    widened: bool,
    form: str,
    scale: float,
    align: int,
    draw: st.DataObject,
    stage: dict,
    seed: int,
) -> None:
    numels = [draw.draw(st.integers(0, world * s)) for s in shards]
    theirs, ours = layouts(world, shards, numels, align, form == "rank-major")
    out_kind = "float32" if kind == "bfloat16" and widened else kind
    data = np.random.default_rng(seed)
    in_size, out_size = (np.dtype(oracle.KINDS[k]).itemsize for k in (kind, out_kind))
    inputs = []
    gathered = ours.gathered_numel if ours else world * sum(shards)
    for _ in range(world):
        if kind in ("int32", "int64"):
            packed = data.integers(-(1 << 31), 1 << 31, gathered).astype(oracle.KINDS[kind])
        else:
            packed = data.standard_normal(gathered).astype(np.float32)
            packed = (
                oracle.float32_to_bf16(packed) if kind == "bfloat16" else packed.astype(oracle.KINDS[kind])
            )
        inputs.append(oracle.split_parameters(packed, ours) if form == "separate" else packed)
    outputs = [poisoned(sum(shards), out_size) for _ in range(world)]
    plans = [
        _C.plan(
            "reduce_scatter",
            r,
            world,
            in_size,
            sum(shards),
            theirs,
            separate_inputs=form == "separate",
            in_type=kind,
            out_type=out_kind,
            **stage,
        )
        for r in range(world)
    ]
    given_inputs = [[a.tobytes() for a in (x if form == "separate" else [x])] for x in inputs]
    Simulator(plans, given_inputs, outputs, kind, out_kind, scale).run(random.Random(seed))
    for output, expected in zip(
        outputs, oracle.reduce_scatter(inputs, kind, ours, out_kind, scale), strict=True
    ):
        assert output == expected.tobytes()


@examples
@given(worlds, st.sampled_from([1, 2, 4, 8, 12]), st.booleans(), st.data(), staging, st.integers(0, 1 << 30))
def test_all_to_all(
    world: int, itemsize: int, in_arena: bool, draw: st.DataObject, stage: dict, seed: int
) -> None:
    sent = st.one_of(st.just(0), st.integers(0, 120))
    splits = [[draw.draw(sent) for _ in range(world)] for _ in range(world)]
    data = np.random.default_rng(seed)
    rows = [data.integers(0, 256, (sum(s), itemsize), dtype=np.uint8) for s in splits]
    received = [[splits[r][q] for r in range(world)] for q in range(world)]
    outputs = [poisoned(sum(r), itemsize) for r in received]
    plans = [
        _C.plan(
            "all_to_all",
            r,
            world,
            itemsize,
            sum(splits[r]),
            in_splits=splits[r],
            out_splits=received[r],
            in_arena=in_arena,
            peer_offsets=[sum(received[q][:r]) for q in range(world)],
            **stage,
        )
        for r in range(world)
    ]
    Simulator(plans, [[x.tobytes()] for x in rows], outputs).run(random.Random(seed))
    for output, expected in zip(outputs, oracle.all_to_all(rows, splits), strict=True):
        assert output == expected.tobytes()


@examples
@given(st.integers(2, 64), st.integers(1, 10_000_000), st.integers(2, 4), st.integers(1 << 16, 1 << 26))
def test_staging_keeps_its_budget(world: int, numel: int, depth: int, budget: int) -> None:
    """One rank's window never exceeds the budget, or one smallest chunk a buffer where that is more."""
    for op in ("all_gather", "reduce_scatter"):
        writers = 1 if op == "all_gather" else world - 1
        limit = max(budget, writers * depth * 4096)
        # Few chunks: the plan's length is not what this is about.
        numel_here = min(numel, 50 * limit // (4 * writers * depth))
        plan = _C.plan(
            op, 0, world, 4, numel_here, in_type="float32", out_type="float32", budget=budget, depth=depth
        )
        assert plan.path == "staged"
        assert 0 < plan.window_bytes <= limit

"""all_gather_into_tensor on real ranks against the oracle, bit for bit: both layouts, each kind of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_data import backend, check_bits, expect_path, numpy_type, random_bytes, small_staging, tensor
from ranks import run_ranks

import tide_backend

SIZES = [0, 1, 2, 3, 7, 64, 1000, 4097, 65536, 300_001]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]
FILL = 0xA5


def arena_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    slot, reason = backend().slot(max(numel * dtype.itemsize, 1))
    if slot is None:
        raise AssertionError(f"no slot: {reason}")
    return slot[: numel * dtype.itemsize].view(dtype)


def gather_plain(rank: int, world: int, sizes: list[int], dtypes: list[torch.dtype], in_arena: bool) -> None:
    for dtype in dtypes:
        for numel in sizes:
            what = f"{dtype} of {numel}"
            shards = [random_bytes(numel, r, numel, dtype) for r in range(world)]
            out = arena_tensor(world * numel, dtype) if in_arena else torch.empty(world * numel, dtype=dtype)
            dist.all_gather_into_tensor(out, tensor(shards[rank], dtype))
            check_bits(out, oracle.all_gather(shards), what)
            if world > 1 and numel:
                expect_path("zero_copy" if in_arena else "staged", what)


@pytest.mark.parametrize("in_arena", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_rank_major_sizes(world: int, in_arena: bool) -> None:
    run_ranks(world, gather_plain, SIZES, [torch.float32, torch.bfloat16], in_arena)


@pytest.mark.parametrize("in_arena", [False, True])
def test_every_dtype(in_arena: bool) -> None:
    run_ranks(2, gather_plain, [1, 1001], DTYPES, in_arena)


def test_many_chunks() -> None:
    run_ranks(4, gather_plain, [6_000_001], [torch.int8], False)


@dataclass(frozen=True)
class LayoutCase:
    shard_numels: tuple[int, ...]
    align: int
    dtype: torch.dtype
    in_arena: tuple[bool, ...]  # by rank
    placed: tuple[bool, ...]  # by rank
    seed: int


def gather_layouts(rank: int, world: int, cases: list[LayoutCase]) -> None:
    for case in cases:
        theirs = oracle.Layout(world, case.shard_numels, align=case.align)
        mine = tide_backend.ParameterLayout(world, list(case.shard_numels), align=case.align)
        total = theirs.gathered_numel
        shards = [random_bytes(case.seed, r, theirs.shard_numel, case.dtype) for r in range(world)]
        out = (arena_tensor if case.in_arena[rank] else torch.empty)(total, dtype=case.dtype)
        out.view(torch.uint8).fill_(FILL) if total else None
        source = tensor(shards[rank], case.dtype)
        placed = case.placed[rank] and total > 0
        if placed:
            index = torch.from_numpy(theirs.gathered_index(rank))
            raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[case.dtype.itemsize]
            out.view(raw)[index] = source.view(raw)
            source = torch.zeros(1, dtype=case.dtype).expand(theirs.shard_numel)
        tide_backend.apply_layout(out, mine, placed=placed, label="case")
        dist.all_gather_into_tensor(out, source)
        fill = np.full(1, FILL, np.uint8).repeat(case.dtype.itemsize).view(numpy_type(case.dtype))[0]
        check_bits(out, oracle.all_gather(shards, theirs, fill), str(case))
        if total and world > 1:
            call = expect_path("zero_copy" if all(case.in_arena) else "staged", str(case))
            if call["label"] != "case":
                raise AssertionError(f"label: {call}")


def layout_cases(world: int) -> Any:
    every = st.lists(st.booleans(), min_size=world, max_size=world).map(tuple)
    same = st.booleans().map(lambda b: (b,) * world)
    return st.builds(
        LayoutCase,
        shard_numels=st.lists(st.integers(0, 300), max_size=8).map(tuple),
        align=st.sampled_from([1, 4, 128]),
        dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.int64]),
        in_arena=same | every,
        placed=same | every,
        seed=st.integers(0, 2**20),
    )


@pytest.mark.parametrize("world", [2, 4, 8])
def test_parameter_contiguous(world: int) -> None:
    @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(layout_cases(world), min_size=8, max_size=12))
    def many(cases: list[LayoutCase]) -> None:
        run_ranks(world, gather_layouts, cases)

    many()


def gather_layouts_in_small_chunks(rank: int, world: int, cases: list[LayoutCase]) -> None:
    small_staging()
    gather_layouts(rank, world, cases)
    dist.destroy_process_group()


def test_layout_that_crosses_chunks() -> None:
    shards = (70_001, 3, 0, 120_000, 1)
    cases = [
        LayoutCase(shards, 128, torch.bfloat16, (arena,) * 4, (placed,) * 4, 1)
        for arena in (False, True)
        for placed in (False, True)
    ]
    run_ranks(4, gather_layouts_in_small_chunks, cases, backend=None)


def mixed_memory(rank: int, world: int) -> None:
    numel = 5000
    shards = [random_bytes(9, r, numel, torch.float32) for r in range(world)]
    for with_slot in range(1, world):  # ranks below it have a slot
        out = arena_tensor(world * numel, torch.float32) if rank < with_slot else torch.empty(world * numel)
        dist.all_gather_into_tensor(out, tensor(shards[rank], torch.float32))
        check_bits(out, oracle.all_gather(shards), f"{with_slot} slots")
        reason = expect_path("staged")["reason"]
        if f"{world - with_slot} of {world} ranks had no slot" not in reason:
            raise AssertionError(f"reason: {reason}")


def test_one_rank_without_a_slot_makes_the_call_staged_everywhere() -> None:
    run_ranks(4, mixed_memory)


def out_of_step_outputs(rank: int, world: int) -> None:
    """Strided inputs and outputs, and a shape that is not flat."""
    shards = [random_bytes(3, r, 24, torch.float32).reshape(4, 6) for r in range(world)]
    want = oracle.all_gather([s.reshape(-1) for s in shards])
    own = tensor(shards[rank].reshape(-1), torch.float32).view(4, 6)
    strided = torch.empty(6, 4).t()
    strided.copy_(own)
    wide = torch.full((world * 4, 12), -1.0)
    dist.all_gather_into_tensor(wide[:, ::2], strided)
    check_bits(wide[:, ::2], want, "strided output")
    if not bool((wide[:, 1::2] == -1).all()):
        raise AssertionError("wrote between the elements of a strided output")
    if backend().records()[-1]["repair_copies"] != 2:
        raise AssertionError(f"repair copies: {backend().records()[-1]}")
    stacked = torch.empty(world, 4, 6)
    dist.all_gather_into_tensor(stacked, own)
    check_bits(stacked, want, "stacked output")


def test_non_contiguous_tensors() -> None:
    run_ranks(2, out_of_step_outputs)


def outstanding(rank: int, world: int) -> None:
    calls = []
    for n in range(12):
        numel = 1 + 777 * n
        shards = [random_bytes(n, r, numel, torch.bfloat16) for r in range(world)]
        out = arena_tensor(world * numel, torch.bfloat16) if n % 2 else torch.empty(world * numel).bfloat16()
        work = dist.all_gather_into_tensor(out, tensor(shards[rank], torch.bfloat16), async_op=True)
        calls.append((work, out, oracle.all_gather(shards)))
    for n in (11, 3, 0, 7, 1, 2, 4, 5, 6, 8, 9, 10):  # waited for in any order
        work, out, want = calls[n]
        work.wait()
        if not work.is_completed():
            raise AssertionError(f"call {n} not completed after wait()")
        check_bits(out, want, f"call {n}")


def test_several_outstanding() -> None:
    run_ranks(4, outstanding)


def slots_come_back(rank: int, world: int) -> None:
    def in_use() -> int:
        return backend().arena_bytes()[0]

    before = in_use()
    out = arena_tensor(world * 10_000, torch.float32)
    if not backend().in_arena(out) or out.data_ptr() % 4096:
        raise AssertionError("the slot is not a 4096-aligned part of the arena")
    if in_use() < before + out.nbytes:
        raise AssertionError(f"in use: {before} before and {in_use()} with a slot of {out.nbytes}")
    row = next(m for m in tide_backend.report(dist.group.WORLD).memory if m.device == "cpu")
    if row.in_use != in_use() or row.held < row.in_use:
        raise AssertionError(f"reported: {row}, in use: {in_use()}")
    view = out[5:7]
    del out
    if in_use() == before:
        raise AssertionError("the slot went back while a view still needs it")
    del view
    if in_use() != before or backend().in_arena(torch.empty(100)):
        raise AssertionError(f"in use after the last view went: {in_use()}, before: {before}")


def test_a_slot_returns_with_its_last_view() -> None:
    run_ranks(2, slots_come_back)

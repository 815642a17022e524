"""Tensors with gaps in an all-to-all: how they are seen, cut and copied; on CPU ranks bit for bit against torch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import rank_process
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_simulator import POISON, Simulator
from rank_data import backend, check_bits, error_of, expect_path, random_bytes, small_staging, tensor
from ranks import run_ranks

import tide_backend
from tide_backend import _C

examples = settings(max_examples=150, deadline=None, derandomize=True)


# --- the form of a view ---------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn, expand: bool = True) -> torch.Tensor:
    """A view of a base whose every element is its own place, in elements; at least one element."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    view = torch.arange(int(np.prod(sizes))).view(sizes)
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, view.dim() - 1))
        match draw(st.sampled_from(["permute", "narrow", "step", "split", *(["expand"] if expand else [])])):
            case "permute":
                view = view.permute(draw(st.permutations(range(view.dim()))))
            case "narrow":
                start = draw(st.integers(0, view.size(dim) - 1))
                view = view.narrow(dim, start, draw(st.integers(1, view.size(dim) - start)))
            case "step":
                view = view[(slice(None),) * dim + (slice(None, None, 2),)]
            case "split" if view.size(dim) % 2 == 0:
                view = view.unflatten(dim, (view.size(dim) // 2, 2))
            case "expand":
                view = view.unsqueeze(dim).expand(*view.shape[:dim], draw(st.integers(1, 3)), *view.shape[dim:])
    return view


def places(form: Any, elements: int) -> list[int]:
    """Every byte of a tensor of this form, in order."""
    return [
        e * form.stride + r * form.pitch + c
        for e in range(elements)
        for r in range(form.rows)
        for c in range(form.row_bytes)
    ]


def bytes_of(view: torch.Tensor, itemsize: int) -> list[int]:
    flat = view.reshape(-1).tolist()
    return [(p - flat[0]) * itemsize + c for p in flat for c in range(itemsize)]


def are_rows(addresses: list[int]) -> bool:
    """Whether these are runs of one length, at one distance that is no shorter than they are."""
    n = len(addresses)
    run = next((i for i in range(1, n) if addresses[i] != addresses[i - 1] + 1), n)
    if n % run:
        return False
    starts = addresses[::run]
    pitch = starts[1] - starts[0] if len(starts) > 1 else run
    return pitch >= run and addresses == [addresses[0] + i // run * pitch + i % run for i in range(n)]


@examples
@given(views(), st.sampled_from([1, 2, 4, 8]))
def test_form_is_how_torch_reads_the_view(view: torch.Tensor, itemsize: int) -> None:
    form = _C.strided_form(list(view.shape), list(view.stride()), itemsize)
    if form is None:
        assert not are_rows(view[0].reshape(-1).tolist())
    else:
        assert places(form, view.size(0)) == bytes_of(view, itemsize)
        assert form.pitch >= form.row_bytes > 0 and form.rows > 0


def test_forms_of_known_views() -> None:
    def form(view: torch.Tensor) -> tuple[int, ...] | None:
        f = _C.strided_form(list(view.shape), list(view.stride()), view.element_size())
        return f and (f.stride, f.rows, f.row_bytes, f.pitch)

    x = torch.empty(6, 8, 32, dtype=torch.bfloat16)  # [tokens, heads, dim]
    assert form(x.view(6, 4, 2, 32).permute(1, 0, 2, 3)) == (128, 6, 128, 512)
    assert form(x.permute(1, 0, 2)) == (64, 6, 64, 512)
    assert form(x[:, 2:5]) == (512, 1, 192, 192)
    assert form(x[:, 0].expand(3, 6, 32)) == (0, 6, 64, 512)
    batched = torch.empty(3, 6, 4, 2, 32)  # [batch, tokens, ranks, heads, dim]
    assert form(batched.permute(2, 0, 1, 3, 4)) == (256, 18, 256, 1024)
    assert form(batched.transpose(0, 2)) is None  # heads of a token before the next batch
    assert form(x[..., 0].t()) == (64, 6, 2, 512)
    assert form(torch.empty(1).expand(4, 5)) is None


@examples
@given(views(), st.sampled_from([1, 4]))
def test_disjoint_is_never_said_of_views_that_overlap(view: torch.Tensor, itemsize: int) -> None:
    form = _C.strided_form(list(view.shape), list(view.stride()), itemsize)
    if form is not None and form.disjoint(view.size(0)):
        assert view.unique().numel() == view.numel()


def test_disjoint() -> None:
    assert _C.Strided(128, 6, 128, 512).disjoint(4)  # side by side between the rows
    assert not _C.Strided(128, 6, 128, 512).disjoint(5)
    assert _C.Strided(512, 1, 192, 192).disjoint(9)  # one behind the other
    assert not _C.Strided(0, 6, 128, 512).disjoint(2)
    assert _C.Strided(0, 6, 128, 512).disjoint(1)
    assert not _C.Strided(64, 1, 128, 128).disjoint(2)


# --- copies and plans -----------------------------------------------------------------------------


@st.composite
def forms(draw: st.DrawFn) -> Any:
    """Of no element that overlaps another; or none, as of a contiguous tensor."""
    if draw(st.integers(0, 3)) == 0:
        return None
    row, rows = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    pitch = row + draw(st.integers(0, 4)) if rows > 1 else row
    gap = draw(st.integers(0, 5))
    return _C.Strided((rows - 1) * pitch + row + gap, rows, row, pitch)


def all_places(form: Any, count: int) -> list[int]:
    if form is None:
        return list(range(count))
    return places(form, -(-count // (form.rows * form.row_bytes)))[:count]


@examples
@given(forms(), st.integers(0, 30), forms(), st.integers(0, 30), st.integers(0, 80))
def test_copies_move_every_byte_to_its_place(a: Any, a_at: int, b: Any, b_at: int, size: int) -> None:
    moved = [
        (to + r * to_pitch + c, source + r * from_pitch + c)
        for to, source, rows, width, to_pitch, from_pitch in _C.strided_copies(a, a_at, b, b_at, size)
        for r in range(rows)
        for c in range(width)
    ]
    assert moved == list(zip(all_places(b, b_at + size)[b_at:], all_places(a, a_at + size)[a_at:], strict=True))


def test_few_copies() -> None:
    """(to, from, rows, bytes, to_pitch, from_pitch)"""
    enter = _C.Strided(128, 6, 128, 512)
    assert _C.strided_copies(enter, 768, None, 0, 768) == [(0, 128, 6, 128, 128, 512)]
    assert _C.strided_copies(enter, 768, enter, 0, 768) == [(0, 128, 6, 128, 512, 512)]
    # A part that begins and ends within a row.
    assert _C.strided_copies(None, 0, enter, 100, 500) == [
        (100, 0, 1, 28, 28, 28),
        (512, 28, 3, 128, 512, 128),
        (2048, 412, 1, 88, 88, 88),
    ]
    # Any number of elements whose rows go on at one pitch; blocks otherwise.
    assert len(_C.strided_copies(_C.Strided(512, 1, 192, 192), 0, None, 0, 192 * 1000)) == 1
    assert len(_C.strided_copies(enter, 0, None, 0, 4 * 768)) == 4
    # Long rows into short ones: one copy for each of the long ones.
    assert len(_C.strided_copies(_C.Strided(4096, 1, 512, 512), 0, enter, 0, 768)) == 2


@examples
@given(
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([16, 64, 200]),
    st.data(),
    st.integers(0, 2**32),
)
def test_plans(world: int, in_arena: bool, chunk: int, data: st.DataObject, seed: int) -> None:
    """Every rank with forms of its own, parts that end within rows; the gaps of the outputs are left alone."""
    sent = st.one_of(st.just(0), st.integers(0, 90))
    splits = [[data.draw(sent) for _ in range(world)] for _ in range(world)]
    received = [[splits[r][q] for r in range(world)] for q in range(world)]
    in_forms = [data.draw(forms()) for _ in range(world)]
    out_forms = [data.draw(forms()) for _ in range(world)]
    random_bytes_of = np.random.default_rng(seed)
    logical = [random_bytes_of.integers(0, 256, sum(s), dtype=np.uint8) for s in splits]
    inputs, outputs = [], []
    for r in range(world):
        at = all_places(in_forms[r], sum(splits[r]))
        memory = np.full(max(at, default=-1) + 1, POISON, np.uint8)
        memory[at] = logical[r]
        inputs.append([memory.tobytes()])
        outputs.append(bytearray([POISON]) * (max(all_places(out_forms[r], sum(received[r])), default=-1) + 1))
    plans = [
        _C.plan(
            "all_to_all",
            r,
            world,
            1,
            sum(splits[r]),
            in_splits=splits[r],
            out_splits=received[r],
            in_arena=in_arena,
            peer_offsets=[sum(received[q][:r]) for q in range(world)],
            in_form=in_forms[r],
            out_form=out_forms[r],
            peer_forms=out_forms,
            budget=1,
            smallest_chunk=chunk,
        )
        for r in range(world)
    ]
    Simulator(plans, inputs, outputs).run(random.Random(seed))
    for output, form, expected in zip(outputs, out_forms, oracle.all_to_all(logical, splits), strict=True):
        memory = np.full(len(output), POISON, np.uint8)
        memory[all_places(form, len(expected))] = expected
        assert bytes(output) == memory.tobytes()


# --- real ranks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`tokens[r]` tokens on rank r; reader q gets `heads[q]` heads of every rank's. Elements of any bits."""

    tokens: tuple[int, ...]
    heads: tuple[int, ...]
    dim: int = 32
    dtype: torch.dtype = torch.bfloat16


def even(world: int, tokens: int = 6, heads: int = 2, **more: Any) -> Case:
    return Case((tokens,) * world, (heads,) * world, **more)


def everybody(case: Case, seed: int = 0) -> list[torch.Tensor]:
    """[tokens, heads, dim] of every rank."""
    heads = sum(case.heads)
    return [
        tensor(random_bytes(seed, r, n * heads * case.dim, case.dtype), case.dtype).view(n, heads, case.dim)
        for r, n in enumerate(case.tokens)
    ]


def received(case: Case, rank: int, seed: int = 0) -> torch.Tensor:
    """What rank must get, flat: [rank, head, token, dim]."""
    first = sum(case.heads[:rank])
    parts = [x[:, first : first + case.heads[rank]].permute(1, 0, 2) for x in everybody(case, seed)]
    return torch.cat([p.reshape(-1) for p in parts])


def with_gaps(rows: int, width: int, gap: int, dtype: torch.dtype, memory: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, width] at a pitch of width + gap, zeros in between."""
    size = rows * (width + gap)
    base = torch.zeros(size, dtype=dtype) if memory is None else memory.view(dtype)[:size].zero_()
    return base.view(rows, width + gap)[:, :width]


def check_gaps(out: torch.Tensor, gap: int) -> None:
    whole = out.as_strided((out.size(0), out.size(1) + gap), (out.size(1) + gap, 1), out.storage_offset())
    if whole[:, out.size(1) :].view(torch.uint8).any():
        raise AssertionError("the gaps were written")


def slot(nbytes: int) -> torch.Tensor:
    memory, why = backend().slot(nbytes)
    assert memory is not None, why
    return memory


def expect_copies(count: int, *why: str) -> None:
    call = backend().records()[-1]
    if call["repair_copies"] != count or not all(text in call["repair_reason"] for text in why):
        raise AssertionError(f"expected {count} copies because of {why}: {call}")


def exchange(rank: int, world: int, cases: list[Case], gap: int, slots: bool, path: str) -> None:
    """Heads of a token-major input, into rows with gaps where there are any."""
    for seed, case in enumerate(cases):
        mine = everybody(case, seed)[rank]
        want = received(case, rank, seed)
        rows = want.numel() // case.dim
        size = rows * (case.dim + gap) * case.dtype.itemsize
        out = with_gaps(rows, case.dim, gap, case.dtype, slot(size) if slots else None)
        splits = [t * case.heads[rank] for t in case.tokens]
        for repeat in range(2):
            out.zero_()
            dist.all_to_all_single(out, mine.permute(1, 0, 2), splits, list(case.heads))
            check_bits(out, want.view(torch.uint8).numpy(), f"{case}, call {repeat}")
            expect_path(path, str(case))
            expect_copies(0)
        if rows:
            check_gaps(out, gap)


MANY = {
    2: [even(2), even(2, 1), Case((7, 3), (1, 4)), Case((0, 5), (2, 1)), Case((3, 300), (0, 6), 64, torch.float32)],
    4: [even(4), even(4, 130, 4, dim=128), Case((1, 0, 9, 33), (3, 1, 0, 2), 40)],
}


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_heads_of_tokens(world: int, slots: bool, gap: int) -> None:
    run_ranks(world, exchange, MANY[world], gap, slots, "zero_copy" if slots else "staged")


def in_small_chunks(rank: int, world: int) -> None:
    small_staging()
    for gap in (0, 5):
        exchange(rank, world, [even(world, 700, 3, dim=37, dtype=torch.float32)], gap, False, "staged")
        exchange(rank, world, [Case((2001, 1, 300), (0, 4, 3), 65)], gap, False, "staged")
    dist.destroy_process_group()


def test_many_chunks_that_end_within_rows() -> None:
    run_ranks(3, in_small_chunks, backend=None)


def ulysses(rank: int, world: int, dtype: torch.dtype, batch: int, slots: bool) -> None:
    """Into attention and back, as its callers write it, without one copy on the way."""
    tokens, heads, dim = 12, 3 * world, 32
    shape = (batch, tokens, heads, dim)
    inputs = [tensor(random_bytes(batch, r, int(np.prod(shape)), dtype), dtype).view(shape) for r in range(world)]
    mine = inputs[rank].view(batch, tokens, world, heads // world, dim).permute(2, 0, 1, 3, 4)

    def empty(*size: int) -> torch.Tensor:
        memory = slot(int(np.prod(size)) * dtype.itemsize) if slots else torch.empty(size, dtype=dtype)
        return memory.view(dtype)[: int(np.prod(size))].view(size) if slots else memory

    # Whole sequence, own heads. The output's dim 0 is the rank that the tokens come from.
    whole = empty(batch, world, tokens, heads // world, dim)
    dist.all_to_all_single(whole.transpose(0, 1), mine)
    expect_path("zero_copy" if slots else "staged")
    expect_copies(int(batch > 1), *["input: rows of"] * (batch > 1))  # short rows into long ones
    own = slice(rank * heads // world, (rank + 1) * heads // world)
    check_bits(whole, torch.stack([x[:, :, own] for x in inputs], 1).contiguous().view(torch.uint8).numpy(), "enter")
    back = torch.empty_like(inputs[rank]) if not slots else empty(*shape)
    into = back.view(batch, tokens, world, heads // world, dim).permute(2, 0, 1, 3, 4)
    dist.all_to_all_single(into, whole.transpose(0, 1))
    expect_path("zero_copy" if slots else "staged")
    expect_copies(int(batch > 1))
    check_bits(back, inputs[rank].contiguous().view(torch.uint8).numpy(), "leave")


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_ulysses(batch: int, slots: bool) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        run_ranks(2, ulysses, dtype, batch, slots)
    run_ranks(4, ulysses, torch.bfloat16, batch, slots)


def some_strided(rank: int, world: int) -> None:
    """Every rank with tensors of its own kind; forms change from call to call, and plans with them."""
    case = even(world, 8, 2)
    want = received(case, rank)
    for n in range(8):
        mine = everybody(case)[rank].permute(1, 0, 2)
        if (n + rank) % 3 == 0:
            mine = mine.contiguous()
        gap = (0, 8, 5)[(n // 2 + rank) % 3]
        out = with_gaps(want.numel() // 32, 32, gap, case.dtype, slot(1 << 16) if n % 2 else None)
        dist.all_to_all_single(out, mine, [8 * 2] * world, [2] * world)
        check_bits(out, want.view(torch.uint8).numpy(), f"call {n}")
        expect_path("zero_copy" if n % 2 else "staged")
        expect_copies(0)


def test_ranks_need_not_agree_about_strides() -> None:
    run_ranks(3, some_strided)


def rows_that_do_not_fit(rank: int, world: int) -> str:
    """Rank 0 sends rows of 192 bytes, rank 1 wants rows of 128; elsewhere neither has gaps."""
    inputs = [tensor(random_bytes(1, r, world * 96 * 20, torch.bfloat16), torch.bfloat16) for r in range(world)]
    source = inputs[rank].view(world * 20, 96)
    if rank == 0:
        source = with_gaps(world * 20, 96, 8, torch.bfloat16).copy_(source)
        assert not source.is_contiguous()
    rows = world * 20 * 96 // 64
    out = with_gaps(rows, 64, 8 if rank == 1 else 0, torch.bfloat16, slot(1 << 16))
    split = [rows // world] * world
    dist.all_to_all_single(out, source, split, [20] * world)
    check_bits(out, torch.stack([x.view(world, -1)[rank] for x in inputs]).view(torch.uint8).numpy())
    expect_copies(0)
    return expect_path("staged")["reason"]


def test_rows_that_do_not_fit_go_through_staging() -> None:
    want = "through staging windows: rows of 192 bytes into rows of 128, from rank 0 to rank 1"
    assert run_ranks(3, rows_that_do_not_fit) == [want] * 3


def copied(rank: int, world: int) -> None:
    """What is no rows, or not worth it, is copied as a whole, counted, and said."""
    x = torch.arange(float(world * 4 * 3 * 2 * 32)).view(3, 4, world, 2, 32) + rank * 1e6
    source = x.transpose(0, 2)
    out = torch.empty(source.shape)
    dist.all_to_all_single(out, source)
    everyones = [(x - rank * 1e6 + r * 1e6).transpose(0, 2) for r in range(world)]
    assert torch.equal(out, torch.stack([s[rank] for s in everyones]))
    expect_copies(1, "input: not rows at one pitch")

    short = torch.arange(float(world * 10)).view(10, world).t() + rank * 1e6
    out, columns = torch.empty(world, 10), torch.empty(world, 20)[:, ::2]
    for target, copies in ((out, 1), (columns, 2)):
        dist.all_to_all_single(target, short)
        want = torch.stack([torch.arange(10.0) * world + rank + r * 1e6 for r in range(world)])
        assert torch.equal(target, want)
        expect_copies(copies, "input: rows of 4 bytes", *["output: rows of 4 bytes"] * (copies - 1))

    many = torch.arange(float(65 * world * 2 * 32)).view(2, 65 * world, 32).transpose(0, 1) + rank * 1e6
    out = torch.empty(65 * world, 2, 32)
    dist.all_to_all_single(out, many)
    part = slice(65 * rank, 65 * rank + 65)
    assert torch.equal(out, torch.cat([(many - rank * 1e6 + r * 1e6)[part] for r in range(world)]))
    expect_copies(1, f"input: {65 * world} blocks of 256 bytes")

    # One block for all: rows that are read again and again.
    block = with_gaps(5, 32, 4, torch.float32).copy_(torch.arange(5.0 * 32).view(5, 32) + rank * 1e6)
    out = torch.empty(world, 5, 32)
    dist.all_to_all_single(out, block.expand(world, 5, 32))
    assert torch.equal(out, torch.stack([torch.arange(5.0 * 32).view(5, 32) + r * 1e6 for r in range(world)]))
    expect_copies(0)

    # Interleaved with the output in one buffer.
    both = torch.empty(world * 6, 2, 32)
    both[:, 0] = torch.arange(world * 6 * 32.0).view(-1, 32) + rank * 1e6
    dist.all_to_all_single(both[:, 1], both[:, 0])
    base = torch.arange(world * 6 * 32.0).view(world, 6, 32)[rank]
    assert torch.equal(both[:, 1], torch.cat([base + r * 1e6 for r in range(world)]))
    expect_copies(1, "input: overlaps the output")


def test_what_is_copied_says_why() -> None:
    run_ranks(2, copied)
    run_ranks(3, copied)


def overlapping_output(rank: int, world: int) -> tuple[str, str]:
    """Never written by peers: the copy that follows is torch's, which refuses what it can tell."""
    windows = torch.empty(64 + 16 * world).as_strided((world, 64), (16, 1))
    dist.all_to_all_single(windows, torch.ones(world, 64))
    expect_copies(1, "output: rows overlap")
    interleaved = torch.empty(4096).as_strided((world, 3, 64), (32, 128, 1))
    dist.all_to_all_single(interleaved, torch.ones(world, 3, 64))
    expect_copies(1, "output: elements may overlap")
    error = error_of(dist.all_to_all_single, torch.empty(1, 64).expand(world, 64), torch.ones(world, 64))
    exchange(rank, world, [even(world)], 3, False, "staged")  # the group goes on
    return error


def test_an_output_that_overlaps_itself_is_refused() -> None:
    for name, text in run_ranks(2, overlapping_output):
        assert name == "RuntimeError" and "single memory location" in text


def outstanding(rank: int, world: int) -> None:
    """Several at once, strided on both sides, in the caller's own memory and in the group's."""
    calls = []
    for n in range(6):
        case = even(world, 5 + n, 2)
        want = received(case, rank, n)
        out = with_gaps(want.numel() // 32, 32, n, case.dtype, slot(1 << 16) if n % 3 == 0 else None)
        source = everybody(case, n)[rank].permute(1, 0, 2)
        work = dist.all_to_all_single(out, source, [(5 + n) * 2] * world, [2] * world, async_op=True)
        del source
        calls.append((work, out, want))
    for work, out, want in reversed(calls):
        work.wait()
        check_bits(out, want.view(torch.uint8).numpy())


def test_several_outstanding() -> None:
    run_ranks(3, outstanding)


def by_the_inner_backend(rank: int, world: int, async_op: bool) -> None:
    options = tide_backend.Options()
    options.shared_memory = False
    rank_process.init("tide", pg_options=options)
    case = even(world, 8, 2)
    want = received(case, rank)
    for gap in (0, 8):
        for strided in (True, False):
            source = everybody(case)[rank].permute(1, 0, 2)
            out = with_gaps(want.numel() // 32, 32, gap, case.dtype)
            source = source if strided else source.contiguous()
            work = dist.all_to_all_single(out, source, [16] * world, [2] * world, async_op=async_op)
            if work is not None:
                work.wait()
                work.wait()
            check_bits(out, want.view(torch.uint8).numpy(), f"gap {gap}, strided {strided}")
            check_gaps(out, gap)
            expect_path("inner")
            copies = int(strided) + int(gap > 0)
            expect_copies(copies, *["the inner backend takes contiguous tensors"] * (copies > 0))
    short = torch.arange(float(world * 10)).view(10, world).t() + rank * 1e6
    columns = torch.empty(world, 20)[:, ::2]
    dist.all_to_all_single(columns, short)
    assert torch.equal(columns, torch.stack([torch.arange(10.0) * world + rank + r * 1e6 for r in range(world)]))
    expect_copies(2)
    dist.destroy_process_group()


@pytest.mark.parametrize("async_op", [False, True])
def test_the_inner_backend_gets_contiguous_tensors(async_op: bool) -> None:
    run_ranks(2, by_the_inner_backend, async_op, backend=None)


def alone(rank: int, world: int) -> None:
    x = torch.arange(6.0 * 4 * 32).view(6, 4, 32)
    out = torch.zeros(4, 6, 40)[..., :32]
    dist.all_to_all_single(out, x.permute(1, 0, 2))
    assert torch.equal(out, x.permute(1, 0, 2))
    expect_path("local")
    expect_copies(0)


def test_one_rank() -> None:
    run_ranks(1, alone)


def passed_on(rank: int, world: int) -> None:
    """PyTorch hands strided tensors to the backend as they are: strides and memory."""
    x = torch.arange(world * 4 * 32.0).view(4, world, 32)
    out = torch.zeros(world, 4, 40)[..., :32]
    dist.all_to_all_single(out, x.permute(1, 0, 2))
    expect_copies(0)
    work = dist.all_to_all_single(out, x.permute(1, 0, 2), async_op=True)
    work.wait()
    assert work.result()[0].data_ptr() == out.data_ptr() and work.result()[0].stride() == out.stride()


def test_pytorch_passes_strides_on() -> None:
    run_ranks(2, passed_on)

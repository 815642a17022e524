"""all_to_all_single (and the list form) on real ranks against the oracle, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_data import backend, check_bits, error_of, expect_path, random_bytes, small_staging, tensor
from ranks import run_ranks

# splits[r][q]: rows that rank r sends to rank q.
Splits = list[list[int]]


def exchange(rank: int, world: int, cases: list[tuple[Splits, int, torch.dtype]], repeats: int = 1) -> None:
    for splits, width, dtype in cases:
        what = f"{splits} rows of {width} {dtype}"
        for repeat in range(repeats):
            rows = [sum(s) for s in splits]
            inputs = [random_bytes(repeat, r, rows[r] * width, dtype) for r in range(world)]
            elements = [[n * width for n in s] for s in splits]
            received = [splits[r][rank] for r in range(world)]
            out = torch.empty(sum(received), width, dtype=dtype)
            source = tensor(inputs[rank], dtype).view(rows[rank], width)
            dist.all_to_all_single(out, source, received, splits[rank])
            check_bits(out, oracle.all_to_all(inputs, elements)[rank], what)
            if world > 1:
                expect_path("staged", what)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_even(world: int) -> None:
    cases = [([[rows] * world] * world, 3, torch.float32) for rows in (1, 2, 1000)]
    cases += [([[5] * world] * world, 7, dtype) for dtype in (torch.bfloat16, torch.int64, torch.uint8)]
    run_ranks(world, exchange, cases)


def even_without_splits(rank: int, world: int) -> None:
    for rows, width in [(1, 1), (3, 5), (2, 0), (0, 4)]:
        inputs = [random_bytes(1, r, world * rows * width, torch.float32) for r in range(world)]
        out = torch.empty(world * rows, width)
        dist.all_to_all_single(out, tensor(inputs[rank], torch.float32).view(world * rows, width))
        splits = [[rows * width] * world] * world
        check_bits(out, oracle.all_to_all(inputs, splits)[rank], f"{rows} rows of {width}")


def test_even_without_splits() -> None:
    run_ranks(4, even_without_splits)


def into_slots(rank: int, world: int, splits: Splits, with_slot: list[int]) -> None:
    """Outputs in the arena on the ranks of ``with_slot``."""
    inputs = [random_bytes(3, r, sum(splits[r]), torch.float32) for r in range(world)]
    received = [splits[r][rank] for r in range(world)]
    for _ in range(3):
        out = torch.empty(sum(received))
        if rank in with_slot:
            slot, why = backend().slot(out.nbytes)
            assert slot is not None, why
            out = slot.view(torch.float32)[: out.numel()]
        dist.all_to_all_single(out, tensor(inputs[rank], torch.float32), received, splits[rank])
        check_bits(out, oracle.all_to_all(inputs, splits)[rank])
        expect_path("zero_copy" if len(with_slot) == world else "staged")


@pytest.mark.parametrize("without", [0, 1])
def test_outputs_in_the_arena(without: int) -> None:
    run_ranks(3, into_slots, [[300, 7, 20], [0, 5, 1], [4, 0, 0]], list(range(without, 3)))
    run_ranks(3, into_slots, [[40_000] * 3] * 3, list(range(without, 3)))


def test_a_rank_that_receives_nothing_needs_no_slot() -> None:
    run_ranks(3, into_slots, [[3, 0, 2], [1, 0, 2], [9, 0, 0]], [0, 1, 2])


UNEVEN = {
    "asymmetric": [[3, 2, 1], [2, 2, 2], [1, 2, 3]],
    "one rank sends nothing": [[0, 0, 0], [4, 1, 2], [3, 0, 5]],
    "one rank receives nothing": [[2, 0, 3], [1, 0, 1], [5, 0, 0]],
    "nobody sends anything": [[0] * 3] * 3,
    "one pair only": [[0, 0, 0], [0, 0, 9], [0, 0, 0]],
    "only to oneself": [[4, 0, 0], [0, 1, 0], [0, 0, 7]],
}


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven(name: str) -> None:
    run_ranks(3, exchange, [(UNEVEN[name], width, torch.float32) for width in (1, 5)], 4)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_random_splits(world: int) -> None:
    row = st.lists(st.sampled_from([0, 0, 1, 2, 3, 50, 400]), min_size=world, max_size=world)
    case = st.tuples(
        st.lists(row, min_size=world, max_size=world),
        st.sampled_from([1, 3, 64]),
        st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
    )

    @settings(max_examples=6, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(case, min_size=8, max_size=12))
    def many(cases: list[tuple[Splits, int, torch.dtype]]) -> None:
        run_ranks(world, exchange, cases)

    many()


def exchange_in_small_chunks(rank: int, world: int, cases: list[Any]) -> None:
    small_staging()
    exchange(rank, world, cases)
    dist.destroy_process_group()


def test_many_chunks() -> None:
    splits = [[30_001, 0, 70_000], [1, 50_000, 44_444], [90_000, 3, 0]]
    run_ranks(3, exchange_in_small_chunks, [(splits, 3, torch.bfloat16)], backend=None)
    run_ranks(4, exchange, [([[700_001] * 4] * 4, 1, torch.int16)])


def rows_that_do_not_divide(rank: int, world: int) -> tuple[str, str]:
    error = error_of(dist.all_to_all_single, torch.empty(world), torch.ones(world + (rank == 1)))
    exchange(rank, world, [([[2] * world] * world, 1, torch.float32)])
    return error


def test_rows_that_do_not_divide_raise_on_every_rank() -> None:
    errors = run_ranks(3, rows_that_do_not_divide)
    assert all(name == "UsageError" for name, _ in errors), errors
    assert all("not divisible" in text and "4" in text for _, text in errors), errors
    assert all("rank 1 cannot take part" in errors[r][1] for r in (0, 2)), errors


def list_of_tensors(rank: int, world: int) -> None:
    sizes = [[(r + 2 * q) % 4 for q in range(world)] for r in range(world)]
    inputs = [random_bytes(5, r, sum(sizes[r]), torch.float32) for r in range(world)]
    own = list(tensor(inputs[rank], torch.float32).split(sizes[rank]))
    outputs = [torch.empty(sizes[r][rank]) for r in range(world)]
    dist.all_to_all(outputs, own)
    check_bits(torch.cat(outputs), oracle.all_to_all(inputs, sizes)[rank])
    expect_path("staged")


def test_list_form() -> None:
    run_ranks(4, list_of_tensors)


def strided_and_outstanding(rank: int, world: int) -> None:
    calls = []
    for n in range(6):
        inputs = [random_bytes(n, r, world * (n + 1) * 4, torch.float32) for r in range(world)]
        source = tensor(inputs[rank], torch.float32).view(world * (n + 1), 4)
        out = torch.empty(world * (n + 1), 8)
        strided = torch.empty(4, world * (n + 1)).t()
        strided.copy_(source)
        work = dist.all_to_all_single(out[:, 1::2], strided, async_op=True)
        splits = [[(n + 1) * 4] * world] * world
        calls.append((work, out[:, 1::2], oracle.all_to_all(inputs, splits)[rank]))
    for work, out, want in reversed(calls):
        work.wait()
        check_bits(out, want)
    if backend().records()[-1]["repair_copies"] != 2:
        raise AssertionError(f"repair copies: {backend().records()[-1]}")


def test_strided_tensors_and_several_outstanding() -> None:
    run_ranks(2, strided_and_outstanding)


def splits_that_do_not_match(rank: int, world: int) -> tuple[str, str]:
    sends = [[1, 2], [3, 4]]
    expects = [[1, 3], [5, 4]]  # rank 0 sends 2 rows to rank 1, which expects 5
    out, source = torch.empty(sum(expects[rank])), torch.ones(sum(sends[rank]))
    error = error_of(dist.all_to_all_single, out, source, expects[rank], sends[rank])
    exchange(rank, world, [(sends, 1, torch.float32)])
    return error


def test_splits_that_do_not_match_are_named() -> None:
    for name, text in run_ranks(2, splits_that_do_not_match):
        assert name == "UsageError"
        assert "rank 0 sends 2 elements to rank 1, which expects 5" in text


def wrong_sums(rank: int, world: int) -> list[tuple[str, str]]:
    out, source = torch.empty(world), torch.ones(world)
    return [
        error_of(dist.all_to_all_single, out, source, [1, 1], [2, 1]),
        error_of(dist.all_to_all_single, out, source, [1, 1, 0], [1, 1]),
        error_of(dist.all_to_all_single, out, source, [3, -1], [1, 1]),
    ]


def test_splits_that_do_not_fit_the_tensor() -> None:
    for errors in run_ranks(2, wrong_sums):
        assert [name for name, _ in errors] == ["UsageError"] * 3, errors
        assert "input_split_sizes do not fit; got 2 sizes with sum 3" in errors[0][1]
        assert "output_split_sizes do not fit; got 3 sizes with sum 2" in errors[1][1]
        assert "a negative one" in errors[2][1]


def one_rank(rank: int, world: int) -> list[tuple[str, str]]:
    """Nobody else compares the sizes of both ends."""
    memory = torch.zeros(100)
    out, splits = memory[40:42], ([2], [4])
    errors = [
        error_of(dist.all_to_all_single, out, torch.ones(4)),
        error_of(dist.all_to_all_single, out, torch.ones(1)),
        error_of(dist.all_to_all_single, out, torch.ones(4), *splits),
        error_of(dist.all_to_all, [out], [torch.ones(4)]),
    ]
    assert not memory.any(), "something was written"
    dist.all_to_all_single(out, torch.ones(2))
    assert out.sum() == memory.sum() == 2
    return errors


def test_sizes_that_do_not_match_on_one_rank() -> None:
    (errors,) = run_ranks(1, one_rank)
    assert [name for name, _ in errors] == ["UsageError"] * 4, errors
    for (_, text), sent in zip(errors, (4, 1, 4, 4), strict=True):
        assert f"rank 0 sends {sent} elements to rank 0, which expects 2" in text


def without_a_dimension(rank: int, world: int) -> list[tuple[str, str]]:
    one, none = torch.zeros(()), [0] * world
    errors = [
        error_of(dist.all_to_all_single, one, torch.ones(())),
        error_of(dist.all_to_all_single, one, torch.ones(()), none, none),
        error_of(dist.all_to_all_single, torch.empty(0), torch.ones(())),
    ]
    exchange(rank, world, [([[1] * world] * world, 1, torch.float32)])
    return errors


@pytest.mark.parametrize("world", [1, 2])
def test_tensors_without_a_dimension(world: int) -> None:
    """Of which gloo says so as well."""
    for errors in run_ranks(world, without_a_dimension):
        assert [name for name, _ in errors] == ["UsageError"] * 3, errors
        assert all("tensor has no dim 0, by which it is cut; got Float[]" in text for _, text in errors), errors


def slow_rank_then_reuse(rank: int, world: int) -> None:
    """One rank lags; an all-gather right behind an all-to-all must not meet its unread staging."""
    import time

    for n in range(60):
        inputs = [random_bytes(n, r, world * 64, torch.float32) for r in range(world)]
        out, gathered = torch.empty(world * 64), torch.empty(world * world * 64)
        if rank == n % world:
            time.sleep(0.003)
        dist.all_to_all_single(out, tensor(inputs[rank], torch.float32))
        dist.all_gather_into_tensor(gathered, out)
        exchanged = oracle.all_to_all(inputs, [[64] * world] * world)
        check_bits(gathered, np.concatenate(exchanged), f"round {n}")


def test_all_gather_right_behind_all_to_all() -> None:
    run_ranks(4, slow_rank_then_reuse)

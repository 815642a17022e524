"""Bad input: every rank raises, the message names the ranks and what each passed, and the group lives on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import oracle
import pytest
import rank_process
import torch
import torch.distributed as dist
from rank_data import backend, check_bits, error_of, random_bytes, tensor
from ranks import run_ranks

import tide_backend

Errors = list[tuple[str, str]]


def still_works(rank: int, world: int) -> None:
    shards = [random_bytes(1, r, 1000, torch.float32) for r in range(world)]
    out = torch.empty(world * 1000)
    dist.all_gather_into_tensor(out, tensor(shards[rank], torch.float32))
    check_bits(out, oracle.all_gather(shards), "the call after an error")
    ints = [np.arange(world * 2, dtype=np.int64) + r for r in range(world)]
    total = torch.empty(2, dtype=torch.int64)
    dist.reduce_scatter_tensor(total, torch.from_numpy(ints[rank].copy()))
    check_bits(total, oracle.reduce_scatter(ints, "int64")[rank], "the reduction after an error")


def odd_one_out(rank: int, world: int, name: str) -> tuple[str, str]:
    """The last rank passes something else than the others."""
    odd = rank == world - 1
    gather, scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    if name == "size":
        n = 6 if odd else 5
        error = error_of(gather, torch.empty(world * n), torch.ones(n))
    elif name == "dtype":
        dtype = torch.int32 if odd else torch.float32
        error = error_of(gather, torch.empty(world * 5, dtype=dtype), torch.ones(5, dtype=dtype))
    elif name == "reduction scale":
        op = dist.ReduceOp.AVG if odd else dist.ReduceOp.SUM
        error = error_of(scatter, torch.empty(5), torch.ones(world * 5), op=op)
    elif name == "reduction kind":
        op = dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
        error = error_of(scatter, torch.empty(5), torch.ones(world * 5), op=op)
    elif name == "output dtype":
        out = torch.empty(5, dtype=torch.bfloat16 if odd else torch.float32)
        error = error_of(scatter, out, torch.ones(world * 5, dtype=torch.bfloat16))
    elif name == "layout":
        out = torch.empty(world * 6)
        shards = [4, 2] if odd else [2, 4]
        tide_backend.apply_layout(out, tide_backend.ParameterLayout(world, shards))
        error = error_of(gather, out, torch.ones(6))
    elif name == "layout on one rank":
        out = torch.empty(world * 6)
        if odd:
            tide_backend.apply_layout(out, tide_backend.ParameterLayout(world, [6]))
        error = error_of(gather, out, torch.ones(6))
    else:
        raise ValueError(name)
    still_works(rank, world)
    return error


DIFFERENCES = {
    "size": ("Float[5]", "Float[6]"),
    "dtype": ("Float[5]", "Int[5]"),
    "reduction scale": ("scale 1.0", "scale 0.3"),
    "reduction kind": ("sum", "max"),
    "output dtype": ("BFloat16 -> Float", "BFloat16[5]"),
    "layout": ("shards [2, 4]", "shards [4, 2]"),
    "layout on one rank": ("on rank 0", "layout world 3"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ(name: str) -> None:
    for kind, text in run_ranks(3, odd_one_out, name):
        assert kind == "UsageError", text
        assert "on rank 0 and" in text and "on rank 2" in text
        for passed in DIFFERENCES[name]:
            assert passed in text, text


def only_here(rank: int, world: int, name: str, bad_rank: int) -> tuple[str, str]:
    """One rank's own arguments do not fit together."""
    bad = rank == bad_rank
    out, source = torch.empty(world * 4), torch.ones(4)
    error = ("", "")
    if name == "output too small":
        out = out[1:] if bad else out
        error = error_of(dist.all_gather_into_tensor, out, source)
    elif name == "dtypes":
        error = error_of(dist.all_gather_into_tensor, out, source.double() if bad else source)
    elif name == "layout does not add up":
        tide_backend.apply_layout(out, tide_backend.ParameterLayout(world, [3] if bad else [4]))
        error = error_of(dist.all_gather_into_tensor, out, source)
    elif name == "layout of another world":
        layout = tide_backend.ParameterLayout(world * 2, [2]) if bad else None
        tide_backend.apply_layout(out, layout or tide_backend.ParameterLayout(world, [4]))
        error = error_of(dist.all_gather_into_tensor, out, source[:2] if bad else source)
    elif name == "reduce-scatter sizes":
        big = torch.ones(world * 4 + (1 if bad else 0))
        error = error_of(dist.reduce_scatter_tensor, torch.empty(4), big)
    elif name == "number of tensors":
        placeholder = torch.zeros(1).expand(world * 4)
        grads = [torch.ones(world * 2)] * (1 if bad else 2)
        tide_backend.apply_layout(placeholder, tide_backend.ParameterLayout(world, [2, 2]), tensors=grads)
        error = error_of(dist.reduce_scatter_tensor, torch.empty(4), placeholder)
    elif name == "size of a tensor":
        placeholder = torch.zeros(1).expand(world * 4)
        grads = [torch.ones(world * 2), torch.ones(world * 2 - (1 if bad else 0))]
        tide_backend.apply_layout(placeholder, tide_backend.ParameterLayout(world, [2, 2]), tensors=grads)
        error = error_of(dist.reduce_scatter_tensor, torch.empty(4), placeholder)
    elif name == "narrowing":
        dtype = torch.bfloat16 if bad else torch.float32
        error = error_of(dist.reduce_scatter_tensor, torch.empty(4, dtype=dtype), torch.ones(world * 4))
    else:
        raise ValueError(name)
    still_works(rank, world)
    return error


LOCAL = {
    "output too small": "expected",
    "dtypes": "differ in dtype",
    "layout does not add up": "layout",
    "layout of another world": "the layout is for 6 ranks; expected 3",
    "reduce-scatter sizes": "expected an input of 12 elements (output times 3 ranks)",
    "number of tensors": "got 1 tensors for a layout of 2 parameters",
    "size of a tensor": "tensor 1 does not fit the layout; got Float[5] on cpu, expected 6 elements",
    "narrowing": "expected the same, or bfloat16 into float32",
}


@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize("name", LOCAL)
def test_one_rank_that_cannot_take_part(name: str, bad_rank: int) -> None:
    errors = run_ranks(3, only_here, name, bad_rank)
    for rank, (kind, text) in enumerate(errors):
        assert kind == "UsageError", text
        assert LOCAL[name] in text, text
        if rank != bad_rank:
            assert f"rank {bad_rank} cannot take part" in text, text


def bad_call_before_the_others_come(rank: int, world: int) -> tuple[tuple[str, str], float]:
    if rank != 1:
        time.sleep(2)
    start = time.monotonic()
    out = torch.empty(world * 4 - (1 if rank == 1 else 0))
    error = error_of(dist.all_gather_into_tensor, out, torch.ones(4))
    took = time.monotonic() - start
    still_works(rank, world)
    return error, took


def test_a_bad_call_does_not_wait_for_late_ranks() -> None:
    results = run_ranks(3, bad_call_before_the_others_come)
    assert all(kind == "UsageError" for (kind, _), _ in results), results
    assert results[1][1] < 1.9, "the bad rank waited for the others"
    assert all("rank 1 cannot take part" in results[r][0][1] for r in (0, 2))


def asynchronous(rank: int, world: int) -> tuple[Errors, bool]:
    n = 4 + rank
    bad = dist.all_gather_into_tensor(torch.empty(world * n), torch.ones(n), async_op=True)
    good_out = torch.empty(world)
    good = dist.all_gather_into_tensor(good_out, torch.full((1,), float(rank)), async_op=True)
    good.wait()
    check_bits(good_out, np.arange(world, dtype=np.float32), "the call behind")
    return [error_of(bad.wait), error_of(bad.wait)], bad.is_success()


def test_an_asynchronous_call_raises_in_wait() -> None:
    for (first, second), success in run_ranks(2, asynchronous):
        assert first == second
        assert first[0] == "UsageError" and "Float[4] on rank 0 and" in first[1] and "Float[5] on rank 1" in first[1]
        assert not success


def out_of_memory(rank: int, world: int, poor: list[int]) -> dict[str, Any]:
    options = tide_backend.Options()
    options.arena_bytes = 2 << 20 if rank in poor else 64 << 20
    rank_process.init("tide", pg_options=options)
    backend().connect()
    slot, reason = backend().slot(12 << 20)
    numel = (12 << 20) // 4 // world
    shards = [random_bytes(1, r, numel, torch.float32) for r in range(world)]
    out = torch.empty(world * numel) if slot is None else slot.view(torch.float32)
    error = error_of(dist.all_gather_into_tensor, out, tensor(shards[rank], torch.float32))
    if not error[0]:
        check_bits(out, oracle.all_gather(shards))
    path = backend().records()[-1]["path"]
    small = torch.empty(world)
    dist.all_gather_into_tensor(small, torch.full((1,), float(rank)))
    check_bits(small, np.arange(world, dtype=np.float32), "the small call after")
    dist.destroy_process_group()
    return {"slot": slot is not None, "reason": reason, "error": error, "path": path}


def test_a_full_arena_gives_no_slot_and_says_why() -> None:
    results = run_ranks(2, out_of_memory, [0, 1], backend=None)
    for result in results:
        assert not result["slot"]
        assert "12582912" in result["reason"] and "2097152" in result["reason"], result
        # 4 MiB of staging do not fit into 2 MiB either.
        kind, text = result["error"]
        assert kind == "" or (kind == "UsageError" and "no memory for" in text), result


def test_one_rank_without_memory_is_named_on_all() -> None:
    results = run_ranks(3, out_of_memory, [1], backend=None)
    assert [r["slot"] for r in results] == [True, False, True]
    for result in results:
        kind, text = result["error"]
        if kind:
            assert kind == "UsageError" and "rank 1" in text and "no memory for" in text, result
        else:
            assert result["path"] in ("staged", "inner"), result


def bad_layouts() -> Errors:
    make = tide_backend.ParameterLayout
    return [
        error_of(make, 0, [1]),
        error_of(make, 2, [-1]),
        error_of(make, 2, [1, 2], [2]),
        error_of(make, 2, [2], [5]),
        error_of(make, 2, [2], align=0),
    ]


def test_a_layout_that_cannot_be() -> None:
    errors = bad_layouts()
    assert [kind for kind, _ in errors] == ["UsageError"] * 5
    assert "world_size must be at least 1; got 0" in errors[0][1]
    assert "give one of each per parameter" in errors[2][1]
    assert "has 5 elements and shards of 2 on 2 ranks" in errors[3][1]


def test_layout_arithmetic() -> None:
    layout = tide_backend.ParameterLayout(2, [3, 1], align=4)
    assert (list(layout.shard_offsets)[:2], list(layout.gathered_offsets)[:2]) == ([0, 3], [0, 8])
    assert (layout.total_shard_numel, layout.total_gathered_numel) == (4, 12)
    assert layout.numels == [6, 2] and layout.hash != tide_backend.ParameterLayout(2, [1, 3], align=4).hash


def one_shot(rank: int, world: int) -> None:
    out = torch.empty(world * 3)
    layout = tide_backend.ParameterLayout(world, [2, 1])
    source = torch.arange(3.0) + 10 * rank
    tide_backend.apply_layout(out, layout)
    dist.all_gather_into_tensor(out, source)
    check_bits(out, np.array([0, 1, 10, 11, 2, 12], np.float32), "with the layout")
    dist.all_gather_into_tensor(out, source)
    check_bits(out, np.array([0, 1, 2, 10, 11, 12], np.float32), "the layout holds for one call")
    tide_backend.apply_layout(out, layout)
    out.set_(torch.empty(world * 3))
    dist.all_gather_into_tensor(out, source)
    check_bits(out, np.array([0, 1, 2, 10, 11, 12], np.float32), "the same tensor with other memory")


def test_a_layout_is_for_one_call_and_one_tensor() -> None:
    run_ranks(2, one_shot)


def wrong_options(rank: int, world: int) -> tuple[str, str]:
    return error_of(rank_process.init, "tide", pg_options=dist.ProcessGroupGloo._Options())


def test_options_of_another_backend() -> None:
    ((kind, text),) = run_ranks(1, wrong_options, backend=None, fresh=True)
    assert kind == "TypeError" and "expected tide_backend.Options" in text


def test_unknown_option() -> None:
    assert error_of(setattr, tide_backend.Options(), "arena_byte", 1)[0] == "AttributeError"

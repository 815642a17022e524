"""reduce-scatter of bf16 and fp32 gradients side by side into fp32: bit for bit as if bf16 had been widened first."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_simulator import POISON, Simulator
from rank_data import REDUCED, backend, check_bits, error_of, expect_path, random_values, small_staging, tensor
from ranks import run_ranks

import tide_backend
from tide_backend import _C

Kinds = tuple[str, ...]
NARROW, WIDE = "bfloat16", "float32"


def widened(array: np.ndarray, kind: str) -> np.ndarray:
    return oracle.bf16_to_float32(array) if kind == NARROW else array


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 90), st.sampled_from([NARROW, WIDE])), min_size=1, max_size=5),
    st.sampled_from([1.0, 1 / 3]),
    st.data(),
    st.integers(2, 4),
    st.integers(0, 1 << 30),
)
def test_plans(
    world: int, parameters: list[tuple[int, str]], scale: float, draw: st.DataObject, depth: int, seed: int
) -> None:
    shards, kinds = [s for s, _ in parameters], [k for _, k in parameters]
    numels = [draw.draw(st.integers(0, world * s)) for s in shards]
    inputs = [[random_values(seed + i, r, n, kinds[i]) for i, n in enumerate(numels)] for r in range(world)]
    layout = _C.ParameterLayout(world, shards, numels)
    stage = dict(budget=1, depth=depth, smallest_chunk=64, separate_inputs=True)
    kind = dict(in_type=WIDE, out_type=WIDE, in_types=kinds)
    plans = [_C.plan("reduce_scatter", r, world, 4, sum(shards), layout, **stage, **kind) for r in range(world)]
    outputs = [bytearray([POISON]) * (4 * sum(shards)) for _ in range(world)]
    given_inputs = [[a.tobytes() for a in arrays] for arrays in inputs]
    Simulator(plans, given_inputs, outputs, WIDE, WIDE, scale).run(random.Random(seed))
    wide = [[widened(a, k) for a, k in zip(arrays, kinds, strict=True)] for arrays in inputs]
    ours = oracle.Layout(world, shards, numels, 1)
    for output, want in zip(outputs, oracle.reduce_scatter(wide, WIDE, ours, WIDE, scale), strict=True):
        assert output == want.tobytes()
    copied = sum(s["bytes"] for p in plans for s in p.steps if s["kind"] == "copy")
    sizes = sum(n * (2 if k == NARROW else 4) for n, k in zip(numels, kinds, strict=True))
    assert copied == (world - 1) * sizes, "a gradient travels in its own dtype, and padding not at all"


def scatter(rank: int, world: int, numels: list[int], kinds: list[Kinds], path: str, reason: str, bytes_: int) -> None:
    """kinds[r]: of rank r's gradients, in turn."""
    shards = [-(-n // world) for n in numels]
    inputs = [[random_values(i, r, n, kinds[r][i % len(kinds[r])]) for i, n in enumerate(numels)] for r in range(world)]
    mine = [tensor(a, REDUCED[kinds[rank][i % len(kinds[rank])]]) for i, a in enumerate(inputs[rank])]
    source = torch.zeros(1).expand(world * sum(shards))
    tide_backend.apply_layout(source, tide_backend.ParameterLayout(world, shards, numels), tensors=mine)
    out = torch.full((sum(shards),), 7.0)
    dist.reduce_scatter_tensor(out, source, op=dist.ReduceOp.AVG)
    call = expect_path(path)
    if reason not in call["reason"] or (bytes_ and call["bytes"] != bytes_):
        raise AssertionError(f"expected {reason!r} and {bytes_} bytes, got {call}")
    wide = [[widened(a, kinds[r][i % len(kinds[r])]) for i, a in enumerate(x)] for r, x in enumerate(inputs)]
    want = oracle.reduce_scatter(wide, WIDE, oracle.Layout(world, shards, numels, 1), WIDE, 1 / world)[rank]
    if path == "staged":
        check_bits(out, want)
    else:  # in gloo's order
        np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("kinds", [(NARROW, WIDE), (WIDE, NARROW, NARROW)])
@pytest.mark.parametrize("world", [2, 4])
def test_reduced_as_they_are(world: int, kinds: Kinds) -> None:
    numels = [101, 7, 0, 4096, 1, 333]
    sizes = [2 if kinds[i % len(kinds)] == NARROW else 4 for i in range(len(numels))]
    nbytes = sum(-(-n // world) * world * size for n, size in zip(numels, sizes, strict=True))
    run_ranks(world, scatter, numels, [kinds] * world, "staged", "no packing", nbytes)


def in_small_chunks(rank: int, world: int, *args: Any) -> None:
    small_staging()
    scatter(rank, world, *args)
    dist.destroy_process_group()


def test_across_chunks() -> None:
    numels = [70_003, 1, 0, 33_333, 12_345]
    run_ranks(4, in_small_chunks, numels, [(NARROW, WIDE)] * 4, "staged", "no packing", 0, backend=None)


@pytest.mark.parametrize("odd", [(WIDE,), (NARROW,), (WIDE, NARROW)])
def test_ranks_with_other_dtypes_go_to_the_inner_backend(odd: Kinds) -> None:
    """A gradient that one rank accumulated in fp32 may be fresh bf16 on another: no error, and right sums."""
    run_ranks(3, scatter, [50, 4000], [odd, (NARROW, WIDE), (NARROW, WIDE)], "inner", "different dtypes", 0)
    run_ranks(2, scatter, [50, 4000], [(NARROW,), (WIDE,)], "inner", "different dtypes", 0)


def asynchronous(rank: int, world: int) -> tuple[str, str]:
    """The output of a call that is not made must not be taken for its result."""
    layout, source = tide_backend.ParameterLayout(world, [4]), torch.zeros(1).expand(world * 4)

    def scatter_async(kind: torch.dtype) -> torch.Tensor:
        tide_backend.apply_layout(source, layout, tensors=[torch.full((world * 4,), rank + 1, dtype=kind)])
        out = torch.full((4,), 7.0)
        dist.reduce_scatter_tensor(out, source, async_op=True).wait()
        return out

    error = error_of(scatter_async, torch.bfloat16 if rank else torch.float32)
    assert backend().records()[-1]["state"] == "failed"
    assert scatter_async(torch.bfloat16).tolist() == [world * (world + 1) / 2] * 4  # the group goes on
    return error


def test_other_dtypes_in_an_asynchronous_call_are_an_error_on_every_rank() -> None:
    for rank, (name, text) in enumerate(run_ranks(2, asynchronous)):
        assert name == "UsageError" and text.startswith(f"tide[rank {rank}/2, group ")
        assert "(ranks have gradients of different dtypes for the same parameters)" in text and "async_op=True" in text

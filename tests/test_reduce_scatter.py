"""reduce_scatter_tensor on real ranks against the oracle, bit for bit, in rank order."""

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
from rank_data import (
    REDUCED,
    backend,
    bits,
    check_bits,
    error_of,
    expect_path,
    random_values,
    small_staging,
    tensor,
)
from ranks import run_ranks

import tide_backend

SIZES = [0, 1, 2, 3, 17, 1000, 4097, 50_001]


def operation(name: str, world: int) -> tuple[Any, float]:
    """The op and what it multiplies the sum with."""
    if name == "sum":
        return dist.ReduceOp.SUM, 1.0
    if name == "avg":
        return dist.ReduceOp.AVG, 1.0 / world
    return dist._make_nccl_premul_sum(float(name)), float(name)


def operations_for(kind: str) -> list[str]:
    if kind in ("int32", "int64"):
        return ["sum"]  # an average of integers is not theirs to round
    premul = ["0.5", "0.3", "2.0"] if hasattr(dist, "_make_nccl_premul_sum") else []
    return ["sum", "avg", *premul]


def scatter_packed(
    rank: int, world: int, kind: str, out_kind: str, sizes: list[int], names: list[str] | None = None
) -> None:
    for numel in sizes:
        for name in names or operations_for(kind):
            what = f"{kind} -> {out_kind}, {name}, {numel}"
            op, scale = operation(name, world)
            inputs = [random_values(numel, r, numel * world, kind) for r in range(world)]
            out = torch.zeros(numel, dtype=REDUCED[out_kind])
            dist.reduce_scatter_tensor(out, tensor(inputs[rank], REDUCED[kind]), op=op)
            want = oracle.reduce_scatter(inputs, kind, out_kind=out_kind, scale=scale)
            check_bits(out, want[rank], what)
            if world > 1 and numel:
                expect_path("staged", what)


KINDS = [(k, k) for k in REDUCED] + [("bfloat16", "float32")]


@pytest.mark.parametrize(("kind", "out_kind"), KINDS)
def test_packed(kind: str, out_kind: str) -> None:
    run_ranks(4, scatter_packed, kind, out_kind, SIZES)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_packed_worlds(world: int) -> None:
    for kind, out_kind in [("bfloat16", "float32"), ("float32", "float32")]:
        run_ranks(world, scatter_packed, kind, out_kind, [1, 1003, 20_001])


def scatter_in_small_chunks(rank: int, world: int) -> None:
    small_staging()
    scatter_packed(rank, world, "bfloat16", "float32", [150_001], ["avg"])
    scatter_packed(rank, world, "float64", "float64", [50_001], ["sum"])
    dist.destroy_process_group()


def test_many_chunks() -> None:
    run_ranks(4, scatter_in_small_chunks, backend=None)
    run_ranks(4, scatter_packed, "bfloat16", "float32", [1_000_001], ["avg"])


@dataclass(frozen=True)
class ListCase:
    """Gradients of parameters numels[i] (dim 0 need not divide by the world), from tensors or packed."""

    numels: tuple[int, ...]
    extra: tuple[int, ...]  # padding of shard i beyond ceil(numel / world)
    align: int
    kind: str
    out_kind: str
    op: str
    separate: bool
    strided: bool
    seed: int

    def layout(self, world: int) -> oracle.Layout:
        shards = [-(-n // world) + e for n, e in zip(self.numels, self.extra, strict=True)]
        return oracle.Layout(world, shards, list(self.numels), self.align)


def strided_copy(flat: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(flat.numel(), 2, dtype=flat.dtype)
    wide[:, 0] = flat
    return wide[:, 0]


def scatter_layouts(rank: int, world: int, cases: list[ListCase]) -> None:
    for case in cases:
        theirs = case.layout(world)
        mine = tide_backend.ParameterLayout(world, list(theirs.shard_numels), list(case.numels), align=case.align)
        dtype = REDUCED[case.kind]
        op, scale = operation(case.op, world)
        if case.separate:
            inputs = [
                [random_values(case.seed + i, r, n, case.kind) for i, n in enumerate(case.numels)] for r in range(world)
            ]
            tensors = [tensor(a, dtype) for a in inputs[rank]]
            if case.strided:
                tensors = [strided_copy(t) for t in tensors]
            source = torch.zeros(1, dtype=dtype).expand(world * theirs.shard_numel)
            tide_backend.apply_layout(source, mine, tensors=tensors, label="grads")
        else:
            inputs = [random_values(case.seed, r, theirs.gathered_numel, case.kind) for r in range(world)]
            source = tensor(inputs[rank], dtype)
            tide_backend.apply_layout(source, mine, label="grads")
        out = torch.full((theirs.shard_numel,), 7, dtype=REDUCED[case.out_kind])
        dist.reduce_scatter_tensor(out, source, op=op)
        want = oracle.reduce_scatter(inputs, case.kind, theirs, case.out_kind, scale)[rank]
        check_bits(out, want.astype(want.dtype), str(case))
        if theirs.shard_numel and world > 1:
            call = expect_path("staged", str(case))
            repaired = sum(n > 1 for n in case.numels) if case.separate and case.strided else 0
            if call["label"] != "grads" or call["repair_copies"] != repaired:
                raise AssertionError(f"{case}: expected {repaired} repair copies: {call}")


def list_cases() -> Any:
    def build(sizes: list[tuple[int, int]], kinds: tuple[str, str], op: str, **more: Any) -> ListCase:
        return ListCase(
            numels=tuple(n for n, _ in sizes),
            extra=tuple(e for _, e in sizes),
            kind=kinds[0],
            out_kind=kinds[1],
            op=op if op in operations_for(kinds[0]) else "sum",
            **more,
        )

    return st.builds(
        build,
        st.lists(st.tuples(st.integers(0, 300), st.sampled_from([0, 0, 1, 5])), min_size=1, max_size=8),
        st.sampled_from([*KINDS, ("bfloat16", "float32"), ("bfloat16", "float32")]),
        st.sampled_from(["sum", "avg", "0.3"]),
        align=st.sampled_from([1, 4, 128]),
        separate=st.booleans(),
        strided=st.sampled_from([False, False, True]),
        seed=st.integers(0, 2**20),
    )


@pytest.mark.parametrize("world", [2, 4, 8])
def test_layouts(world: int) -> None:
    @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(list_cases(), min_size=8, max_size=12))
    def many(cases: list[ListCase]) -> None:
        run_ranks(world, scatter_layouts, cases)

    many()


def layouts_in_small_chunks(rank: int, world: int, cases: list[ListCase]) -> None:
    small_staging()
    scatter_layouts(rank, world, cases)
    dist.destroy_process_group()


@pytest.mark.parametrize("separate", [True, False])
def test_layout_that_crosses_chunks(separate: bool) -> None:
    numels = (70_003, 1, 0, 33_333, 12_345)
    case = ListCase(numels, (0,) * 5, 128, "bfloat16", "float32", "avg", separate, False, 5)
    run_ranks(4, layouts_in_small_chunks, [case], backend=None)


def all_but_finite(rank: int, world: int) -> None:
    """Infinities, NaN, signed zeros and the smallest numbers go through the additions unharmed."""
    special = [np.inf, -np.inf, np.nan, -0.0, 0.0, 1e-40, -1e-45, 3e38, 3e38, 1.0]
    rows = [np.roll(np.array(special, np.float32), r).repeat(world) for r in range(world)]
    for kind in ("float32", "bfloat16"):
        inputs = rows if kind == "float32" else [(x.view(np.uint32) >> 16).astype(np.uint16) for x in rows]
        out = torch.zeros(len(special))
        dist.reduce_scatter_tensor(out, tensor(inputs[rank], REDUCED[kind]))
        want = oracle.reduce_scatter(inputs, kind, out_kind="float32")[rank]
        got, nan = out.numpy(), np.isnan(want)
        if not np.array_equal(np.isnan(got), nan):
            raise AssertionError(f"{kind}: NaN at {np.isnan(got)}, expected at {nan}")
        check_bits(np.where(nan, np.float32(0), got), np.where(nan, np.float32(0), want), kind)


def test_special_values() -> None:
    run_ranks(4, all_but_finite)


def reduce_again(rank: int, world: int) -> bytes:
    inputs = random_values(77, rank, world * 10_007, "bfloat16")
    out = torch.empty(10_007)
    dist.reduce_scatter_tensor(out, tensor(inputs, torch.bfloat16), op=dist.ReduceOp.AVG)
    return bits(out).tobytes()


def test_the_same_bits_from_run_to_run() -> None:
    first = run_ranks(4, reduce_again)
    assert first == run_ranks(4, reduce_again) == run_ranks(4, reduce_again, fresh=True)
    assert len(set(first)) == 4


def factor_in_a_tensor(rank: int, world: int) -> None:
    inputs = [random_values(3, r, world * 9, "float32") for r in range(world)]
    out = torch.empty(9)
    op = dist._make_nccl_premul_sum(torch.tensor([0.25]))
    dist.reduce_scatter_tensor(out, tensor(inputs[rank], torch.float32), op=op)
    check_bits(out, oracle.reduce_scatter(inputs, "float32", scale=0.25)[rank])


@pytest.mark.skipif(not hasattr(dist, "_make_nccl_premul_sum"), reason="this torch has no PREMUL_SUM")
def test_premultiplied_sum_with_a_tensor() -> None:
    run_ranks(2, factor_in_a_tensor)


def left_to_inner(rank: int, world: int) -> list[dict[str, Any]]:
    rows = np.stack([np.arange(world * 5, dtype=np.float32) + 1 + 3 * r for r in range(world)])
    expected = {
        dist.ReduceOp.MIN: rows.min(0),
        dist.ReduceOp.MAX: rows.max(0),
        dist.ReduceOp.PRODUCT: rows.prod(0),
    }
    calls = []
    for op, whole in expected.items():
        out = torch.zeros(5)
        dist.reduce_scatter_tensor(out, torch.from_numpy(rows[rank].copy()), op=op)
        np.testing.assert_allclose(out.numpy(), whole.reshape(world, 5)[rank], rtol=1e-6, err_msg=str(op))
        calls.append(expect_path("inner", str(op)))
    half = torch.full((world * 3,), float(rank), dtype=torch.float16)
    out = torch.zeros(3, dtype=torch.float16)
    dist.reduce_scatter_tensor(out, half)
    check_bits(out, np.full(3, sum(range(world)), np.float16), "float16 sum")
    return [*calls, expect_path("inner", "float16")]


def test_other_operations_and_dtypes_go_to_the_inner_backend_with_the_reason() -> None:
    for calls in run_ranks(2, left_to_inner):
        reasons = [c["reason"] for c in calls]
        assert reasons == [
            "reduction min is left to the inner backend",
            "reduction max is left to the inner backend",
            "reduction product is left to the inner backend",
            "tide reduces float32, float64, bfloat16, int32 and int64",
        ]


def averages_of_any_shape(rank: int, world: int) -> None:
    """gloo compares shapes. tide packs an average for it, and only the number of elements counts."""
    total = sum(range(1, world + 1))
    for shape in [(), (3, 2), (0, 2)]:
        for out in [torch.zeros(shape).half(), torch.zeros(shape[::-1]).half().t()]:
            whole = torch.full((world * out.numel(),), rank + 1.0).half()
            dist.reduce_scatter_tensor(out, whole, op=dist.ReduceOp.AVG)
            check_bits(out, np.full(shape, total / world, np.float16), f"the average in {shape}")
            expect_path("inner", "float16")


def test_averages_by_the_inner_backend_fit_outputs_of_any_shape() -> None:
    run_ranks(2, averages_of_any_shape)


def average_of_integers(rank: int, world: int) -> tuple[str, str]:
    out = torch.zeros(2, dtype=torch.int32)
    error = error_of(dist.reduce_scatter_tensor, out, torch.ones(2 * world).int(), op=dist.ReduceOp.AVG)
    after = torch.zeros(2, dtype=torch.int32)
    dist.reduce_scatter_tensor(after, torch.ones(2 * world).int())
    check_bits(after, np.full(2, world, np.int32), "the call after")
    return error


def test_average_of_integers_raises_on_every_rank() -> None:
    for name, text in run_ranks(2, average_of_integers):
        assert name and text


def strided_and_outstanding(rank: int, world: int) -> None:
    calls = []
    for n in range(8):
        numel = 11 + 1009 * n
        inputs = [random_values(n, r, numel * world, "bfloat16") for r in range(world)]
        source = tensor(inputs[rank], torch.bfloat16)
        if n % 2:
            source = strided_copy(source)
        out = torch.full((numel, 2), 3.0)
        op = dist.ReduceOp.AVG
        work = dist.reduce_scatter_tensor(out[:, 0], source, op=op, async_op=True)
        calls.append((work, out, oracle.reduce_scatter(inputs, "bfloat16", None, "float32", 1 / world)[rank]))
    for n in (7, 0, 5, 1, 2, 3, 4, 6):
        work, out, want = calls[n]
        work.wait()
        check_bits(out[:, 0], want, f"call {n}")
        if not bool((out[:, 1] == 3).all()):
            raise AssertionError("wrote between the elements of a strided output")
    if backend().records()[-1]["repair_copies"] != 2:
        raise AssertionError(f"repair copies: {backend().records()[-1]}")


def test_strided_tensors_and_several_outstanding() -> None:
    run_ranks(4, strided_and_outstanding)

"""`bench overlap` on CPU ranks: what it counts beside GEMMs, SM time from a trace, wrong elements, deadlines."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

from tide_backend.bench import __main__ as command
from tide_backend.bench import beside, gemm, launch, overlap, overlap_table, sm_time
from tide_backend.bench.call import Place
from tide_backend.bench.data import random_bf16
from tide_backend.bench.settings import Settings

ROOT = Path(__file__).resolve().parent.parent


def launched(name: str, start: float, us: float, grid: list[int]) -> dict[str, Any]:
    args = {"device": 0, "stream": 7, "grid": grid, "block": [512, 1, 1]}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": us, "args": args}


ADD = "void tide::(anonymous namespace)::accumulate_kernel<__nv_bfloat16, float>(tide::(anonymous namespace)::Args)"
NCCL = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
CAT = "void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float, c10::BFloat16>(c10::BFloat16**, float*)"
NOT_KERNELS = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy PtoP", "ts": 5, "dur": 900, "args": {"bytes": 4}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 7, "args": {}},
]


def test_sm_time_of_a_trace() -> None:
    events = [
        # Three collectives; the second one's peer was late. Not in the order of time.
        launched(NCCL, 300, 40.0, [24, 1, 1]),
        launched(NCCL, 100, 30.0, [24, 1, 1]),
        launched(NCCL, 200, 9000.0, [24, 1, 1]),
        *(launched(CAT, at, 10.0, [100, 4, 1]) for at in (90, 190, 290)),
        *NOT_KERNELS,
    ]
    cat, nccl = sm_time.kernels({"traceEvents": events}, sms=132, calls=3)
    assert (nccl.name, nccl.own, nccl.launches, nccl.blocks) == (
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", True, 1, 24,
    )
    assert (nccl.us, nccl.sm_us) == (40, 24 * 40)  # of 30, 9000 and 40 the median
    assert cat.name == "chunk_cat_cuda_kernel<float, c10::BFloat16>" and not cat.own
    assert (cat.blocks, cat.us, cat.sm_us) == (400, 10, 132 * 10)  # never more SMs than there are


def test_several_launches_of_a_collective_are_summed() -> None:
    events = [launched(ADD, at, us, [grid, 1, 1]) for at, us, grid in [(1, 4, 16), (2, 6, 8), (11, 8, 16), (12, 2, 8)]]
    (add,) = sm_time.kernels({"traceEvents": events}, sms=132, calls=2)
    assert (add.name, add.own, add.launches) == ("accumulate_kernel<__nv_bfloat16, float>", True, 2)
    assert (add.us, add.sm_us) == (10, (16 * 4 + 8 * 6 + 16 * 8 + 8 * 2) / 2)
    # Three launches do not divide among two collectives: the mean.
    (add,) = sm_time.kernels({"traceEvents": events[:3]}, sms=10, calls=2)
    assert (add.launches, add.us, add.sm_us) == (1.5, 9, (10 * 4 + 8 * 6 + 10 * 8) / 2)


def test_a_trace_without_kernels_and_one_without_grids() -> None:
    assert sm_time.kernels({"traceEvents": NOT_KERNELS}, sms=132, calls=2) == []
    event = launched(NCCL, 1, 2, [1, 1, 1])
    del event["args"]["grid"]
    with pytest.raises(ValueError, match=r"ncclDevKernel.*got no grid or no duration"):
        sm_time.kernels({"traceEvents": [event]}, sms=132, calls=1)


@dataclass
class At:
    """An event of the device at a known time."""

    ms: float

    def elapsed_time(self, later: At) -> float:
        return later.ms - self.ms


def test_only_gemms_within_the_collectives_count() -> None:
    feed = beside.Feed(gemm.Gemm((1, 1, 1), "cpu"), 1e-3)
    feed.marks = [(At(10 + 2.0 * i), At(11.5 + 2.0 * i)) for i in range(5)]  # 10 to 11.5, ..., 18 to 19.5
    assert feed.between(At(8), 3, 10) == [1.5e-3] * 3  # 11 to 18: the first and the last lie half outside
    assert feed.between(At(8), 2, 11.5) == [1.5e-3] * 5


def test_gemm_shapes() -> None:
    assert gemm.parse("2048x28672X8192") == (2048, 28672, 8192)
    for text in ("", "1x2", "0x1x1", "1x2x3x4", "axbxc"):
        with pytest.raises(ValueError, match="expected M, N and K"):
            gemm.parse(text)


def side(alone: list[float], together: list[float], gemm_s: list[float], wrong: int, path: str) -> dict[str, Any]:
    held = {"busy_us": 10.0 * len(path), "layout_us": 4.0, "kernels": []}
    return {"alone": alone, "beside": together, "gemm_beside": gemm_s, "wrong": wrong, "path": path, "gemms": 5, **held}


def test_merged_row() -> None:
    head = {"name": "all_gather", "size": 10**6, "count": 5, "dtype": "bf16", "redop": "none"}
    stock = side([2e-3] * 3, [3e-3] * 3, [15e-4] * 3, 0, "gloo")
    first = {**head, "gemm": [1e-3, 1e-3, 1e-3], "stock": stock}
    first["tide"] = side([1e-3, 9e-4, 1e-3], [1e-3, 1e-3, 2e-3], [1e-3, 1e-3, 11e-4], 2, "ab")
    second = {**head, "gemm": [9e-4, 5e-4, 7e-3], "stock": stock}
    second["tide"] = side([5e-4, 1e-3, 7e-3], [11e-4, 9e-4, 12e-4], [12e-4, 9e-4, 1e-3], 1, "abcd")
    row = overlap.merge([first, second])
    tide = row["tide"]
    assert row["gemm_us"] == pytest.approx(1000)  # the median of 1, 1 and 7 ms
    assert (tide["alone_us"], tide["beside_us"]) == (pytest.approx(1000), pytest.approx(1100))
    assert (tide["slower"], tide["gemm_slower"]) == (pytest.approx(0.1), pytest.approx(0.1))
    assert (tide["algbw"], tide["busbw"]) == (pytest.approx(1), pytest.approx(0.5))
    assert (tide["wrong"], tide["path"], tide["busy_us"], tide["layout_us"]) == (3, "ab+abcd", 30, 4)
    assert row["stock"]["slower"] == row["stock"]["gemm_slower"] == pytest.approx(0.5)
    printed = overlap_table.lines(row, Settings("overlap"))
    assert "+10.0%" in printed and "+50.0%" in printed and "ab+abcd" in printed


def test_kernels_are_printed_with_their_blocks() -> None:
    (add,) = sm_time.kernels({"traceEvents": [launched(ADD, 1, 5, [64, 1, 1])]}, sms=132, calls=1)
    (text,) = overlap_table.kernel_lines([vars(add)], "tide")
    assert "64 blocks" in text and "320.0 us of SMs" in text and "(copy)" not in text
    assert "saw no kernel" in overlap_table.kernel_lines([], "nccl")[0]


def every_pair(rank: int, world: int) -> list[tuple[str, str, int]]:
    """(collective, side, wrong elements beside GEMMs) as it is, then with an output spoilt on the last rank alone."""
    groups = dist.distributed_c10d._get_default_group(), dist.new_group(backend="gloo")
    places = [Place(rank, world, "cpu", group) for group in groups]
    product, found = gemm.Gemm((16, 32, 32), "cpu"), []
    for collective, make in overlap.PAIR.items():
        pair = make(*places, 10_000, "llama")
        sources = [random_bf16(3, r, pair.tide.source_numel) for r in range(world)]
        for which in overlap.SIDES:
            call = getattr(pair, which)
            measure = partial(beside.on_cpu, call, 3, product, 1e-3)
            found.append((collective, which, overlap.check(call, measure, sources)[0]))
            honest = call.after

            def spoilt(call: Any = call, honest: Any = honest) -> None:
                honest()
                if rank == world - 1:
                    outputs = getattr(call, "parameters", None) or [call.out]
                    outputs[-1].view(-1)[-1] += 1000

            call.after = spoilt
            found.append((collective, which, overlap.check(call, measure, sources)[0]))
    return found


def test_wrong_elements_are_found_on_any_rank() -> None:
    for rank, found in enumerate(run_ranks(3, every_pair)):
        kinds = [(collective, which) for collective in overlap.PAIR for which in overlap.SIDES]
        assert found[::2] == [(*kind, 0) for kind in kinds]
        assert found[1::2] == [(*kind, int(rank == 2)) for kind in kinds]


def passed_deadline(rank: int, world: int) -> str:
    with pytest.raises(RuntimeError) as error:
        beside.Deadline("Even alone", time.monotonic() - 1).check()
    return str(error.value)


def test_a_measurement_that_does_not_end_names_the_rank_and_the_call() -> None:
    assert "rank 1/2: Even alone: not over after 60 s; expected" in run_ranks(2, passed_deadline)[1]


def test_a_silent_rank_is_named_at_the_deadline() -> None:
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    for rank in (0, 2):
        pipes[rank][1].send((launch.VALUE, rank))
    with pytest.raises(launch.RankFailed, match=r"ranks \[1\] of 3: no result within 0.3 s"):
        launch._next_row([ours for ours, _ in pipes], 0.3)


def test_the_command(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = ["--sizes", "64K", "--ranks", "2", "--repetitions", "2", "--gemm", "32x64x128", "--json", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "tide_backend.bench", "overlap", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# wrong elements: 0" in done.stdout and "GEMM: [32, 128] @ [128, 64], fp32" in done.stdout
    result = json.loads(output.read_text())
    assert result["settings"]["gemm"] == [32, 64, 128]
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["all_gather", "reduce_scatter", "all_to_all"]
    paths = {"all_gather": "zero_copy", "reduce_scatter": "staged", "all_to_all": "zero_copy"}
    for name, row in rows.items():
        assert (row["tide"]["path"], row["stock"]["path"]) == (paths[name], "gloo")
        assert row["size"] == 65536 and row["gemm_us"] > 0 and not row["shared_gpus"] and row["accumulate_ctas"] > 0
        for s in (row["tide"], row["stock"]):
            assert min(s["alone_us"], s["beside_us"], s["gemm_beside_us"], s["busy_us"]) > 0 and s["gemms"] > 0
            assert all(len(r["beside"]) == len(r["gemm_beside"]) == 2 for r in s["ranks"])
            assert f"{s['gemm_slower']:+.1%}" in done.stdout and f"{s['slower']:+.1%}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gemm", "12x12"], "expected M, N and K"),
        (["--collectives", "all_gather,broadcast"], "expected some of all_gather"),
        (["--vs", "gloo,nccl"], "expected one of"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        command.main(["overlap", *arguments])
    assert error.value.code == 2 and text in capsys.readouterr().err

"""The benchmark measures the right thing: layouts add up, wrong elements are found on any rank, columns are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from rank_data import bits, check_bits
from ranks import run_ranks

from tide_backend.bench import __main__ as command
from tide_backend.bench import all_gather, all_to_all, data, layouts, reduce_scatter, settings, table
from tide_backend.bench.call import Place
from tide_backend.bench.measure import check

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("text", "size"),
    [("4K", 4096), ("64m", 64 << 20), ("1.5M", 3 << 19), ("1G", 1 << 30), ("100", 100), ("2KiB", 2048)],
)
def test_sizes(text: str, size: int) -> None:
    assert settings.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-4K", "0", "4T"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected a positive number"):
        settings.parse_size(text)


@pytest.mark.parametrize("layout", ["llama", "llama-odd", "qwen3-moe"])
@pytest.mark.parametrize("numel", [1, 7, 512, 131072, 8388608])
def test_layouts_add_up(layout: str, numel: int) -> None:
    shards = layouts.shard_numels(layout, numel)
    assert sum(shards) == numel and min(shards) > 0
    if numel > 1 << 22:
        weights, row = layouts.PARAMETERS[layout]
        largest = max(weights) / sum(weights)
        assert all(shard % row == 0 for shard in shards[:-1])
        assert abs(max(shards) / numel - largest) < 1e-4


def test_random_data_is_finite_and_differs_by_rank_and_seed() -> None:
    drawn = [data.random_bf16(seed, rank, 10_000) for seed in (0, 1) for rank in (0, 1)]
    for one in drawn:
        assert bool(one.isfinite().all()) and float(one.abs().min()) >= 2**-8 and float(one.abs().max()) < 2**8
    # Two elements agree by chance about once in 2^12.
    assert all(data.differing(a, b) > 9_900 for i, a in enumerate(drawn) for b in drawn[:i])
    assert data.differing(drawn[0], drawn[0]) == 0


def places(rank: int, world: int) -> tuple[Place, Place]:
    default = dist.distributed_c10d._get_default_group()
    return Place(rank, world, "cpu", default), Place(rank, world, "cpu", dist.new_group(backend="gloo"))


def every_pair(rank: int, world: int) -> list[tuple[str, dict[str, int]]]:
    """(name, wrong elements) as measured, then with an output or an input spoilt on the last rank alone."""
    found = []
    for collective in (all_gather, reduce_scatter, all_to_all):
        for pair in collective.pairs(*places(rank, world), 10_000, "llama"):
            found.append((pair.name, check(pair, 1)[0]))
            for call in (pair.tide, pair.stock):
                honest = call.run

                def spoilt(call: Any = call, honest: Any = honest) -> None:
                    honest()
                    if rank == world - 1:
                        outputs = getattr(call, "parameters", None) or [call.out]
                        outputs[-1].view(-1)[-1] += 1000

                call.run = spoilt  # type: ignore[method-assign]
            found.append((pair.name, check(pair, 2)[0]))
    return found


def test_wrong_elements_are_found_on_any_rank() -> None:
    good, bad = {"tide": 0, "stock": 0}, {"tide": 1, "stock": 1}
    names = ["per-param", "rank-major", "per-param", "packed", "even"]
    results = run_ranks(3, every_pair)
    for rank, found in enumerate(results):
        assert found[::2] == [(name, good) for name in names]
        assert found[1::2] == [(name, bad if rank == 2 else good) for name in names]


def delivered(rank: int, world: int) -> None:
    """What the two sides of the all-gather deliver is the same, and what the oracle says."""
    shards = layouts.shard_numels("llama", 5000)
    tide, stock = places(rank, world)
    calls = [all_gather.TidePerParameter(tide, shards), all_gather.StockPerParameter(stock, shards)]
    sources = [data.random_bf16(3, r, 5000) for r in range(world)]
    raw = [np.frombuffer(bits(s).tobytes(), np.uint16) for s in sources]
    packed = oracle.all_gather(raw, oracle.Layout(world, shards))
    expected = oracle.split_parameters(packed, oracle.Layout(world, shards))
    for call in calls:
        call.fill(sources[rank])
        call.run()
        for parameter, want in zip(call.parameters, expected, strict=True):
            check_bits(parameter, want, type(call).__name__)


def test_both_sides_deliver_the_same_parameters() -> None:
    run_ranks(2, delivered)


def test_count_wrong_allows_for_the_order_of_additions_only() -> None:
    addends = [torch.tensor([v, 1.0]).bfloat16() for v in (256.0, 2.0**-7, -256.0)]
    for order in ([0, 1, 2], [0, 2, 1], [2, 0, 1]):
        total = torch.zeros(2)
        for i in order:
            total += addends[i].float()
        assert reduce_scatter.count_wrong(total / 3, addends) == 0
    assert reduce_scatter.count_wrong(torch.tensor([2.0**-7 / 3, 1.001]), addends) == 1


def test_merged_row() -> None:
    def sample(tide: list[float], wrong: int, path: str) -> dict[str, Any]:
        side = {"seconds": tide, "wrong": wrong, "path": path}
        stock = {"seconds": [0.5, 0.5, 0.5], "wrong": 0, "path": "gloo"}
        return {"name": "x", "size": 10**9, "count": 5, "dtype": "bf16", "redop": "none", "tide": side, "stock": stock}

    row = table.merge([sample([0.1, 0.2, 0.3], 2, "staged"), sample([0.2, 0.1, 0.9], 1, "zero_copy")])
    assert row["tide"]["time_us"] == pytest.approx(200_000)  # median of 0.2, 0.2, 0.9
    assert row["tide"]["algbw"] == pytest.approx(5.0)
    assert row["tide"]["busbw"] == pytest.approx(2.5)
    assert (row["tide"]["wrong"], row["tide"]["path"], row["ratio"]) == (3, "staged+zero_copy", pytest.approx(2.5))
    assert "2.50x" in table.line(row) and "staged+zero_copy" in table.line(row)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_to_all", "init"])
def test_the_command(collective: str, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    sizes = ["--sizes", "4K,64K", "--ranks", "2", "--repetitions", "2", "--json", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "tide_backend.bench", collective, *sizes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert result["command"].startswith(f"python -m tide_backend.bench {collective} --sizes 4K,64K")
    rows = result["rows"]
    if collective == "init":
        assert [r["backend"] for r in rows] == ["tide", "gloo"] and all(r["total_s"] > 0 for r in rows)
        return
    assert "# wrong elements: 0" in done.stdout
    assert {r["size"] for r in rows} == {4096, 65536}
    expected = {"per-param": "zero_copy" if collective == "all_gather" else "staged"}
    for row in rows:
        assert row["tide"]["path"] == expected.get(row["name"], "staged") and row["stock"]["path"] == "gloo"
        assert len(row["tide"]["repetitions_us"]) == 2 and f"{row['ratio']:.2f}x" in done.stdout


def test_ulysses_permutes_on_the_stock_side_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    arguments = ["--layout", "ulysses", "--sizes", "64K", "--ranks", "2", "--repetitions", "2", "--json", str(output)]
    assert command.main(["all_to_all", *arguments]) == 0
    assert "# wrong elements: 0" in capfd.readouterr().out
    rows = json.loads(output.read_text())["rows"]
    assert [(r["name"], r["tide"]["path"], r["stock"]["path"]) for r in rows] == [
        ("ulysses", "staged", "gloo"),
        ("into-group", "zero_copy", "gloo"),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["all_gather", "--sizes", "big"],
        ["all_gather", "--ranks", "1"],
        ["all_gather", "--layout", "ulysses"],
        ["broadcast"],
    ],
)
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        command.main(arguments)
    assert error.value.code == 2 and "error:" in capsys.readouterr().err


def test_seam_measures_both_sides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "seam.json"
    arguments = ["seam", "--ranks", "2", "--parameters", "3", "--numel", "7", "--repetitions", "6", "--json", str(file)]
    assert command.main(arguments) == 0
    assert "3 parameters of 7 elements" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [row["backend"] for row in rows] == ["tide", "gloo"]
    for row in rows:
        for key in ("forward", "copies", "backward", "collective"):
            assert 0 < row[f"{key}_least_us"] <= row[f"{key}_us"] < row["whole_us"], row
        assert row["copies_us"] < row["backward_us"], row

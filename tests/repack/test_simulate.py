"""The repacking simulator: workloads as published, the fit fits, outputs complete and honest."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys

import pytest
from solve_oracle import spread_by_work, total, unrepacked

from tide_backend.repack import CostModel
from tide_backend.simulate.__main__ import main
from tide_backend.simulate.repack_job import Job, assign, change, fit_ratio, play, wide_steps
from tide_backend.simulate.workloads import Workload, catalogue

SMALL = Job(gpus=64, parent=16, tokens_per_rank=16384, steps=20, share=0.2)


def drawn(name: str, count: int = 40_000) -> list[int]:
    rng, draw = random.Random(1), Workload(name).sampler()
    return [draw(rng) for _ in range(count)]


@pytest.mark.parametrize(("name", "mean"), [("prolong", 3052), ("wlbllm", 3962)])
def test_histograms_have_the_published_mean_within_six_percent(name, mean):
    assert statistics.mean(drawn(name, 200_000)) == pytest.approx(mean, rel=0.06)


@pytest.mark.parametrize("name", ["magi", "prolong", "wlbllm"])
def test_histograms_have_the_published_bins(name):
    spec, lengths = catalogue()[name], drawn(name)
    low = spec.get("lower_edge", 1)
    shares = sum(spec["percent_of_documents"])
    for high, percent in zip(spec["upper_edges"], spec["percent_of_documents"], strict=True):
        found = sum(low < length <= high or length == low == 1 for length in lengths) / len(lengths)
        assert found == pytest.approx(percent / shares, abs=0.01)
        low = high


def test_parametric_workloads_keep_their_range():
    for name in ("megatron_varlen", "lognormal_8.3_1.5", "lognormal_9.0_1.2", "longalign"):
        spec, lengths = catalogue()[name], drawn(name, 5000)
        assert spec["min"] <= min(lengths) < max(lengths) <= spec["max"]
    assert set(drawn("video_buckets", 200)) == {32760, 75600}
    assert statistics.median(drawn("lognormal_9.0_1.2")) == pytest.approx(8103, rel=0.03)  # exp(9)


def test_every_distribution_but_the_free_parametric_ones_names_its_source():
    for name, spec in catalogue().items():
        assert spec.get("source") or name.startswith("lognormal_")


def test_batches_fill_the_step_and_repeat():
    workload = Workload("wlbllm", 2, cap=200_000)
    batch = workload.batch(1_000_000, seed=3)
    assert batch == workload.batch(1_000_000, seed=3) != workload.batch(1_000_000, seed=4)
    assert 1_000_000 - 200_000 < sum(batch) <= 1_000_000
    assert max(batch) <= 200_000


def test_wide_steps_are_those_with_the_longest_samples():
    workload = Workload("wlbllm", 2)
    every = [workload.batch(64 * 16384, step) for step in range(20)]
    chosen = wide_steps(workload, SMALL)
    assert len(chosen) == 4
    rest = [batch for batch in every if batch not in chosen]
    assert min(map(max, chosen)) >= max(map(max, rest))
    assert all(max(batch) > 150_000 for batch in wide_steps(workload, SMALL, longer_than=150_000))


@pytest.mark.parametrize("sync", ["step", "layer"])
def test_baseline_is_samples_by_work_and_even_splits(sync):
    job = Job(gpus=64, parent=16, tokens_per_rank=16384, steps=5, share=0.4, sync=sync)
    model = CostModel.from_ratio(0.005)
    steps = wide_steps(Workload("lognormal_9.0_1.2"), job)
    phases = [unrepacked(spread_by_work(s, 4, 16, model, 8), 16, s, model, 8) for s in steps]
    baseline = sum(total(p, sync) for p in phases)
    assert sum(assign(s, model, job).stats["work_us"] for s in steps) == pytest.approx(baseline)


def test_fit_reaches_its_target_and_more_exchange_gains_more():
    steps = wide_steps(Workload("wlbllm", 2), SMALL)
    k = fit_ratio(steps, SMALL, CostModel(), 7.0, -0.04)
    assert change(steps, CostModel.from_ratio(k), SMALL, membership="work") == pytest.approx(-0.04, abs=5e-4)
    assert change(steps, CostModel.from_ratio(2 * k), SMALL, membership="work") < -0.04
    with pytest.raises(ValueError, match="no k up to"):
        fit_ratio(steps, SMALL, CostModel(), 7.0, -0.9)


@pytest.mark.parametrize("name", ["wlbllm", "prolong", "lognormal_8.3_1.5", "magi"])
@pytest.mark.parametrize("sync", ["step", "layer"])
def test_guarded_outcomes_never_lose(name, sync):
    job = Job(gpus=64, parent=32, tokens_per_rank=8192, steps=10, share=1.0, sync=sync)
    outcome = play(wide_steps(Workload(name, 2), job), CostModel.from_ratio(0.005), job)
    assert outcome.alone <= 1e-9
    assert outcome.solver <= 1e-9
    assert outcome.solver_spill <= 1e-9
    assert 0 <= outcome.kept <= 1


def test_command_writes_table_numbers_and_figure(tmp_path, capsys):
    numbers, figure = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["repack", "--gpus", "64", "--steps", "10", "--share", "0.2", "--tokens-per-rank", "16384"]
    pytest.importorskip("matplotlib")
    assert main([*arguments, "--target", "-0.03", "--json", str(numbers), "--png", str(figure)]) == 0
    text = capsys.readouterr().out
    assert "calibrated  k = " in text
    assert "predicted   every other number" in text
    assert "none is a measurement" in text
    result = json.loads(numbers.read_text())
    assert [row["calibrated"] for row in result["rows"]] == [True] + [False] * (len(result["rows"]) - 1)
    assert result["rows"][0]["alone"] == pytest.approx(-0.03, abs=1e-3)
    others = {row["workload"] for row in result["rows"]} - {result["rows"][0]["workload"]}
    assert len(others) >= 3
    for row in result["rows"]:
        assert row["alone_mfu"] == pytest.approx(59 * (1 / (1 + row["alone"]) - 1))
        assert row["workload"] in text
    assert {row["sync"] for row in result["regimes"]} == {"step", "layer"}
    assert max(row["alone_unguarded"] for row in result["regimes"]) > 0.2
    assert max(max(row["alone"], row["solver"], row["solver_spill"]) for row in result["regimes"]) <= 1e-9
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_given_k_is_not_called_a_fit(capsys):
    assert main(["repack", "--gpus", "32", "--steps", "2", "--share", "0.5", "--k", "0.004"]) == 0
    assert "k = 0.00400 (given, nothing fitted)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "40"], "gpus: got 40, expected a multiple of the parent width 32"),
        (["--steps", "0"], "expected at least 1 step"),
        (["--elongate", "-1"], "elongate: got -1.0"),
        (["--steps", "5", "--target", "-0.95"], "no k up to"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    assert main(["repack", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_figure_without_matplotlib_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "tide_backend.simulate.repack_figure", raising=False)
    monkeypatch.delattr("tide_backend.simulate.repack_figure", raising=False)
    assert main(["repack", "--png", str(tmp_path / "x.png")]) == 2
    assert "--png needs matplotlib" in capsys.readouterr().err


def test_unknown_subject_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["weather"])
    assert caught.value.code == 2
    assert "repack" in capsys.readouterr().err


def test_solver_bench_prints_every_case(capsys):
    assert main(["solver-bench", "--seeds", "1", "--repeat", "1"]) == 0
    text = capsys.readouterr().out
    assert text.count("step") == text.count("layer") == 11


def test_importing_starts_no_process_group():
    code = (
        "import tide_backend.repack, tide_backend.simulate, torch.distributed as d; "
        "assert not d.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

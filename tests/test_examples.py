"""The A/B job: runs end to end, says the truth about a layout computed by hand, and can fail."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "ab_fsdp2.py"
RANKS, HIDDEN, LAYERS, STEPS = 2, 128, 2, 3
VOCABULARY = 256
TINY = [f"--ranks={RANKS}", f"--hidden={HIDDEN}", f"--layers={LAYERS}", f"--steps={STEPS}"]
TINY += ["--warmup=1", "--seq=32", "--device=cpu", "--timeout=60"]

# The job is a program, not part of the package: it finds its parts beside itself.
pytest.importorskip("transformers")


def run_job(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, with this checkout's tide."""
    command = [sys.executable, str(EXAMPLE), *arguments]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment, check=False)


@pytest.fixture(scope="module")
def job() -> Iterator[ModuleType]:
    """The same program as a module, for what starts no ranks."""
    sys.path.insert(0, str(EXAMPLE.parent))
    yield importlib.import_module(EXAMPLE.stem)
    sys.path.remove(str(EXAMPLE.parent))


def llama_parameters() -> int:
    """Counted by hand: heads of 64 channels, half as many key/value heads, inner size 8/3 in steps of 64."""
    heads = HIDDEN // 64
    inner = HIDDEN * 8 // 3 // 64 * 64
    attention = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * (heads // 2) * 64
    block = attention + 3 * HIDDEN * inner + 2 * HIDDEN
    return LAYERS * block + 2 * VOCABULARY * HIDDEN + HIDDEN


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, str]:
    """gloo against itself: the kept raw results, the JSON and the terminal's text."""
    folder = tmp_path_factory.mktemp("ab") / "a folder"
    out = folder.parent / "out.json"
    done = run_job("--backends=gloo,gloo", *TINY, f"--keep={folder}", f"--json={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, json.loads(out.read_text()), done.stdout


def test_table_and_json_agree(stock: tuple[Path, dict, str]) -> None:
    _, found, text = stock
    first, second = found["backends"]["gloo#1"], found["backends"]["gloo#2"]
    assert first["losses"] == second["losses"] and len(first["losses"]) == STEPS
    assert abs(first["losses"][0] - math.log(VOCABULARY)) < 1.0  # random weights: about ln(256) nats a byte
    assert f"{first['losses'][-1]:.5f}" in text
    assert f"{first['step_seconds_median'] * 1e3:.1f} ms" in text
    assert len(first["step_seconds"]) == STEPS - 1
    assert 0 < first["collectives_seconds"] < first["step_seconds_median"]
    assert found["within"] and all(d["relative"] == 0 for d in found["differences"]["gloo#1"])


def test_stock_copies_match_the_layout(stock: tuple[Path, dict, str]) -> None:
    """FSDP2 packs every gradient once as fp32 and copies every gathered parameter out twice as bf16."""
    measured = stock[1]["backends"]["gloo#1"]
    parameters = llama_parameters()
    assert measured["parameters"] == parameters
    assert measured["packed_fp32_bytes"] == RANKS * parameters * 4
    assert measured["copy_bytes"]["all-gather copy-out"] == RANKS * 2 * parameters * 2
    assert measured["copy_bytes"]["all-gather copy-in"] == 2 * parameters * 2
    assert measured["copy_calls"]["reduce-scatter copy-in"] == RANKS * (LAYERS + 1)
    assert measured["memory_bytes"]["pss"] > RANKS * (50 << 20)


def doctor(target: Path, edit: str) -> None:
    """Changes one number of the first run."""
    run = target / "gloo_1" / "repeat0"
    if edit == "loss":
        path = run / "rank1.json"
        record = json.loads(path.read_text())
        record["losses"][0] *= 1 + 1e-5
        path.write_text(json.dumps(record))
    else:
        path = run / ("parameters.pt" if edit == "parameter" else "gradients_step0_rank1.pt")
        tensors = torch.load(path, weights_only=True)
        tensor = tensors["model.layers.1.mlp.down_proj.weight"]
        if edit == "missing":
            del tensors["model.layers.1.mlp.down_proj.weight"]
        elif edit == "nan":
            tensor[3, 5] = math.nan
        elif edit == "swapped rows":
            tensor[[0, 1]] = tensor[[1, 0]]
        else:
            tensor[3, 5] += 0.01 * float(tensor.norm())
        torch.save(tensors, path)


@pytest.mark.parametrize("edit", ["loss", "parameter", "gradient", "missing", "nan", "swapped rows"])
def test_a_doctored_result_fails(
    stock: tuple[Path, dict, str],
    job: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    edit: str,
) -> None:
    target = tmp_path / "doctored"
    shutil.copytree(stock[0], target)
    assert job.main([f"--reuse={target}"]) == 0
    doctor(target, edit)
    capsys.readouterr()
    assert job.main([f"--reuse={target}"]) == 1
    shown = capsys.readouterr()
    where = "loss, step 1" if edit == "loss" else "FAILED at model.layers.1.mlp.down_proj.weight"
    assert where in shown.out
    assert "FAILED: the backends differ" in shown.err


def test_a_failed_backend_shows_its_error() -> None:
    done = run_job("--backends=gloo,no_such_backend", *TINY)
    assert done.returncode == 2
    assert "backend 'no_such_backend' failed" in done.stderr and "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hidden=100"], "expected a multiple of 128"),
        (["--steps=2", "--warmup=2"], "expected at least 0 and less than --steps 2"),
        (["--lr=0"], "expected a positive number"),
        (["--ranks=0"], "expected a number of at least 1"),
    ],
)
def test_wrong_arguments_are_named(
    job: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as exit_status:
        job.main(["--backends=gloo", *arguments])
    assert exit_status.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("model", "dtype"), [("llama", "bf16"), ("llama", "fp32"), ("qwen3-moe", "bf16")])
def test_tide_against_gloo(tmp_path: Path, model: str, dtype: str) -> None:
    if importlib.util.find_spec("tide_backend._C") is None:
        pytest.skip("tide_backend._C is not built")
    out = tmp_path / "out.json"
    arguments = [*TINY, f"--model={model}", f"--dtype={dtype}", f"--json={out}"]
    done = run_job("--backends=tide,gloo", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    tide, gloo = found["backends"]["tide"], found["backends"]["gloo"]
    assert tide["losses"][0] == gloo["losses"][0]  # an all-gather only moves bits
    assert tide["packed_fp32_bytes"] == 0 < gloo["packed_fp32_bytes"]
    for kind in ("all-gather copy-in", "all-gather copy-out", "reduce-scatter copy-in"):
        assert tide["copy_calls"][kind] == 0 < gloo["copy_calls"][kind]
    assert tide["report"]["rows"] and not tide["report"]["fallbacks"]
    assert "FSDP2 seam: installed" in done.stdout

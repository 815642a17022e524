"""The A/B job: the same FSDP2 training under two backends; only the name given to init_process_group differs.

python examples/ab_fsdp2.py --help
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from ab.compare import Difference, compare_runs
from ab.launch import BackendFailed, launch, prepare
from ab.results import Run, read_run
from ab.settings import Settings, make_parser, settings_from
from ab.table import render, render_report


def _labels(backends: list[str]) -> list[str]:
    """A name per column; a backend given twice gets a number."""
    return [f"{b}#{i}" if backends.count(b) > 1 else b for i, b in enumerate(backends, start=1)]


def _folder(root: Path, label: str, repeat: int) -> Path:
    return root / label.replace(":", "_").replace("#", "_") / f"repeat{repeat}"


def _train(root: Path, settings: Settings, backends: list[str], labels: list[str], repeat: int) -> None:
    prepare()
    for turn in range(repeat):
        for backend, label in zip(backends, labels, strict=True):
            name = label if repeat == 1 else f"{label} ({turn + 1}/{repeat})"
            launch(settings, backend, name, _folder(root, label, turn))
    plan = {"settings": settings.as_dict(), "backends": backends, "repeat": repeat}
    (root / "plan.json").write_text(json.dumps(plan))


def _as_json(settings: Settings, runs: list[Run], differences: dict[str, list[Difference]]) -> dict[str, Any]:
    return {
        "settings": settings.as_dict(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "backends": {
            run.label: {
                "losses": run.losses,
                "gradient_norms": run.norms,
                "step_seconds": run.step_seconds,
                "step_seconds_median": run.step_median,
                "phase_seconds": run.phase_seconds,
                "collectives_seconds": run.phases_seconds,
                "collectives_cpu_seconds": run.phases_cpu_seconds,
                "copy_calls": run.copy_calls,
                "copy_bytes": run.copy_bytes,
                "packed_fp32_bytes": run.packed_fp32_bytes,
                "memory_bytes": run.memory,
                "memory_point": run.memory_point,
                "parameters": run.parameters,
                "repeats_identical": run.repeats_identical,
                "report": run.report,
            }
            for run in runs
        },
        "differences": {label: [d.as_dict() for d in found] for label, found in differences.items()},
        "within": all(d.within for found in differences.values() for d in found),
    }


def _conclude(root: Path, settings: Settings, labels: list[str], repeat: int, args: Any) -> int:
    runs = [read_run(name, [_folder(root, name, r) for r in range(repeat)], settings.ranks) for name in labels]
    differences = {run.label: compare_runs(run, runs[-1], settings) for run in runs[:-1]}
    print(render(runs, differences, settings))
    for run in runs:
        if run.report:
            print(f"\n{run.label}, rank 0:\n{render_report(run.report)}")
    found = _as_json(settings, runs, differences)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    if args.png:
        from ab.plot import draw

        draw(runs, args.png, f"{settings.model}, {settings.ranks} ranks on {settings.device}")
    if not found["within"]:
        print("\nFAILED: the backends differ by more than the allowed amount (table above)", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(torch.cuda.device_count())
    args = parser.parse_args(arguments)
    if args.reuse:
        plan = json.loads((Path(args.reuse) / "plan.json").read_text())
        labels = _labels(plan["backends"])
        return _conclude(Path(args.reuse), Settings(**plan["settings"]), labels, plan["repeat"], args)
    backends = args.backends.split(",")
    try:
        settings = settings_from(args)
    except ValueError as error:
        parser.error(str(error))
    root = Path(args.keep) if args.keep else Path(tempfile.mkdtemp(prefix="ab_fsdp2_"))
    try:
        root.mkdir(parents=True, exist_ok=True)
        _train(root, settings, backends, _labels(backends), args.repeat)
        return _conclude(root, settings, _labels(backends), args.repeat, args)
    except BackendFailed as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 2
    finally:
        if not args.keep:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

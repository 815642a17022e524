"""The one table at the end: a column per backend and a verdict per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .compare import Difference
from .results import Run
from .settings import Settings
from .timing import PHASES

_MIB = 1 << 20


def _verdict(labels: list[str], values: list[float]) -> str:
    """Who has less, and by how much against the worst of the others."""
    if len(values) < 2:
        return ""
    best, worst = min(values), max(values)
    if best == worst:
        return "equal"
    name = labels[values.index(best)]
    if best == 0:
        return f"{name}: none"
    return f"{name}: {(1 - best / worst) * 100:.0f} % less ({worst / best:.2f}x)"


def loss_rows(runs: list[Run]) -> list[list[str]]:
    """First steps, some between, the last; every row says whether the losses are equal."""
    total = len(runs[0].losses)
    every = max(1, (total + 7) // 8)
    shown = sorted({0, 1, total - 1, *range(every - 1, total, every)} & set(range(total)))
    rows = []
    for step in shown:
        values = [run.losses[step] for run in runs]
        spread = max(values) - min(values)
        note = "" if len(runs) < 2 else ("equal" if spread == 0 else f"differ by {spread:.1e}")
        rows.append([f"loss, step {step + 1}", *(f"{value:.5f}" for value in values), note])
    return rows


def measure_rows(runs: list[Run], settings: Settings) -> list[list[str]]:
    labels = [run.label for run in runs]
    rows: list[list[str]] = []

    def row(title: str, value: Callable[[Run], float], form: Callable[[float], str]) -> None:
        values = [value(run) for run in runs]
        rows.append([title, *map(form, values), _verdict(labels, values)])

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.1f} ms"

    def mib(size: float) -> str:
        return f"{size / _MIB:.1f} MiB"

    kinds = sorted({kind for run in runs for kind in run.copy_bytes})
    row("step time, median", lambda run: run.step_median, ms)
    row("step time, fastest", lambda run: min(run.step_seconds), ms)
    row("time in collectives and copies", lambda run: run.phases_seconds, ms)
    for phase in PHASES:
        row(f"  {phase}", lambda run, p=phase: run.phase_seconds[p], ms)
    row("CPU time there, all ranks", lambda run: run.phases_cpu_seconds, ms)
    row("layout copies a step, calls", lambda run: sum(run.copy_calls.values()), lambda v: f"{v:.0f}")
    row("layout copies a step, size", lambda run: sum(run.copy_bytes.values()), mib)
    for kind in kinds:
        row(f"  {kind}", lambda run, k=kind: run.copy_bytes.get(k, 0), mib)
    row("packed fp32 gradients a step", lambda run: run.packed_fp32_bytes, mib)
    row("memory, highest sum of PSS", lambda run: run.memory["pss"], mib)
    if settings.device == "cuda":
        row("GPU memory in use (driver)", lambda run: run.memory["driver"], mib)
        row("GPU caching allocator, peak", lambda run: run.memory["allocator peak"], mib)
    return rows


def _align(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for cells in [header, ["-" * width for width in widths], *rows]:
        inner = [cell.rjust(width) for cell, width in zip(cells[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([cells[0].ljust(widths[0]), *inner, cells[-1]]).rstrip())
    return lines


def render(runs: list[Run], differences: dict[str, list[Difference]], settings: Settings) -> str:
    """The table; `differences` maps a backend's label to its comparison with the last backend."""
    precision = "bf16 parameters, fp32 reduction" if settings.dtype == "bf16" else "fp32"
    title = (
        f"{settings.model}, {runs[0].parameters / 1e6:.1f} M parameters, {precision}; {settings.ranks} ranks "
        f"on {settings.device}, {settings.batch} x {settings.seq} bytes of text a rank; copies and memory: "
        "sums over the ranks"
    )
    header = ["", *(run.label for run in runs), "who is better" if len(runs) > 1 else ""]
    lines = [title, "", *_align(header, loss_rows(runs) + measure_rows(runs, settings))]
    for label, found in differences.items():
        rows = [[d.what, f"{d.relative:.2e}", f"{d.tolerance:.0e}", f"{d.absolute:.2e}", _judge(d)] for d in found]
        header = [f"{label} against {runs[-1].label}", "relative", "allowed", "absolute", ""]
        lines += ["", *_align(header, rows)]
    for run in runs:
        if run.repeats_identical is not None:
            said = "bit-identical" if run.repeats_identical else "NOT identical"
            lines.append(f"{run.label}: losses of its repeats are {said}")
    return "\n".join(lines)


def _judge(difference: Difference) -> str:
    if not difference.within:
        return f"FAILED at {difference.relative_at}"
    return "bit-identical" if difference.relative == 0 else f"within, worst: {difference.relative_at}"


def render_report(report: dict[str, Any]) -> str:
    """Which way each parameter group went, in short: one line per operation, path and reason."""
    ways: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in report["rows"]:
        ways.setdefault((row["op"], row["path"], row["backend_path"], row["reason"]), []).append(row)
    lines = [f"FSDP2 seam: {report['fsdp2']}"]
    for (op, path, backend_path, reason), rows in ways.items():
        way = f"{path} ({backend_path})" if backend_path else path
        avoided = sum(row["copies_avoided"] for row in rows) / _MIB
        line = f"{op}: {way}, {len(rows)} parameter groups, {sum(row['calls'] for row in rows)} calls, "
        line += f"{avoided:.0f} MiB not copied, {sum(row['fallbacks'] for row in rows)} fallbacks"
        lines.append(line + (f"; {reason}" if reason else ""))
    return "\n".join(lines)

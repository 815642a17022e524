"""The output of ``simulate repack`` as text."""

from __future__ import annotations

from typing import Any


def render(result: dict[str, Any]) -> str:
    """``result`` as `repack.evaluate` makes it, with ``k``, ``slowdown`` and ``target`` added."""
    return "\n".join([*_head(result), "", *_table(result), "", *_regimes(result)])


def _head(result: dict[str, Any]) -> list[str]:
    job, first = result["job"], result["rows"][0]
    meet = "every layer" if job["sync"] == "layer" else "the optimizer step"
    if first["calibrated"]:
        fit = (
            f"fitted: repacking alone {result['target']:+.2%} on {first['workload']}, width {first['parent']}"
        )
    else:
        fit = "given, nothing fitted"
    return [
        f"Layerwise repacking, simulated: {job['gpus']} GPUs in nodes of 8, "
        f"{job['tokens_per_rank']:,} tokens per rank,",
        f"parents meet at {meet}; the {first['steps']} of {job['steps']} steps with the longest samples.",
        "",
        f"calibrated  k = {result['k']:.5f} ({fit});",
        f"            from the paper's abstract: exchange between nodes {result['slowdown']:g} times that "
        f"inside, baseline MFU {result['mfu_baseline']:g} %",
        "predicted   every other number, with the same k; none is a measurement",
    ]


def _table(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{'':<30}  {'repacking alone':^20}  {'with the solver':^20}  {'minus paper, pp':^17}  "
        f"{'left':>5} {'gap to':>6}",
        f"{'workload':<22}{'parents':>8}  {'time':>9} {'MFU':>10}  {'time':>9} {'MFU':>10}  "
        f"{'alone':>8} {'solver':>8}  {'alone':>5} {'bound':>6}",
        _ways("paper", "16/32", result["paper"]).rstrip(),
    ]
    for row in result["rows"]:
        name = row["workload"] + (" *" if row["calibrated"] else "")
        misses = [(row[way] - result["paper"][way]) * 100 for way in ("alone", "solver")]
        lines.append(
            _ways(name, str(row["parent"]), row)
            + f"{misses[0]:>+8.2f} {misses[1]:>+8.2f}  {row['kept']:>5.0%} {row['gap']:>6.2%}"
        )
    return [
        *lines,
        "* its repacking-alone figure is the input; only the solver's part is predicted",
        "left alone: parents the guard did not repack; gap: solver to its lower bound, mean",
    ]


def _ways(name: str, parents: str, row: dict[str, Any]) -> str:
    text = f"{name:<22}{parents:>8}  "
    for way in ("alone", "solver"):
        text += f"{row[way]:>+9.2%} {row[way + '_mfu']:>+7.2f} pp  "
    return text


def _regimes(result: dict[str, Any]) -> list[str]:
    lines = [
        "Where it goes wrong without a guard: steps with a sample above 256K tokens, change of time",
        f"{'':<22}{'tokens':>9}{'parents':>9}{'':>7}  {'no guard':^20}  {'guard':^20}  {'and spill':>9}",
        f"{'workload':<22}{'per rank':>9}{'meet at':>9}{'steps':>7}  {'alone':>10}{'solver':>10}  "
        f"{'alone':>10}{'solver':>10}  {'solver':>9}",
    ]
    for row in result["regimes"]:
        lines.append(
            f"{row['workload']:<22}{row['tokens_per_rank']:>9,}{row['sync']:>9}{row['steps']:>7}  "
            f"{row['alone_unguarded']:>+10.2%}{row['solver_unguarded']:>+10.2%}  "
            f"{row['alone']:>+10.2%}{row['solver']:>+10.2%}  {row['solver_spill']:>+9.2%}"
        )
    return lines

"""Losses and step times as one picture."""

from __future__ import annotations

from .results import Run


def draw(runs: list[Run], path: str, title: str) -> None:
    """Writes a PNG: loss over steps on the left, step times on the right. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    styles = ["-", "--", ":", "-."]
    for index, run in enumerate(runs):
        steps = range(1, len(run.losses) + 1)
        left.plot(steps, run.losses, styles[index % len(styles)], label=run.label, linewidth=2)
    left.set(xlabel="step", ylabel="loss (nats per byte)", title="loss")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend()
    times = [[seconds * 1e3 for seconds in run.step_seconds] for run in runs]
    right.boxplot(times, widths=0.5, medianprops={"color": "black"})
    right.set_xticks(range(1, len(runs) + 1), [f"{r.label}\nmedian {r.step_median * 1e3:.0f} ms" for r in runs])
    right.set(ylabel="ms", title="step time after warm-up")
    right.set_ylim(bottom=0)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

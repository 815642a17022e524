"""One training on tide and on gloo: the same numbers, tide's path on the one, FSDP2's copies on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
from fsdp2_cases import Trace, close

import tide_backend

COPIES = ("split_with_sizes_copy", "chunk_cat", "all_gather_copy_in")
Result = dict[str, torch.Tensor | float]


def full(model: nn.Module, what: str = "parameter") -> Result:
    """Every parameter whole; gradients too where there are any."""
    result: Result = {}
    for name, p in model.named_parameters():
        result[f"{what} {name}"] = p.full_tensor().detach().clone()
        if p.grad is not None:
            result[f"gradient {name}"] = p.grad.full_tensor().detach().clone()
    return result


def assert_on_tide(report: Any, ops: Iterable[str] = ("all_gather", "reduce_scatter")) -> None:
    """Every call of every parameter group went tide's way, all-gathers without a copy behind them."""
    assert report.fallbacks == [], report
    assert {row.op for row in report.rows} == set(ops), report
    for row in report.rows:
        assert row.path == "tide" and row.calls > 0, row
        assert row.backend_path == {"all_gather": "zero_copy", "reduce_scatter": "staged"}[row.op], row


def on_both(
    train: Callable[[str], Result],
    *,
    tolerance: float = 1e-6,
    copies: Iterable[str] = COPIES,
    ops: Iterable[str] = ("all_gather", "reduce_scatter"),
    trace: bool = True,
) -> tuple[Result, Any]:
    """Runs ``train("tide")`` and ``train("gloo")`` and compares what they return, by name.

    ``copies``: FSDP2's copies that must run on gloo and must not run on tide. ``trace`` False: not looked for,
    where a dispatch mode would change what runs. Returns tide's result and report.
    """
    tide_backend.report(reset=True)
    ours, our_operators = _traced(train, "tide", trace)
    report = tide_backend.report()
    assert_on_tide(report, ops)
    theirs, their_operators = _traced(train, "gloo", trace)
    if trace:
        for name in copies:
            assert their_operators.count(name) > 0, f"the trace does not see {name} on gloo, so it proves nothing"
            assert our_operators.count(name) == 0, f"{name} ran on tide"
    assert ours.keys() == theirs.keys() and ours
    for name, value in ours.items():
        close(value, theirs[name], tolerance, name)
    return ours, report


def _traced(train: Callable[[str], Result], backend: str, trace: bool) -> tuple[Result, Trace]:
    operators = Trace()
    if not trace:
        return train(backend), operators
    with operators:
        return train(backend), operators

"""Compares two runs element by element, in float64."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .results import Run, load_gradients, load_parameters
from .settings import Settings

# Step 1 starts from equal weights, so only the order of the fp32 additions may differ. Later steps
# differ by what the optimizer makes of that.
FIRST_STEP_GRADIENTS = 1e-6
FIRST_STEP_LOSS = 1e-6
LATER_GRADIENTS = 1e-3
FINAL_PARAMETERS = 1e-4
LATER_LOSS = 1e-4


@dataclass
class Difference:
    """The worst parameter: relative L2 norm of the difference, and the largest element anywhere."""

    what: str
    relative: float
    relative_at: str
    absolute: float
    absolute_at: str
    tolerance: float

    @property
    def within(self) -> bool:
        return self.relative <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"within": self.within}


def _norm(pieces: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(piece.double().square().sum()) for piece in pieces))


def tensor_difference(
    what: str, a: dict[str, list[torch.Tensor]], b: dict[str, list[torch.Tensor]], tolerance: float
) -> Difference:
    """Worst difference over parameters; a missing tensor, another shape or a NaN counts as infinite."""
    worst = Difference(what, 0.0, "", 0.0, "", tolerance)
    for name in sorted(a.keys() | b.keys()):
        relative, absolute = _one_difference(a.get(name, []), b.get(name, []))
        if relative > worst.relative:
            worst.relative, worst.relative_at = relative, name
        if absolute > worst.absolute:
            worst.absolute, worst.absolute_at = absolute, name
    if not a or not b:
        worst.relative, worst.relative_at = math.inf, "(no tensors)"
    return worst


def _one_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> tuple[float, float]:
    if [x.shape for x in a] != [y.shape for y in b] or not a:
        return math.inf, math.inf
    gaps = [x.double() - y.double() for x, y in zip(a, b, strict=True)]
    absolute = max((float(gap.abs().max()) for gap in gaps if gap.numel()), default=0.0)
    gap, norm = _norm(gaps), _norm(b)
    if math.isnan(gap) or math.isinf(gap):
        return math.inf, math.inf
    if gap == 0.0:
        return 0.0, 0.0
    return (gap / norm if norm else math.inf), absolute


def loss_difference(what: str, a: list[float], b: list[float], tolerance: float) -> Difference:
    """Worst relative difference of losses; `relative_at` names the step (from 1) within the lists."""
    worst = Difference(what, 0.0, "", 0.0, "", tolerance)
    if len(a) != len(b):
        worst.relative, worst.relative_at = math.inf, f"{len(a)} steps against {len(b)}"
        return worst
    for step, (x, y) in enumerate(zip(a, b, strict=True), start=1):
        gap = abs(x - y)
        relative = gap / abs(y) if math.isfinite(gap) and y else (math.inf if gap else 0.0)
        if relative > worst.relative:
            worst.relative, worst.relative_at = relative, f"step {step}"
            worst.absolute, worst.absolute_at = gap, f"step {step}"
    return worst


def compare_runs(run: Run, reference: Run, settings: Settings) -> list[Difference]:
    """Everything that must agree; the reference is the denominator of relative differences."""
    differences = [
        loss_difference("loss, step 1", run.losses[:1], reference.losses[:1], FIRST_STEP_LOSS),
        loss_difference("loss, all steps", run.losses, reference.losses, LATER_LOSS),
    ]
    for step in settings.compared_steps():
        a = load_gradients(run.folder, step, settings.ranks)
        b = load_gradients(reference.folder, step, settings.ranks)
        tolerance = LATER_GRADIENTS if step else FIRST_STEP_GRADIENTS
        differences.append(tensor_difference(f"gradients, step {step + 1}", a, b, tolerance))
    parameters = load_parameters(run.folder), load_parameters(reference.folder)
    differences.append(tensor_difference("parameters, end", *parameters, FINAL_PARAMETERS))
    return differences

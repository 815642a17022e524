"""Layerwise repacking: wide parents for full attention, node-local children for the sparse layers."""

from __future__ import annotations

from tide_backend.repack.assignment import Assignment, Child, Parent
from tide_backend.repack.cost import CostModel
from tide_backend.repack.envelope import Envelope
from tide_backend.repack.errors import AgreementError, RepackError
from tide_backend.repack.heads import HeadMap
from tide_backend.repack.plan import Plan, plans
from tide_backend.repack.solve import pack_children, solve

__all__ = [
    "AgreementError",
    "Assignment",
    "Child",
    "CostModel",
    "Envelope",
    "HeadMap",
    "Parent",
    "Plan",
    "RepackError",
    "pack_children",
    "plans",
    "solve",
]

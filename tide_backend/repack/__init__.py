"""Layerwise repacking: wide parents for full attention, node-local children for the sparse layers."""

from __future__ import annotations

from tide_backend.repack.assignment import Assignment, Child, Parent

__all__ = ["Assignment", "Child", "Parent"]

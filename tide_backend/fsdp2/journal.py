"""What the seam did: one row per parameter group, kind of call and reason.

Standard library only, so that ``tide_backend.report()`` can read it without importing FSDP2.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
TIDE = "tide"
STOCK = "stock"


@dataclass(frozen=True)
class Reason:
    """Why PyTorch's own path is taken. ``kind`` is a stable word, ``text`` the sentence for people."""

    kind: str
    text: str


@dataclass
class Row:
    """Calls of one kind by one parameter group that went one way for one reason.

    ``bytes``: the collective's payload on this rank (gathered output, or reduced input), padding included.
    ``copies_avoided``: bytes of FSDP2's own layout copies that did not happen; see ``all_gather.Plan`` and
    ``reduce_scatter.Plan`` for the formulas.
    """

    group: str
    module: str
    op: str
    path: str
    kind: str
    reason: str
    calls: int = 0
    bytes: int = 0
    copies_avoided: int = 0


class Journal:
    """All rows of this process. Rows stay the same objects over ``reset``: plans hold references to them."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str, str, str], Row] = {}
        self._warned: set[str] = set()
        self.install_problem: Reason | None = None

    def row(self, group: str, module: str, op: str, reason: Reason | None = None) -> Row:
        """The row for this group, module and way; ``reason`` None means tide's path."""
        path, kind, text = (STOCK, reason.kind, reason.text) if reason else (TIDE, "", "")
        key = (group, module, op, path, kind)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = Row(group, module, op, path, kind, text)
        return row

    def fall_back(self, group: str, module: str, op: str, reason: Reason, nbytes: int = 0) -> Row:
        """Count a call on PyTorch's own path; warn at the first of its kind in this process."""
        row = self.row(group, module, op, reason)
        row.calls += 1
        row.bytes += nbytes
        self.warn(
            reason.kind,
            f"tide: {op} of {module} (group {group}) takes PyTorch's own path: {reason.text}. Results are "
            "unaffected; FSDP2's layout copies are made. Further calls for this reason are counted in "
            "tide_backend.report() without a warning.",
        )
        return row

    def warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def rows(self, group: str | None = None) -> list[Row]:
        """Rows with at least one call, in order of first use."""
        return [row for row in self._rows.values() if row.calls and group in (None, row.group)]

    def reset(self, group: str | None = None) -> None:
        """Zero the counts, of one group or of all. Warnings already given are not repeated."""
        for row in self._rows.values():
            if group in (None, row.group):
                row.calls = row.bytes = row.copies_avoided = 0


journal = Journal()

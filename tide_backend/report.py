"""What ran, which way and why: ``tide_backend.report()``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .fsdp2 import state as fsdp2_state
from .fsdp2.journal import STOCK, journal

_MEBI = 1 << 20


@dataclass(frozen=True)
class ReportRow:
    """Calls of one kind by one FSDP2 parameter group that went one way for one reason.

    ``path``: "tide", or "stock" for PyTorch's own functions. ``backend_path``: how the backend carried the
    recorded calls ("zero_copy", "staged", "inner"; several are joined by "+"; empty on the stock path and
    when its ring no longer holds a call). ``bytes``: payload on this rank. ``copies_avoided``: bytes that
    FSDP2's own layout copies would have written. ``fallbacks``: calls that took PyTorch's path, or that the
    backend handed to its inner group (``kind`` is then "inner" and ``reason`` the backend's).
    """

    group: str
    module: str
    op: str
    path: str
    backend_path: str
    kind: str
    reason: str
    calls: int
    bytes: int
    copies_avoided: int
    fallbacks: int


@dataclass(frozen=True)
class CollectiveRow:
    """All calls of one operation of a group that went one way for one reason, FSDP2's among them.

    ``repair_copies``: tensors that were copied because they do not lie as the call needs them. ``kernel_copies``:
    pieces that were so small and so many that a kernel moved them in the place of the copy engines.
    """

    group: str
    device: str
    op: str
    path: str
    reason: str
    calls: int
    bytes: int
    repair_copies: int
    kernel_copies: int
    seconds: float


@dataclass(frozen=True)
class MemoryRow:
    """Memory of this rank that the peers of one group can write, in bytes: slots and staging, and what the group holds
    for them. On GPUs it is the driver's and NCCL's own: PyTorch's memory statistics do not contain it."""

    group: str
    device: str
    in_use: int
    held: int


@dataclass
class Report:
    """Prints as a table. ``fsdp2``: state of the FSDP2 seam, with what is wrong if it was refused."""

    fsdp2: str
    rows: list[ReportRow] = field(default_factory=list)
    collectives: list[CollectiveRow] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)

    @property
    def fallbacks(self) -> list[ReportRow]:
        """The rows of which at least one call did not go tide's own way."""
        return [row for row in self.rows if row.fallbacks]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "fallbacks": [asdict(row) for row in self.fallbacks]}

    def __str__(self) -> str:
        lines = [f"tide: FSDP2 seam {self.fsdp2}"]
        if self.rows:
            lines += _table(
                "group module call path backend calls MiB MiB-not-copied fallbacks reason",
                [
                    (r.group, r.module, r.op, r.path, r.backend_path, *_numbers(r), r.reason)
                    for r in self.rows
                ],
            )
        if self.collectives:
            lines += _table(
                "group device collective path calls MiB repair-copies kernel-copies seconds reason",
                [
                    (
                        c.group,
                        c.device,
                        c.op,
                        c.path,
                        c.calls,
                        _mebi(c.bytes),
                        c.repair_copies,
                        c.kernel_copies,
                        f"{c.seconds:.3f}",
                        c.reason,
                    )
                    for c in self.collectives
                ],
            )
        if self.memory:
            lines += _table(
                "group device MiB-in-use MiB-held",
                [(m.group, m.device, _mebi(m.in_use), _mebi(m.held)) for m in self.memory],
            )
        if not self.rows and not self.collectives:
            lines.append("no call yet")
        return "\n".join(lines)


def report(group: dist.ProcessGroup | None = None, *, reset: bool = False) -> Report:
    """What tide did in this process since the start or the last reset.

    Args:
        group: only this process group; all of them if None.
        reset: zero the counts after reading them.

    Returns:
        A :class:`Report`; ``print`` it, or read ``.rows``, ``.collectives``, ``.memory``, ``.fallbacks`` and
        ``.to_dict()``. Rows of groups that were destroyed stay; their ``backend_path`` is empty.
    """
    name = None if group is None else group.group_name
    problem = journal.install_problem
    result = Report(fsdp2_state() if problem is None else f"refused: {problem.text}")
    backends = {n: b for n, b in _backends() if name in (None, n)}
    ways: dict[tuple[str, str, str], dict[str, None]] = {}
    handed_on: dict[tuple[str, str, str], list[str]] = {}
    for group_name, backend in backends.items():
        for total in backend.totals():
            result.collectives.append(CollectiveRow(group_name, **total))
        for device in ("cpu", "cuda"):
            in_use, held = backend.arena_bytes(device)
            if held:
                result.memory.append(MemoryRow(group_name, device, in_use, held))
        for record in backend.records():
            key = (group_name, record["label"], record["op"])
            ways.setdefault(key, {})[record["path"]] = None
            if record["path"] == "inner":
                handed_on.setdefault(key, []).append(record["reason"])
    for row in journal.rows(name):
        key = (row.group, row.module, row.op)
        values = asdict(row) | {"backend_path": "", "fallbacks": row.calls}
        if row.path != STOCK:
            reasons = handed_on.get(key, [])
            values |= {"backend_path": "+".join(ways.get(key, ())), "fallbacks": min(len(reasons), row.calls)}
            if reasons:
                values |= {"kind": "inner", "reason": "; ".join(dict.fromkeys(reasons))}
        result.rows.append(ReportRow(**values))
    if reset:
        journal.reset(name)
        for backend in backends.values():
            backend.reset_totals()
    return result


def _backends() -> Iterator[tuple[str, Any]]:
    """Every live tide backend of this process with its group's name."""
    from . import _C

    for group in list(dist.distributed_c10d._world.pg_map):
        seen: list[Any] = []
        for device in ("cpu", "cuda"):
            try:
                backend = group._get_backend(torch.device(device))
            except RuntimeError:  # the group has no backend for this device
                continue
            backend = getattr(backend, "wrapped_pg", backend)
            if isinstance(backend, _C.TideBackend) and not any(backend is other for other in seen):
                seen.append(backend)
                yield group.group_name, backend


def _numbers(row: ReportRow) -> tuple[Any, ...]:
    return row.calls, _mebi(row.bytes), _mebi(row.copies_avoided), row.fallbacks


def _mebi(nbytes: int) -> str:
    return f"{nbytes / _MEBI:.2f}"


def _table(columns: str, rows: Sequence[Sequence[Any]]) -> list[str]:
    cells = [[name.replace("-", " ") for name in columns.split()], *([str(c) for c in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(cell.replace(".", "", 1).isdigit() for cell in c[1:]) for c in zip(*cells, strict=True)]
    lines = [""]
    for row in cells:
        parts = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)]
        lines.append("  ".join(parts).rstrip())
    return lines

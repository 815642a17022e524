"""What `tide_backend.report()` says of FSDP2 calls that the backend handed to its inner backend."""

from __future__ import annotations

from typing import Any

import pytest
from fallback_kinds import unexplained

import tide_backend
from tide_backend.fsdp2 import journal as journal_module


class Backend:
    """Three all-gathers of one FSDP2 module, two of them inner."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def arena_bytes(self, device: str) -> tuple[int, int]:
        return (3 << 20, 4 << 20) if device == "cuda" else (0, 0)

    def totals(self) -> list[dict[str, Any]]:
        return []

    def records(self) -> list[dict[str, Any]]:
        paths = [("zero_copy", "in the arena"), ("inner", self.reason), ("inner", self.reason)]
        return [{"label": "layer", "op": "all_gather", "path": path, "reason": reason} for path, reason in paths]


@pytest.mark.parametrize("reason", ["a rank had no slot", ""])
def test_a_call_handed_on_has_the_backends_reason(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = journal_module.Journal()
    journal.row("0", "layer", "all_gather").calls = 3
    monkeypatch.setattr(tide_backend.report.__globals__["journal"], "_rows", journal._rows)
    monkeypatch.setitem(tide_backend.report.__globals__, "_backends", lambda: [("0", Backend(reason))])
    (row,) = tide_backend.report().rows
    assert (row.path, row.backend_path, row.fallbacks) == ("tide", "zero_copy+inner", 2)
    assert (row.kind, row.reason) == ("inner", reason)
    memory = {"group": "0", "device": "cuda", "in_use": 3 << 20, "held": 4 << 20}
    assert tide_backend.report().to_dict()["memory"] == [memory]
    assert str(tide_backend.report()).splitlines()[-1].split() == ["0", "cuda", "3.00", "4.00"]
    assert bool(unexplained(tide_backend.report())) == (reason == "")

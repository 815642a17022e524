"""Real text without a download: the source of the running Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

VOCABULARY = 256
_ENOUGH_BYTES = 8 << 20


def load_text() -> torch.Tensor:
    """All top-level modules of the standard library: uint8, one dimension, the same on every rank."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = bytearray()
    for file in files:
        data += file.read_bytes()
        if len(data) >= _ENOUGH_BYTES:
            break
    if not data:
        raise RuntimeError(
            f"no *.py file in {sysconfig.get_paths()['stdlib']}; expected the standard library's source; "
            "use a Python that ships it unpacked"
        )
    return torch.frombuffer(data, dtype=torch.uint8)


class Batches:
    """Random windows of the text; a batch depends on (seed, step, rank) and nothing else."""

    def __init__(self, text: torch.Tensor, batch: int, seq: int, seed: int, rank: int) -> None:
        if text.numel() <= seq:
            raise ValueError(f"seq {seq}: expected less than the text's {text.numel()} bytes")
        self._text, self._batch, self._seq = text, batch, seq
        self._seed, self._rank = seed, rank

    def __call__(self, step: int) -> torch.Tensor:
        """int64 byte values, shape (batch, seq)."""
        generator = torch.Generator().manual_seed(hash((self._seed, step, self._rank)) % (1 << 31))
        starts = torch.randint(self._text.numel() - self._seq, (self._batch,), generator=generator)
        return torch.stack([self._text[s : s + self._seq] for s in starts.tolist()]).long()

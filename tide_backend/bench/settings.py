"""What to measure."""

from __future__ import annotations

import re
from dataclasses import dataclass

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Settings:
    """sizes: bytes of the gathered (all-gather), unreduced (reduce-scatter) or whole (all-to-all) buffer.
    parameters, numel (of each): of one FSDP2 parameter group, for the seam.
    model, layers, tokens (per rank), rounds, profile: for fsdp2, where `versus` may name several, comma-separated.
    gemm (M, N, K), collectives: for overlap."""

    collective: str
    ranks: int = 4
    sizes: tuple[int, ...] = ()
    versus: str = "gloo"
    layout: str = "llama"
    repetitions: int = 15
    warmups: int = 3
    parameters: int = 12
    numel: int = 128
    model: str = "tiny"
    layers: int = 6
    tokens: tuple[int, ...] = ()
    rounds: int = 1
    profile: bool = False
    gemm: tuple[int, int, int] = (64, 256, 512)
    collectives: tuple[str, ...] = COLLECTIVES

    @property
    def device(self) -> str:
        return "cuda" if "nccl" in self.versus else "cpu"


def parse_size(text: str) -> int:
    """Bytes of "4K", "1.5M", "64M", "1G" or a plain number.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), flags=re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise ValueError(f"size {text!r}: expected a positive number with K, M, G or nothing behind it, such as 64M")
    return int(float(match[1]) * UNITS[match[2].upper()])

"""Random data that every rank can work out for every other."""

from __future__ import annotations

import torch

from .call import Place


def empty_bf16(place: Place, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=place.device)


def random_bf16(seed: int, rank: int, numel: int) -> torch.Tensor:
    """bfloat16[numel] of either sign with magnitudes from 2^-8 to 2^8: finite, and every bit of it counts."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    drawn = torch.randint(-(1 << 15), 1 << 15, (numel,), generator=generator, dtype=torch.int16)
    exponent = ((drawn >> 7) & 0xF).add_(119).bitwise_left_shift_(7)
    return drawn.bitwise_and_(~0x7F80).bitwise_or_(exponent).view(torch.bfloat16)


def differing(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many elements differ in any bit (2-byte dtypes)."""
    return int((got.cpu().reshape(-1).view(torch.int16) != want.reshape(-1).view(torch.int16)).sum())

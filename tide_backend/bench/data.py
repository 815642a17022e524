"""Random data that every rank can work out for every other."""

from __future__ import annotations

import torch

from .call import Place


def empty_bf16(place: Place, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=place.device)


def sources_of_all(place: Place, seed: int, numel: int) -> list[torch.Tensor]:
    """Every rank's input, in rank order, on this rank's device: one core of the host takes longer to draw and compare a
    GiB than a GPU to send it many times."""
    return [random_bf16(seed, rank, numel, place.own_device) for rank in range(place.world)]


def random_bf16(seed: int, rank: int, numel: int, device: torch.device | None = None) -> torch.Tensor:
    """bfloat16[numel] of either sign with magnitudes from 2^-8 to 2^8: finite, and every bit of it counts."""
    # What a GPU draws for a seed depends on its number of multiprocessors: this assumes that all ranks' GPUs are of one
    # kind. If they were not, nearly every element would count as wrong.
    device = device or torch.device("cpu")
    generator = torch.Generator(device).manual_seed(seed * 1009 + rank)
    drawn = torch.randint(-(1 << 15), 1 << 15, (numel,), generator=generator, dtype=torch.int16, device=device)
    exponent = ((drawn >> 7) & 0xF).add_(119).bitwise_left_shift_(7)
    return drawn.bitwise_and_(~0x7F80).bitwise_or_(exponent).view(torch.bfloat16)


def differing(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many elements differ in any bit (2-byte dtypes), found on the device of `want`."""
    got = got.to(want.device)
    return int((got.reshape(-1).view(torch.int16) != want.reshape(-1).view(torch.int16)).sum())

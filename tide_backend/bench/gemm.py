"""The matrix product that runs beside a collective."""

from __future__ import annotations

import re

import torch

# tokens x hidden x width of the MLP of a Llama 3.1 70B block; on CPU ranks one of some 0.3 ms.
DEFAULT = {"cuda": (2048, 28672, 8192), "cpu": (64, 256, 512)}


class Gemm:
    """[m, k] @ [k, n] of random values, bf16 on GPUs and fp32 on CPU ranks (whose bf16 may have no instructions)."""

    def __init__(self, shape: tuple[int, int, int], device: str) -> None:
        m, n, k = shape
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.a = torch.randn(m, k, dtype=dtype, device=device)
        self.b = torch.randn(k, n, dtype=dtype, device=device)
        self.out = torch.empty(m, n, dtype=dtype, device=device)

    def run(self) -> None:
        torch.mm(self.a, self.b, out=self.out)


def parse(text: str) -> tuple[int, int, int]:
    """M, N and K of "2048x28672x8192": [M, K] @ [K, N].

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text.strip(), flags=re.IGNORECASE)
    if not match:
        raise ValueError(f"GEMM {text!r}: expected M, N and K of [M, K] @ [K, N], such as 2048x28672x8192")
    return int(match[1]), int(match[2]), int(match[3])

"""Transformer blocks of real proportions: Llama 3.1 70B, and a small one for CPU ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    width: int
    heads: int
    key_value_heads: int
    hidden: int  # of the MLP

    @property
    def parameters(self) -> int:
        """Elements of one block."""
        projected = self.width // self.heads * self.key_value_heads
        return 2 * self.width * (self.width + projected) + 3 * self.width * self.hidden + 2 * self.width


SHAPES = {"llama70b": Shape(8192, 64, 8, 28672), "tiny": Shape(64, 4, 2, 192)}


class Block(nn.Module):
    """Attention without position encoding and a gated MLP; [batch, tokens, width] in and out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, projected = shape.width, shape.width // shape.heads * shape.key_value_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, projected, bias=False)
        self.v = nn.Linear(width, projected, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, shape.hidden, bias=False)
        self.up = nn.Linear(width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        y = self.attention_norm(x)
        q, k, v = (
            projection(y).view(batch, tokens, -1, width // self.shape.heads).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, tokens, width))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Blocks(nn.Module):
    """`layers` blocks; the loss is the mean square of what comes out."""

    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().pow(2).mean()

"""Tiny models whose sizes divide by no world size in use, and the ways of training that FSDP2 offers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, HIDDEN, EXPERTS = 37, 10, 23, 6


@dataclass(frozen=True)
class Case:
    """One training set-up; the defaults are the plainest."""

    name: str
    precision: str = "bf16"  # bf16: bfloat16 parameters reduced in float32; fp32: all float32
    reshard: bool | int = True
    tied: bool = False
    frozen: bool = False
    unused: bool = False
    moe: bool = False
    checkpoint: bool = False
    prefetch: bool = False
    accumulate: str = ""  # "", "no_sync", "no_reshard"
    evaluate: bool = False
    state_dict: bool = False
    hsdp: bool = False
    async_unshard: bool = False
    deterministic: bool = False
    divide: float | None = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Experts(nn.Module):
    """Many parameters of a few elements, of which one call uses half."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        self.first = nn.ParameterList(nn.Parameter(torch.randn(3, DIM) / 3) for _ in range(EXPERTS))
        self.second = nn.ParameterList(nn.Parameter(torch.randn(DIM, 3) / 2) for _ in range(EXPERTS))
        self.scale = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(EXPERTS))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = F.softmax(self.router(x), dim=-1)
        for e in range(self.turn % 2, EXPERTS, 2):
            y = F.linear(F.gelu(F.linear(x, self.first[e])), self.second[e]) * self.scale[e]
            x = x + weights[..., e : e + 1] * y
        return x


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.checkpoint = case.checkpoint
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Experts() if case.moe and i == 1 else Block() for i in range(3))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        if case.unused:
            self.blocks[0].spare = nn.Linear(DIM, 5)
        if case.frozen:
            self.blocks[0].up.weight.requires_grad_(False)
            self.blocks[2].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return self.head(self.norm(x))


def build(case: Case) -> Net:
    torch.manual_seed(7)
    return Net(case)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    tokens = torch.randint(0, VOCAB, (2, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())

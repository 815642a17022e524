"""Synthetic sequence lengths from published distributions.

``lengths.json`` holds the distributions with their sources: histograms (share of documents per bin) and
parametric families. Inside a histogram bin lengths are log-uniform, which puts the mean of the two lists
whose mean is known 4 % above it. Everything is drawn from a seeded generator: the same arguments give the
same lengths everywhere.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

Draw = Callable[[random.Random], float]


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Name to distribution, histograms and parametric ones together."""
    text = resources.files("tide_backend.simulate").joinpath("lengths.json").read_text(encoding="utf-8")
    data = json.loads(text)
    return {**data["histograms"], **data["parametric"]}


@dataclass(frozen=True)
class Workload:
    """A distribution; ``elongate`` multiplies its lengths, ``cap`` (tokens) limits them."""

    name: str
    elongate: float = 1.0
    cap: int = 1 << 20

    def __post_init__(self) -> None:
        if self.name not in catalogue():
            raise ValueError(f'workload: got "{self.name}", expected one of {", ".join(catalogue())}')
        if not self.elongate > 0:
            raise ValueError(f"elongate: got {self.elongate}, expected a factor > 0")

    @property
    def label(self) -> str:
        return f"{self.name} x{self.elongate:g}"

    @property
    def source(self) -> str:
        return catalogue()[self.name].get("source", "parametric, no source")

    def sampler(self) -> Draw:
        """A function that draws one length, in tokens, from a generator."""
        draw = _sampler(catalogue()[self.name])
        factor, cap = self.elongate, self.cap
        return lambda rng: max(1, min(cap, round(draw(rng) * factor)))

    def batch(self, tokens: int, seed: int) -> list[int]:
        """Lengths of one step: documents are drawn until the next one no longer fits in ``tokens``."""
        rng, draw = random.Random(f"{self.name}/{self.elongate:g}/{self.cap}/{seed}"), self.sampler()
        lengths: list[int] = []
        left = tokens
        while True:
            length = int(draw(rng))
            if length > left:
                return lengths
            lengths.append(length)
            left -= length


def _sampler(spec: dict[str, Any]) -> Draw:
    if "upper_edges" in spec:
        return _histogram(spec)
    kind = spec["kind"]
    if kind == "choice":
        values = spec["values"]
        return lambda rng: rng.choice(values)
    low, high = spec["min"], spec["max"]
    if kind == "loguniform":
        return _log_uniform(low, high)
    if kind == "lognormal":
        sigma = spec["sigma"]
        mu = spec["mu"] if "mu" in spec else math.log(spec["mean"]) - sigma**2 / 2
        return lambda rng: min(high, max(low, math.exp(rng.gauss(mu, sigma))))
    raise ValueError(f'lengths.json: kind "{kind}", expected choice, loguniform or lognormal')


def _log_uniform(low: float, high: float) -> Draw:
    ratio = math.log(high / low)
    return lambda rng: low * math.exp(rng.random() * ratio)


def _histogram(spec: dict[str, Any]) -> Draw:
    edges = [spec.get("lower_edge", 1), *spec["upper_edges"]]
    bins = [_log_uniform(low, high) for low, high in itertools.pairwise(edges)]
    shares = list(itertools.accumulate(spec["percent_of_documents"]))

    def draw(rng: random.Random) -> float:
        index = bisect.bisect_right(shares, rng.random() * shares[-1])
        return bins[min(index, len(bins) - 1)](rng)

    return draw

"""What one period of a hybrid model costs: the only thing the solver knows about hardware and model.

A period is the group of layers that repeats, by default one full-attention layer and three sparse ones,
forward and backward. With ``A = sum of L^2`` and ``M`` rows on the fullest rank of a parent of ``W`` ranks::

    repacked      attention_us * A / W + (linear_us + full * exchange(W) + sparse * exchange(w)) * M
    not repacked  attention_us * A / W + (linear_us + (full + sparse) * exchange(W)) * S / W

where ``w`` is the width of a rank's child, ``S`` the parent's tokens and ``exchange`` the cost per row of one
layer's two Ulysses exchanges. In the parent every rank sees all tokens and its share of heads, so attention
is even inside a parent; only rows can be uneven. No overlap, no kernel-efficiency curve and no routing skew
is modelled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tide_backend.repack.assignment import is_power_of_two

MAX_CHILD_WIDTH = 8


@dataclass(frozen=True)
class CostModel:
    """All times in microseconds per period or layer, forward and backward together.

    Attributes:
        attention_us: causal attention core of the period's full layers, per squared token, before ``/ W``.
        linear_us: everything linear in tokens (projections, experts, sparse attention) of all layers of the
            period, per row.
        intra_us: exchange of one layer inside a node, per row, at width 8.
        inter_us: exchange of one layer over nodes, per row.
        full_layers, sparse_layers: layers of each kind in a period.
        q_heads, kv_heads: when both are given, exchanges grow where KV heads are replicated, that is where
            the width exceeds kv_heads.
    """

    attention_us: float = 1.0e-4
    linear_us: float = 11.0
    intra_us: float = 0.055
    inter_us: float = 0.385
    full_layers: int = 1
    sparse_layers: int = 3
    q_heads: int = 0
    kv_heads: int = 0

    def __post_init__(self) -> None:
        for name in ("attention_us", "linear_us", "intra_us", "inter_us"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name}: got {value}, expected a finite number of microseconds >= 0")
        for name in ("full_layers", "sparse_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if (self.q_heads > 0) != (self.kv_heads > 0) or min(self.q_heads, self.kv_heads) < 0:
            raise ValueError(
                f"q_heads {self.q_heads} and kv_heads {self.kv_heads}: give both (positive) or neither (0)"
            )

    @classmethod
    def from_shape(
        cls,
        *,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        active_parameters: float,
        attention_tflops: float,
        linear_tflops: float,
        intra_gb_per_s: float,
        inter_gb_per_s: float,
        element_bytes: int = 2,
        full_layers: int = 1,
        sparse_layers: int = 3,
    ) -> CostModel:
        """From a model's shape and achieved rates.

        ``active_parameters`` are those of one whole period that a token uses; rates are per GPU and
        direction. Attention: 2 L^2 H d FLOPs forward (causal), 3.5 times that with backward. Exchange: q, k,
        v in and the output back, forward and backward, in ``element_bytes``.
        """
        row_bytes = 2 * element_bytes * head_dim * (2 * q_heads + 2 * max(kv_heads, MAX_CHILD_WIDTH))
        row_us = row_bytes / 1e3  # at 1 GB/s
        return cls(
            attention_us=full_layers * 3.5 * 2 * q_heads * head_dim / (attention_tflops * 1e6),
            linear_us=6 * active_parameters / (linear_tflops * 1e6),
            intra_us=row_us * (1 - 1 / MAX_CHILD_WIDTH) / intra_gb_per_s,
            inter_us=row_us / inter_gb_per_s,
            full_layers=full_layers,
            sparse_layers=sparse_layers,
            q_heads=q_heads,
            kv_heads=kv_heads,
        )

    @classmethod
    def from_ratio(cls, k: float, *, slowdown: float = 7.0, **fields: float) -> CostModel:
        """``intra_us = k * linear_us`` and ``inter_us = slowdown * intra_us``, other fields as given."""
        model = cls(**fields)  # type: ignore[arg-type]
        return replace(model, intra_us=k * model.linear_us, inter_us=slowdown * k * model.linear_us)

    def exchange_us(self, width: int, ranks_per_node: int = 8) -> float:
        """One layer's exchange per row over ``width`` ranks; 0 for width 1.

        Inside a node it shrinks with the share of rows that leave their rank, ``1 - 1/width``. Over nodes it
        is ``inter_us`` whatever the width, since nearly all rows leave the node.
        """
        if width == 1:
            return 0.0
        if width > ranks_per_node:
            return self.inter_us * self._replication(width)
        return self.intra_us * self._replication(width) * (1 - 1 / width) / (1 - 1 / MAX_CHILD_WIDTH)

    def _replication(self, width: int) -> float:
        if self.q_heads == 0:
            return 1.0
        reference = self.q_heads + max(self.kv_heads, MAX_CHILD_WIDTH)
        return (self.q_heads + max(self.kv_heads, width)) / reference

    def full_row_us(self, parent_width: int, ranks_per_node: int = 8) -> float:
        """Full layers of a period without their attention core, per row."""
        share = self.linear_us * self.full_layers / (self.full_layers + self.sparse_layers)
        return share + self.full_layers * self.exchange_us(parent_width, ranks_per_node)

    def sparse_row_us(self, width: int, ranks_per_node: int = 8) -> float:
        """Sparse layers of a period, per row, for samples spread over ``width`` ranks."""
        share = self.linear_us * self.sparse_layers / (self.full_layers + self.sparse_layers)
        return share + self.sparse_layers * self.exchange_us(width, ranks_per_node)

    def break_even(self, parent_width: int, ranks_per_node: int = 8) -> float:
        """Child imbalance (fullest rank over mean) above which repacking loses, with unit-wide children."""
        unit = unit_width(parent_width, ranks_per_node)
        full = self.full_row_us(parent_width, ranks_per_node)
        wide = full + self.sparse_row_us(parent_width, ranks_per_node)
        return wide / (full + self.sparse_row_us(unit, ranks_per_node))


def unit_width(parent_width: int, ranks_per_node: int) -> int:
    """Widest child of a parent: 8 ranks, a node, or the parent, whichever is smallest."""
    for name, value in (("parent width", parent_width), ("ranks_per_node", ranks_per_node)):
        if not is_power_of_two(value):
            raise ValueError(f"{name}: got {value}, expected a power of two")
    return min(MAX_CHILD_WIDTH, ranks_per_node, parent_width)

"""Attention sample by sample on global float64 tensors, and the same by `cu_seqlens` as kernels take it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int = 0) -> torch.Tensor:
    """One sequence: q `[t, H, d]`, k `[t, H_kv, d]`, v `[t, H_kv, d_v]` -> `[t, H, d_v]`, causal, grouped."""
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[2] ** 0.5
    t = torch.arange(q.shape[0])
    hidden = t.unsqueeze(1) < t.unsqueeze(0)
    if window:
        hidden = hidden | (t.unsqueeze(1) - t.unsqueeze(0) >= window)
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def by_lengths(q, k, v, lengths: Sequence[int], window: int = 0) -> torch.Tensor:
    """Sequences of the given lengths one after the other in dimension 0."""
    parts = zip(*(t.split(list(lengths)) for t in (q, k, v)), strict=True)
    out = [causal_attention(*part, window=window) for part in parts]
    return torch.cat(out) if out else q.new_zeros(0, q.shape[1], v.shape[2])


def by_cu_seqlens(q, k, v, cu_seqlens: torch.Tensor, window: int = 0) -> torch.Tensor:
    """As a variable-length kernel: rows `[T, heads, d]`, sequence n is rows cu_seqlens[n] to cu_seqlens[n + 1]."""
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens[-1] == q.shape[0]
    return by_lengths(q, k, v, cu_seqlens.diff().tolist(), window)


def by_position_ids(q, k, v, position_ids: torch.Tensor) -> torch.Tensor:
    """As frameworks that find sequence starts by position 0."""
    begins = (position_ids == 0).nonzero().flatten().tolist()
    assert not len(position_ids) or begins[0] == 0
    ends = [*begins[1:], len(position_ids)]
    return by_lengths(q, k, v, [e - b for b, e in zip(begins, ends, strict=True)])

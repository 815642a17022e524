"""Per-parameter shards in the proportions of a real transformer block."""

from __future__ import annotations

# Elements of each parameter of one block.
# Llama 3 8B: hidden 4096, 32 heads, 8 key-value heads of 128, intermediate 14336.
LLAMA = [4096 * 4096, 4096 * 1024, 4096 * 1024, 4096 * 4096, *[4096 * 14336] * 3, 4096, 4096]
# Qwen3 30B-A3B: hidden 2048, 32 heads, 4 key-value heads of 128, 128 experts of intermediate 768.
QWEN3_MOE = [
    2048 * 4096,
    2048 * 512,
    2048 * 512,
    4096 * 2048,
    128,
    128,
    2048 * 128,
    *[2048 * 768] * 384,
    2048,
    2048,
]
# (elements of each parameter, elements that a shard is a multiple of): real shards are whole rows. "llama-odd" is the
# worst case: every parameter misaligns the next.
PARAMETERS = {"llama": (LLAMA, 64), "llama-odd": (LLAMA, 1), "qwen3-moe": (QWEN3_MOE, 1)}


def shard_numels(layout: str, shard_numel: int) -> list[int]:
    """Elements of each parameter in one rank's shard: the block's proportions, `shard_numel` in all.

    Raises:
        ValueError: an unknown layout.
    """
    if layout not in PARAMETERS:
        raise ValueError(f"layout {layout!r}: expected one of {', '.join(PARAMETERS)}")
    weights, row = PARAMETERS[layout]
    total = sum(weights)
    shards, given, seen = [], 0, 0
    for weight in weights:
        # Rounding the running sum keeps the whole exact.
        seen += weight
        upto = shard_numel if seen == total else min(shard_numel, round(seen * shard_numel / total / row) * row)
        shards.append(upto - given)
        given = upto
    return [s for s in shards if s > 0]

"""What a fallback row of `tide_backend.report()` may give as its kind, and which rows explain nothing."""

from __future__ import annotations

from typing import Any

# FSDP2's own functions ran. The words that tide_backend/fsdp2 gives to its `Reason`s.
STOCK_KINDS = frozenset(
    {
        "changed_parameter",
        "compiled_autograd",
        "cpu_offload",
        "custom_all_gather",
        "custom_reduce_scatter",
        "device",
        "extension",
        "functorch",
        "gradient_dtype",
        "gradient_kind",
        "keep_unsharded_storage",
        "no_cuda_kernels",
        "no_shared_memory",
        "odd_shard",
        "output_hook",
        "reduce_dtype",
        "shard_device",
        "shard_dim",
        "sharded_state",
        "spmd_types",
        "tensor_subclass",
        "unknown_fsdp2",
        "world_size_1",
    }
)
# The seam called tide, and tide's backend handed the call to its inner backend.
INNER_KIND = "inner"


def unexplained(report: Any) -> list[str]:
    """Every row of the report that fell back without a sentence, or with a kind that is not known."""
    found = [
        f"{row.op} of {row.module} (group {row.group}): kind {row.kind!r}, reason {row.reason!r}"
        for row in report.fallbacks
        if not row.reason.strip() or row.kind not in STOCK_KINDS | {INNER_KIND}
    ]
    found += [
        f"{row.op} on {row.device} (group {row.group}): no reason"
        for row in report.collectives
        if row.path == "inner" and not row.reason.strip()
    ]
    return found

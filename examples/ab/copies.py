"""Counts the layout copies of one step: what FSDP2 moves only to change a layout."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# operator -> (row, argument that says how much is moved)
LAYOUT_COPIES = {
    "fsdp::all_gather_copy_in": ("all-gather copy-in", "all_gather_inputs"),
    "fsdp::split_with_sizes_copy": ("all-gather copy-out", "out"),
    "fsdp::chunk_cat": ("reduce-scatter copy-in", "out"),
    "fsdp::chunk_cat_mixed_dtype": ("reduce-scatter copy-in", "out"),
}
COPY_KINDS = sorted({row for row, _ in LAYOUT_COPIES.values()})
# The cast of the local shard; a backend may use it to place the shard as well.
_CAST = "aten::_foreach_copy_"


def _bytes(value: Any) -> int:
    tensors = [value] if isinstance(value, torch.Tensor) else value
    return sum(t.numel() * t.element_size() for t in tensors)


class CopyCounter(TorchDispatchMode):
    """Calls and bytes by kind. `packed_fp32` is the part of the reduce-scatter copy-in written as fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)
        self.packed_fp32 = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in LAYOUT_COPIES:
            row, argument = LAYOUT_COPIES[name]
            value = kwargs.get(argument)
            if value is None:
                position = [a.name for a in func._schema.arguments].index(argument)
                value = args[position]
            self._count(row, _bytes(value))
            if row == "reduce-scatter copy-in" and value.dtype == torch.float32:
                self.packed_fp32 += _bytes(value)
        elif name == _CAST:
            self._count("shard cast or placement", _bytes(args[0]))
        return func(*args, **kwargs)

    def _count(self, row: str, size: int) -> None:
        self.calls[row] += 1
        self.bytes[row] += size

    def result(self) -> dict[str, Any]:
        return {"calls": dict(self.calls), "bytes": dict(self.bytes), "packed_fp32_bytes": self.packed_fp32}

"""For `bench fsdp2`: FSDP2's all-gather with its output in symmetric memory, what PyTorch offers without tide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather


class SymmetricAllGather(DefaultAllGather):
    """NCCL's copy-engine all-gather needs a registered output and a group made with `NCCL_CTA_POLICY_ZERO`."""

    def __init__(self) -> None:
        super().__init__()
        symmetric_memory.set_backend("NCCL")

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(symmetric_memory.get_mem_pool(device)):
            return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        symmetric_memory.rendezvous(output_tensor, group=group.group_name)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

"""Which parameter groups are placed by tide's cast kernel: those that it casts, so that no call asks it in vain."""

from __future__ import annotations

import pytest
import torch

from tide_backend.fsdp2.gather_plan import casts_in_kernel

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("to", "sources", "kernel"),
    [
        (BF16, [[F32], [F32, F32]], True),
        (BF16, [[BF16]], False),
        (BF16, [[F32], [BF16]], False),
        (BF16, [[F32, F16]], False),
        (F32, [[F32]], False),
        (F16, [[F32]], False),
        (torch.uint8, [[F32], [BF16]], False),
    ],
)
def test_only_what_the_kernel_casts(to: torch.dtype, sources: list[list[torch.dtype]], kernel: bool) -> None:
    assert casts_in_kernel(to, [[torch.zeros(3, dtype=t) for t in own] for own in sources]) is kernel

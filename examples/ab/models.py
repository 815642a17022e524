"""The two architectures, built from their `transformers` configurations with random weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .settings import Settings
from .text import VOCABULARY

_HEAD_CHANNELS = 64


def _multiple_of(value: float, step: int) -> int:
    return max(step, int(value) // step * step)


def build_model(settings: Settings) -> nn.Module:
    """The whole model in fp32 on the device, the same weights on every rank (seeded)."""
    torch.manual_seed(settings.seed)
    heads = settings.hidden // _HEAD_CHANNELS
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": _HEAD_CHANNELS,
        "max_position_embeddings": settings.seq,
        "use_cache": False,
    }
    with torch.device(settings.device):
        if settings.model == "llama":
            from transformers import LlamaConfig, LlamaForCausalLM

            inner = _multiple_of(settings.hidden * 8 / 3, 64)
            return LlamaForCausalLM(LlamaConfig(intermediate_size=inner, **shared))
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                intermediate_size=settings.hidden * 2,
                moe_intermediate_size=_multiple_of(settings.hidden / 2, 64),
                num_experts=settings.experts,
                num_experts_per_tok=min(2, settings.experts),
                **shared,
            )
        )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The decoder blocks, in order."""
    return list(model.get_submodule("model.layers").children())


def shard_model(model: nn.Module, mesh: DeviceMesh, settings: Settings) -> None:
    """FSDP2 as its documentation shows it: every block, then the root."""
    policy = MixedPrecisionPolicy()
    if settings.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.reshard_after_forward)

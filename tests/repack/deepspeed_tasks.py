"""DeepSpeed's own sequence-parallel attention modules, unmodified, on the envelope of random plans."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import torch.distributed as dist
from attention_reference import by_cu_seqlens, by_position_ids
from caller_tasks import Case, replicated


def start_deepspeed() -> None:
    import deepspeed

    # Not part of what is tested, and minutes of compiling: a shared-memory all-reduce for CPU inference.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def distributed_attention(rank: int, world: int, seeds: list[int], batch_dim: int) -> None:
    """`DistributedAttention` with tensors `[b, t, H, d]` (batch_dim 0) or `[t, b, H, d]` (batch_dim 1)."""
    start_deepspeed()
    from deepspeed.sequence.layer import DistributedAttention

    for seed in seeds:
        case = Case(seed, world, kv=(1, world, 2 * world)[seed % 3])
        e = case.plan.envelope
        cu_seqlens = e.cu_seqlens()

        def local(q, k, v, cu_seqlens=cu_seqlens):
            out = by_cu_seqlens(*(t.squeeze(batch_dim) for t in (q, k, v)), cu_seqlens)
            return out.unsqueeze(batch_dim)

        module = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1 - batch_dim)
        leaves = [e.place(t, rank).requires_grad_() for t in case.qkv]
        q, k, v = leaves[0], replicated(leaves[1], world), replicated(leaves[2], world)
        out = module(*(t.unsqueeze(batch_dim) for t in (q, k, v)), batch_dim).squeeze(batch_dim)
        (out * e.place(case.weight, rank)).sum().backward()
        case.check(rank, out, leaves, f"DistributedAttention, seed {seed}, rank {rank}")


def alst(rank: int, world: int, seeds: list[int]) -> None:
    """`UlyssesSPAttentionHF`: variable length; gathers position ids and replicates KV heads itself."""
    start_deepspeed()
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    def attention(module, q, k, v, mask, position_ids, **_):
        out = by_position_ids(*(t[0].transpose(0, 1) for t in (q, k, v)), position_ids[0])
        return out.unsqueeze(0), None

    for seed in seeds:
        kv = (1, 2, world, 2 * world)[seed % 4]
        case = Case(seed, world, kv=kv, v_dim=4)
        e = case.plan.envelope
        module = UlyssesSPAttentionHF(
            attention, 1, 2 * world, 4, kv, 1, dist.group.WORLD, seq_length_is_variable=True
        )
        own = e.position_ids()[rank * e.rows : (rank + 1) * e.rows].unsqueeze(0)
        leaves = [e.place(t, rank).requires_grad_() for t in case.qkv]
        layer = SimpleNamespace(training=True, num_key_value_groups=2 * world // kv)
        out, _ = module(layer, *(t.transpose(0, 1).unsqueeze(0) for t in leaves), None, position_ids=own)
        out = out.reshape(e.rows, 2 * world, 4)
        (out * e.place(case.weight, rank)).sum().backward()
        case.check(rank, out, leaves, f"UlyssesSPAttentionHF, seed {seed}, rank {rank}")

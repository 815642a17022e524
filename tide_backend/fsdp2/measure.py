"""Host time of one FSDP2 parameter group's all-gather and reduce-scatter, for ``python -m tide_backend.bench seam``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

# The collectives under their names in PyTorch from 2.14 on and before.
COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
KINDS = ("forward", "copies", "backward", "collective", "whole")


class Clock:
    """Seconds in some functions of each kind, without those spent in collectives that they call."""

    def __init__(self) -> None:
        self.spent = {"forward": 0.0, "copies": 0.0, "backward": 0.0, "collective": 0.0}
        self._depth = dict.fromkeys(self.spent, 0)

    def wrap(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            spent, depth = self.spent, self._depth
            depth[kind] += 1
            collective = spent["collective"]
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                depth[kind] -= 1
                if not depth[kind]:  # one of a kind may call another
                    spent[kind] += took - (spent["collective"] - collective)

        return timed

    def take(self) -> dict[str, float]:
        """Seconds of each kind since the last call."""
        taken = dict(self.spent)
        self.spent.update(dict.fromkeys(self.spent, 0.0))
        return taken


@contextmanager
def _timed(clock: Clock, comm: Any) -> Iterator[None]:
    names: list[tuple[Any, str, str]] = [
        (_fsdp_param_group, "foreach_all_gather", "forward"),
        (_fsdp_param_group, "foreach_all_gather_copy_out", "forward"),
        (_fsdp_param_group, "foreach_reduce", "backward"),
        (_fsdp_collectives, "foreach_reduce_scatter_copy_in", "copies"),
        (type(comm), "allocate", "copies"),
        (type(comm), "__call__", "copies"),
    ]
    names += [(dist, name, "collective") for name in COLLECTIVES if hasattr(dist, name)]
    kept = [(owner, name, owner.__dict__.get(name), getattr(owner, name)) for owner, name, _ in names]
    for (owner, name, kind), (_, _, _, original) in zip(names, kept, strict=True):
        setattr(owner, name, clock.wrap(kind, original))
    try:
        yield
    finally:
        for owner, name, own, _ in kept:
            delattr(owner, name) if own is None else setattr(owner, name, own)


def group_seconds(
    group: dist.ProcessGroup,
    parameters: int,
    numel: int,
    warmups: int,
    repetitions: int,
    device: torch.device,
) -> dict[str, list[float]]:
    """Times of a group of ``parameters`` bf16 parameters of ``numel`` elements, reduced in fp32, on ``device``.

    In seconds of this rank's host thread, without the collectives: ``forward``: FSDP2's all-gather and copy-out
    functions; ``copies``: what surrounds the reduce-scatter (its buffers, the copy-in, the call); ``backward``: FSDP2's
    whole reduce function, which also hands out the sharded gradients. ``collective``: the two collectives. ``whole``:
    all of it. On a GPU, which works while the host goes on, every repetition begins when the device has nothing to do.
    """
    module = nn.Module()
    module.weights = nn.ParameterList(nn.Parameter(torch.ones(numel, device=device)) for _ in range(parameters))
    module.forward = lambda x: x
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(module, mesh=DeviceMesh.from_group(group, device.type), mp_policy=policy)
    module(torch.ones(1, device=device))
    state = module._get_fsdp_state()
    param_group = (getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])[0]
    clock = Clock()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with _timed(clock, param_group._reduce_scatter_comm):
        for repetition in range(-warmups, repetitions):
            module.reshard()
            module.unshard()
            for p in module.parameters():
                p.grad = torch.ones_like(p)
            param_group.post_backward()
            param_group.finalize_backward()
            module.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken = clock.take()
            if repetition >= 0:
                taken["whole"] = taken["forward"] + taken["backward"] + taken["collective"]
                for kind, seconds in taken.items():
                    times[kind].append(seconds)
    return times

"""Groups split from groups, options copied, groups aborted."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any
from unittest import mock

import pytest
import rank_process
import torch
import torch.distributed as dist
from rank_data import backend, error_of
from ranks import run_ranks
from test_lifecycle import use

import tide_backend

DEFAULT = dist.distributed_c10d._get_default_group
CPU = torch.device("cpu")


def split_of_the_group(rank: int, world: int) -> None:
    """ProcessGroup.split_group, which dist.split_group calls, needs no accelerator."""
    parent = DEFAULT()
    ours = backend()
    if not ours.supports_splitting:
        raise AssertionError("splitting is not supported")
    before = ours.options.group_name, ours.options._timeout
    for n in range(2):  # the same name again, once the first is gone
        pair = [[0, 2], [1, 3]][rank % 2]
        child = parent.split_group(pair, group_name=f"pair{rank % 2}", group_desc="a pair")
        if not isinstance(child._get_backend(CPU), tide_backend._C.TideBackend) or child.size() != 2:
            raise AssertionError(f"{child._get_backend(CPU)}, {child.size()}")
        if child._get_backend(CPU).options.global_ranks_in_group != pair:
            raise AssertionError(f"{child._get_backend(CPU).options.global_ranks_in_group}")
        out = torch.empty(2)
        child._allgather_base(out, torch.full((1,), float(rank + n))).wait()
        if out.tolist() != [float(r + n) for r in pair]:
            raise AssertionError(f"{out}")
        child.allreduce([out]).wait()
        child.shutdown()
        del child
    if parent.split_group([0, 1], group_name="half") is not None and rank > 1:
        raise AssertionError("a group for a rank that is not in it")
    if ours.options is ours.options or (ours.options.group_name, ours.options._timeout) != before:
        raise AssertionError("the split changed its parent's options")
    use()


def test_split_of_a_group() -> None:
    run_ranks(4, split_of_the_group, fresh=True)


def bound_to_a_device(rank: int, world: int) -> None:
    """dist.split_group with the CPU in the accelerator's place, which PyTorch 2.14 refuses as device_id."""
    rank_process.init("tide")
    DEFAULT().bound_device_id = torch.device("cpu:0")
    accelerator = mock.patch.multiple(
        torch.accelerator, is_available=lambda: True, current_accelerator=lambda *a, **k: CPU
    )
    with accelerator:
        pair = dist.split_group(split_ranks=[[0, 1], [3, 2]])
        use(pair)
        if dist.get_rank(pair) != [0, 1, 1, 0][rank]:
            raise AssertionError(f"rank {rank} has rank {dist.get_rank(pair)} in its pair")
        some = dist.split_group(split_ranks=[[1, 2, 3]])
        if rank:
            use(some)
        elif some is not dist.GroupMember.NON_GROUP_MEMBER:
            raise AssertionError(f"{some}")
    # What new_group calls on ranks outside the new group; it refuses to be bound to a CPU, so it is called here.
    backend().perform_nocolor_split(CPU)
    DEFAULT().bound_device_id = None
    use()
    dist.destroy_process_group()


NEW = tuple(int(v) for v in torch.__version__.split(".")[:2]) >= (2, 14)


@pytest.mark.skipif(not NEW, reason="dist.split_group of this torch knows its device from CUDA alone")
def test_split_group_with_a_bound_device() -> None:
    run_ranks(4, bound_to_a_device, backend=None, fresh=True)


def test_options_are_copied() -> None:
    options = tide_backend.Options()
    options.arena_bytes, options.shared_memory = 123 << 20, False
    for other in (copy.copy(options), copy.deepcopy(options)):
        assert other is not options and (other.arena_bytes, other.shared_memory) == (123 << 20, False)
        other.arena_bytes = 1
    assert options.arena_bytes == 123 << 20


def aborted(rank: int, world: int) -> dict[str, Any]:
    use()
    seen: list[str] = []
    group = DEFAULT()
    if hasattr(group, "register_abort_hook"):
        group.register_abort_hook(1, lambda: seen.append("kept"))
        group.register_abort_hook(2, lambda: seen.append("removed"))
        group.unregister_abort_hook(2)
    if rank != 0:
        time.sleep(1.5)
        return {}
    timer = threading.Timer(0.5, group.abort)
    timer.start()
    start = time.monotonic()
    first = error_of(dist.all_gather_into_tensor, torch.empty(world), torch.ones(1))
    took = time.monotonic() - start
    timer.join()
    second = error_of(dist.all_gather_into_tensor, torch.empty(world), torch.ones(1))
    return {"first": first, "second": second, "took": took, "hooks": seen}


def test_abort_ends_a_waiting_call() -> None:
    got = run_ranks(2, aborted, fresh=True)[0]
    assert got["took"] < 1.2
    for kind, text in (got["first"], got["second"]):
        assert kind == "PeerError" and "aborted on rank 0" in text, text
    assert got["hooks"] == (["kept"] if hasattr(dist.ProcessGroup, "register_abort_hook") else [])

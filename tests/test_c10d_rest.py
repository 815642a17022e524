"""The rest of torch.distributed's calls and group functions, and what tide refuses as any backend without it does."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import oracle
import pytest
import rank_process
import torch
import torch.distributed as dist
from rank_data import backend, check_bits, error_of, expect_path, last_call, random_bytes, random_values, tensor
from ranks import run_ranks
from test_lifecycle import use
from torch._C import _distributed_c10d as c10d

import tide_backend

DEFAULT = dist.distributed_c10d._get_default_group
CPU = torch.device("cpu")
MONITORED = tuple(int(v) for v in torch.__version__.split(".")[:2]) >= (2, 14)


def full(value: float, numel: int = 3) -> torch.Tensor:
    return torch.full((numel,), float(value))


def coalesced_and_sparse(rank: int, world: int) -> None:
    total = sum(range(world))
    values = [full(rank), full(rank + 1, 2)]
    dist.all_reduce_coalesced(values)
    check_bits(values[0], np.full(3, total, np.float32), "all_reduce_coalesced")
    check_bits(values[1], np.full(2, total + world, np.float32), "all_reduce_coalesced")

    lists = [[torch.empty(3), torch.empty(2)] for _ in range(world)]
    dist.all_gather_coalesced(lists, [full(rank), full(rank + 9, 2)])
    for r in range(world):
        check_bits(lists[r][0], np.full(3, r, np.float32), "all_gather_coalesced")
        check_bits(lists[r][1], np.full(2, r + 9, np.float32), "all_gather_coalesced")

    sparse = torch.sparse_coo_tensor([[rank, world]], [1.0, 2.0], (world + 1,))
    dist.all_reduce(sparse)
    check_bits(sparse.to_dense(), np.array([1.0] * world + [2.0 * world], np.float32), "sparse all_reduce")


def test_coalesced_and_sparse_reductions() -> None:
    run_ranks(2, coalesced_and_sparse)


def objects_from_rank_to_rank(rank: int, world: int) -> None:
    sent = [{"from": 1}, "x" * 1000]
    if rank == 1:
        dist.send_object_list(sent, dst=2)
    elif rank == 2:
        got: list[Any] = [None, None]
        if dist.recv_object_list(got, src=1) != 1 or got != sent:
            raise AssertionError(f"{got}")


def test_object_lists_from_rank_to_rank() -> None:
    run_ranks(3, objects_from_rank_to_rank)


def subgroups(rank: int, world: int) -> None:
    mine, every = dist.new_subgroups(2)
    use(mine)
    if len(every) != world // 2 or dist.get_process_group_ranks(mine) != [rank // 2 * 2, rank // 2 * 2 + 1]:
        raise AssertionError(f"{dist.get_process_group_ranks(mine)} of {len(every)} groups")
    odd_even, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    use(odd_even)
    place = dist.get_group_rank(odd_even, rank)
    if place != rank // 2 or dist.get_global_rank(odd_even, place) != rank:
        raise AssertionError(f"rank {rank} is {place} in its group")
    if {dist.get_backend(g) for g in (mine, odd_even)} != {"tide"}:
        raise AssertionError(f"{dist.get_backend(mine)}, {dist.get_backend(odd_even)}")
    for group in [*every, odd_even]:
        if group is not dist.GroupMember.NON_GROUP_MEMBER and rank in dist.get_process_group_ranks(group):
            dist.destroy_process_group(group)


def test_subgroups() -> None:
    run_ranks(4, subgroups)


def names_of_newer_versions(rank: int, world: int) -> None:
    shards = [random_bytes(1, r, 7, torch.float32) for r in range(world)]
    out = torch.empty(world * 7)
    dist.all_gather_single(out, tensor(shards[rank], torch.float32))
    check_bits(out, oracle.all_gather(shards), "all_gather_single")
    expect_path("staged")
    inputs = [random_values(2, r, world * 5, "float32") for r in range(world)]
    out = torch.empty(5)
    dist.reduce_scatter_single(out, tensor(inputs[rank], torch.float32))
    check_bits(out, oracle.reduce_scatter(inputs, "float32")[rank], "reduce_scatter_single")
    expect_path("staged")


def names_of_newer_methods(rank: int, world: int) -> None:
    shards = [random_bytes(1, r, 7, torch.float32) for r in range(world)]
    inputs = [random_values(2, r, world * 5, "float32") for r in range(world)]
    group = backend()
    outs, parts = [torch.empty(world * 7)], [torch.empty(5)]
    group.all_gather_single_coalesced(outs, [tensor(shards[rank], torch.float32)]).wait()
    group.reduce_scatter_single_coalesced(parts, [tensor(inputs[rank], torch.float32)]).wait()
    check_bits(outs[0], oracle.all_gather(shards), "all_gather_single_coalesced")
    check_bits(parts[0], oracle.reduce_scatter(inputs, "float32")[rank], "reduce_scatter_single_coalesced")
    out = torch.empty(world * 7 if rank == 0 else 0)
    group.gather_single(out, tensor(shards[rank], torch.float32)).wait()
    if rank == 0:
        check_bits(out, oracle.all_gather(shards), "gather_single")


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="newer than this torch")
def test_names_of_newer_versions() -> None:
    run_ranks(2, names_of_newer_versions)


@pytest.mark.skipif(not hasattr(c10d.Backend, "all_gather_single_coalesced"), reason="newer than this torch")
def test_names_of_newer_methods() -> None:
    run_ranks(2, names_of_newer_methods)


def lists_at_once(rank: int, world: int) -> None:
    """The coalesced calls of ProcessGroup, which functional collectives and the coalescing manager use."""
    shards = [[random_bytes(i, r, 4 + i, torch.float32) for r in range(world)] for i in range(2)]
    outs = [torch.empty(world * (4 + i)) for i in range(2)]
    DEFAULT().allgather_into_tensor_coalesced(outs, [tensor(s[rank], torch.float32) for s in shards]).wait()
    for i, out in enumerate(outs):
        check_bits(out, oracle.all_gather(shards[i]), f"all_gather {i}")
    inputs = [[random_values(i, r, world * (3 + i), "float32") for r in range(world)] for i in range(2)]
    outs = [torch.empty(3 + i) for i in range(2)]
    DEFAULT().reduce_scatter_tensor_coalesced(outs, [tensor(s[rank], torch.float32) for s in inputs]).wait()
    for i, out in enumerate(outs):
        check_bits(out, oracle.reduce_scatter(inputs[i], "float32")[rank], f"reduce_scatter {i}")


def test_coalesced_calls_of_the_process_group() -> None:
    run_ranks(3, lists_at_once)


def absent(rank: int, world: int, wait_all: bool) -> str:
    dist.barrier()
    if rank in (1, 2):
        time.sleep(1.5)
        return ""
    return error_of(dist.monitored_barrier, timeout=timedelta(seconds=0.5), wait_all_ranks=wait_all)[1]


@pytest.mark.skipif(not MONITORED, reason="older ones raise for every backend that is not called gloo")
@pytest.mark.parametrize(("wait_all", "who"), [(False, "Rank 1 failed"), (True, "Ranks 1, 2 failed")])
def test_monitored_barrier_names_the_absent_rank(wait_all: bool, who: str) -> None:
    results = run_ranks(4, absent, wait_all, fresh=True)
    assert f"{who} to pass monitoredBarrier" in results[0], results[0]
    assert "Rank 3 successfully reached monitoredBarrier" in results[3] and "rank 0" in results[3], results[3]


# Backend's method -> arguments, for what a tide group does not have.
REFUSED: dict[str, tuple[Any, ...]] = {
    "get_reconfigure_handle": (),
    "mem_allocator": (),
    "memory_stats": (),
    "new_window": (),
    "suspend": (),
    "resume": (),
    "merge": (dist.HashStore(), None, 0, 2),
    "reconfigure": (c10d.ReconfigureOptions() if hasattr(c10d, "ReconfigureOptions") else None,),
    "shrink": ([1],),
    "_enable_collectives_timing": (),
    "_wait_for_pending_works": (),
    "_register_on_completion_hook": (print,),
}


def refuses(rank: int, world: int) -> dict[str, str]:
    ours = backend()
    texts = {}
    for name, arguments in REFUSED.items():
        if hasattr(type(ours), name):
            given = [ours.options if a is None else a for a in arguments]
            # Some are properties.
            texts[name] = error_of(lambda name=name, given=given: getattr(ours, name)(*given))[1]
    for name in ("supports_reconfigure", "supports_shrinking", "supports_time_estimate", "supports_window"):
        value = getattr(ours, name, False)
        if value() if callable(value) else value:
            raise AssertionError(f"{name} says yes")
    use()
    return texts


def test_what_is_refused_says_so_and_harms_nothing() -> None:
    for texts in run_ranks(2, refuses):
        assert texts and all("tide" in text for text in texts.values()), texts


def small_questions(rank: int, world: int) -> None:
    ours = backend()
    before = ours._get_sequence_number_for_group()
    use()
    if ours._get_sequence_number_for_group() <= before:
        raise AssertionError("the sequence number stands still")
    got = ours.name(), ours.rank(), ours.size(), ours.supports_splitting, ours.supports_coalescing
    if got != ("tide", rank, world, True, True):
        raise AssertionError(f"{got}")
    if hasattr(ours, "get_error") and "SUCCESS" not in str(ours.get_error()):
        raise AssertionError(f"{ours.get_error()}")
    if hasattr(ours, "eager_connect_single_device"):
        ours.eager_connect_single_device(CPU)
    if dist.get_backend_config() != "cpu:tide,cuda:tide" or not dist.is_backend_available("tide"):
        raise AssertionError(f"{dist.get_backend_config()}")


def test_small_questions() -> None:
    run_ranks(2, small_questions)


def without_effect(rank: int, world: int) -> None:
    ours = backend()
    for name, argument in (
        ("_add_ephemeral_timeout", timedelta(seconds=1)),
        ("_set_group_uid", "a name"),
        ("setUsePgForSymmMemRendezvous", True),
    ):
        if hasattr(ours, name):
            getattr(ours, name)(argument)
    use()


def test_what_has_no_effect_is_accepted() -> None:
    run_ranks(2, without_effect, fresh=True)


def hooks(rank: int, world: int) -> list[str]:
    seen: list[str] = []
    group = DEFAULT()
    group.register_pre_hook(1, lambda args: seen.append(f"before {args.name}"))
    group.register_post_hook(2, lambda args: seen.append("after"))
    dist.all_gather_into_tensor(torch.empty(world), full(rank, 1))
    group.unregister_pre_hook(1)
    group.unregister_post_hook(2)
    dist.all_gather_into_tensor(torch.empty(world), full(rank, 1))
    return seen


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="newer than this torch")
def test_hooks_before_and_after_calls() -> None:
    for seen in run_ranks(2, hooks):
        assert seen[0].startswith("before HookOpName.ALLGATHER") and seen[1:] == ["after"], seen


def profiled(rank: int, world: int) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler, dist.record_comm("layer 3"):
        dist.all_gather_into_tensor(torch.empty(world), full(rank, 1))
    return [event.name for event in profiler.events()]


@pytest.mark.skipif(not hasattr(dist, "record_comm"), reason="newer than this torch")
def test_profilers_see_calls_under_their_names() -> None:
    for names in run_ranks(2, profiled):
        assert "tide::all_gather" in names and "layer 3" in names, names


def recorded_failure(rank: int, world: int) -> dict[str, Any]:
    hook = c10d.FlightRecorderHook.attach(DEFAULT()) if hasattr(c10d, "FlightRecorderHook") else None
    dist.all_gather_into_tensor(torch.empty(world * 3), full(rank))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    kind, _ = error_of(dist.reduce_scatter_tensor, torch.empty(3), full(rank, 3 * world))
    flight = json.loads(c10d._dump_fr_trace_json()) if hook is not None else None
    return {"error": kind, "last": last_call(), "flight": flight, "rows": tide_backend.report().collectives}


def test_recorders_after_a_failure() -> None:
    """tide's ring of calls has the failed one; PyTorch's flight recorder, where there is one, has all of them."""
    got = run_ranks(2, recorded_failure, fresh=True, dies={1})[0]
    assert got["error"] == "PeerError"
    last = got["last"]
    # The ranks had not decided yet which way it goes.
    assert (last["op"], last["state"], last["path"]) == ("reduce_scatter", "failed", ""), last
    assert [(row.op, row.path, row.calls) for row in got["rows"]] == [("all_gather", "staged", 1)], got["rows"]
    if got["flight"] is not None:
        names = [entry["profiling_name"] for entry in got["flight"]["entries"]]
        assert len(names) >= 3 and any("reduce_scatter" in name for name in names), names


def mesh_of_bound_group(rank: int, world: int) -> None:
    """A mesh whose default group is bound to a device takes its dimensions by splitting that group.

    The CPU stands in for the accelerator: PyTorch refuses a CPU as device_id of init_process_group.
    """
    from torch.distributed import device_mesh

    refused = error_of(rank_process.init, "tide", device_id=CPU)
    if refused[0] != "ValueError":
        raise AssertionError(f"{refused}")
    rank_process.init("tide")
    DEFAULT().bound_device_id = torch.device("cpu:0")
    accelerator = mock.patch.multiple(
        torch.accelerator, is_available=lambda: True, current_accelerator=lambda *a, **k: CPU
    )
    with accelerator, mock.patch.object(device_mesh, "split_group", wraps=dist.split_group) as split:
        mesh = device_mesh.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    if split.call_count != 2:
        raise AssertionError(f"{split.call_count} splits for two dimensions")
    for name, ranks in (("dp", [rank % 2, rank % 2 + 2]), ("tp", [rank // 2 * 2, rank // 2 * 2 + 1])):
        group = mesh[name].get_group()
        if dist.get_process_group_ranks(group) != ranks:
            raise AssertionError(f"{name}: {dist.get_process_group_ranks(group)}, expected {ranks}")
        use(group)
    use(mesh["dp", "tp"]._flatten("all").get_group())
    dist.destroy_process_group()


@pytest.mark.skipif(not MONITORED, reason="dist.split_group of this torch knows its device from CUDA alone")
def test_mesh_dimensions_of_a_group_bound_to_a_device() -> None:
    run_ranks(4, mesh_of_bound_group, backend=None, fresh=True)

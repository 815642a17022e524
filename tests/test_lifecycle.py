"""Groups: made, shared, split, beside other backends, destroyed; and nothing left behind."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from typing import Any

import numpy as np
import oracle
import pytest
import rank_process
import torch
import torch.distributed as dist
from rank_data import backend, check_bits, error_of, expect_path, random_bytes, random_values, tensor
from ranks import run_ranks

import tide_backend


def use(group: Any = None, seed: int = 1, path: str = "staged") -> None:
    """One of each collective in `group`, against the oracle."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    shards = [random_bytes(seed, r, 100 + seed, torch.float32) for r in range(world)]
    out = torch.empty(world * (100 + seed))
    dist.all_gather_into_tensor(out, tensor(shards[rank], torch.float32), group=group)
    check_bits(out, oracle.all_gather(shards), "all_gather")
    if path:
        expect_path(path, "all_gather", group)

    inputs = [random_values(seed, r, world * 33, "bfloat16") for r in range(world)]
    out = torch.empty(33)
    dist.reduce_scatter_tensor(out, tensor(inputs[rank], torch.bfloat16), group=group)
    check_bits(out, oracle.reduce_scatter(inputs, "bfloat16", out_kind="float32")[rank], "reduce_scatter")

    inputs = [random_bytes(seed, r, world * 5, torch.int64) for r in range(world)]
    out = torch.empty(world * 5, dtype=torch.int64)
    dist.all_to_all_single(out, tensor(inputs[rank], torch.int64), group=group)
    check_bits(out, oracle.all_to_all(inputs, [[5] * world] * world)[rank], "all_to_all")

    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    check_bits(total, np.full(2, world, np.float32), "all_reduce")


def descriptors() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return names


def shared_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:tide" in line for line in maps)


def cycles(rank: int, world: int, many: int) -> dict[str, Any]:
    counts = []
    for n in range(many):
        rank_process.init("tide")
        use(seed=n, path="local" if world == 1 else "staged")
        dist.destroy_process_group()
        gc.collect()
        counts.append((len(descriptors()), shared_mappings(), len(os.listdir("/proc/self/task"))))
    tide_files = [d for d in descriptors() if "memfd:tide" in d]
    return {"counts": counts, "files": tide_files}


@pytest.mark.parametrize("world", [1, 2])
def test_twenty_groups_one_after_another_leave_nothing(world: int) -> None:
    before = set(os.listdir("/dev/shm"))
    for result in run_ranks(world, cycles, 20, backend=None, fresh=True):
        counts = result["counts"]
        assert counts[-1] == counts[2], f"descriptors, mappings, threads grow: {counts}"
        assert counts[-1][1] == 0, f"{counts[-1][1]} shared mappings are left"
        assert result["files"] == []
    assert {f for f in set(os.listdir("/dev/shm")) - before if "tide" in f} == set()


def world_of_one(rank: int, world: int) -> None:
    use(path="local")
    out = torch.empty(3)
    layout = tide_backend.ParameterLayout(1, [2, 1])
    tide_backend.apply_layout(out, layout)
    dist.all_gather_into_tensor(out, torch.arange(3.0))
    check_bits(out, np.arange(3, dtype=np.float32), "layout")
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        dist.reduce_scatter_tensor(out, torch.arange(3.0).bfloat16() if op != dist.ReduceOp.MAX else out + 0, op=op)
        check_bits(out, np.arange(3, dtype=np.float32), f"{op}")
    slot, reason = backend().slot(100)
    if slot is not None or reason != "one rank":
        raise AssertionError(f"slot of one rank: {reason}")
    dist.barrier()
    got: list[Any] = [None]
    dist.all_gather_object(got, "me")
    if got != ["me"]:
        raise AssertionError(f"{got}")


def test_world_size_one() -> None:
    run_ranks(1, world_of_one)


def subgroups(rank: int, world: int) -> None:
    rank_process.init("gloo")
    beside = dist.new_group(backend="tide")
    use(beside)
    pairs = [dist.new_group([0, 2], backend="tide"), dist.new_group([1, 3], backend="tide")]
    use(pairs[rank % 2])
    three = dist.new_group([1, 2, 3], backend="tide", timeout=timedelta(seconds=20))
    if rank:
        use(three)
    # The gloo group lives on, and the tide groups work side by side.
    works = []
    for n, group in enumerate([beside, pairs[rank % 2]] * 4):
        size = dist.get_world_size(group)
        out = torch.empty(size * 1000)
        value = torch.full((1000,), float(10 * n + dist.get_rank(group)))
        works.append((dist.all_gather_into_tensor(out, value, group=group, async_op=True), out, n, size))
    for work, out, n, size in works:
        work.wait()
        want = np.repeat(np.arange(size, dtype=np.float32) + 10 * n, 1000)
        check_bits(out, want, f"call {n}")
    total = torch.ones(1)
    dist.all_reduce(total)
    if dist.get_backend() != "gloo" or dist.get_backend(beside) != "tide" or total.item() != world:
        raise AssertionError(f"{dist.get_backend()}, {dist.get_backend(beside)}, {total}")
    dist.destroy_process_group(beside)
    use(pairs[rank % 2], seed=2)
    dist.destroy_process_group()


def test_groups_beside_gloo_and_each_other() -> None:
    run_ranks(4, subgroups, backend=None)


def gloo_beside(rank: int, world: int) -> None:
    other = dist.new_group(backend="gloo")
    value = torch.full((4,), float(rank))
    dist.all_reduce(value, group=other)
    check_bits(value, np.full(4, sum(range(world)), np.float32))
    use()
    dist.destroy_process_group(other)
    use(seed=3)


def test_gloo_beside_tide() -> None:
    run_ranks(2, gloo_beside)


def local_synchronization(rank: int, world: int) -> None:
    """Only the members call new_group, as FSDP2 does for its separate reduce-scatter group."""
    if rank > 0:
        group = dist.new_group([1, 2], backend="tide", use_local_synchronization=True)
        use(group)
        dist.destroy_process_group(group)
    use()


def test_groups_that_only_members_make() -> None:
    run_ranks(3, local_synchronization)


def with_debug_wrapper(rank: int, world: int) -> str:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around the backend."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    rank_process.init("tide")
    use(path="")
    with dist._coalescing_manager():
        out = torch.empty(world)
        dist.all_gather_into_tensor(out, torch.full((1,), float(rank)))
    check_bits(out, np.arange(world, dtype=np.float32))
    name = type(backend()).__name__
    dist.destroy_process_group()
    return name


DETAIL_WORKS = tuple(int(v) for v in torch.__version__.split(".")[:2]) >= (2, 14)


@pytest.mark.skipif(not DETAIL_WORKS, reason="the wrapper of this torch lacks the coalesced calls, for any plugin")
def test_debug_wrapper() -> None:
    assert run_ranks(2, with_debug_wrapper, backend=None, fresh=True) == ["_ProcessGroupWrapper"] * 2


def device_strings(rank: int, world: int, name: str) -> list[str]:
    rank_process.init(name)
    cpu = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    if "cpu:tide" in name:
        use()
    else:
        value = torch.empty(world)
        dist.all_gather_into_tensor(value, torch.full((1,), float(rank)))
        check_bits(value, np.arange(world, dtype=np.float32))
    dist.barrier()
    got: list[Any] = [None] * world
    dist.all_gather_object(got, rank)
    dist.destroy_process_group()
    return [cpu.name(), str(got)]


@pytest.mark.parametrize("name", ["cpu:tide", "cpu:gloo,cuda:tide", "cpu:tide,cuda:tide"])
def test_device_strings(name: str) -> None:
    expected = "gloo" if "cpu:gloo" in name else "tide"
    assert run_ranks(2, device_strings, name, backend=None) == [[expected, "[0, 1]"]] * 2


def meshes(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    use(flat.get_group())
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        group = square.get_group(name)
        if not isinstance(backend(group), tide_backend._C.TideBackend):
            raise AssertionError(f"mesh dimension {name} has {backend(group)}")
        use(group)
    whole = torch.arange(24.0).reshape(6, 4)
    sharded = distribute_tensor(whole, flat, [Shard(0)])
    check_bits(sharded.redistribute(placements=[Replicate()]).to_local(), whole.numpy(), "DTensor gather")
    partial = DTensor.from_local(whole * (rank + 1), flat, [torch.distributed.tensor.Partial()])
    expected = whole.numpy() * sum(r + 1 for r in range(world))
    check_bits(partial.redistribute(placements=[Shard(0)]).full_tensor(), expected, "DTensor reduction")


def test_device_meshes() -> None:
    run_ranks(4, meshes)


def forked_child(rank: int, world: int) -> tuple[int, str]:
    use()
    dist.all_gather_into_tensor(torch.empty(world), torch.ones(1), async_op=True).wait()  # starts a thread, which waits
    slot, _ = backend().slot(1000)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kind, text = error_of(dist.all_gather_into_tensor, torch.empty(world), torch.ones(1))
            os.write(write, f"{kind}: {text}".encode())
            del slot
            gc.collect()
            dist.destroy_process_group()
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    text = ""
    while part := os.read(read, 4096):
        text += part.decode()
    os.close(read)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    use(seed=2)
    assert slot is not None
    return status, text


def test_a_forked_child_is_inert() -> None:
    for status, text in run_ranks(2, forked_child, fresh=True):
        assert status == 0, text
        assert text.startswith("UsageError") and "called in a forked child" in text


def one_object_for_two_groups(rank: int, world: int) -> tuple[Any, ...]:
    options = tide_backend.Options(recorded_calls=7)
    given = options._timeout, options.group_name
    rank_process.init("tide", timeout_s=20, pg_options=options)
    other = dist.new_group([1, 0], backend="tide", timeout=timedelta(seconds=2), pg_options=options)
    assert (options._timeout, options.group_name) == given, "the caller's object is the caller's"
    options.recorded_calls = 1  # of groups to come
    use(path="")
    use(other, path="")
    found = [backend(group).options for group in (None, other)]
    dist.destroy_process_group()
    return [(o._timeout.total_seconds(), o.recorded_calls) for o in found], found[0].group_name != found[1].group_name


def test_options_may_be_used_for_several_groups() -> None:
    """Each keeps its own name and timeout."""
    assert run_ranks(2, one_object_for_two_groups, backend=None) == [([(20, 7), (2, 7)], True)] * 2


def destroy_while_busy(rank: int, world: int) -> tuple[float, list[tuple[str, str]]]:
    use()
    out = torch.empty(world * 10)
    works = []
    if rank == 0:  # the others never join these
        works = [dist.all_gather_into_tensor(out, torch.ones(10), async_op=True) for _ in range(3)]
        time.sleep(0.2)
    start = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - start
    return took, [error_of(w.wait) for w in works]


def test_destroy_with_outstanding_work() -> None:
    results = run_ranks(2, destroy_while_busy, fresh=True)
    assert all(took < 3 for took, _ in results), results
    assert len(results[0][1]) == 3
    for kind, text in results[0][1]:
        assert kind == "PeerError" and ("destroyed" in text or "rank 1" in text), text


def arena_outlives_group(rank: int, world: int) -> None:
    rank_process.init("tide")
    slot, reason = backend().slot(world * 4000)
    if slot is None:
        raise AssertionError(reason)
    out = slot.view(torch.float32)
    dist.all_gather_into_tensor(out, torch.full((1000,), float(rank)))
    dist.destroy_process_group()
    gc.collect()
    check_bits(out, np.repeat(np.arange(world, dtype=np.float32), 1000), "after destroy")
    out += 1
    del slot, out
    gc.collect()
    if shared_mappings():
        raise AssertionError("the arena is still mapped after its last tensor went")


def test_a_slot_outlives_its_group() -> None:
    run_ranks(2, arena_outlives_group, backend=None, fresh=True)


def two_default_groups(rank: int, world: int) -> None:
    """A new default group in the same process and store does not meet the old one."""
    store = rank_process.store()
    for n in range(3):
        dist.init_process_group("tide", store=store, rank=rank, world_size=world)
        use(seed=n)
        if rank == n % world:
            time.sleep(0.05)
        dist.destroy_process_group()


def test_groups_in_one_store() -> None:
    run_ranks(3, two_default_groups, backend=None)


def import_is_idempotent(rank: int, world: int) -> tuple[str, Any]:
    tide_backend.register()
    tide_backend.register()
    return dist.Backend.TIDE, dist.Backend.backend_capability["tide"]


def test_registration_is_idempotent() -> None:
    assert run_ranks(1, import_is_idempotent, backend=None) == [("tide", ["cpu", "cuda"])]

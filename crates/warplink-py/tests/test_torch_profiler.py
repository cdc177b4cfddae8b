"""Calls with CPU tensors in PyTorch's profilers and debug modes; PyTorch's own tests look at the rest."""

import json

import pytest

torch = pytest.importorskip("torch")

from conftest import as_ranks, start  # noqa: E402


@as_ranks(2)
def test_a_profile_has_every_call(dist, rank, world, place):
    peer = 1 - rank
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 4))
        work = dist.all_gather_into_tensor(torch.empty(10), torch.ones(5), async_op=True)
        work.get_future().wait()
        dist.barrier()
        sent = dist.isend(torch.ones(7), peer)
        dist.recv(torch.ones(7), peer)
        dist.recv(torch.ones(7)) if rank == 0 else dist.send(torch.ones(7), peer)
        sent.wait()
        # One that fails has an end, too.
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(2 + rank))
    found = [(event.name, event.input_shapes) for event in profile.events() if event.name.startswith("warplink:a")]
    assert ("warplink:all_reduce", [[3, 4]]) in found and ("warplink:all_reduce", [[2 + rank]]) in found
    assert ("warplink:all_gather", [[5]]) in found
    events = [event for event in profile.events() if event.name.startswith("warplink:") and "::" not in event.name]
    names = sorted(event.name.removeprefix("warplink:") for event in events)
    last = "recvAnySource" if rank == 0 else "send"
    assert names == sorted(["all_reduce", "all_reduce", "all_gather", "barrier", "send", "recv", last])
    assert all(event.is_async for event in events)
    profile.export_chrome_trace(f"{place}.trace.{rank}")
    with open(f"{place}.trace.{rank}") as file:
        trace = json.load(file)["traceEvents"]
    (said,) = (event["args"] for event in trace if event.get("name") == "warplink::all_gather")
    expected = {
        "Collective name": "all_gather",
        "dtype": "float32",
        "In msg nelems": 5,
        "Out msg nelems": 10,
        "Group size": world,
        "Process Group Ranks": "[0, 1]",
        "Process Group Name": str(dist.group.WORLD.group_name),
    }
    assert {name: said.get(name) for name in expected} == expected


def counted(rank, world, place, backend):
    """The calls that ``CommDebugMode`` counts, with PyTorch's own debugging at its highest level, at which DDP crashes
    with Gloo."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF" if backend == "gloo" else "DETAIL")
        torch.distributed.set_debug_level_from_env()
        dist = start(rank, world, place + backend, backend)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    own, whole = torch.ones(4), torch.ones(4 * world)
    parts = list(whole.chunk(world))
    mesh = init_device_mesh("cpu", (world,))
    with CommDebugMode() as mode:
        model(own).sum().backward()
        distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        dist.all_reduce(own)
        dist.all_reduce(own, async_op=True).wait()
        dist.broadcast(own, 0)
        dist.reduce(own, 0)
        dist.all_gather(parts, own)
        dist.all_gather_into_tensor(whole, own)
        dist.reduce_scatter_tensor(own, whole)
        dist.all_to_all_single(whole, whole.clone())
        dist.gather(own, parts if rank == 0 else None)
        dist.scatter(own, parts if rank == 0 else None)
        dist.barrier()
        dist.send(own, 1) if rank == 0 else dist.recv(own, 0)
    dist.destroy_process_group()
    return {str(operator): count for operator, count in mode.get_comm_counts().items()}


@as_ranks(2)
def test_debug_modes_see_every_call(rank, world, place):
    expected = counted(rank, world, place, "gloo")
    assert expected["c10d.allreduce_"] >= 2 and len(expected) >= 9
    assert counted(rank, world, place, "warplink") == expected

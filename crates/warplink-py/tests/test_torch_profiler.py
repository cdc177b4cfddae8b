"""Calls with CPU tensors in PyTorch's profilers; PyTorch's own tests look at the rest."""

import json

import pytest

torch = pytest.importorskip("torch")

from test_torch_group import on_ranks, start  # noqa: E402


def profiled(rank, world, _, place):
    dist = start(rank, world, place)
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
    dist.destroy_process_group()


def test_a_profile_has_every_call():
    on_ranks(profiled, 2)

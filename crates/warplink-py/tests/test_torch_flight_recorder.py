"""The flight recorder: PyTorch's own analyzer says from our dumps which rank did not call, or called something else."""

import pickle
import subprocess
import sys
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from conftest import as_ranks, meet, on_ranks, start  # noqa: E402

WORLD = 3


def begin(rank, world, place, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "100")
        dist = start(rank, world, place)
    # The file is named when it is written.
    import os

    os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = f"{folder}/trace_rank_"
    return dist


def analyzed(folder):
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "-p", "trace_rank_", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    return done.stdout


def calls(dist, rank, world):
    """Each kind of call once."""
    own, whole = torch.ones(2, 3), torch.empty(2 * world, 3)
    dist.all_reduce(own)
    dist.broadcast(own, 1)
    dist.reduce(own, 0)
    dist.all_gather_into_tensor(whole, own)
    dist.all_gather([torch.empty(2, 3) for _ in range(world)], own)
    dist.reduce_scatter_tensor(own, whole)
    dist.all_to_all_single(torch.empty(world, 2), torch.ones(world, 2))
    parts = [torch.ones(4) for _ in range(world)]
    dist.gather(torch.ones(4), parts if rank == 0 else None)
    dist.scatter(torch.ones(4), parts if rank == 0 else None)
    dist.barrier()


def skipping(rank, world, _, place, folder):
    import warplink.errors
    import warplink.torch

    dist = begin(rank, world, place, folder)
    calls(dist, rank, world)
    dist.group.WORLD.set_timeout(timedelta(seconds=3))
    if rank < world - 1:
        with pytest.raises(warplink.errors.TimeoutError):
            dist.all_reduce(torch.ones(5, dtype=torch.bfloat16))
    meet(place, "failed", rank, range(world))
    if rank == world - 1:
        with open(f"{folder}/trace_rank_{rank}", "wb") as file:
            file.write(warplink.torch.dump_flight_recorder())
    dump = pickle.loads(warplink.torch.dump_flight_recorder(only_active=True))
    return dump


def test_the_rank_that_did_not_call_is_named(tmp_path):
    first, _, last = on_ranks(skipping, WORLD, str(tmp_path))
    assert last["entries"] == []
    (entry,) = first["entries"]
    assert entry["frames"][0]["name"] == "all_reduce" and "skipping" in {frame["name"] for frame in entry["frames"]}
    assert (entry["state"], entry["retired"], entry["timeout_ms"]) == ("started", True, 3000)
    output = analyzed(tmp_path)
    assert "missing ranks: {2}" in output and "collective: nccl:all_reduce" in output, output
    # The calls before it match.
    assert output.count("Collective sequence number") + output.count("Not all ranks joining") == 1, output


def differing(rank, world, _, place, folder):
    import warplink.errors

    dist = begin(rank, world, place, folder)
    calls(dist, rank, world)
    with pytest.raises(warplink.errors.WarplinkError):
        dist.all_reduce(torch.ones(5 + rank // 2))
    meet(place, "failed", rank, range(world))


def test_a_rank_that_calls_something_else_is_named(tmp_path):
    on_ranks(differing, WORLD, str(tmp_path))
    output = analyzed(tmp_path)
    assert "Culprit rank 2; Error type: SIZE_OR_SYNTAX_MISMATCH" in output, output


def messages(rank, world, _, place, folder):
    import warplink.torch

    dist = begin(rank, world, place, folder)
    if rank == 0:
        dist.send(torch.ones(3), 1)
        dist.recv(torch.ones(3))
    else:
        dist.recv(torch.ones(3), 0)
        dist.send(torch.ones(3), 0)
    found = pickle.loads(warplink.torch.dump_flight_recorder())["entries"]
    dist.destroy_process_group()
    return [(entry["profiling_name"], entry["is_p2p"], entry["p2p_seq_id"], entry["state"]) for entry in found]


def test_messages_have_their_peers(tmp_path):
    first, second = on_ranks(messages, 2, str(tmp_path))
    assert first == [("nccl:send 0->1", True, 1, "completed")]
    assert second == [("nccl:recv 1<-0", True, 1, "completed"), ("nccl:send 1->0", True, 2, "completed")]
    # Nothing failed.
    assert not list(tmp_path.iterdir())


def batches(rank, world, _, place, folder):
    import warplink.torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "100")
        dist = start(rank, world, place, pg_options=warplink.torch.Options(direct_messages=True))
    peer = 1 - rank
    ends = [(dist.isend, torch.ones(3)), (dist.irecv, torch.ones(3)), (dist.isend, torch.ones(0))]
    ends = [dist.P2POp(end, tensor, peer) for end, tensor in (*ends, (dist.irecv, torch.ones(0)))]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    with open(f"{folder}/trace_rank_{rank}", "wb") as file:
        file.write(warplink.torch.dump_flight_recorder())
    dist.destroy_process_group()
    found = pickle.loads(warplink.torch.dump_flight_recorder())["entries"]
    return [(entry["profiling_name"], entry["p2p_seq_id"], entry["state"]) for entry in found]


def test_messages_of_a_batch_have_an_entry_each(tmp_path):
    names = {False: "nccl:send {0}->{1}", True: "nccl:recv {0}<-{1}"}
    for rank, found in enumerate(on_ranks(batches, 2, str(tmp_path))):
        expected = [(names[number % 2 == 1].format(rank, 1 - rank), number + 1, "completed") for number in range(4)]
        assert found == expected
    assert "Not all ranks joining" not in analyzed(tmp_path)


@as_ranks(2)
def test_nothing_is_recorded_unless_it_is_asked_for(dist):
    import warplink.torch

    dist.all_reduce(torch.ones(3))
    assert dist.group.WORLD._host_works._recorder is None
    assert pickle.loads(warplink.torch.dump_flight_recorder())["entries"] == []

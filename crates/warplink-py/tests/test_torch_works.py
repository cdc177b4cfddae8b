"""Handles, futures and errors of calls with CPU tensors, and what a call leaves of its group."""

import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from conftest import as_ranks, meet  # noqa: E402


@as_ranks(2, timeout=20)
def test_callbacks_of_futures_make_calls(dist, world):
    """Callbacks that wait for another call, as hooks of DDP do."""

    def again(future):
        work = dist.all_reduce(future.value()[0], async_op=True)
        return work.get_future().wait()[0]

    first = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    assert (first.then(again).wait() == world**2).all()
    # Several that all wait at once. All first calls are made before any callback can call: ranks whose
    # calls come in different orders would sum the first call of one with the second of another.
    firsts = [dist.all_reduce(torch.ones(3), async_op=True).get_future() for _ in range(5)]
    futures = [first.then(again) for first in firsts]
    assert all((future.wait() == world**2).all() for future in futures)
    for _ in range(100):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        future = work.get_future()
        work.wait()
        assert future.done()


@as_ranks(2, timeout=20)
def test_powersgd(dist):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model(torch.randn(4, 64)).sum().backward()
    own = model.module.weight.grad.clone()
    dist.broadcast(own, 0)
    assert torch.equal(own, model.module.weight.grad)


@as_ranks(2)
def test_inference_mode(dist, rank, world):
    import torch.distributed._functional_collectives as functional

    peer = 1 - rank
    with torch.inference_mode():
        whole = torch.empty(2 * world, 3)[:, :2]
        dist.all_gather_into_tensor(whole, torch.full((2, 2), float(rank)))
        assert whole[:, 0].tolist() == [0, 0, 1, 1]
        gathered = functional.all_gather_tensor(torch.ones(3), 0, dist.group.WORLD)
        assert (gathered + 0).shape == (6,)
        columns = torch.ones(4, 4)[:, ::2]
        dist.all_reduce(columns)
        assert (columns == world).all()
        work, received = dist.isend(torch.full((4,), float(rank)), peer), torch.empty(4, 2)[:, 0]
        dist.recv(received, peer)
        work.wait()
        assert (received == peer).all()
    total = torch.ones(2)
    dist.all_reduce(total)
    assert (total == world).all() and not total.is_inference()


@as_ranks(2, timeout=20)
def test_mistakes_end_nothing(dist, rank, world):
    """An error of one rank raises there, and ends nothing."""
    group = dist.group.WORLD
    overlapping = torch.zeros(1).expand(4)
    for wrong, kind, says in (
        (lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND), NotImplementedError, "band of torch.float32"),
        (lambda: group.allreduce([torch.ones(3) * 1j], dist.ReduceOp.MAX), NotImplementedError, "max of torch.complex64"),
        (lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX), NotImplementedError, "sparse"),
        (lambda: dist.send(torch.eye(2).to_sparse(), 1 - rank), NotImplementedError, "expected torch.strided"),
        (lambda: dist.broadcast(torch.eye(2).to_sparse(), 0), NotImplementedError, "expected torch.strided"),
        (lambda: dist.all_reduce(overlapping), ValueError, "share memory"),
        (lambda: dist.recv(overlapping, 1 - rank), ValueError, "share memory"),
        (lambda: group.allgather([[torch.ones(2)] * world], [torch.ones(3)]), ValueError, "the output is 2 elements"),
        (lambda: group.allgather([[torch.ones(2, device="meta")] * world], [torch.ones(2)]), ValueError, "on meta"),
    ):
        if rank == 0:
            with pytest.raises(kind, match=says):
                wrong()
    small = torch.full((3,), 1.5).to(torch.float8_e4m3fn)
    for op, expected in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.MAX, 1.5)):
        total = small.clone()
        dist.all_reduce(total, op)
        assert (total.float() == expected).all()


@as_ranks(2)
def test_errors_do_not_grow(dist, rank):
    """An error that many calls raise is one of its own in each."""
    from warplink.errors import MismatchError

    lengths = []
    for _ in range(20):
        with pytest.raises(MismatchError) as caught:
            dist.all_reduce(torch.ones(2 + rank))
        assert caught.value.rank == rank and caught.value.peer == 1 - rank
        lengths.append(len(caught.traceback))
    assert lengths[-1] <= lengths[1], lengths
    kept = dist.group.WORLD._host._failure
    assert kept.__traceback__ is None


@as_ranks(2)
def test_a_wait_with_a_limit(dist, rank, place):
    from warplink.errors import TimeoutError

    if rank == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        with pytest.raises(TimeoutError, match="rank 0: all_reduce: timed out after 0.2 s") as caught:
            work.wait(timedelta(seconds=0.2))
        assert caught.value.kind == "timeout" and caught.value.operation == "all_reduce"
        meet(place, "waited", rank, range(2))
        work.wait()
    else:
        meet(place, "waited", rank, range(2))
        dist.all_reduce(torch.ones(2))


class Stream:
    """Stands in for a stream of a GPU."""

    def __init__(self, raw):
        self.raw, self.did = raw, []

    def mark(self):
        return f"what {self.raw} has so far"

    def wait_event(self, event):
        self.did.append(event)

    def synchronize(self, limit):
        self.did.append(limit)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_stream_waits_for_a_work_where_the_host_does_not(blocks):
    from warplink.torch.works import GpuWork, WorkGroup

    def fail():
        raise AssertionError("nothing is to be raised")

    caller, ours = Stream(1), Stream(2)
    space = SimpleNamespace(stream=caller, device=torch.device("cpu"))
    limit = 5.0 if blocks else None
    marked = GpuWork([], space, (None, ours), "the end of the first", fail, limit)
    later = GpuWork([], space, (None, ours), None, fail, limit)
    of_the_caller = GpuWork([], space, (None, caller), None, fail, limit)
    WorkGroup([marked, of_the_caller, later]).block_current_stream()
    assert (caller.did, ours.did) == (["the end of the first", "what 2 has so far"], [])


@as_ranks(2)
def test_coalescing_is_a_threads(dist, rank):
    """Another thread's calls are not of those that one coalesces."""
    group, cpu = dist.group.WORLD, torch.device("cpu")
    group._start_coalescing(cpu)
    call = group.send if rank == 0 else group.recv
    other = threading.Thread(target=lambda: call([torch.ones(1)], 1 - rank).wait())
    other.start()
    own = group.allreduce([torch.ones(1)])
    other.join()
    assert group._end_coalescing(cpu)._works == [own]
    own.wait()


@as_ranks(3, timeout=2)
def test_a_receive_that_times_out_ends_alone(dist, rank, world, place):
    """A rank that sends nothing does not end what the others send."""
    from warplink.errors import TimeoutError

    got = torch.zeros(1)
    if rank == 1:
        dist.send(torch.ones(1), 0)
    elif rank == 0:
        assert dist.recv(got) == 1
        with pytest.raises(TimeoutError, match="rank 0: recv: no message of rank 2 with tag 5 came") as caught:
            dist.recv(got, 2, tag=5)
        assert caught.value.peer == 2 and caught.value.operation == "recv" and caught.value.kind == "timeout"
        with pytest.raises(TimeoutError, match="no message of any rank"):
            dist.recv(got, tag=6)
    meet(place, "timed out", rank, range(world))
    if rank == 0:
        for peer in (1, 2):
            dist.recv(got, peer)
            assert got == 10 + peer
    else:
        dist.send(torch.tensor([10.0 + rank]), 0)


@as_ranks(2)
def test_a_message_of_another_type(dist, rank):
    from warplink.errors import MismatchError

    if rank == 0:
        works = [dist.isend(torch.ones(1), 1, tag=tag) for tag in (1, 2, 3)]
        for work in works:
            work.wait()
    else:
        got = torch.zeros(1)
        # The second comes before its receive.
        dist.recv(got, 0, tag=2)
        for tag in (1, 3):
            with pytest.raises(MismatchError, match="4 bytes of float32; expected 4 of int32") as caught:
                dist.recv(torch.zeros(1, dtype=torch.int32), 0, tag=tag)
            assert caught.value.peer == 0


@as_ranks(2, dies=(1,))
def test_a_sender_that_dies_in_a_message(dist, rank):
    """A rank that dies between the header of a message and the message."""
    import warplink.torch.messages

    dist.barrier()
    if rank == 1:
        put, sent = warplink.torch.messages._Line._put, []

        def die_at_second(line, *arguments):
            sent.append(None)
            if len(sent) == 2:
                line.wait(20)
                os._exit(1)
            put(line, *arguments)

        warplink.torch.messages._Line._put = die_at_second
        dist.send(torch.ones(warplink.torch.messages.INLINE), 0)
    for length in (warplink.torch.messages.INLINE, 10):
        work = dist.irecv(torch.empty(length), 1)
        end = time.monotonic() + 20
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(ConnectionError):
            work.wait(timedelta(seconds=0.1))

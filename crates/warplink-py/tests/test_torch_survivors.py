"""A member that is killed in any call: the others hear of it within seconds, and go on in new groups without a restart."""

import os
import signal
import threading

import pytest

torch = pytest.importorskip("torch")

from conftest import Stopwatch, as_ranks, meet, start  # noqa: E402

#: Members of a group, and which of them is killed.
WORLD = 3
VICTIM = 2

#: How many elements a call moves: enough that it takes a while.
COUNT = 100_000


def exchange(dist, own, received):
    rank = dist.get_rank()
    sent = dist.isend(own, (rank + 1) % WORLD)
    dist.recv(received, (rank - 1) % WORLD)
    sent.wait()


def batch(dist, own, received):
    rank = dist.get_rank()
    ends = (dist.isend, own, (rank + 1) % WORLD), (dist.irecv, received, (rank - 1) % WORLD)
    for work in dist.batch_isend_irecv([dist.P2POp(*end) for end in ends]):
        work.wait()


def fused(dist, operation, *how):
    name, a, b = dist.group.WORLD.group_name, torch.ones(8 * WORLD, 64), torch.ones(64, 16)
    operation(a, [b] if len(how) == 1 else b, *how, name)


#: Each kind of call, given the module, a tensor, one that is as long as all ranks', and that in parts.
CALLS = {
    "all_reduce": lambda dist, own, whole, parts: dist.all_reduce(own),
    "maximum": lambda dist, own, whole, parts: dist.all_reduce(own, dist.ReduceOp.MAX),
    "reduce": lambda dist, own, whole, parts: dist.reduce(own, VICTIM),
    "broadcast": lambda dist, own, whole, parts: dist.broadcast(own, VICTIM),
    "all_gather": lambda dist, own, whole, parts: dist.all_gather(parts, own),
    "reduce_scatter": lambda dist, own, whole, parts: dist.reduce_scatter_tensor(own, whole),
    "all_to_all": lambda dist, own, whole, parts: dist.all_to_all_single(whole, whole.clone()),
    "gather": lambda dist, own, whole, parts: dist.gather(own, parts if dist.get_rank() == 0 else None),
    "scatter": lambda dist, own, whole, parts: dist.scatter(own, parts if dist.get_rank() == 0 else None),
    "barrier": lambda dist, own, whole, parts: dist.barrier(),
    "objects": lambda dist, own, whole, parts: dist.all_gather_object([None] * WORLD, "object"),
    "messages": lambda dist, own, whole, parts: exchange(dist, own, parts[0]),
    "batch": lambda dist, own, whole, parts: batch(dist, own, parts[0]),
    "direct batch": lambda dist, own, whole, parts: batch(dist, own, parts[0]),
    "direct all_to_all": lambda dist, own, whole, parts: dist.all_to_all_single(whole, whole.clone()),
    "fused gather": lambda dist, own, whole, parts: fused(dist, torch.ops.warplink.fused_all_gather_matmul, 0),
    "fused scatter": lambda dist, own, whole, parts: fused(dist, torch.ops.warplink.fused_matmul_reduce_scatter, "sum", 0),
    "intra_node_barrier": lambda dist, own, whole, parts: dist.group.WORLD.intra_node_barrier(),
}


@as_ranks(VICTIM + len(CALLS), dies=tuple(range(VICTIM, VICTIM + len(CALLS))))
def test_a_member_is_killed_in_every_call_and_the_others_go_on(rank, place):
    """Processes from the third on are killed in a call each, as a member of a group with the first two."""
    import warplink.torch
    from warplink.errors import PeerLostError

    for turn, (name, call) in enumerate(CALLS.items()):
        if rank >= VICTIM and rank != VICTIM + turn:
            continue
        member = min(rank, VICTIM)
        options = warplink.torch.Options(direct_messages=name.startswith("direct"))
        dist = start(member, WORLD, f"{place}.{turn}", timeout=60, pg_options=options)
        own, whole = torch.ones(COUNT), torch.ones(WORLD * COUNT)
        tensors = own, whole, list(torch.empty(WORLD, COUNT).unbind())
        call(dist, *tensors)
        meet(f"{place}.{turn}", "called", member, range(WORLD))
        if member == VICTIM:
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            while True:
                call(dist, *tensors)
        lost = None
        while lost is None:
            watch = Stopwatch()
            try:
                call(dist, *tensors)
            except PeerLostError as error:
                lost = error
            assert watch.elapsed() < 5, name
        assert lost.peer == VICTIM and f"rank {VICTIM}" in str(lost), (name, lost)
        if turn % 2:
            dist.group.WORLD.abort()
        dist.destroy_process_group()
    if rank >= VICTIM:
        return
    dist = start(rank, VICTIM, f"{place}.last")
    total = torch.ones(3)
    dist.all_reduce(total)
    assert (total == VICTIM).all()
    dist.destroy_process_group()

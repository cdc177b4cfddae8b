"""Lost and absent peers, and ranks that differ, on CUDA tensors: what raises, and when."""

import os
import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from conftest import Stopwatch, as_ranks, meet  # noqa: E402
from gpus import gpu, needs_gpus, start_on_gpu  # noqa: E402

WORLD = 2

pytestmark = needs_gpus(WORLD)


#: Seconds in which the loss of a peer is to be raised, those that a timeout of 2 s and its explanation take, and those in which a
#: test of either is to end.
TOLD_SECONDS, EXPLAINED_SECONDS, LOST_LIMIT = 5.0, 15.0, 60.0


def raised_by(operation, limit=TOLD_SECONDS):
    """Exception of ``operation``, once its peer is lost."""
    watch = Stopwatch()
    while watch.elapsed() < limit:
        try:
            operation()
            # Nothing more is enqueued than what waits for the peer.
            torch.cuda.synchronize()
        except RuntimeError as error:
            assert watch.elapsed() < limit, error
            return error
        time.sleep(0.01)
    raise AssertionError(f"nothing was raised in {limit} s")


@as_ranks(WORLD, dies=(1,), limit=LOST_LIMIT)
def test_a_lost_peer_ends_fused_operations(rank, world, place):
    dist = start_on_gpu(rank, world, place, timeout=10)
    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    device = torch.device("cuda", gpu(rank))
    a, b = torch.ones(64, 32, device=device), torch.ones(32, 48, device=device)
    wide = torch.ones(64, 48, device=device)
    operations = [
        lambda: ops.fused_all_gather_matmul(a, [b], 0, name),
        lambda: ops.fused_matmul_reduce_scatter(a, b, "sum", 0, name),
        lambda: ops.fused_all_gather_matmul(a, [wide], 1, name),
        lambda: ops.fused_matmul_reduce_scatter(a, b, "sum", 1, name),
    ]
    for operation in operations:
        operation()
    torch.cuda.synchronize()
    meet(place, "ran", rank, range(world))
    if rank == 1:
        os._exit(1)
    for operation in operations:
        error = raised_by(operation)
        assert isinstance(error, ConnectionError) and (error.kind, error.peer) == ("peer_lost", 1), error


@as_ranks(WORLD, limit=LOST_LIMIT)
def test_a_peer_that_is_absent_from_a_fused_operation_is_told(rank, world, place):
    dist = start_on_gpu(rank, world, place)
    group, device = dist.group.WORLD, torch.device("cuda", gpu(rank))
    a, b = torch.ones(64, 32, device=device), torch.ones(32, 48, device=device)

    def operation():
        torch.ops.warplink.fused_all_gather_matmul(a, [b], 0, group.group_name)

    operation()
    torch.cuda.synchronize()
    group.set_timeout(timedelta(seconds=2))
    if rank == 0:
        error = raised_by(operation, EXPLAINED_SECONDS)
        assert error.kind == "timeout", error
    meet(place, "told", rank, range(world))


def batch(dist, own, whole):
    ends = (dist.isend, own), (dist.irecv, whole[: own.numel()])
    for work in dist.batch_isend_irecv([dist.P2POp(call, one, 1 - dist.get_rank()) for call, one in ends]):
        work.wait()


#: Calls that go direct, given the module, a tensor, and one that is as long as all ranks'.
CALLS = {
    "all_reduce": lambda dist, own, whole: dist.all_reduce(own),
    "asynchronous all_reduce": lambda dist, own, whole: dist.all_reduce(own, async_op=True).wait(),
    "broadcast": lambda dist, own, whole: dist.broadcast(own, 1),
    "all_gather": lambda dist, own, whole: dist.all_gather_into_tensor(whole, own),
    "reduce_scatter": lambda dist, own, whole: dist.reduce_scatter_tensor(own, whole),
    "all_to_all": lambda dist, own, whole: dist.all_to_all_single(whole, whole.clone()),
    "batch": batch,
}


@pytest.mark.parametrize("name", CALLS)
@as_ranks(WORLD, dies=(1,), limit=LOST_LIMIT)
def test_a_lost_peer_ends_direct_calls_and_the_other_goes_on(rank, world, place, name):
    dist = start_on_gpu(rank, world, place, timeout=10)
    own, whole = torch.ones(1 << 20, device="cuda"), torch.ones(world << 20, device="cuda")
    dist.all_reduce(own)
    CALLS[name](dist, own, whole)
    group = dist.group.WORLD
    assert group.collectives_path == group.messages_path == "direct"
    torch.cuda.synchronize()
    meet(place, "ran", rank, range(world))
    if rank == 1:
        os._exit(1)
    error = raised_by(lambda: CALLS[name](dist, own, whole))
    assert isinstance(error, ConnectionError) and (error.kind, error.peer) == ("peer_lost", 1), error
    group.abort()
    dist.destroy_process_group()
    dist = start_on_gpu(0, 1, f"{place}.again")
    own.fill_(1)
    dist.all_reduce(own)
    assert (own == 1).all()
    dist.destroy_process_group()


@pytest.mark.parametrize("blocks", [False, True])
@as_ranks(WORLD)
def test_ends_that_differ_are_told_by_a_wait_that_blocks(rank, world, place, blocks):
    import warplink.torch
    from warplink.errors import MismatchError

    # A wait without a timeout blocks with it.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = str(int(blocks))
    dist = start_on_gpu(rank, world, place, pg_options=warplink.torch.Options(direct_messages=True))
    tensor = torch.zeros(4 + rank, device="cuda")
    operation = dist.irecv if rank else dist.isend
    (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, 1 - rank)])
    with pytest.raises(MismatchError) as caught:
        work.wait() if blocks else work.wait(timedelta(seconds=30))
    assert caught.value.peer == 1 - rank
    meet(place, "told", rank, range(world))

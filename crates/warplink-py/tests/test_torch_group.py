"""The process group on CPU tensors, over the host device."""

import os
import threading
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from conftest import Stopwatch, as_ranks, meet, resident_bytes, start  # noqa: E402


@as_ranks(3)
def test_collectives(dist, rank, world):
    everyone = range(world)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
        # Below and above what goes in one shot, and lengths that do not divide by the world.
        for length in (1, 7, 50_001):
            values = torch.arange(length).remainder(5)
            own = (values + rank).to(dtype)
            total = own.clone()
            dist.all_reduce(total)
            assert torch.equal(total, (values * world + sum(everyone)).to(dtype)), (dtype, length)
            largest = own.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            assert torch.equal(largest, (values + world - 1).to(dtype))
            gathered = torch.empty(world * length, dtype=dtype)
            dist.all_gather_into_tensor(gathered, own)
            expected = torch.cat([(values + peer).to(dtype) for peer in everyone])
            assert torch.equal(gathered, expected)
            part = torch.empty(length, dtype=dtype)
            dist.reduce_scatter_tensor(part, gathered.clone())
            assert torch.equal(part, (world * (values + rank)).to(dtype))
    # Not contiguous, of no dimension, of no element, complex.
    columns = torch.zeros(4, 6)[:, ::2]
    columns += rank
    dist.all_reduce(columns)
    assert (columns == sum(everyone)).all()
    scalar = torch.tensor(float(rank))
    dist.broadcast(scalar, 1)
    assert scalar == 1
    dist.all_reduce(torch.empty(0))
    turned = torch.full((3,), complex(1, rank))
    dist.all_reduce(turned)
    assert torch.equal(turned, torch.full((3,), complex(world, sum(everyone))))
    average = torch.full((3,), float(rank))
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert torch.equal(average, torch.full((3,), sum(everyone) / world))
    # Uneven parts, the old and the new names, coalescing.
    rows = [rank + peer for peer in everyone]
    own = torch.full((sum(rows), 2), float(rank))
    received = torch.empty(sum(rows), 2)
    dist.all_to_all_single(received, own, rows, rows)
    assert torch.equal(received, torch.cat([torch.full((n, 2), float(p)) for p, n in enumerate(rows)]))
    group, own = dist.group.WORLD, torch.full((2,), float(rank))
    for name in ("_allgather_base", "all_gather_single"):
        gathered = torch.empty(2 * world)
        getattr(group, name)(gathered, own).wait()
        assert gathered.view(world, 2)[:, 0].tolist() == [float(peer) for peer in everyone]
    for name in ("_reduce_scatter_base", "reduce_scatter_single"):
        part = torch.empty(2)
        getattr(group, name)(part, gathered.clone()).wait()
        assert torch.equal(part, torch.full((2,), float(rank * world)))
    for name in ("gather_single", "gather_into_tensor"):
        gathered, options = torch.zeros(2 * world), dist.GatherOptions()
        options.rootRank = 1
        getattr(group, name)(gathered if rank == 1 else torch.empty(0), own, options).wait()
        assert gathered.view(world, 2)[:, 0].tolist() == [float(peer * (rank == 1)) for peer in everyone]
    several = [torch.full((n,), float(rank)) for n in (3, 40_000)]
    with dist._coalescing_manager():
        for one in several:
            dist.all_reduce(one)
    assert all((one == sum(everyone)).all() for one in several)
    for asynchronous in (False, True):
        parts = [torch.full((n,), float(rank)) for n in (3, 40_000)]
        wholes = [torch.empty(world * len(part)) for part in parts]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for whole, part in zip(wholes, parts):
                dist.all_gather_into_tensor(whole, part)
        if asynchronous:
            manager.wait()
        for whole in wholes:
            assert whole.view(world, -1)[:, -1].tolist() == [float(peer) for peer in everyone]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for whole, part in zip(wholes, parts):
                dist.reduce_scatter_tensor(part, whole)
        if asynchronous:
            manager.wait()
        assert all((part == rank * world).all() for part in parts)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(own, 0)
    manager.wait()
    assert (own == 0).all()
    # Handles with futures.
    total = torch.ones(10)
    work = dist.all_reduce(total, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert work.wait() and work.is_completed() and work.is_success()
    assert (doubled.wait() == 2 * world).all()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": peer} for peer in everyone]


@as_ranks(3)
def test_scaled_sums(dist, rank, world):
    """Sums of what is multiplied beforehand, by a number or a tensor."""
    everyone = range(world)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for factor in (0.1, torch.tensor(0.1), -3.0):
            op = dist._make_nccl_premul_sum(factor)
            # Short and long ones go by other algorithms.
            for length in (5, 100_000):
                inputs = [torch.linspace(-1, 1, length, dtype=dtype) * (peer + 1) for peer in everyone]
                exact = sum(one.double() * float(factor) for one in inputs)
                close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
                total = inputs[rank].clone()
                dist.all_reduce(total, op)
                torch.testing.assert_close(total.double(), exact, **close)
                total = inputs[rank].clone()
                dist.reduce(total, 1, op)
                if rank == 1:
                    torch.testing.assert_close(total.double(), exact, **close)
            part = torch.empty(2, dtype=dtype)
            whole = torch.full((2 * world,), float(rank + 1), dtype=dtype)
            dist.reduce_scatter_tensor(part, whole, op)
            expected = float(factor) * sum(peer + 1 for peer in everyone) * torch.ones(2).double()
            torch.testing.assert_close(part.double(), expected, **close)
    # Ranks that scale by other factors are found.
    with pytest.raises(RuntimeError, match=r"premul_sum\(0\.[25]"):
        dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(0.5 if rank else 0.25))


@as_ranks(3)
def test_sends_and_receives(dist, rank, world):
    if rank == 0:
        # Tags in another order than they are received in, and a large message.
        works = [dist.isend(torch.full((4,), float(tag)), 1, tag=tag) for tag in (1, 2, 3)]
        works.append(dist.isend(torch.arange(300_000), 1, tag=9))
        for work in works:
            work.wait()
    elif rank == 1:
        for tag in (3, 1, 2):
            got = torch.empty(4)
            assert dist.recv(got, 0, tag=tag) == 0 and (got == tag).all()
        large = torch.empty(300_000, dtype=torch.int64)
        dist.recv(large, 0, tag=9)
        assert torch.equal(large, torch.arange(300_000))
    dist.barrier()
    # From any rank.
    if rank == 0:
        sources = set()
        for _ in range(world - 1):
            got = torch.empty(1)
            source = dist.recv(got)
            assert got.item() == source
            sources.add(source)
        assert sources == set(range(1, world))
    else:
        dist.send(torch.tensor([float(rank)]), 0)
    # Later messages are from one rank to another, and could be taken for one of those.
    dist.barrier()
    # Batched, both ways at once.
    right, left = (rank + 1) % world, (rank - 1) % world
    own, got = torch.full((50_000,), float(rank)), torch.empty(50_000)
    operations = [dist.P2POp(dist.isend, own, right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (got == left).all()
    dist.barrier()


@as_ranks(4)
def test_groups(rank, world, place):
    dist = start(rank, world, place)
    # A strict subset meets, then the world goes on.
    pair = dist.new_group([3, 1])
    if rank in (1, 3):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=pair)
        assert total == 4
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == world
    # Groups overlap in time and in ranks without meeting.
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = rows[rank // 2], columns[rank % 2]
    first, second = torch.tensor([float(rank)]), torch.tensor([float(rank)])
    works = [
        dist.all_reduce(first, group=row, async_op=True),
        dist.all_reduce(second, group=column, async_op=True),
    ]
    for work in works if rank % 2 else reversed(works):
        work.wait()
    assert first == 4 * (rank // 2) + 1 and second == 2 * (rank % 2) + 2
    half = dist.group.WORLD.split_group([rank % 2, rank % 2 + 2])
    total = torch.tensor([float(rank)])
    half.allreduce([total]).wait()
    assert total == 2 * (rank % 2) + 2 and half.size() == 2
    assert dist.group.WORLD.split_group([(rank + 1) % world]) is None
    half.shutdown()
    dist.destroy_process_group(row)
    with pytest.raises(RuntimeError, match="destroyed"):
        row.allreduce([total]).wait()
    dist.destroy_process_group()
    # And again.
    dist = start(rank, world, place + "again")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == world
    dist.destroy_process_group()


@as_ranks(2)
def test_beside_gloo(rank, world, place):
    dist = start(rank, world, place, "cpu:gloo,cuda:warplink")
    import warplink.torch

    found = warplink.torch.get_warplink_group()
    assert found is not None and warplink.torch.is_direct_group()
    assert type(found._get_backend(torch.device("cpu"))).__name__ == "ProcessGroupGloo"
    total = torch.ones(5)
    dist.all_reduce(total)
    assert (total == world).all()
    dist.barrier()
    with pytest.raises(ValueError, match="no backend for meta tensors"):
        dist.all_reduce(torch.ones(5, device="meta"))
    dist.destroy_process_group()
    dist = start(rank, world, place + "alone", "gloo")
    assert warplink.torch.get_warplink_group() is None and not warplink.torch.is_direct_group()
    # Gloo connects while a group is made, and fails where a rank has left already.
    dist.barrier()
    dist.destroy_process_group()


@as_ranks(3)
def test_ranks_that_call_something_else_are_told(rank, world, place):
    from warplink.errors import MismatchError

    dist = start(rank, world, place)
    dist.all_reduce(torch.ones(3))
    with pytest.raises(MismatchError, match="help: call the same collectives") as caught:
        if rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.all_reduce(torch.ones(3, dtype=torch.float64))
    assert caught.value.peer is not None and caught.value.rank == rank
    dist.destroy_process_group()
    dist = start(rank, world, place + "again")
    received = torch.empty(3)
    if rank == 1:
        dist.send(torch.ones(2), 0)
    elif rank == 0:
        with pytest.raises(MismatchError, match="sends 8 bytes of float32; expected 12 of"):
            dist.recv(received, 1)
    with pytest.raises(MismatchError, match="broadcast"):
        if rank == 0:
            dist.broadcast(received, 0)
        else:
            dist.barrier()
    dist.destroy_process_group()


@as_ranks(3, timeout=2)
def test_a_rank_that_does_not_take_part_is_a_timeout(dist, rank, place):
    from warplink.errors import TimeoutError

    if rank < 2:
        expected = "Rank 2 failed to pass" if rank == 0 else "Rank 1 successfully reached"
        with pytest.raises(TimeoutError, match=expected):
            dist.group.WORLD.monitored_barrier(timedelta(seconds=1))
        with pytest.raises(TimeoutError, match="before the timeout of 2.0 s") as caught:
            dist.barrier()
        assert caught.value.kind == "timeout" and caught.value.operation == "barrier"
    # Rank 2 leaves neither before the others had their errors nor after them.
    meet(place, "timed out", rank, range(3))


@as_ranks(3, dies=(2,))
def test_a_lost_rank_raises_in_the_others(dist, rank, place):
    rest = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3))
    meet(place, "reduced", rank, range(3))
    if rank == 2:
        os._exit(1)
    watch = Stopwatch()
    with pytest.raises(ConnectionError) as caught:
        for _ in range(1000):
            dist.all_reduce(torch.ones(3))
    assert watch.elapsed() < 5
    assert caught.value.kind == "peer_lost" and caught.value.peer == 2
    with pytest.raises(ConnectionError):
        dist.recv(torch.ones(1), 2)
    # Groups without it go on.
    total = torch.ones(1)
    dist.all_reduce(total, group=rest)
    assert total == 2


@as_ranks(2)
def test_wrong_use_says_what_and_where(rank, world, place):
    from warplink.torch.options import Options

    dist = start(rank, world, place)
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="tensors of one device"):
        group.allreduce([torch.ones(1), torch.ones(1, device="meta")])
    with pytest.raises(ValueError, match="expected one to have 2 times"):
        group._allgather_base(torch.empty(3), torch.empty(2))
    with pytest.raises(ValueError, match="rank of the group"):
        group.broadcast([torch.ones(1)], 5)
    with pytest.raises(NotImplementedError, match="premul_sum of torch.int32; expected floats"):
        group.allreduce([torch.ones(1, dtype=torch.int32)], dist._make_nccl_premul_sum(2.0))
    child = os.fork()
    if child == 0:
        try:
            group.allreduce([torch.ones(1)])
        except NotImplementedError as error:
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(TypeError, match="pg_options"):
        Options.read(3)
    assert group.get_buffer_size() == 64 << 20
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="destroyed"):
        group.allreduce([torch.ones(1)])


@as_ranks(3)
def test_buffers_that_peers_reach(rank, world, place):
    import warplink.torch

    dist = start(rank, world, place, pg_options=warplink.torch.Options(buffer_size=4096))
    group = warplink.torch.get_warplink_group()
    assert group.get_buffer_size() == 4096
    own = group.get_p2p_buffer(rank, (4, 8), torch.float32, storage_offset=16)
    own.fill_(rank)
    group.intra_node_barrier()
    for peer in range(world):
        theirs = group.get_p2p_buffer(peer, (4, 8), torch.float32, storage_offset=16)
        assert (theirs == peer).all()
    for wrong, says in (
        (((1025,), torch.float32), "buffer's 4096"),
        (((4,), "float32"), "dtype is 'float32'; expected one of PyTorch's"),
        (((-4,), torch.float32), r"shape \[-4\] in buffer 0; expected sizes and a number of at least 0"),
        ((4, torch.float32, 0, None, -1), "in buffer -1; expected"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            group.get_p2p_buffer(0, *wrong)
    other = group.get_p2p_buffer(rank, (4, 8), torch.float32, storage_offset=16, buffer=1)
    other.fill_(10 + rank)
    work = group.intra_node_barrier()
    assert work.wait() and work.is_completed() and work.exception() is None
    for peer in range(world):
        # Each buffer has memory of its own.
        theirs = group.get_p2p_buffer(peer, (4, 8), torch.float32, storage_offset=16)
        assert (theirs == peer).all()
        theirs = group.get_p2p_buffer(peer, (4, 8), torch.float32, storage_offset=16, buffer=1)
        assert (theirs == 10 + peer).all()
    group.intra_node_barrier()
    del own, other, theirs
    dist.destroy_process_group()


@as_ranks(3)
def test_a_barrier_of_some_members_asks_no_others(dist, rank, world):
    import warplink.torch

    group = warplink.torch.get_warplink_group()
    own = group.get_p2p_buffer(rank, (1,), torch.int32)
    own.zero_()
    group.intra_node_barrier()
    if rank < 2:
        for step in range(1, 20):
            own.fill_(step)
            # The third member is in another call.
            group.intra_node_barrier(ranks=[1, 0]).wait()
            assert group.get_p2p_buffer(1 - rank, (1,), torch.int32).item() == step
            group.intra_node_barrier(ranks=[0, 1])
    for wrong in ([0, 0, rank], [rank, world], [(rank + 1) % world], []):
        with pytest.raises(ValueError, match="expected different ones below 3, and this one"):
            group.intra_node_barrier(ranks=wrong)
    group.intra_node_barrier()
    del own


@as_ranks(2)
def test_steps_of_random_sizes_take_constant_memory(dist):
    generator = torch.Generator().manual_seed(0)
    marks = []
    for turn in range(600):
        length = int(torch.randint(1, 100_000, (1,), generator=generator))
        dist.all_reduce(torch.ones(length))
        if turn in (200, 599):
            marks.append(resident_bytes())
    early, late = marks
    assert late < early + (24 << 20), marks


@as_ranks(3)
def test_a_store_serves_one_group_after_another(rank, world, place):
    import torch.distributed as dist

    import warplink.torch

    # A launcher's store is there before the first group and after the last.
    store = dist.FileStore(place, world)
    for turn in range(4):
        options = warplink.torch.Options(buffer_size=(turn + 1) << 16, direct_messages=turn % 2 == 1)
        dist.init_process_group("warplink", store=store, rank=rank, world_size=world, pg_options=options)
        group = dist.group.WORLD
        assert group.messages_path == ("direct" if turn % 2 else "backend")
        total = torch.tensor([float(rank + turn)])
        dist.all_reduce(total)
        assert total.item() == sum(peer + turn for peer in range(world))
        assert group.get_p2p_buffer((rank + 1) % world, [4], torch.float32).shape == (4,)
        dist.destroy_process_group()


@as_ranks(2)
def test_several_threads_with_a_group_each(dist, rank, world):
    groups = [dist.new_group(list(range(world))) for _ in range(4)]
    wrong = []

    def run(number):
        group = groups[number]
        try:
            for turn in range(40):
                total = torch.full((100 + 7000 * (turn % 3),), float(rank + number))
                dist.all_reduce(total, group=group)
                assert (total == sum(peer + number for peer in range(world))).all(), turn
                a = torch.full((4, 8), rank + 1.0)
                whole, (product,) = torch.ops.warplink.fused_all_gather_matmul(
                    a, [torch.ones(8, 3)], 0, group.group_name
                )
                assert (whole.view(world, -1)[:, 0] == torch.arange(world) + 1).all(), turn
                assert (product[:, 0] == 8 * whole[:, 0]).all(), turn
        except BaseException as error:
            wrong.append((number, repr(error)))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


@as_ranks(4)
def test_a_group_that_spans_machines(rank, world, place):
    import warplink.torch
    from warplink.errors import UnsupportedError
    from warplink.torch import joining

    # Two ranks on each of two machines.
    joining.machine = lambda: f"machine {rank // 2}"
    dist = start(rank, world, place)
    group = dist.group.WORLD
    assert not group.is_direct and not warplink.torch.is_direct_group() and group.get_buffer_size() == 0
    total = torch.ones(3)
    dist.all_reduce(total)
    assert (total == world).all()
    a = torch.full((2, 4), float(rank))
    whole, (product,) = torch.ops.warplink.fused_all_gather_matmul(a, [torch.ones(4, 2)], 0, group.group_name)
    assert whole[:, 0].tolist() == [float(peer) for peer in range(world) for _ in range(2)]
    assert torch.equal(product, whole @ torch.ones(4, 2))
    scattered = torch.ops.warplink.fused_matmul_reduce_scatter(
        torch.ones(world, 4), torch.ones(4, 2), "sum", 0, group.group_name
    )
    assert (scattered == 4 * world).all()
    # Operations that Gloo lacks fail with its name.
    with pytest.raises(RuntimeError, match="PREMUL_SUM with Gloo"):
        dist.all_reduce(total, dist._make_nccl_premul_sum(2.0))
    with pytest.raises(UnsupportedError, match="the group spans machines"):
        group.get_p2p_buffer(0, (4,), torch.float32)
    # A part on one machine is direct again.
    for members in ([0, 1], [2, 3], [1, 2]):
        part = dist.new_group(members)
        if rank in members:
            assert part.is_direct == (members != [1, 2])
            total = torch.ones(3)
            dist.all_reduce(total, group=part)
            assert (total == 2).all()
    operations = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % world),
        dist.P2POp(dist.irecv, received := torch.empty(2), (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (received == (rank - 1) % world).all()
    dist.barrier()
    dist.destroy_process_group()

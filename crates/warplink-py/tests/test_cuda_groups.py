"""The process group on CUDA tensors: what goes to NCCL, and what goes direct."""

import contextlib
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from gpus import gpu, needs_gpus, start_on_gpu  # noqa: E402
from conftest import as_ranks, start  # noqa: E402

WORLD = 2

pytestmark = needs_gpus(WORLD)


@pytest.mark.parametrize("backend", ["warplink", "cpu:gloo,cuda:warplink"])
@as_ranks(WORLD)
def test_collectives(rank, world, place, backend):
    dist = start_on_gpu(rank, world, place, backend)
    device = torch.device("cuda", gpu(rank))
    assert type(dist.group.WORLD._get_backend(device)).__name__ == "ProcessGroupNCCL"
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        own = torch.full((1000,), rank + 1, dtype=dtype, device=device)
        total = own.clone()
        dist.all_reduce(total)
        assert (total == 3).all()
        gathered = torch.empty(2000, dtype=dtype, device=device)
        dist.all_gather_into_tensor(gathered, own)
        assert (gathered.view(2, -1) == torch.tensor([[1], [2]], device=device)).all()
        part = torch.empty(1000, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(part, gathered)
        assert (part == 2 * (rank + 1)).all()
        swapped = torch.empty_like(gathered)
        dist.all_to_all_single(swapped, gathered)
        assert (swapped == rank + 1).all()
    # Several at once, as FSDP2 and functional collectives ask for them.
    owns = [torch.full((size,), rank + 1.0, device=device) for size in (8, 1000)]
    wholes = [torch.empty(2 * own.numel(), device=device) for own in owns]
    dist.group.WORLD.allgather_into_tensor_coalesced(wholes, owns).wait()
    for whole in wholes:
        assert (whole.view(2, -1) == torch.tensor([[1], [2]], device=device)).all()
    dist.group.WORLD.reduce_scatter_tensor_coalesced(owns, wholes).wait()
    for own in owns:
        assert (own == 2 * (rank + 1)).all()
    # CPU tensors beside them.
    total = torch.ones(10)
    dist.all_reduce(total)
    assert (total == world).all()
    # Sends and receives, batched, in an order that would wait for each other one by one.
    peer = 1 - rank
    own = torch.full((100_000,), float(rank), device=device)
    got = torch.empty_like(own)
    operations = [dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, got, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (got == peer).all()
    group = dist.new_group([0, 1])
    dist.all_reduce(own, group=group)
    assert (own == 1).all()
    dist.barrier(device_ids=[gpu(rank)])
    objects = [None] * world
    dist.all_gather_object(objects, rank)
    assert objects == [0, 1]
    dist.destroy_process_group()


@as_ranks(WORLD, starts=start_on_gpu)
def test_buffers_that_peers_reach(rank, dist):
    group = dist.group.WORLD
    own = group.get_p2p_buffer(rank, (1 << 20,), torch.float32)
    assert own.device == torch.device("cuda", gpu(rank))
    for turn in range(10):
        own.fill_(10 * turn + rank)
        group.intra_node_barrier()
        theirs = group.get_p2p_buffer(1 - rank, (1 << 20,), torch.float32)
        copied = torch.empty_like(own)
        copied.copy_(theirs)
        group.intra_node_barrier()
        assert (copied == 10 * turn + 1 - rank).all()
    del own, theirs


@as_ranks(WORLD)
def test_all_to_alls_and_batches_that_go_direct(rank, world, place):
    import warplink.torch

    dist = start_on_gpu(rank, world, place, pg_options=warplink.torch.Options(direct_collectives=False))
    group, device, peer = dist.group.WORLD, torch.device("cuda", gpu(rank)), 1 - rank
    # The first collective of the group joins them, whatever it is.
    assert group._on_gpu is None
    total = torch.ones(4, device=device)
    dist.all_reduce(total)
    assert (total == world).all() and group._on_gpu is not None and group.messages_path == "direct"
    generator = torch.Generator(device=device).manual_seed(rank)
    for turn, dtype in enumerate((torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn)):
        # Uneven, some of them empty, on the current stream and beside it; NCCL's collectives between them.
        rows = [[(1000, 3), (70_000, 0)], [(0, 5), (1, 1)], [(0, 0), (0, 9000)], [(4, 4), (4, 4)]][turn]
        sent, received = list(rows[rank]), [row[rank] for row in rows]
        for asynchronous in (False, True):
            own = torch.randint(0, 2, (sum(sent), 24), device=device, generator=generator).to(dtype)
            output, expected = (torch.zeros(sum(received), 24, device=device).to(dtype) for _ in range(2))
            group._nccl.alltoall_base(expected.view(torch.uint8), own.view(torch.uint8), received, sent).wait()
            work = dist.all_to_all_single(output, own, received, sent, async_op=asynchronous)
            scratch = torch.full_like(own, 1)
            if asynchronous:
                work.wait()
            assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8)), (turn, asynchronous)
            dist.all_reduce(total)
            del own, scratch
        outputs = [torch.zeros(n, 24, device=device) for n in received]
        inputs = [torch.full((n, 24), float(10 * rank + p), device=device) for p, n in enumerate(sent)]
        dist.all_to_all(outputs, inputs)
        for p, one in enumerate(outputs):
            assert (one == 10 * p + rank).all()
    # More than one call takes, and not contiguous.
    for turn in range(5):
        sends = [torch.full((n, 7), float(n + rank + turn), device=device) for n in range(80)]
        receives = [torch.zeros(n, 14, device=device)[:, ::2] for n in range(80)]
        operations = [dist.P2POp(dist.isend, one, peer) for one in sends]
        operations += [dist.P2POp(dist.irecv, one, peer) for one in receives]
        works = dist.batch_isend_irecv(operations)
        del sends, operations
        for work in works:
            # Blocks on the host as well, and would say what went wrong.
            work.wait(timedelta(seconds=30)) if turn == 4 else work.wait()
        for n, one in enumerate(receives):
            assert (one == n + peer + turn).all()
    # In a graph.
    own, output = torch.zeros(2 * 512, device=device), torch.zeros(2 * 512, device=device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        dist.all_to_all_single(output, own)
    for turn in range(5):
        own.copy_(torch.arange(2, device=device).repeat_interleave(512) + 10 * rank + 100 * turn)
        graph.replay()
        assert output.view(2, -1)[:, 0].tolist() == [float(10 * p + rank + 100 * turn) for p in range(2)]
    # Several groups, one of which has other options.
    both = dist.new_group([0, 1], pg_options=warplink.torch.Options(direct_messages=False))
    gathered = torch.empty(2, device=device)
    dist.all_to_all_single(gathered, torch.full((2,), float(rank), device=device), group=both)
    assert gathered.tolist() == [0.0, 1.0] and both.messages_path == "backend"
    dist.barrier(device_ids=[gpu(rank)])
    dist.destroy_process_group()


@as_ranks(WORLD)
def test_collectives_that_go_direct(rank, world, place):
    import warplink.torch

    options = warplink.torch.Options(direct_messages=False)
    dist = start_on_gpu(rank, world, place, pg_options=options)
    group, device, kinds = dist.group.WORLD, torch.device("cuda", gpu(rank)), dist.ReduceOp
    dist.barrier(device_ids=[gpu(rank)])
    dist.all_reduce(torch.ones(4, device=device))
    assert group.collectives_path == "direct" and group.messages_path == "backend"
    generator = torch.Generator(device=device).manual_seed(rank)
    for turn in range(40):
        dtype = (torch.bfloat16, torch.float32, torch.int64, torch.float16)[turn % 4]
        numel = (1, 1000, 70_001, 3_000_000)[turn // 4 % 4]
        asynchronous = turn % 3 == 0
        own = torch.randint(0, 9, (world * numel,), device=device, generator=generator).to(dtype)
        nccl, found, expected = group._nccl, own.clone(), own.clone()
        nccl.allreduce([expected]).wait()
        work = dist.all_reduce(found, async_op=asynchronous)
        if asynchronous:
            work.wait()
        assert torch.equal(found, expected), (turn, "all_reduce")
        part = torch.empty(numel, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(part, own)
        assert torch.equal(part, expected.view(world, -1)[rank]), (turn, "reduce_scatter")
        outputs = [torch.empty_like(part) for _ in range(world)]
        dist.all_gather(outputs, part)
        assert torch.equal(torch.cat(outputs), expected), (turn, "all_gather")
        whole = torch.empty_like(own)
        whole.view(world, -1)[rank].copy_(part)
        dist.all_gather_into_tensor(whole, whole.view(world, -1)[rank])
        assert torch.equal(whole, expected), (turn, "all_gather_into_tensor")
        dist.broadcast(part, 1)
        assert torch.equal(part, expected.view(world, -1)[1]), (turn, "broadcast")
        root = turn % world
        outputs = [torch.empty_like(part) for _ in range(world)] if rank == root else None
        work = dist.gather(whole.view(world, -1)[rank], outputs, root, async_op=asynchronous)
        if asynchronous:
            work.block_current_stream()
        assert outputs is None or torch.equal(torch.cat(outputs), expected), (turn, "gather")
        dist.scatter(part, list(whole.view(world, -1)) if rank == root else None, root)
        assert torch.equal(part, expected.view(world, -1)[rank]), (turn, "scatter")
        del own, whole, outputs
    # Reductions that Warplink lacks go to NCCL, several calls may be one work, and graphs replay.
    flags = torch.full((8,), rank == 1, device=device)
    dist.all_reduce(flags, kinds.MAX)
    assert flags.all()
    for of in (device, None):
        ones = [torch.ones(1000, device=device) for _ in range(3)]
        with dist._coalescing_manager(device=of, async_ops=True) as manager:
            for one in ones:
                dist.all_reduce(one)
        manager.wait()
        assert all((one == world).all() for one in ones), of
    total, graph = torch.ones(1000, device=device), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        dist.all_reduce(total)
    for turn in range(5):
        total.fill_(turn)
        graph.replay()
        assert (total == world * turn).all()
    dist.barrier(device_ids=[gpu(rank)])
    dist.destroy_process_group()


@as_ranks(WORLD)
def test_several_groups_go_direct_side_by_side(rank, world, place):
    import warplink.torch
    from warplink.errors import InvalidArgumentError

    options = warplink.torch.Options(direct_collectives=True)
    dist = start_on_gpu(rank, world, place, pg_options=options)
    groups = [dist.group.WORLD, dist.new_group([0, 1], pg_options=options)]
    device, beside = torch.device("cuda", gpu(rank)), torch.cuda.Stream()
    for turn in range(60):
        # Large enough that two of them do not fit on the GPU, on streams that nothing else orders.
        own = torch.full((1 << 23,), float(rank + turn), device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(beside) if turn % 4 == 3 else contextlib.nullcontext():
            first = dist.all_reduce(own, group=groups[turn % 2], async_op=turn % 3 == 0)
        nothing = dist.all_reduce(torch.empty(0, device=device), group=groups[1], async_op=True)
        other = torch.full((1 << 23,), float(rank), device=device)
        second = dist.all_reduce(other, group=groups[(turn + 1) % 2], async_op=True)
        for work in (first, nothing, second):
            if work is not None:
                work.wait()
        torch.cuda.synchronize()
        assert (own == 2 * turn + 1).all() and (other == 1).all(), turn
    assert all(group.collectives_path == "direct" for group in groups)
    one = torch.zeros(4, device=device)
    with pytest.raises(InvalidArgumentError, match="outputs"):
        dist.all_gather([one], one)
    with pytest.raises(InvalidArgumentError, match="inputs"):
        dist.reduce_scatter(one, [one.clone()])
    dist.destroy_process_group()


@as_ranks(WORLD)
def test_messages_are_on_the_device_of_the_tensors(rank, world, place):
    import warplink.torch

    # The current GPU is the first one on both ranks.
    dist = start(rank, world, place, pg_options=warplink.torch.Options(direct_messages=True))
    device = torch.device("cuda", gpu(rank))
    total = torch.ones(4, device=device)
    dist.all_reduce(total)
    assert (total == world).all()
    assert torch.cuda.current_device() == 0 and dist.group.WORLD.messages_path == "direct"
    for turn in range(3):
        own = torch.full((2 * 70_000,), float(10 * turn + rank), device=device)
        output = torch.zeros_like(own)
        dist.all_to_all_single(output, own)
        assert output.view(2, -1)[:, 0].tolist() == [10.0 * turn, 10.0 * turn + 1]
        received = torch.zeros_like(own)
        operations = [dist.P2POp(dist.isend, own, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        # The current stream of this device, and not that of the current one.
        torch.cuda.current_stream(device).synchronize()
        assert (received == 10 * turn + 1 - rank).all()
    dist.barrier(device_ids=[gpu(rank)])
    dist.destroy_process_group()

"""The process group and the fused operations on CUDA tensors; needs two GPUs, or one that ranks may share."""

import contextlib
import gc
import os
import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from conftest import meet  # noqa: E402
from gpus import RANKS_PER_GPU, gpu  # noqa: E402
from test_torch_group import on_ranks, start  # noqa: E402

WORLD = 2

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() * RANKS_PER_GPU < WORLD, reason="needs two GPUs, or one that ranks share"
)


def start_on_gpu(rank, world, place, backend="warplink", **options):
    torch.cuda.set_device(gpu(rank))
    return start(rank, world, place, backend, **options)


def collectives(rank, world, _, place, backend):
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


@pytest.mark.parametrize("backend", ["warplink", "cpu:gloo,cuda:warplink"])
def test_collectives(backend):
    on_ranks(collectives, WORLD, backend)


def buffers(rank, world, _, place):
    dist = start_on_gpu(rank, world, place)
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
    dist.destroy_process_group()


def test_buffers_that_peers_reach():
    on_ranks(buffers, WORLD)


def fused(rank, world, _, place, dtype_name):
    dist = start_on_gpu(rank, world, place)
    from torch.distributed._symmetric_memory import (
        _fused_all_gather_matmul_fallback,
        _fused_matmul_reduce_scatter_fallback,
    )

    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    dtype, device = getattr(torch, dtype_name), torch.device("cuda", gpu(rank))
    close = {"rtol": 3e-2, "atol": 0.5} if dtype.itemsize == 2 else {"rtol": 1e-3, "atol": 1e-2}
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    for shape, dim in [((64, 128), 0), ((3, 5, 64), 0), ((3, 5, 64), 1), ((1, 5, 64), 1), ((257, 96), 0), ((4, 64), 1)]:
        last = dim == len(shape) - 1
        k = shape[-1] * (world if last else 1)
        # Tensors at new addresses each time.
        for _ in range(3):
            a, bs = random(*shape) + rank, [random(k, 32), random(48, k).t()]
            whole, results = ops.fused_all_gather_matmul(a, bs, dim, name)
            expected, products = _fused_all_gather_matmul_fallback(a, bs, dim, name)
            for got, wanted in zip([whole, *results], [expected, *products], strict=True):
                assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())
                torch.testing.assert_close(got, wanted, **close)
            sizes = list(shape)
            sizes[dim] *= 1 if last else world
            left, right = random(*sizes) + rank, random(shape[-1], 32 * world)
            got = ops.fused_matmul_reduce_scatter(left, right, "sum", dim, name)
            wanted = _fused_matmul_reduce_scatter_fallback(left, right, "sum", dim, name)
            assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())
            torch.testing.assert_close(got, wanted, **close)
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_fused_operations_equal_the_unfused(dtype):
    on_ranks(fused, WORLD, dtype)


def scaled_operations(rank, world, meeting, place):
    from test_torch_scaled import scaled, scaled_columns

    torch.cuda.set_device(gpu(rank))
    scaled(rank, world, meeting, place, f"cuda:{gpu(rank)}")
    scaled_columns(rank, world, meeting, place + "columns", f"cuda:{gpu(rank)}")


def test_scaled_operations_equal_the_unfused():
    on_ranks(scaled_operations, WORLD)


def scaled_by_rows(rank, world, _, place):
    dist = start_on_gpu(rank, world, place)
    from test_torch_scaled import matrices
    from torch.distributed._symmetric_memory import (
        _fused_all_gather_scaled_matmul_fallback,
        _fused_scaled_matmul_reduce_scatter_fallback,
    )

    device = torch.device("cuda", gpu(rank))
    if torch.cuda.get_device_capability(device) < (9, 0):
        # PyTorch has no matmul of rows scaled each on earlier ones.
        dist.destroy_process_group()
        return
    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    random = matrices(9, rank, device)
    generator = torch.Generator().manual_seed(11 + rank)
    close = {"rtol": 3e-2, "atol": 0.5}
    n, k, out = 48, 64, torch.bfloat16

    def scales(*sizes):
        return (torch.rand(*sizes, generator=generator) + 0.5).to(device)

    b, b_scale = random(n, k).t(), scales(1, n)
    one = torch.tensor(0.5, device=device)
    bias = torch.randn(n, generator=generator).to(device, out)
    for shape, dim in [((64, k), 0), ((3, 16, k), 0), ((2, 16, k), 1)]:
        a, whole = random(*shape), [*shape[:-1], 1]
        whole[dim] *= world
        replicated = scales(*whole)
        dist.broadcast(replicated, 0)
        for a_scale, scale in ((scales(*shape[:-1], 1), b_scale), (replicated, b_scale), (one, one)):
            for fast, added in ((False, None), (True, bias)):
                rest = (dim, name, [added], [None], [out], [fast])
                got = ops.fused_all_gather_scaled_matmul(a, [b], a_scale, [scale], *rest)
                wanted = _fused_all_gather_scaled_matmul_fallback(a, [b], a_scale, [scale], *rest)
                assert torch.equal(got[0].view(torch.uint8), wanted[0].view(torch.uint8))
                torch.testing.assert_close(got[1][0], wanted[1][0], **close)
        sizes = list(shape)
        sizes[dim] *= world
        left = random(*sizes)
        for a_scale, scale in ((scales(*sizes[:-1], 1), b_scale), (one, one)):
            for op, fast, added in (("sum", False, None), ("avg", True, bias)):
                rest = (op, dim, min(dim, 1), name, [*sizes[:-1], n], added, None, out, fast)
                got = ops.fused_scaled_matmul_reduce_scatter(left, b, a_scale, scale, *rest)
                wanted = _fused_scaled_matmul_reduce_scatter_fallback(left, b, a_scale, scale, *rest)
                torch.testing.assert_close(got, wanted, **close)
    dist.destroy_process_group()


def test_scales_of_rows_biases_and_fast_accumulation():
    on_ranks(scaled_by_rows, WORLD)


def random_cases(rank, world, meeting, place):
    from test_torch_random import cases, scaled_cases

    torch.cuda.set_device(gpu(rank))
    cases(rank, world, meeting, place, 50, 4, f"cuda:{gpu(rank)}")
    scaled_cases(rank, world, meeting, place + "scaled", 20, 5, f"cuda:{gpu(rank)}")


def test_fused_operations_equal_the_unfused_at_random():
    on_ranks(random_cases, WORLD)


def expandable(rank, world, meeting, place):
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    fused(rank, world, meeting, place, "bfloat16")


def test_fused_operations_on_expandable_segments():
    on_ranks(expandable, WORLD)


def alone_visible(rank, world, meeting, place):
    # Every rank sees one GPU, which is number 0 there.
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu(rank))
    torch.cuda.set_device(0)
    dist = start(rank, world, place)
    name, device = dist.group.WORLD.group_name, torch.device("cuda", 0)
    a, b = (torch.full(shape, rank + 1.0, device=device) for shape in ((64, 32), (32, 48)))
    whole, (product,) = torch.ops.warplink.fused_all_gather_matmul(a, [b], 0, name)
    for peer in range(world):
        assert (whole[64 * peer : 64 * (peer + 1)] == peer + 1).all()
        assert (product[64 * peer : 64 * (peer + 1)] == 32 * (peer + 1) * (rank + 1)).all()
    dist.destroy_process_group()


def test_ranks_that_each_see_one_gpu():
    on_ranks(alone_visible, WORLD)


def captured(rank, world, _, place):
    dist = start_on_gpu(rank, world, place)
    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    device = torch.device("cuda", gpu(rank))
    a = torch.zeros(64, 128, dtype=torch.bfloat16, device=device)
    up, down = (torch.ones(*shape, dtype=torch.bfloat16, device=device) for shape in ((128, 96), (96, 32)))

    def both():
        _, (product,) = ops.fused_all_gather_matmul(a, [up], 0, name, return_A=False)
        return ops.fused_matmul_reduce_scatter(product, down.t().contiguous().t(), "sum", 0, name)

    # The first call makes the plans.
    both()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = both()
    for turn in range(5):
        a.fill_(turn + 1)
        graph.replay()
        assert (result == (turn + 1) * 128 * 96 * world).all(), result
    dist.destroy_process_group()


def test_fused_operations_in_a_graph():
    on_ranks(captured, WORLD)


def graphs(rank, world, _, place):
    dist = start_on_gpu(rank, world, place)
    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    device = torch.device("cuda", gpu(rank))
    # Little of the result and much to sum for it, which the matmul divides among multiprocessors and adds up.
    pairs = [
        [torch.ones(*shape, dtype=torch.bfloat16, device=device) for shape in ((m, k), (k, n))]
        for m, k, n in ((64, 8192, 256), (128, 16384, 128), (256, 4096, 512))
    ]

    def record():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [ops.fused_all_gather_matmul(a, [b], 0, name)[1][0] for a, b in pairs]
        graph.replay()
        for (a, _), result in zip(pairs, results, strict=True):
            assert (result == a.shape[1]).all()

    def used():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dist.barrier(device_ids=[gpu(rank)])
        free, total = torch.cuda.mem_get_info()
        dist.barrier(device_ids=[gpu(rank)])
        return total - free

    for a, b in pairs:
        ops.fused_all_gather_matmul(a, [b], 0, name)
    for _ in range(3):
        record()
    early = used()
    for _ in range(30):
        record()
    late = used()
    print("used:", early, late)
    dist.destroy_process_group()
    return late - early


def test_graphs_that_are_gone_keep_no_memory():
    assert max(on_ranks(graphs, WORLD)) <= 32 << 20


def models(rank, world, meeting, place, way):
    import test_torch_llama

    torch.cuda.set_device(gpu(rank))
    device = f"cuda:{gpu(rank)}"
    expected = test_torch_llama.losses(rank, world, meeting, place, "nccl", way, device)
    assert len(expected) == 20 and expected[-1] < 0.8 * expected[0], expected
    for backend in ("warplink", "cpu:gloo,cuda:warplink"):
        found = test_torch_llama.losses(rank, world, meeting, place, backend, way, device)
        assert found == pytest.approx(expected, rel=1e-3), backend


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp", "pipeline"])
def test_a_model_trains_as_with_nccl(way):
    on_ranks(models, WORLD, way)


def compiled_models(rank, world, meeting, place):
    import test_torch_llama

    torch.cuda.set_device(gpu(rank))
    device = f"cuda:{gpu(rank)}"
    # A layer sees what the one before it gives, also where a dimension has one element.
    expected = test_torch_llama.losses(rank, world, meeting, place, "nccl", "tp", device, batch=1)
    found = test_torch_llama.losses(
        rank, world, meeting, place, "warplink", "tp", device, fused=True, batch=1
    )
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_model_compiled_with_the_pass_trains_as_with_nccl():
    on_ranks(compiled_models, WORLD)


def compiled_into_graphs(rank, world, _, place):
    dist = start_on_gpu(rank, world, place)
    from torch._dynamo.utils import counters

    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    device = torch.device("cuda", gpu(rank))
    up, down = (torch.ones(*shape, dtype=torch.bfloat16, device=device) for shape in ((128, 96), (96, 32)))

    def both(a):
        _, (product,) = ops.fused_all_gather_matmul(a, [up], 0, name, return_A=False)
        return ops.fused_matmul_reduce_scatter(product, down, "sum", 0, name)

    compiled = torch.compile(both, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        # The first call makes the plans, the second records a graph, and the others launch it.
        for turn in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            a = torch.full((64, 128), turn + 1.0, dtype=torch.bfloat16, device=device)
            expected = both(a)
            assert torch.equal(compiled(a), expected), turn
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert dist.group.WORLD.workspace(device)._recorded, "no graph was recorded"
    dist.destroy_process_group()


def test_fused_operations_in_graphs_of_the_compiler():
    on_ranks(compiled_into_graphs, WORLD)


#: Seconds in which the loss of a peer is to be raised, and in which a test of it is to end.
TOLD_SECONDS, LOST_LIMIT = 15.0, 60.0


def raised_by(operation):
    """What ``operation`` raises, once its peer is lost."""
    end = time.monotonic() + TOLD_SECONDS
    while time.monotonic() < end:
        try:
            operation()
            # Nothing more is enqueued than what waits for the peer.
            torch.cuda.synchronize()
        except RuntimeError as error:
            return error
        time.sleep(0.01)
    raise AssertionError(f"nothing was raised in {TOLD_SECONDS} s")


def lost_in_fused(rank, world, _, place):
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


def test_a_lost_peer_ends_fused_operations():
    on_ranks(lost_in_fused, WORLD, dies=(1,), limit=LOST_LIMIT)


def absent_from_fused(rank, world, _, place):
    dist = start_on_gpu(rank, world, place)
    group, device = dist.group.WORLD, torch.device("cuda", gpu(rank))
    a, b = torch.ones(64, 32, device=device), torch.ones(32, 48, device=device)

    def operation():
        torch.ops.warplink.fused_all_gather_matmul(a, [b], 0, group.group_name)

    operation()
    torch.cuda.synchronize()
    group.set_timeout(timedelta(seconds=2))
    if rank == 0:
        error = raised_by(operation)
        assert error.kind == "timeout", error
    meet(place, "told", rank, range(world))


def test_a_peer_that_is_absent_from_a_fused_operation_is_told():
    on_ranks(absent_from_fused, WORLD, limit=LOST_LIMIT)


def lost_in_direct(rank, world, _, place):
    import warplink.torch

    options = warplink.torch.Options(direct_collectives=True)
    dist = start_on_gpu(rank, world, place, timeout=10, pg_options=options)
    own = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(own)
    assert dist.group.WORLD.collectives_path == "direct"
    torch.cuda.synchronize()
    meet(place, "ran", rank, range(world))
    if rank == 1:
        os._exit(1)
    error = raised_by(lambda: dist.all_reduce(own))
    assert isinstance(error, ConnectionError) and (error.kind, error.peer) == ("peer_lost", 1), error


def test_a_lost_peer_ends_direct_collectives():
    on_ranks(lost_in_direct, WORLD, dies=(1,), limit=LOST_LIMIT)


def models_by_direct_collectives(*arguments):
    os.environ["WARPLINK_TORCH_DIRECT_COLLECTIVES"] = "1"
    models(*arguments)


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp"])
def test_a_model_trains_by_direct_collectives_as_with_nccl(way):
    on_ranks(models_by_direct_collectives, WORLD, way)


def direct_messages(rank, world, _, place):
    import warplink.torch

    dist = start_on_gpu(rank, world, place, pg_options=warplink.torch.Options(direct_messages=True))
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


def test_all_to_alls_and_batches_that_go_direct():
    on_ranks(direct_messages, WORLD)


def direct_collectives(rank, world, _, place):
    import warplink.torch

    options = warplink.torch.Options(direct_collectives=True)
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
        del own, whole, outputs
    # What Warplink does not reduce goes to NCCL, several calls may be one work, and graphs replay.
    flags = torch.full((8,), rank == 1, device=device)
    dist.all_reduce(flags, kinds.MAX)
    assert flags.all()
    ones = [torch.ones(1000, device=device) for _ in range(3)]
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        for one in ones:
            dist.all_reduce(one)
    manager.wait()
    assert all((one == world).all() for one in ones)
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


def several_groups(rank, world, _, place):
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


def test_several_groups_go_direct_side_by_side():
    on_ranks(several_groups, WORLD)


def test_collectives_that_go_direct():
    on_ranks(direct_collectives, WORLD)


def steps(rank, world, _, place, count):
    import warplink.torch

    options = warplink.torch.Options(direct_collectives=True)
    dist = start_on_gpu(rank, world, place, pg_options=options)
    device = torch.device("cuda", gpu(rank))
    group = dist.group.WORLD
    name, space = group.group_name, group.workspace(device)
    generator = torch.Generator().manual_seed(0)
    weights = torch.ones(64, 32, device=device, dtype=torch.bfloat16)

    def used():
        """Bytes of the GPU that are not PyTorch's own, and of this process."""
        torch.cuda.synchronize()
        gc.collect()
        dist.barrier(device_ids=[gpu(rank)])
        free, total = torch.cuda.mem_get_info()
        reserved = [None] * world
        dist.all_gather_object(reserved, torch.cuda.memory_reserved())
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        here = sum(reserved[peer] for peer in range(world) if gpu(peer) == gpu(rank))
        return total - free - here, resident

    def drawn(most):
        return int(torch.randint(1, most, (1,), generator=generator))

    marks = []
    for turn in range(count):
        own = torch.full((drawn(1 << drawn(22)),), rank + 1.0, device=device)
        whole = torch.empty(world * own.numel(), device=device)
        dist.all_gather_into_tensor(whole, own)
        dist.all_reduce(own)
        a = torch.ones(drawn(4000), 64, device=device, dtype=torch.bfloat16)
        gathered, (product,) = torch.ops.warplink.fused_all_gather_matmul(a, [weights], 0, name)
        sums = torch.ops.warplink.fused_matmul_reduce_scatter(gathered, weights, "sum", 0, name)
        if turn % 50 == 0:
            assert (own == 3).all() and (whole.view(2, -1) == torch.tensor([[1], [2]], device=device)).all()
            assert (product == 64).all() and (sums == 128).all()
        if turn in (count // 2, count - 1):
            marks.append((*used(), sum(space.communicator.registrations_and_mappings())))
    dist.destroy_process_group()
    return marks


#: A long run is WARPLINK_TEST_STEPS=10000.
STEPS = int(os.environ.get("WARPLINK_TEST_STEPS", "500"))


def test_steps_of_random_sizes_take_constant_memory():
    for early, late in on_ranks(steps, WORLD, STEPS, limit=120 + STEPS / 20):
        print("GPU, host, registered:", early, late)
        assert late[0] <= early[0] + (256 << 20)
        assert late[1] < early[1] + (64 << 20)
        assert late[2] <= early[2] + 120


def on_another_device(rank, world, _, place):
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


def test_messages_are_on_the_device_of_the_tensors():
    on_ranks(on_another_device, WORLD)


def differing_ends(rank, world, _, place):
    import warplink.torch
    from warplink.errors import MismatchError

    dist = start_on_gpu(rank, world, place, pg_options=warplink.torch.Options(direct_messages=True))
    tensor = torch.zeros(4 + rank, device="cuda")
    operation = dist.irecv if rank else dist.isend
    (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, 1 - rank)])
    with pytest.raises(MismatchError) as caught:
        work.wait(timedelta(seconds=30))
    assert caught.value.peer == 1 - rank
    meet(place, "told", rank, range(world))


def test_ends_that_differ_are_told_by_a_wait_with_a_timeout():
    on_ranks(differing_ends, WORLD)


def tensors(rank, world, meeting):
    import warplink

    torch.cuda.set_device(gpu(rank))
    with warplink.Job.join(rank, world, meeting, device="cuda", ordinal=gpu(rank)) as job:
        comm = job.world()
        own = torch.full((1 << 16,), float(rank), device="cuda")
        received = torch.empty_like(own)
        current = torch.cuda.current_stream()
        stream = comm.borrow_stream(current.cuda_stream, current)
        regions = [comm.register(tensor, stream) for tensor in (own, received)]
        assert regions[0].address == own.data_ptr()
        transfers = comm.exchange(
            [warplink.Send(regions[0], 1 - rank), warplink.Receive(regions[1], 1 - rank)]
        )
        for turn in range(5):
            own.fill_(10 * turn + rank)
            warplink.post_all(transfers, stream)
            warplink.wait_all(transfers, stream)
            # In stream order, without a wait on the host.
            assert (received == 10 * turn + 1 - rank).all()
            comm.barrier()
        view = comm.alloc(64).view([16], "f32")
        tensor = torch.from_dlpack(view)
        assert (tensor.data_ptr(), tensor.device.index) == (view.address, gpu(rank))
        with pytest.raises(ValueError, match="the processor's memory"):
            comm.register(torch.ones(4))


def test_tensors_go_in_and_out_in_place():
    from conftest import run_ranks

    run_ranks(tensors, WORLD)


def on_the_current_stream(rank, world, meeting):
    import warplink

    torch.cuda.set_device(gpu(rank))
    with warplink.Job.join(rank, world, meeting, device="cuda", ordinal=gpu(rank)) as job:
        comm = job.world()
        collectives = comm.collectives()
        side = torch.cuda.Stream()
        stream = comm.borrow_stream(side.cuda_stream, side)
        layer = collectives.experts(experts=world, top_k=1, max_tokens=64, elements=256, dtype="bf16")
        dispatched = layer.allocate()
        counts = torch.from_dlpack(dispatched.counts)
        generator = torch.Generator(device="cuda").manual_seed(rank)
        with torch.cuda.stream(side):
            for turn in range(10):
                # All in stream order: what was written before, and what is read behind.
                own = torch.full((100_000 + turn,), 10.0 * turn + rank, device="cuda")
                come = torch.empty_like(own)
                collectives.send_receive(stream, [(1 - rank, own)], [(1 - rank, come)])
                parts, sizes = [1000, 3000], [[1000, 3000][rank]] * world
                gathered = torch.empty(sum(sizes), device="cuda")
                collectives.all_to_all_v(stream, gathered, own[: sum(parts)].clone(), sizes, parts)
                tokens = torch.randn(64, 256, device="cuda", generator=generator).bfloat16()
                experts = torch.randint(0, world, (64, 1), device="cuda", generator=generator).int()
                weights = torch.full((64, 1), 2.0, device="cuda")
                target = torch.empty_like(tokens)
                layer.dispatch(stream, dispatched, tokens, experts)
                layer.combine(stream, target, dispatched, weights)
                assert (come == 10 * turn + 1 - rank).all()
                rows = gathered.view(world, -1).mean(1).round().tolist()
                assert rows == [10.0 * turn + peer for peer in range(world)]
                assert torch.equal(target, 2 * tokens) and counts[rank] == (experts == rank).sum()
        comm.barrier()


def test_messages_and_experts_on_the_current_stream():
    from conftest import run_ranks

    run_ranks(on_the_current_stream, WORLD)

"""The fused operations on CUDA tensors, eager and in graphs."""

import gc
import os

import pytest

torch = pytest.importorskip("torch")

from gpus import gpu, needs_gpus, start_on_gpu  # noqa: E402
from conftest import as_ranks, on_ranks, start  # noqa: E402

WORLD = 2

pytestmark = needs_gpus(WORLD)


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


@as_ranks(WORLD)
def test_scaled_operations_equal_the_unfused(rank, world, meeting, place):
    from test_torch_scaled import scaled, scaled_columns

    torch.cuda.set_device(gpu(rank))
    scaled(rank, world, meeting, place, f"cuda:{gpu(rank)}")
    scaled_columns(rank, world, meeting, place + "columns", f"cuda:{gpu(rank)}")


@as_ranks(WORLD, starts=start_on_gpu)
def test_scales_of_rows_biases_and_fast_accumulation(dist, rank, world):
    from test_torch_scaled import matrices
    from torch.distributed._symmetric_memory import (
        _fused_all_gather_scaled_matmul_fallback,
        _fused_scaled_matmul_reduce_scatter_fallback,
    )

    device = torch.device("cuda", gpu(rank))
    if torch.cuda.get_device_capability(device) < (9, 0):
        # PyTorch has no matmul of rows scaled each on earlier ones.
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


@as_ranks(WORLD)
def test_fused_operations_equal_the_unfused_at_random(rank, world, meeting, place):
    from test_torch_random import cases, scaled_cases

    torch.cuda.set_device(gpu(rank))
    cases(rank, world, meeting, place, 50, 4, f"cuda:{gpu(rank)}")
    scaled_cases(rank, world, meeting, place + "scaled", 20, 5, f"cuda:{gpu(rank)}")


@as_ranks(WORLD)
def test_fused_operations_on_expandable_segments(rank, world, meeting, place):
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    fused(rank, world, meeting, place, "bfloat16")


@as_ranks(WORLD)
def test_ranks_that_each_see_one_gpu(rank, world, place):
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


@as_ranks(WORLD, starts=start_on_gpu)
def test_fused_operations_in_a_graph(rank, world, dist):
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


@as_ranks(WORLD, starts=start_on_gpu)
def test_first_calls_in_a_graph_raise(dist, rank, world):
    from warplink.errors import InvalidArgumentError

    group, device = dist.group.WORLD, torch.device("cuda", gpu(rank))
    a, b = (torch.full(shape, rank + 1.0, device=device) for shape in ((64, 32), (32, 48)))

    def fused():
        return torch.ops.warplink.fused_all_gather_matmul(a, [b], 0, group.group_name)[1][0]

    def record(call):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        return graph, result

    # Rank 1 does not record, and would wait for the other. The barrier before the fused call, whose trials make one.
    calls = ((fused, "what needs memory of other members"), (group.intra_node_barrier, "intra_n"), (fused, "fused_all_gather"))
    for made, (call, what) in enumerate(calls):
        if rank == 0:
            with pytest.raises(InvalidArgumentError, match=f"records a graph.*{what}.*call it once on every rank before"):
                record(call)
        if made == 0:
            # That makes the group's memory, and nothing else.
            group.workspace(device)
        else:
            call()
    torch.cuda.synchronize()
    dist.barrier(device_ids=[gpu(rank)])
    graph, result = record(fused)
    for _ in range(3):
        graph.replay()
        for peer in range(world):
            assert (result[64 * peer : 64 * (peer + 1)] == 32 * (peer + 1) * (rank + 1)).all()


@as_ranks(WORLD, starts=start_on_gpu)
def test_graphs_that_are_gone_keep_no_memory(dist, rank):
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
    assert late - early <= 32 << 20

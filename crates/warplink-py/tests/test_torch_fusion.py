"""The compile pass, and the scaled operations that it uses."""

import pytest

torch = pytest.importorskip("torch")

import torch._inductor.config  # noqa: E402
from test_torch_group import on_ranks, start  # noqa: E402

WORLD = 2

#: Seconds for what compiles many graphs, most of them by the C++ compiler.
COMPILING = 400.0


def start_compiling(rank, world, place):
    # The report tells of graphs that are compiled, not of those from the cache.
    torch._inductor.config.force_disable_caches = True
    return start(rank, world, place)


def compiled(rank, world, _, place):
    dist = start_compiling(rank, world, place)
    import torch.distributed._functional_collectives as funcol
    from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

    import warplink.torch

    name = dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    def gathered(a, dim):
        # As DTensor gathers along another dimension.
        whole = funcol.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(a, world, name)
        )
        return torch.cat(whole.chunk(world), dim) if dim else whole

    def one(a, b):
        return all_gather_tensor(a, 0, name) @ b

    def several(a, b):
        whole = all_gather_tensor(a, 0, name)
        return whole @ b, whole.sum(0), (whole @ (2 * b)).relu()

    def along_the_second(a, b):
        return gathered(a, 1) @ b

    def with_bias(a, b):
        return torch.nn.functional.linear(gathered(a, 1), b.t(), b[0])

    def as_bytes(a, b):
        whole = funcol.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(a.view(torch.uint8), world, name)
        )
        return whole.view(torch.float32) @ b

    def dependent(a, b):
        whole = all_gather_tensor(a, 0, name)
        return whole @ (b + whole.sum())

    def along_the_sum(a, b):
        return gathered(a, a.dim() - 1) @ torch.cat([b, b])

    def no_matmul(a, b):
        return all_gather_tensor(a, 0, name).relu()

    def scattered(a, b):
        return reduce_scatter_tensor(a @ b, "sum", 0, name)

    def scattered_along_the_second(a, b):
        return reduce_scatter_tensor(a @ b, "avg", 1, name)

    def scattered_with_bias(a, b):
        return reduce_scatter_tensor(torch.nn.functional.linear(a, b.t(), b[0]), "sum", 0, name)

    def scattered_columns(a, b):
        return reduce_scatter_tensor(a @ b, "sum", a.dim() - 1, name)

    def used_twice(a, b):
        product = a @ b
        return reduce_scatter_tensor(product, "sum", 0, name), product.sum()

    def maximum(a, b):
        return reduce_scatter_tensor(a @ b, "max", 0, name)

    b = random(16, 6) + rank
    flat, deep = random(8, 16) + rank, random(2, 4, 16) + rank
    cases = [
        (one, flat, 1, None),
        (one, deep, 1, None),
        (several, flat, 2, None),
        (several, deep, 2, None),
        (along_the_second, deep, 1, None),
        (with_bias, deep, 1, None),
        (as_bytes, flat, 1, None),
        (dependent, flat, 0, "depends on the gathered tensor"),
        (along_the_sum, flat, 0, "sums over"),
        (no_matmul, flat, 0, "no matmul"),
        (scattered, flat, 1, None),
        (scattered, deep, 1, None),
        (scattered_along_the_second, deep, 1, None),
        (scattered_with_bias, flat, 1, None),
        (scattered_columns, flat, 0, "columns"),
        (used_twice, flat, 0, "used elsewhere"),
        (maximum, flat, 0, "not sum or avg"),
    ]
    warplink.torch.enable_fusion()
    warplink.torch.enable_fusion()
    try:
        for function, a, matmuls, reason in cases:
            torch._dynamo.reset()
            warplink.torch.fusion_report(clear=True)
            got = torch.compile(function, fullgraph=True)(a, b)
            wanted = function(a, b)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
            (found,) = warplink.torch.fusion_report()
            assert (found.replaced, found.matmuls) == (matmuls > 0, matmuls), found
            assert reason is None or reason in str(found), found
            assert found.group == name and "test_torch_fusion" in str(found), found
    finally:
        warplink.torch.disable_fusion()
    torch._dynamo.reset()
    torch.compile(one)(flat, b)
    assert len(warplink.torch.fusion_report()) == 1
    dist.destroy_process_group()


def test_collectives_beside_matmuls_are_replaced():
    on_ranks(compiled, WORLD, limit=COMPILING)


def scaled(rank, world, _, place, device="cpu"):
    dist = start(rank, world, place)
    from torch.distributed._symmetric_memory import (
        _fused_all_gather_scaled_matmul_fallback,
        _fused_scaled_matmul_reduce_scatter_fallback,
    )

    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        values = torch.randn(*shape, generator=generator) + rank
        return values.to(torch.float8_e4m3fn).to(device)

    scale = torch.tensor(0.5, device=device)
    close = {"rtol": 2e-2, "atol": 1e-1}
    for shape, dim in [((16, 32), 0), ((3, 16, 32), 0), ((3, 16, 32), 1)]:
        for _ in range(3):
            a, bs = random(*shape), [random(48, 32).t(), random(16, 32).t()]
            rest = (dim, name, [None] * 2, [None] * 2, [torch.bfloat16, torch.float32], [False] * 2)
            whole, results = ops.fused_all_gather_scaled_matmul(a, bs, scale, [scale] * 2, *rest)
            expected, products = _fused_all_gather_scaled_matmul_fallback(
                a, bs, scale, [scale] * 2, *rest
            )
            assert torch.equal(whole.view(torch.uint8), expected.view(torch.uint8))
            for got, wanted in zip(results, products, strict=True):
                assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
                torch.testing.assert_close(got, wanted, **close)
            sizes = list(shape)
            sizes[dim] *= world
            left, right = random(*sizes), random(48, 32).t()
            for op in ("sum", "avg"):
                rest = (op, dim, min(dim, 1), name, [*sizes[:-1], 48], None, None, torch.bfloat16)
                got = ops.fused_scaled_matmul_reduce_scatter(left, right, scale, scale, *rest)
                wanted = _fused_scaled_matmul_reduce_scatter_fallback(left, right, scale, scale, *rest)
                assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
                assert got.is_contiguous()
                torch.testing.assert_close(got, wanted, **close)
    # Along the columns of the product, which runs unfused.
    rest = ("sum", 1, 1, name, None, None, None, torch.bfloat16)
    got = ops.fused_scaled_matmul_reduce_scatter(random(16, 32), right, scale, scale, *rest)
    assert got.shape == (16, 48 // world)
    metas = ops.fused_all_gather_scaled_matmul(
        a.to("meta"), [b.to("meta") for b in bs], scale, [scale] * 2, dim, name,
        [None] * 2, [None] * 2, [torch.bfloat16, torch.float32], [False] * 2,
    )  # fmt: skip
    for meta, result in zip(metas[1], results, strict=True):
        assert (meta.shape, meta.stride(), meta.dtype) == (result.shape, result.stride(), result.dtype)
    with pytest.raises(ValueError, match="biases has 1 entries; expected 2"):
        ops.fused_all_gather_scaled_matmul(
            a, bs, scale, [scale] * 2, dim, name, [None], [None] * 2, [None] * 2, [False] * 2
        )
    with pytest.raises(ValueError, match="multiple of 2 ranks"):
        ops.fused_scaled_matmul_reduce_scatter(
            random(3, 32), right, scale, scale, "sum", 0, 0, name, None
        )
    dist.destroy_process_group()


def test_scaled_operations_equal_the_unfused():
    on_ranks(scaled, WORLD)


def scaled_columns(rank, world, _, place, device="cpu"):
    dist = start(rank, world, place)
    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(8)

    def random(*shape):
        values = torch.randn(*shape, generator=generator) + rank
        return values.to(torch.float8_e4m3fn).to(device)

    one = torch.tensor(0.5, device=device)
    for shape in [(16, 32), (2, 16, 32)]:
        a, bs = random(*shape), [random(48, 32 * world).t(), random(16, 32 * world).t()]
        rest = (len(shape) - 1, name, [None] * 2, [None] * 2, [torch.bfloat16] * 2, [False] * 2)
        whole, results = ops.fused_all_gather_scaled_matmul(a, bs, one, [one] * 2, *rest)
        parts = [torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(world)]
        dist.all_gather(parts, a.view(torch.uint8))
        expected = torch.cat(parts, -1)
        assert torch.equal(whole.view(torch.uint8), expected)
        flat = expected.view(torch.float8_e4m3fn).view(-1, 32 * world)
        for got, b in zip(results, bs, strict=True):
            wanted = torch._scaled_mm(flat, b, one, one, out_dtype=torch.bfloat16)
            wanted = wanted.view(*shape[:-1], -1)
            assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())
            assert torch.equal(got, wanted)
        metas = ops.fused_all_gather_scaled_matmul(
            a.to("meta"), [b.to("meta") for b in bs], one, [one] * 2, *rest
        )
        for meta, result in zip([metas[0], *metas[1]], [whole, *results], strict=True):
            assert (meta.shape, meta.stride()) == (result.shape, result.stride())
    with pytest.raises(ValueError, match="gather_dim is 3; expected a dimension of A, from 0 to 2"):
        ops.fused_all_gather_scaled_matmul(a, bs, one, [one] * 2, 3, *rest[1:])
    with pytest.raises(ValueError, match="expected 64 rows"):
        ops.fused_all_gather_scaled_matmul(a, [b[:32] for b in bs], one, [one] * 2, *rest)
    dist.destroy_process_group()


def test_scaled_matmuls_of_gathered_columns():
    on_ranks(scaled_columns, WORLD)


def fp8_model(rank, world, _, place):
    dist = start_compiling(rank, world, place)
    from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

    import warplink.torch

    name = dist.group.WORLD.group_name
    torch.manual_seed(rank)
    scale = torch.tensor(0.5)

    def gathered(a, b):
        return torch._scaled_mm(all_gather_tensor(a, 0, name), b, scale, scale, out_dtype=torch.bfloat16)

    def scattered(a, b):
        product = torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16)
        return reduce_scatter_tensor(product, "sum", 0, name)

    a, b = (torch.randn(16, 32).to(torch.float8_e4m3fn) for _ in range(2))
    warplink.torch.enable_fusion()
    try:
        for function in (gathered, scattered):
            torch._dynamo.reset()
            got = torch.compile(function, fullgraph=True)(a, b.t())
            torch.testing.assert_close(got, function(a, b.t()), rtol=2e-2, atol=1e-1)
    finally:
        warplink.torch.disable_fusion()
    assert [found.replaced for found in warplink.torch.fusion_report()] == [True, True]
    dist.destroy_process_group()


def test_scaled_matmuls_are_replaced():
    on_ranks(fp8_model, WORLD, limit=COMPILING)


def tensor_parallel(rank, world, _, place):
    dist = start_compiling(rank, world, place)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    import warplink.torch

    mesh = init_device_mesh("cpu", (world,))

    def train(fuse):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32, bias=False), torch.nn.ReLU(), torch.nn.Linear(32, 16)
        )
        parallelize_module(
            model,
            mesh,
            {
                "0": ColwiseParallel(input_layouts=Shard(1)),
                "2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        if fuse:
            warplink.torch.enable_fusion()
        try:
            model = torch.compile(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            data = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(9))
            own = data.chunk(world, 1)[rank].contiguous().requires_grad_()
            losses = []
            for _ in range(5):
                loss = (model(own) - own).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        finally:
            warplink.torch.disable_fusion()
        return losses

    expected = train(False)
    assert warplink.torch.fusion_report() == []
    assert train(True) == pytest.approx(expected, rel=1e-5)
    kinds = [found.kind for found in warplink.torch.fusion_report() if found.replaced]
    # Forward: a gather before the first matmul, a scatter behind the last; backward: the reverse.
    assert sorted(kinds) == ["all-gather + matmul"] * 2 + ["matmul + reduce-scatter"] * 2, (
        warplink.torch.fusion_report()
    )
    dist.destroy_process_group()


def test_a_compiled_tensor_parallel_model_trains_as_before():
    on_ranks(tensor_parallel, WORLD, limit=COMPILING)


class Marker:
    """A pass of somebody else's."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph):
        self.graphs += 1

    def uuid(self):
        return None


def test_the_pass_runs_behind_one_that_is_there():
    from torch._inductor import config

    import warplink.torch

    marker = Marker()
    config.post_grad_custom_post_pass = marker
    try:
        warplink.torch.enable_fusion()
        assert config.post_grad_custom_post_pass.uuid() is None
        torch._dynamo.reset()
        torch.compile(lambda x: x.cos().sum())(torch.ones(3))
        assert marker.graphs == 1
        warplink.torch.disable_fusion()
        assert config.post_grad_custom_post_pass is marker
    finally:
        config.post_grad_custom_post_pass = None

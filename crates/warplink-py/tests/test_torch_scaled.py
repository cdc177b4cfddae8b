"""The fused operations with scaled (fp8) matmuls."""

import pytest

torch = pytest.importorskip("torch")

from conftest import as_ranks, on_ranks, start  # noqa: E402
from torch.distributed._symmetric_memory import (  # noqa: E402
    _fused_all_gather_scaled_matmul_fallback,
    _fused_scaled_matmul_reduce_scatter_fallback,
)

WORLD = 2


def matrices(seed, rank, device):
    """Generator of fp8 tensors of given sizes, other ones on each rank."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        values = torch.randn(*shape, generator=generator) + rank
        return values.to(torch.float8_e4m3fn).to(device)

    return random


def scaled(rank, world, _, place, device="cpu"):
    dist = start(rank, world, place)
    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    random = matrices(5, rank, device)
    scale = torch.tensor(0.5, device=device)
    close = {"rtol": 2e-2, "atol": 1e-1}
    for shape, dim in [((16, 32), 0), ((3, 16, 32), 0), ((3, 16, 32), 1), ((1, 16, 32), 1)]:
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
                assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
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


@as_ranks(WORLD)
def test_scaled_matmuls_with_a_bias(dist, rank, world):
    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    random = matrices(6, rank, "cpu")
    scale = torch.tensor(0.5)
    bias = torch.arange(48).bfloat16() + rank
    b, out = random(48, 32).t(), torch.bfloat16
    for shape, dim in [((16, 32), 0), ((3, 16, 32), 0), ((3, 16, 32), 1), ((1, 16, 32), 1)]:
        a = random(*shape)
        # One with a bias beside one without.
        rest = (dim, name, [bias, None], [None] * 2, [out] * 2, [False] * 2)
        given = (a, [b, b], scale, [scale] * 2, *rest)
        _, results = ops.fused_all_gather_scaled_matmul(*given)
        _, products = _fused_all_gather_scaled_matmul_fallback(*given)
        for got, wanted in zip(results, products, strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-1)
        torch.testing.assert_close(results[0], results[1] + bias, rtol=2e-2, atol=1e-1)
        sizes = list(shape)
        sizes[dim] *= world
        left = random(*sizes)
        for op in ("sum", "avg"):
            given = (op, dim, min(dim, 1), name, [*sizes[:-1], 48], bias, None, out)
            got = ops.fused_scaled_matmul_reduce_scatter(left, b, scale, scale, *given)
            wanted = _fused_scaled_matmul_reduce_scatter_fallback(left, b, scale, scale, *given)
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=5e-1)


def scaled_columns(rank, world, _, place, device="cpu"):
    dist = start(rank, world, place)
    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    random = matrices(8, rank, device)
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

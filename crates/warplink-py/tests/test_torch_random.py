"""Fused operations on random shapes, types and layouts, against the same unfused."""

import random

import pytest

torch = pytest.importorskip("torch")

from conftest import on_ranks, start  # noqa: E402

#: By element type: how far results may be off, relative to the largest.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(generator, shape, dtype, device, rank=None):
    """Values that every rank draws alike, then moved by the rank if that is given."""
    values = torch.randn(shape, generator=generator)
    return (values if rank is None else values + 0.25 * rank).to(dtype).to(device)


def laid_out(chance, generator, k, n, dtype, device):
    """A ``[k, n]`` in one of the layouts that a right operand may have."""
    layout = chance.choice(["plain", "transposed", "columns", "rows"])
    if layout == "plain":
        return draw(generator, (k, n), dtype, device)
    if layout == "transposed":
        return draw(generator, (n, k), dtype, device).t()
    if layout == "columns":
        return draw(generator, (k, 2 * n), dtype, device)[:, ::2]
    return draw(generator, (k + 3, n), dtype, device)[3:]


def is_close(got, wanted, dtype):
    assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
    off = (got.float() - wanted.float()).abs().max().item()
    assert off <= TOLERANCES[dtype] * max(1.0, wanted.float().abs().max().item()), off


def cases(rank, world, _, place, count, seed, device="cpu"):
    dist = start(rank, world, place)
    from torch.distributed._symmetric_memory import (
        _fused_all_gather_matmul_fallback,
        _fused_matmul_reduce_scatter_fallback,
    )

    from warplink.torch.plans import FusedPlan

    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for number in range(count):
        dtype = chance.choice(list(TOLERANCES))
        shape = [chance.randint(1, 9) for _ in range(chance.choice([2, 2, 3, 4]))]
        shape[-1] = 2 * chance.randint(1, 20)
        dim = chance.randrange(len(shape))
        last = dim == len(shape) - 1
        what = f"case {number}: {shape} of {dtype} along {dim}"
        a = draw(generator, shape, dtype, device, rank)
        if chance.random() < 0.3:
            # A that is not contiguous.
            a = draw(generator, [*shape[:-1], 2 * shape[-1]], dtype, device, rank)[..., ::2]
        k = shape[-1] * (world if last else 1)
        bs = [
            laid_out(chance, generator, k, 2 * chance.randint(1, 12), dtype, device)
            for _ in range(chance.randint(1, 3))
        ]
        if chance.random() < 0.3:
            bs.append(bs[0])
        keep = chance.random() < 0.5
        # At other addresses the second time.
        for _ in range(2):
            got = ops.fused_all_gather_matmul(a, bs, dim, name, return_A=keep)
            wanted = _fused_all_gather_matmul_fallback(a, bs, dim, name, return_A=keep)
            try:
                assert (got[0] is None) == (not keep)
                if keep:
                    assert torch.equal(got[0], wanted[0]) and got[0].stride() == wanted[0].stride()
                for one, other in zip(got[1], wanted[1], strict=True):
                    is_close(one, other, dtype)
            except AssertionError as error:
                raise AssertionError(f"all-gather + matmul, {what}") from error
            bs = [b.clone(memory_format=torch.preserve_format) for b in bs]
        sizes = list(shape)
        sizes[dim] *= 1 if last else world
        left = draw(generator, sizes, dtype, device, rank)
        columns = 2 * chance.randint(1, 12) * (world if last else 1)
        right = laid_out(chance, generator, shape[-1], columns, dtype, device)
        op = chance.choice(["sum", "avg"])
        for _ in range(2):
            got = ops.fused_matmul_reduce_scatter(left, right, op, dim, name)
            wanted = _fused_matmul_reduce_scatter_fallback(left, right, op, dim, name)
            try:
                is_close(got, wanted, dtype)
            except AssertionError as error:
                raise AssertionError(f"matmul + reduce-scatter, {what}, {op}") from error
            left, right = left.clone(), right.clone(memory_format=torch.preserve_format)
    # Weights stay where PyTorch has them. Where the machine's model chooses collectives for all shapes, so does the rest.
    plans = dist.group.WORLD.workspace(torch.device(device).type).plans.values()
    fused = [plan for plan in plans if isinstance(plan, FusedPlan)]
    own = {name for plan in fused for name in plan.own}
    assert fused and own <= {"A", "G", "C"}, own
    dist.destroy_process_group()


@pytest.mark.parametrize("world, count, seed", [(2, 30, 1), (3, 15, 2)])
def test_fused_operations_equal_the_unfused_at_random(world, count, seed):
    on_ranks(cases, world, count, seed)


def scaled_cases(rank, world, _, place, count, seed, device="cpu"):
    dist = start(rank, world, place)
    from torch.distributed._symmetric_memory import (
        _fused_all_gather_scaled_matmul_fallback,
        _fused_scaled_matmul_reduce_scatter_fallback,
    )

    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    fp8 = torch.float8_e4m3fn
    for number in range(count):
        # Of sizes that GPUs multiply: columns are multiples of 16.
        shape = [chance.randint(1, 9) for _ in range(chance.choice([2, 3]))]
        shape[-1] = 16 * chance.randint(1, 4)
        dim, n = chance.randrange(len(shape) - 1), 16 * chance.randint(1, 3)
        out = chance.choice([torch.bfloat16, torch.float32])
        what = f"case {number}: {shape} along {dim}, {n} columns of {out}"
        a = draw(generator, shape, fp8, device, rank)
        bs = [draw(generator, (n, shape[-1]), fp8, device).t() for _ in range(chance.randint(1, 2))]
        scale = torch.tensor(chance.uniform(0.2, 2.0), device=device)
        each = len(bs)
        rest = (dim, name, [None] * each, [None] * each, [out] * each, [False] * each)
        got = ops.fused_all_gather_scaled_matmul(a, bs, scale, [scale] * each, *rest)
        wanted = _fused_all_gather_scaled_matmul_fallback(a, bs, scale, [scale] * each, *rest)
        assert torch.equal(got[0].view(torch.uint8), wanted[0].view(torch.uint8)), what
        for one, other in zip(got[1], wanted[1], strict=True):
            is_close(one, other, torch.bfloat16)
        sizes = list(shape)
        sizes[dim] *= world
        left, right = draw(generator, sizes, fp8, device, rank), bs[0]
        op = chance.choice(["sum", "avg"])
        rest = (op, dim, min(dim, 1), name, [*sizes[:-1], n], None, None, out)
        got = ops.fused_scaled_matmul_reduce_scatter(left, right, scale, scale, *rest)
        wanted = _fused_scaled_matmul_reduce_scatter_fallback(left, right, scale, scale, *rest)
        is_close(got, wanted.contiguous(), torch.bfloat16)
    dist.destroy_process_group()


def test_scaled_operations_equal_the_unfused_at_random():
    on_ranks(scaled_cases, 2, 12, 3)

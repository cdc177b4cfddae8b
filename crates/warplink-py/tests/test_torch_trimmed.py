"""The compile pass on gathers of padded parts, as of dimensions that do not divide among the ranks: a slice behind the
gather takes the padding away."""

import pytest

torch = pytest.importorskip("torch")

from test_torch_fusion import fuse_only, fusing, of_all_ranks, start_compiling  # noqa: E402
from conftest import as_ranks  # noqa: E402

WORLD = 2


@as_ranks(WORLD, limit=300.0, starts=start_compiling)
def test_gathers_of_padded_parts_are_fused_and_the_results_are_cut(rank, world, dist):
    import warplink.torch

    name = dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator) + rank

    def gathered(a, dim):
        whole = of_all_ranks(a, world, name)
        return torch.cat(whole.chunk(world), dim) if dim else whole

    def in_slices(a, dim):
        whole = of_all_ranks(a, world, name)
        rows = a.shape[0]
        return torch.cat([whole[rows * part : rows * (part + 1)] for part in range(world)], dim)

    def product(a, b):
        # As a layer computes it that is trained: of a matrix, which copies what a slice has left.
        return torch.mm(a.reshape(-1, a.shape[-1]), b).view(*a.shape[:-1], b.shape[1])

    def rows(a, b):
        return gathered(a, 0)[: world * a.shape[0] - 1] @ b

    def second(a, b):
        return product(gathered(a, 1).narrow(1, 0, world * a.shape[1] - 1), b)

    def second_in_slices(a, b):
        return product(in_slices(a, 1).narrow(1, 0, 5), b)

    def second_from_the_end(a, b):
        return product(in_slices(a, 1)[:, :-3], b)

    def second_with_bias(a, b):
        whole = gathered(a, 1).narrow(1, 0, 5)
        return torch.addmm(b[0], whole.reshape(-1, a.shape[-1]), b).view(*whole.shape[:-1], b.shape[1])

    def second_twice_and_kept(a, b):
        whole = gathered(a, 1).narrow(1, 0, 5)
        return product(whole, b), product(whole, 2 * b).relu(), whole.sum(1)

    def second_with_sizes(a, b):
        whole = gathered(a, 1).narrow(1, 0, world * a.shape[1] - 1)
        return product(whole, b) * whole.shape[1] + whole.shape[0]

    def from_the_second_row(a, b):
        return product(gathered(a, 1)[:, 1:], b)

    def other_dimension(a, b):
        return product(gathered(a, 1)[:1], b)

    def every_second(a, b):
        return product(gathered(a, 1)[:, ::2], b)

    def whole_too(a, b):
        whole = gathered(a, 1)
        return product(whole.narrow(1, 0, 5), b), whole.sum()

    def columns(a, b):
        return product(gathered(a, 2).narrow(2, 0, world * a.shape[2] - 1), torch.cat([b, b])[:-1])

    def scaled(a, b, scale):
        one = torch.ones(())
        whole = gathered(a.view(torch.uint8), 0).view(torch.float8_e4m3fn)[:30]
        return torch._scaled_mm(whole, b.t(), scale if scale is not None else one, one, out_dtype=torch.bfloat16)

    b, flat, deep = random(16, 6), random(4, 16), random(2, 4, 16)
    left, right = (random(*shape).to(torch.float8_e4m3fn) for shape in ((16, 32), (48, 32)))
    cases = [
        (rows, (flat, b), 1, None),
        (rows, (deep, b), 1, None),
        (second, (deep, b), 1, None),
        (second_in_slices, (deep, b), 1, None),
        (second_with_bias, (deep, b), 1, None),
        (second_twice_and_kept, (deep, b), 2, None),
        (second_with_sizes, (deep, b), 1, None),
        (from_the_second_row, (deep, b), 0, "no matmul"),
        (other_dimension, (deep, b), 0, "no matmul"),
        (every_second, (deep, b), 0, "no matmul"),
        (whole_too, (deep, b), 0, "no matmul"),
        # Where sizes are symbols, it is not followed.
        (second_from_the_end, (deep, b), None, None),
        (columns, (deep, b), 0, "a part of the columns that the matmul sums over is taken away"),
        (scaled, (left, right, None), 1, None),
    ]
    # With sizes that are symbols, those of which something depends on them.
    symbolic = (second, second_in_slices, second_from_the_end, second_with_sizes, columns)
    for dynamic in (False, True):
        for function, given, matmuls, reason in cases:
            if dynamic and function not in symbolic:
                continue
            torch._dynamo.reset()
            warplink.torch.fusion_report(clear=True)
            got = fuse_only(function, dynamic=dynamic)(*given)
            torch.testing.assert_close(got, function(*given), rtol=1e-4, atol=1e-4)
            (found,) = warplink.torch.fusion_report()
            wanted = int(not dynamic) if matmuls is None else matmuls
            assert (found.replaced, found.matmuls) == (wanted > 0, wanted), (function, dynamic, found)
            assert reason is None or reason in str(found), found
    # Once by Inductor, with sizes that are symbols and are read.
    with fusing():
        for function in (second_with_sizes, second_twice_and_kept):
            torch._dynamo.reset()
            warplink.torch.fusion_report(clear=True)
            got = torch.compile(function, fullgraph=True, dynamic=True)(deep, b)
            torch.testing.assert_close(got, function(deep, b), rtol=1e-4, atol=1e-4)
            (found,) = warplink.torch.fusion_report()
            assert found.replaced, found

"""The compile pass."""

import contextlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import torch.distributed._functional_collectives as funcol  # noqa: E402
from conftest import as_ranks, compile_every_graph, start  # noqa: E402

WORLD = 2

#: Seconds for what compiles many graphs, most of them by the C++ compiler.
COMPILING = 400.0


def start_compiling(rank, world, place):
    compile_every_graph()
    return start(rank, world, place)


@contextlib.contextmanager
def fusing():
    """The pass is enabled."""
    import warplink.torch

    warplink.torch.enable_fusion()
    try:
        yield
    finally:
        warplink.torch.disable_fusion()


def of_all_ranks(a, world, name):
    """``a`` of every rank, gathered along the first dimension as a compiled ``all_gather_tensor`` does."""
    return funcol.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(a, world, name))


@as_ranks(WORLD, limit=COMPILING, starts=start_compiling)
def test_collectives_beside_matmuls_are_replaced(rank, world, dist):
    from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

    import warplink.torch

    name = dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    def gathered(a, dim):
        # As DTensor gathers along another dimension.
        whole = of_all_ranks(a, world, name)
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
        return of_all_ranks(a.view(torch.uint8), world, name).view(torch.float32) @ b

    def dependent(a, b):
        whole = all_gather_tensor(a, 0, name)
        return whole @ (b + whole.sum())

    def along_the_sum(a, b):
        return gathered(a, a.dim() - 1) @ torch.cat([b, b])

    def along_the_sum_and_kept(a, b):
        whole = gathered(a, a.dim() - 1)
        return whole @ torch.cat([b, b]), whole.sum(0)

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

    def scattered_columns_with_bias(a, b):
        product = torch.nn.functional.linear(a, b.t(), b[0])
        return reduce_scatter_tensor(product, "avg", a.dim() - 1, name)

    b = random(16, 6) + rank
    flat, deep = random(8, 16) + rank, random(2, 4, 16) + rank
    wide, long = (random(2, 4, 1024) + rank) / 8, (random(1024, 6) + rank) / 8
    cases = [
        (one, flat, 1, None),
        (one, deep, 1, None),
        (several, flat, 2, None),
        (several, deep, 2, None),
        (along_the_second, deep, 1, None),
        (with_bias, deep, 1, None),
        (as_bytes, flat, 1, None),
        (dependent, flat, 0, "depends on the gathered tensor"),
        (along_the_sum, flat, 0, "has 16 of the columns that the matmul sums over"),
        (along_the_sum, wide, 1, None),
        (along_the_sum_and_kept, wide, 0, "used elsewhere"),
        (no_matmul, flat, 0, "no matmul"),
        (scattered, flat, 1, None),
        (scattered, deep, 1, None),
        (scattered_along_the_second, deep, 1, None),
        (scattered_with_bias, flat, 1, None),
        (scattered_columns, flat, 1, None),
        (scattered_columns, deep, 1, None),
        (scattered_columns_with_bias, deep, 1, None),
        (used_twice, flat, 0, "used elsewhere"),
        (maximum, flat, 0, "not sum or avg"),
    ]
    with fusing():
        # A second call changes nothing.
        warplink.torch.enable_fusion()
        for function, a, matmuls, reason in cases:
            torch._dynamo.reset()
            warplink.torch.fusion_report(clear=True)
            right = long if a is wide else b
            got = torch.compile(function, fullgraph=True)(a, right)
            wanted = function(a, right)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
            (found,) = warplink.torch.fusion_report()
            assert (found.replaced, found.matmuls) == (matmuls > 0, matmuls), found
            assert reason is None or reason in str(found), found
            assert found.group == name and "test_torch_fusion" in str(found), found
    torch._dynamo.reset()
    torch.compile(one)(flat, b)
    assert len(warplink.torch.fusion_report()) == 1


def fuse_only(function, **options):
    """``function`` compiled with the pass and without Inductor, which takes long."""
    from torch._dynamo.backends.common import aot_autograd

    from warplink.torch.fusion.graph_pass import FusionPass

    def compiler(module, _):
        for node in module.graph.nodes:
            # Inductor takes out what does nothing before its last pass.
            if node.target is torch.ops.aten.detach.default:
                node.replace_all_uses_with(node.args[0])
                module.graph.erase_node(node)
        FusionPass()(module.graph)
        for node in module.graph.nodes:
            assert node.op == "output" or "val" in node.meta, node
        module.recompile()
        return module.forward

    return torch.compile(
        function, fullgraph=True, backend=aot_autograd(fw_compiler=compiler), **options
    )


@as_ranks(WORLD, limit=COMPILING, starts=start_compiling)
def test_what_is_replaced_in_many_forms(rank, world, dist):
    from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

    import warplink.torch

    name = dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    def whole(a):
        return of_all_ranks(a, world, name)

    def scatter(a):
        return funcol.wait_tensor(
            torch.ops._c10d_functional.reduce_scatter_tensor(a, "sum", world, name)
        )

    def twice_gathered(a, b):
        return all_gather_tensor(all_gather_tensor(a, 0, name) @ b, 0, name) @ b

    def gathered_and_scattered(a, b):
        return reduce_scatter_tensor(all_gather_tensor(a, 0, name) @ b, "sum", 1, name)

    def twice_scattered(a, b):
        return reduce_scatter_tensor(reduce_scatter_tensor(a @ b, "sum", 0, name) @ b, "sum", 0, name)

    def scattered_and_gathered(a, b):
        return all_gather_tensor(reduce_scatter_tensor(a @ b, "sum", 0, name), 0, name) @ b

    def scattered_along_the_second(a, b):
        return reduce_scatter_tensor(a @ b, "sum", 1, name)

    def scattered_columns(a, b):
        return reduce_scatter_tensor(a @ b, "sum", a.dim() - 1, name)

    def gathered(a, b):
        return all_gather_tensor(a, 0, name) @ b

    def gathered_and_kept(a, b):
        a = all_gather_tensor(a, 0, name)
        return a @ b, a.sum(-1)

    def gathered_along_the_second(a, b):
        return torch.cat(whole(a).chunk(world), 1) @ b

    def gathered_in_lists(a, b):
        return torch.cat(whole(a).split([a.shape[0]] * world), 1) @ b

    def gathered_in_slices(a, b):
        rows, every = a.shape[0], whole(a)
        return torch.cat([every[rows * r : rows * (r + 1)] for r in range(world)], 1) @ b

    def gathered_in_other_slices(a, b):
        rows, every = a.shape[0], whole(a)
        return torch.cat([every[rows * r : rows * (r + 1)] for r in (1, 0)], 1) @ b

    def gathered_and_viewed(a, b):
        return whole(a).view(1, -1, a.shape[-1]) @ b

    def scattered_in_lists(a, b):
        a = a @ b
        return scatter(torch.cat(a.split([a.shape[1] // world] * world, 1)))

    def scattered_in_slices(a, b):
        a = a @ b
        rows = a.shape[1] // world
        return scatter(torch.cat([a[:, rows * r : rows * (r + 1)] for r in range(world)]))

    def scattered_in_other_slices(a, b):
        a = a @ b
        rows = a.shape[1] // world
        return scatter(torch.cat([a[:, rows * r : rows * (r + 1)] for r in (1, 0)]))

    def gathered_together(a, b):
        return [one @ b for one in funcol.all_gather_into_tensor_coalesced([a, 2 * a], name)]

    def scattered_together(a, b):
        return funcol.reduce_scatter_tensor_coalesced([a @ b, (2 * a) @ b], "sum", [0, 0], name)

    def scattered_and_viewed(a, b):
        return scatter((a @ b).view(1, -1, b.shape[1]).view(2, -1, b.shape[1]))

    b = random(16, 16) + rank
    flat, deep = random(8, 16) + rank, random(2, 4, 16) + rank
    one = random(1, 4, 16) + rank
    cases = [
        (twice_gathered, flat, [True, True]),
        (twice_gathered, deep, [True, True]),
        (gathered_and_scattered, deep, [True, False]),
        (scattered_columns, deep, [True]),
        (twice_scattered, flat, [True, True]),
        (scattered_and_gathered, flat, [True, True]),
        (gathered_and_kept, deep, [True]),
        (gathered_along_the_second, one, [True]),
        (gathered_in_lists, deep, [True]),
        (gathered_in_slices, deep, [True]),
        (gathered_in_other_slices, deep, [False]),
        (gathered_and_viewed, one, [True]),
        (scattered_in_lists, deep, [True]),
        (scattered_in_slices, deep, [True]),
        (scattered_in_other_slices, deep, [False]),
        (scattered_and_viewed, deep, [True]),
        (gathered_together, flat, [False]),
        (scattered_together, flat, [False]),
    ]
    dynamic = [
        (gathered, flat, [True]),
        (gathered, deep, [True]),
        (gathered_and_kept, deep, [True]),
        (gathered_along_the_second, deep, [True]),
        (scattered_along_the_second, deep, [True]),
        (scattered_columns, flat, [True]),
        (twice_scattered, flat, [True, True]),
    ]
    for symbols, function, a, expected in [
        *((False, *case) for case in cases),
        *((True, *case) for case in dynamic),
    ]:
        torch._dynamo.reset()
        warplink.torch.fusion_report(clear=True)
        with torch.no_grad():
            got = fuse_only(function, dynamic=symbols)(a, b)
        torch.testing.assert_close(got, function(a, b), rtol=1e-4, atol=1e-3)
        found = warplink.torch.fusion_report()
        assert [one.replaced for one in found] == expected, (function, symbols, found)


@as_ranks(WORLD, limit=COMPILING, starts=start_compiling)
def test_scaled_matmuls_are_replaced(rank, dist):
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
    with fusing():
        for function in (gathered, scattered):
            torch._dynamo.reset()
            got = torch.compile(function, fullgraph=True)(a, b.t())
            torch.testing.assert_close(got, function(a, b.t()), rtol=2e-2, atol=1e-1)
    assert [found.replaced for found in warplink.torch.fusion_report()] == [True, True]


@as_ranks(WORLD, limit=COMPILING, starts=start_compiling)
def test_what_members_found_slower_is_left(world, dist):
    from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

    import warplink.torch
    from warplink.torch.trials import Decision

    name = dist.group.WORLD.group_name
    space = dist.group.WORLD.workspace("cpu")

    def gathered(a, b):
        return all_gather_tensor(a, 0, name) @ b

    def scattered(a, b):
        return reduce_scatter_tensor(a @ b, "sum", 0, name)

    a, b = torch.randn(4 * world, 8), torch.randn(8, 6)
    torch.ops.warplink.fused_all_gather_matmul(a, [b], 0, name, return_A=False)
    torch.ops.warplink.fused_matmul_reduce_scatter(a, b, "sum", 0, name)
    calls = list(space.plans)
    with fusing():
        for decision in (Decision(False, False), Decision(False, True)):
            for function, call in zip((gathered, scattered), calls, strict=True):
                space.decide(call, decision)
                torch._dynamo.reset()
                warplink.torch.fusion_report(clear=True)
                got = torch.compile(function, fullgraph=True)(a, b)
                torch.testing.assert_close(got, function(a, b), rtol=1e-4, atol=1e-4)
                (found,) = warplink.torch.fusion_report()
                assert found.replaced == any(decision)
                assert found.replaced or "members tried both" in str(found)


@as_ranks(WORLD, limit=COMPILING, starts=start_compiling)
def test_scaled_matmuls_are_replaced_in_many_forms(rank, world, dist):
    from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

    import warplink.torch

    name, fp8 = dist.group.WORLD.group_name, torch.float8_e4m3fn
    torch.manual_seed(rank)
    scale = torch.tensor(0.5)

    def times(a, b):
        product = torch._scaled_mm(a.flatten(0, -2), b, scale, scale, out_dtype=torch.bfloat16)
        return product.view(*a.shape[:-1], b.shape[1])

    def plain(a, dim):
        return all_gather_tensor(a, dim, name)

    def parts_as_bytes(a, dim):
        # As all_gather_tensor does it along another dimension, and a view of the same type along the first.
        whole = all_gather_tensor(a, 0, name)
        if dim == 0:
            return whole.view(fp8)
        return torch.cat([part.view(torch.uint8) for part in whole.chunk(world)], dim).view(fp8)

    def parts_again(a, dim):
        whole = of_all_ranks(a.view(torch.uint8), world, name)
        return torch.cat([part.view(torch.uint8) for part in whole.chunk(world)], dim).view(fp8)

    def bytes_of(a, dim):
        return of_all_ranks(a.view(torch.uint8), world, name).view(fp8)

    flat, deep, one = ((32, 32), 0), ((2, 32, 32), 0), ((1, 32, 32), 1)
    middle = ((2, 32, 32), 1)
    cases = [(plain, [flat, deep]), (bytes_of, [flat, deep])]
    cases += [(parts_as_bytes, [flat, deep, middle, one]), (parts_again, [middle, one])]
    b = torch.randn(16, 32).to(fp8).t()
    for dynamic in (False, True):
        for gather, forms in cases:
            for sizes, dim in forms:

                def multiplied(a, b):
                    return times(gather(a, dim), b)

                torch._dynamo.reset()
                warplink.torch.fusion_report(clear=True)
                a = torch.randn(*sizes).to(fp8)
                with torch.no_grad():
                    got = fuse_only(multiplied, dynamic=dynamic)(a, b)
                torch.testing.assert_close(got, multiplied(a, b), rtol=2e-2, atol=1e-1)
                (found,) = warplink.torch.fusion_report()
                assert found.replaced, (gather, sizes, dim, dynamic, found)
    for sizes, dim, reason in [
        ((64, 32), 0, None),
        ((2, 64, 32), 0, None),
        ((2, 64, 32), 1, None),
        ((2, 64, 32), 2, "is not split along the columns"),
    ]:

        def scattered(a, b):
            return reduce_scatter_tensor(times(a, b), "avg", dim, name)

        torch._dynamo.reset()
        warplink.torch.fusion_report(clear=True)
        a = torch.randn(*sizes).to(fp8)
        with torch.no_grad():
            got = fuse_only(scattered)(a, b)
        torch.testing.assert_close(got, scattered(a, b), rtol=2e-2, atol=1e-1)
        (found,) = warplink.torch.fusion_report()
        assert found.replaced == (reason is None) and (reason is None or reason in str(found)), found


@as_ranks(WORLD)
def test_scales_that_the_operations_do_not_take_are_left(dist, world, place):
    import warplink.torch
    from warplink.torch.fusion.graph_pass import FusionPass
    from warplink.torch.fusion.nodes import FOLDED_SCALE

    name, ops = dist.group.WORLD.group_name, torch.ops
    fp8, out = torch.float8_e4m3fn, torch.bfloat16

    def like(*sizes, dtype=torch.float32):
        return torch.empty(sizes, device="meta", dtype=dtype)

    def call(graph, target, *args, val):
        node = graph.call_function(target, args)
        node.meta["val"] = val
        return node

    def placeholder(graph, name, val):
        node = graph.placeholder(name)
        node.meta["val"] = val
        return node

    def matmul(graph, a, scales, folded):
        b = placeholder(graph, "b", like(32, 16, dtype=fp8))
        scale_a, scale_b = (
            placeholder(graph, f"scale_{place}", like(*sizes)) for place, sizes in enumerate(scales)
        )
        result = placeholder(graph, "scale_result", like())
        val = like(a.meta["val"].shape[0], 16, dtype=out)
        node = call(graph, ops.aten._scaled_mm.default, a, b, scale_a, scale_b, None, result, out, val=val)
        if folded:
            node.meta[FOLDED_SCALE] = True
        return node

    def gather(scales, folded):
        graph, whole = torch.fx.Graph(), like(16 * world, 32, dtype=fp8)
        a = placeholder(graph, "a", like(16, 32, dtype=fp8))
        target = ops._c10d_functional.all_gather_into_tensor.default
        a = call(graph, target, a, world, name, val=whole)
        a = call(graph, ops._c10d_functional.wait_tensor.default, a, val=whole)
        graph.output((matmul(graph, a, scales, folded),))
        return graph

    def scatter(scales, folded):
        graph, part = torch.fx.Graph(), like(16, 16, dtype=out)
        a = placeholder(graph, "a", like(16 * world, 32, dtype=fp8))
        product = matmul(graph, a, scales, folded)
        target = ops._c10d_functional.reduce_scatter_tensor.default
        result = call(graph, target, product, "sum", world, name, val=part)
        result = call(graph, ops._c10d_functional.wait_tensor.default, result, val=part)
        graph.output((result,))
        return graph

    rows = 16 * world
    for scales, folded, reason in [
        (((), ()), False, None),
        (((rows, 1), (1, 16)), False, None),
        (((rows, 4), ()), False, "expected one scale, or one for each row"),
        (((), (1, 2)), False, "expected one scale, or one for each column"),
        (((), ()), True, "moved a multiplication into"),
    ]:
        for make in (gather, scatter):
            warplink.torch.fusion_report(clear=True)
            FusionPass()(make(scales, folded))
            (found,) = warplink.torch.fusion_report()
            assert found.replaced == (reason is None), found
            assert reason is None or reason in str(found), found
    # A graph that lacks what the pass reads stays as it is.
    graph = gather(((), ()), False)
    for node in graph.nodes:
        node.meta.clear()
    warplink.torch.fusion_report(clear=True)
    FusionPass()(graph)
    (found,) = warplink.torch.fusion_report()
    assert not found.replaced and "KeyError" in str(found), found


def test_the_mark_of_folded_scales_is_that_of_inductor():
    from torch._inductor import utils

    from warplink.torch.fusion.nodes import FOLDED_SCALE

    assert getattr(utils, "FOLDED_SCALED_MM_OUTPUT_SCALE", FOLDED_SCALE) == FOLDED_SCALE


@as_ranks(WORLD, limit=COMPILING, starts=start_compiling)
def test_a_compiled_tensor_parallel_model_trains_as_before(rank, world, dist):
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
        with fusing() if fuse else contextlib.nullcontext():
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
        return losses

    expected = train(False)
    assert warplink.torch.fusion_report() == []
    assert train(True) == pytest.approx(expected, rel=1e-5)
    kinds = [found.kind for found in warplink.torch.fusion_report() if found.replaced]
    # Forward: a gather before the first matmul, a scatter behind the last; backward: the reverse.
    assert sorted(kinds) == ["all-gather + matmul"] * 2 + ["matmul + reduce-scatter"] * 2, (
        warplink.torch.fusion_report()
    )


@as_ranks(WORLD, limit=COMPILING, starts=start_compiling)
def test_fused_operations_that_a_compiled_function_calls(rank, dist):
    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    torch.manual_seed(rank)
    b = torch.randn(16, 6)

    def both(a, b):
        # Nothing for which Inductor would run the C++ compiler, which takes long.
        whole, (product,) = ops.fused_all_gather_matmul(a, [b], 0, name)
        return whole, ops.fused_matmul_reduce_scatter(product, b.t(), "sum", 0, name)

    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(both, fullgraph=True, dynamic=dynamic)
        for sizes in ((8, 16), (12, 16)) if dynamic else ((8, 16), (8, 16)):
            a = torch.randn(*sizes)
            torch.testing.assert_close(compiled(a, b), both(a, b), rtol=1e-4, atol=1e-4)


def test_the_pass_is_switched_on_by_the_environment():
    # Reading the module again takes a small part of what another process takes.
    code = """
import importlib, os, warplink.torch
from torch._inductor import config
for given in (None, "0", "1", "yes"):
    os.environ.pop("WARPLINK_TORCH_FUSION", None)
    if given is not None:
        os.environ["WARPLINK_TORCH_FUSION"] = given
    try:
        importlib.reload(warplink.torch)
        print(given, "FusionPass" in repr(config.post_grad_custom_post_pass))
    except ValueError as error:
        print(error)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    *found, refused = told.stdout.splitlines()
    assert found == ["None False", "0 False", "1 True"] and "WARPLINK_TORCH_FUSION is 'yes'; expected 0 or 1" in refused


class Marker:
    """A pass of somebody else's."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph):
        self.graphs += 1

    def uuid(self):
        return None


def cosine_of_ones():
    torch._dynamo.reset()
    torch.compile(lambda x: x.cos().sum())(torch.ones(3))


def test_the_pass_runs_behind_one_that_is_there():
    from torch._inductor import config, custom_graph_pass

    import warplink.torch

    several = hasattr(custom_graph_pass, "get_custom_graph_passes")
    marker = Marker()
    config.post_grad_custom_post_pass = marker
    try:
        warplink.torch.enable_fusion()
        if not several:
            assert config.post_grad_custom_post_pass.uuid() is None
        cosine_of_ones()
        assert marker.graphs == 1
        warplink.torch.disable_fusion()
        assert config.post_grad_custom_post_pass is marker
        warplink.torch.disable_fusion()
        assert config.post_grad_custom_post_pass is marker
    finally:
        config.post_grad_custom_post_pass = None


def test_the_pass_runs_behind_several_that_are_there():
    from torch._inductor import config, custom_graph_pass

    import warplink.torch
    from warplink.torch.fusion.graph_pass import FusionPass

    if not hasattr(custom_graph_pass, "get_custom_graph_passes"):
        pytest.skip("this release of PyTorch takes one pass")

    class Aware(custom_graph_pass.CustomInferenceAwareGraphPass):
        graphs = 0

        def __call__(self, graph, is_inference):
            self.graphs += 1

        def uuid(self):
            return None

    aware, marker, late = Aware(), Marker(), Marker()
    try:
        for present in (None, aware, [marker], (marker, aware)):
            config.post_grad_custom_post_pass = present
            warplink.torch.enable_fusion()
            warplink.torch.enable_fusion()
            kinds = [type(one) for one in config.post_grad_custom_post_pass]
            assert kinds.count(FusionPass) == 1 and kinds[-1] is FusionPass
            aware.graphs = marker.graphs = 0
            cosine_of_ones()
            there = custom_graph_pass.get_custom_graph_passes(present)
            assert (marker.graphs, aware.graphs) == (marker in there, aware in there)
            warplink.torch.disable_fusion()
            assert config.post_grad_custom_post_pass is present
        warplink.torch.enable_fusion()
        config.post_grad_custom_post_pass = [*config.post_grad_custom_post_pass, late]
        warplink.torch.disable_fusion()
        assert config.post_grad_custom_post_pass == [marker, aware, late]
    finally:
        config.post_grad_custom_post_pass = None

"""The fused operations."""

import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from test_torch_direct_collectives import calls_on_host  # noqa: E402
from conftest import as_ranks, start  # noqa: E402

SHAPES = [((4, 8), 0), ((3, 5, 8), 0), ((3, 5, 8), 1), ((1, 5, 8), 1), ((2, 3, 5, 8), 2), ((3, 5, 8), 2), ((7, 8), 1)]


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16", "float64"])
@as_ranks(2)
def test_fused_operations_equal_the_unfused(dist, rank, world, dtype_name):
    from torch.distributed._symmetric_memory import (
        _fused_all_gather_matmul_fallback,
        _fused_matmul_reduce_scatter_fallback,
    )

    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    dtype = getattr(torch, dtype_name)
    close = {"rtol": 3e-2, "atol": 3e-1} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-4}
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        # Every rank draws the same.
        return torch.randn(*shape, generator=generator).to(dtype)

    for shape, dim in SHAPES:
        last = dim == len(shape) - 1
        k = shape[-1] * (world if last else 1)
        a = random(*shape) + rank
        bs = [random(k, 6), random(10, k).t()]
        for keep in (True, False):
            whole, results = ops.fused_all_gather_matmul(a, bs, dim, name, return_A=keep)
            expected, products = _fused_all_gather_matmul_fallback(a, bs, dim, name, return_A=keep)
            assert (whole is None) == (not keep)
            pairs = list(zip(results, products, strict=True)) + ([(whole, expected)] if keep else [])
            for got, wanted in pairs:
                assert (got.shape, got.stride()) == (wanted.shape, wanted.stride()), (shape, dim)
                torch.testing.assert_close(got, wanted, **close)
        with torch.device("meta"):
            metas = ops.fused_all_gather_matmul(
                a.to("meta"), [b.to("meta") for b in bs], dim, name
            )
        for meta, wanted in zip(metas[1], products, strict=True):
            assert (meta.shape, meta.stride()) == (wanted.shape, wanted.stride())
        sizes = list(shape)
        if not last:
            sizes[dim] *= world
        left, right = random(*sizes) + rank, random(shape[-1], 6 * world)
        for op in ("sum", "avg"):
            got = ops.fused_matmul_reduce_scatter(left, right, op, dim, name)
            wanted = _fused_matmul_reduce_scatter_fallback(left, right, op, dim, name)
            assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())
            torch.testing.assert_close(got, wanted, **close)
        meta = ops.fused_matmul_reduce_scatter(left.to("meta"), right.to("meta"), "sum", dim, name)
        assert (meta.shape, meta.stride()) == (wanted.shape, wanted.stride())
    with pytest.raises(ValueError, match="columns of A"):
        ops.fused_all_gather_matmul(a, [random(3, 3)], 0, name)
    with pytest.raises(ValueError, match="sum or avg"):
        ops.fused_matmul_reduce_scatter(left, right, "max", 0, name)


@as_ranks(2)
def test_members_decide_alike_what_is_faster_and_do_it(dist, rank, world):
    from warplink.torch.trials import Decision

    ops, group = torch.ops.warplink, dist.group.WORLD
    space = group.workspace("cpu")
    space.tries = True
    generator = torch.Generator().manual_seed(5)
    for shape, dim in SHAPES:
        k = shape[-1] * (world if dim == len(shape) - 1 else 1)
        a = torch.randn(*shape, generator=generator) + rank
        b = torch.randn(k, 2 * world, generator=generator)
        whole = torch.cat([torch.empty_like(a)] * world, dim)
        dist.all_gather(list(whole.movedim(dim, 0).unflatten(0, (world, -1)).unbind(0)), a.movedim(dim, 0).contiguous())
        sums = (whole + rank) @ b
        dist.all_reduce(sums)
        own = sums.unflatten(dim, (world, -1)).select(dim, rank)
        for forced in (None, None, Decision(False, False), Decision(True, True)):
            if forced is not None:
                space.decisions.update(dict.fromkeys(space.decisions, forced))
            gathered, (product,) = ops.fused_all_gather_matmul(a, [b], dim, group.group_name)
            torch.testing.assert_close(gathered, whole)
            torch.testing.assert_close(product, whole @ b, rtol=1e-4, atol=1e-4)
            part = ops.fused_matmul_reduce_scatter(whole + rank, b, "sum", dim, group.group_name)
            assert part.is_contiguous()
            torch.testing.assert_close(part, own, rtol=1e-4, atol=1e-4)
            if forced is None:
                decisions = [None] * world
                dist.all_gather_object(decisions, list(map(str, space.decisions.items())))
                assert decisions == [decisions[0]] * world


@as_ranks(2)
def test_a_plan_without_overlap_is_tried_where_the_plain_pair_is_faster(dist, rank, world):
    from warplink.torch import trials
    from warplink.torch.trials import Decision

    group = dist.group.WORLD
    space, name = group.workspace("cpu"), group.group_name
    space.tries, b = True, torch.arange(12.0).view(4, 3)

    def gathers(rows, *decisions):
        found = iter(map(Decision._make, decisions))
        trials._compare = lambda *_: next(found)
        for _ in range(2):
            whole, (product,) = torch.ops.warplink.fused_all_gather_matmul(torch.full((rows, 4), rank + 1.0), [b], 0, name)
            assert torch.equal(whole, torch.arange(1.0, world + 1).repeat_interleave(rows)[:, None].expand(-1, 4))
            assert torch.equal(product, whole @ b)
        # Every decision was asked for, and the last one counts.
        assert next(found, None) is None
        (key,) = (key for key in space.decisions if key.sizes[0] == rows)
        assert space.decisions[key] == decisions[-1]
        return space.plans.get(key)

    # What overlaps is tried first. Where the plain pair is faster than that, so is the same as a plan, or not.
    assert not gathers(2, (False, True)).has_collectives
    assert gathers(3, (False, False), (True, False)).has_collectives
    assert gathers(4, (False, False), (False, False)) is None


class Full:
    """A communicator whose rank 1 has no memory left."""

    def __init__(self, communicator):
        self._communicator = communicator

    def __getattr__(self, name):
        return getattr(self._communicator, name)

    def alloc(self, nbytes):
        from warplink.errors import OutOfMemoryError

        if self.rank == 1:
            raise OutOfMemoryError("none is left")
        return self._communicator.alloc(nbytes)


@pytest.mark.parametrize("tries", [False, True])
@as_ranks(2)
def test_without_memory_for_a_plan_calls_are_plain_on_all_ranks(dist, rank, world, tries):
    from warplink.errors import OutOfMemoryError
    from warplink.torch import trials

    ops, group = torch.ops.warplink, dist.group.WORLD
    space, name = group.workspace("cpu"), group.group_name
    communicator, space.tries = space.communicator, tries

    def fail(*arguments):
        raise OutOfMemoryError("a member lacks memory")

    if tries:
        # The plan is there, and what is tried with it fails.
        trials._alone = fail
    else:
        space.communicator = Full(communicator)
    # Plans along the last dimension are kept for calls of other widths.
    dims = (0,) if tries else (0, 1)
    for dim in dims:
        a, b = torch.full((4, 4), rank + 1.0), torch.arange(32.0).view(8, 4)[: 4 * (1 + dim)]
        whole = torch.cat([torch.full((4, 4), peer + 1.0) for peer in range(world)], dim)
        for operation in ("gather", "scatter"):
            for _ in range(3):
                if operation == "gather":
                    gathered, (product,) = ops.fused_all_gather_matmul(a, [b], dim, name)
                    assert torch.equal(gathered, whole) and torch.equal(product, whole @ b)
                else:
                    part = ops.fused_matmul_reduce_scatter(whole, b, "sum", dim, name)
                    assert torch.equal(part, (whole @ b * world).chunk(world, dim)[rank])
    decisions = space.decisions.values()
    assert len(decisions) == 2 * len(dims) and not any(map(any, decisions)) and not space.plans
    # Nothing has ended.
    communicator.barrier()


@as_ranks(2)
def test_calls_like_earlier_ones_take_the_short_path(rank, world, place):
    """Calls like earlier ones, whose longer path is taken away."""
    dist = start(rank, world, place)
    from warplink.errors import ClosedError
    from warplink.torch import ops as path
    from warplink.torch.trials import Decision

    ops, group = torch.ops.warplink, dist.group.WORLD
    space, name = group.workspace("cpu"), group.group_name
    # In the place of a GPU's collectives.
    direct = group._on_gpu = calls_on_host(space.communicator)
    direct._collectives = direct._collectives._collectives
    direct._watch = space.communicator.watch(direct._collectives, 30.0)
    longer = {part: getattr(path, part) for part in ("direct_workspace", "_check", "_check_scatter", "faster")}

    def gone(*_, **__):
        raise AssertionError("the longer path was taken")

    for shape, dim in SHAPES:
        if dim == len(shape) - 1:
            continue
        a = (torch.arange(math.prod(shape), dtype=torch.float32).view(shape) % 5 + rank).requires_grad_()
        for keep, op in ((True, "sum"), (False, "avg")):
            b = (torch.arange(shape[-1] * 2 * world, dtype=torch.float32).view(shape[-1], -1) % 3).requires_grad_()
            bs = [b, b.detach().clone()]
            whole = torch.cat([(torch.arange(a.numel()).float().view(shape) % 5 + r) for r in range(world)], dim)

            def call():
                gathered, products = ops.fused_all_gather_matmul(a, bs, dim, name, return_A=keep)
                part = ops.fused_matmul_reduce_scatter(whole + rank, b, op, dim, name)
                return [gathered, *products, part]

            first = call()
            expected = whole @ b.detach()
            for fuses in (True, False):
                space.decisions.update({key: Decision(fuses, fuses) for key in space.plans})
                vars(path).update(dict.fromkeys(longer, gone))
                found = call()
                vars(path).update(longer)
                for one, other in zip(first, found, strict=True):
                    assert (one is None) == (other is None)
                    if one is not None:
                        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
                        assert (one.stride(), one.requires_grad) == (other.stride(), other.requires_grad)
                torch.testing.assert_close(found[1], expected, rtol=1e-4, atol=1e-3)
            assert torch.is_grad_enabled()
            # Both follow others on the device, of which this one cannot be followed.
            other, collective = object(), {plan: plan.has_collectives for plan in space.plans.values()}
            for fuses, order in ((True, space.order), (False, direct._order)):
                space.decisions.update({key: Decision(fuses, fuses) for key in space.plans})
                for plan in collective:
                    plan.has_collectives = True
                order.add(other)
                with pytest.raises(TypeError):
                    call()
                order.remove(other)
            for plan, has in collective.items():
                plan.has_collectives = has
            space.decisions.clear()
    # Without its plan, with other strides and in a profile, a call takes the longer path; so do those of a closed group.
    shape, dim = SHAPES[0]
    a, b = torch.ones(shape), torch.ones(shape[-1], world)

    def plain():
        return ops.fused_all_gather_matmul(a, [b], dim, name)

    plain()
    space.plans.clear()
    plain()
    strided = torch.ones(2 * shape[0], *shape[1:])[::2]
    ops.fused_all_gather_matmul(strided, [b], dim, name)
    vars(path).update(dict.fromkeys(longer, gone))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(AssertionError, match="longer path"):
            plain()
    vars(path).update(longer)
    group._on_gpu = None
    dist.destroy_process_group()
    with pytest.raises((ClosedError, RuntimeError)):
        plain()


@pytest.mark.parametrize("world", [2, 3])
@as_ranks()
def test_plans_with_collectives_run_where_tensors_are(dist, rank, world):
    """Plans of a collective and a product, whose tensors stay where they are, and which are recorded where they recur."""
    ops, group = torch.ops.warplink, dist.group.WORLD
    space, name = group.workspace("cpu"), group.group_name
    executor, known = space.executor, []

    def by(method):
        def planned(*memory, lowering, **options):
            known.append(lowering)
            return getattr(executor, method)(*memory, lowering="collective", **options)

        return planned

    space.executor = SimpleNamespace(**{name: by(name) for name in ("all_gather_matmul", "matmul_reduce_scatter")})
    a, left, b = torch.empty(3, 8), torch.empty(2 * world, 8), torch.arange(40.0).view(8, 5) % 7
    for turn in range(6):
        for one in (b, b.clone()):
            every = [torch.full_like(a, float(r + turn)) for r in range(world)]
            gathered, (product,) = ops.fused_all_gather_matmul(a.copy_(every[rank]), [one], 0, name)
            assert torch.equal(gathered, torch.cat(every)) and torch.equal(product, torch.cat(every) @ b)
            part = ops.fused_matmul_reduce_scatter(left.fill_(rank + turn), one, "sum", 0, name)
            total = float(sum(r + turn for r in range(world)))
            assert torch.equal(part, torch.full((2, 8), total) @ b)
    # Each is made again without memory that peers would reach.
    assert known == [None, "collective"] * 2
    plans = list(space.plans.values())
    assert len(plans) == 2
    for plan in plans:
        assert plan.has_collectives and plan.plan.lowering == "collective" and not plan.own


@as_ranks(2)
def test_plans_of_many_sizes_take_limited_memory(dist, rank, world):
    from warplink.torch.workspace import MAX_PLANS

    name, right = dist.group.WORLD.group_name, torch.ones(4, 3)
    space = dist.group.WORLD.workspace("cpu")
    counts = []
    for rows in range(1, MAX_PLANS + 40):
        left = torch.full((rows, 4), float(rank))
        _, (got,) = torch.ops.warplink.fused_all_gather_matmul(left, [right], 0, name)
        assert torch.equal(got, torch.cat([torch.full((rows, 3), 4.0 * peer) for peer in range(world)]))
        counts.append(sum(space.communicator.registrations_and_mappings()))
    assert len(space.plans) == MAX_PLANS
    assert counts[-1] <= counts[MAX_PLANS] + 40, counts


@as_ranks(2)
def test_buffers_hold_all_element_types(dist, rank):
    group = dist.distributed_c10d._get_default_group()
    types = (torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64, torch.float32)
    for offset, dtype in enumerate(types):
        own = group.get_p2p_buffer(rank, (2, 8), dtype, offset)
        assert (own.dtype, own.shape) == (dtype, (2, 8))
        own.view(torch.uint8).fill_(rank + 1)
        dist.barrier()
        theirs = group.get_p2p_buffer(1 - rank, (2, 8), dtype, offset)
        assert (theirs.view(torch.uint8) == 2 - rank).all()
        dist.barrier()


@as_ranks(2)
def test_tensors_side_by_side_in_the_buffer(dist, rank, world):
    """Operations of a group that comes from ``symm_mem`` on several tensors of its buffer."""
    group = dist.group.WORLD
    first = group.get_p2p_buffer(rank, (1024,), torch.float32)
    second = group.get_p2p_buffer(rank, (512,), torch.bfloat16, 2 * 1024)
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    # At the same offset it is the same memory.
    assert group.get_p2p_buffer(rank, (512,), torch.bfloat16).data_ptr() == first.data_ptr()
    own, whole = torch.full((1024,), float(rank)), torch.empty(world, 1024)
    for turn in range(3):
        first.copy_(own + turn)
        second.fill_(-1)
        group.intra_node_barrier()
        for peer in range(world):
            whole[peer].copy_(group.get_p2p_buffer(peer, (1024,), torch.float32))
        group.intra_node_barrier()
        for peer in range(world):
            assert (whole[peer] == peer + turn).all()

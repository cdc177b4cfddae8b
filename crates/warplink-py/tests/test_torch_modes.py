"""The fused operations under the settings and modes that programs use."""

import os
import time

import pytest

torch = pytest.importorskip("torch")

from conftest import Stopwatch, as_ranks, start  # noqa: E402

import warplink  # noqa: E402
from warplink.torch.workspace import MAX_PLANS  # noqa: E402

WORLD = 2


def fused(dist, a, b, name):
    """The fused operations along every dimension that they pipeline in another way, and what they give unfused."""
    ops = torch.ops.warplink
    wide = torch.cat([b] * dist.get_world_size())
    for dim, right in ((0, b), (1, wide)):
        whole, (product,) = ops.fused_all_gather_matmul(a, [right], dim, name)
        parts = [torch.empty_like(a) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, a.detach())
        expected = torch.cat(parts, dim)
        torch.testing.assert_close(whole.detach(), expected)
        torch.testing.assert_close(product.detach(), expected @ right.detach(), rtol=1e-4, atol=1e-4)
        scattered = ops.fused_matmul_reduce_scatter(a, b, "sum", dim, name)
        total = (a.detach() @ b.detach()).clone()
        dist.all_reduce(total)
        own = total.chunk(dist.get_world_size(), dim)[dist.get_rank()]
        torch.testing.assert_close(scattered.detach(), own, rtol=1e-4, atol=1e-4)


def operands(dist):
    """What ``fused`` takes."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(6, 8, generator=generator) + dist.get_rank()
    return a, torch.randn(8, 4, generator=generator), dist.group.WORLD.group_name


@as_ranks(WORLD)
def test_receives_that_get(rank, world, place):
    os.environ["WARPLINK_PROTOCOL"] = "get"
    dist = start(rank, world, place, timeout=20)
    fused(dist, *operands(dist))
    dist.destroy_process_group()


@as_ranks(WORLD)
def test_plans_made_in_inference_mode_serve_all_modes(dist, rank):
    a, b, name = operands(dist)
    with torch.inference_mode():
        fused(dist, a.clone(), b.clone(), name)
    fused(dist, a, b, name)
    with torch.inference_mode():
        buffer = dist.group.WORLD.get_p2p_buffer(rank, (4,), torch.float32)
        fused(dist, a.clone(), b.clone(), name)
    buffer.fill_(1)


@as_ranks(WORLD)
def test_plans_hold_no_gradients(dist):
    a, b, name = operands(dist)
    for _ in range(2):
        fused(dist, (a.requires_grad_() * 2), b.requires_grad_(), name)
    for plan in dist.group.WORLD.workspace().plans.values():
        for kept in vars(plan).values():
            kept = getattr(kept, "bytes", kept)
            assert not (isinstance(kept, torch.Tensor) and kept.requires_grad)


@as_ranks(WORLD)
def test_fused_operations_have_no_gradients_whatever_runs_them(dist, rank, world):
    a, b, name = operands(dist)
    ops, alone = torch.ops.warplink, [dist.new_group([peer]) for peer in range(world)][rank].group_name
    for dtype, group in ((torch.float32, name), (torch.float64, name), (torch.float32, alone)):
        wide = torch.cat([b] * (world if group == name else 1)).to(dtype)
        for operation in (
            lambda a: ops.fused_all_gather_matmul(a, [right], 0, group)[1][0],
            lambda a: ops.fused_all_gather_matmul(a, [wide], 1, group)[1][0],
            lambda a: ops.fused_matmul_reduce_scatter(a, right, "sum", 0, group),
            lambda a: ops.fused_matmul_reduce_scatter(a, right, "sum", 1, group),
        ):
            left, right = (one.to(dtype).clone().requires_grad_() for one in (a, b))
            result = operation(left)
            assert result.requires_grad
            with pytest.warns(UserWarning, match="autograd kernel was not registered"):
                result.sum().backward()
            assert left.grad is None and right.grad is None, (dtype, group)
            with torch.no_grad():
                assert torch.equal(operation(left), result) and not operation(left).requires_grad


@as_ranks(WORLD)
def test_an_abort_ends_what_others_wait_for(rank, world, place):
    dist = start(rank, world, place, "cpu:gloo,cuda:warplink", timeout=40)
    group = dist.group.WORLD
    group.intra_node_barrier("cpu")
    if rank == 0:
        # The other waits by now, or finds the group ended.
        time.sleep(0.5)
        begun = Stopwatch()
        group.abort()
        assert begun.elapsed() < 5, begun.elapsed()
        return
    begun = Stopwatch()
    with pytest.raises(warplink.WarplinkError):
        group.intra_node_barrier("cpu")
    assert begun.elapsed() < 10, begun.elapsed()


@as_ranks(WORLD)
def test_plans_that_were_recorded_stay(dist):
    space = dist.group.WORLD.workspace()
    with space.turn() as stream:
        assert stream is space.stream
    with pytest.raises(KeyError), space.turn():
        raise KeyError
    # One that a graph has recorded stays, whatever follows.
    made = space.plan("recorded", object)
    space._recorded.add("recorded")
    for number in range(2 * MAX_PLANS):
        space.plan(number, object)
    assert space.plan("recorded", object) is made
    assert len(space.plans) == MAX_PLANS + 1

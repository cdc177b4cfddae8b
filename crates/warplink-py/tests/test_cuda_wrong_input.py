"""Wrong input on CUDA tensors raises, says what and where, and leaves the group as it was, if it can."""

from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from conftest import as_ranks, meet  # noqa: E402
from gpus import gpu, needs_gpus, start_on_gpu  # noqa: E402

WORLD = 2

pytestmark = needs_gpus(WORLD)


@as_ranks(WORLD)
def test_a_cpu_tensor_where_the_group_has_no_backend_for_it(rank, world, place):
    from warplink.errors import InvalidArgumentError

    dist = start_on_gpu(rank, world, place, "cuda:warplink")
    device = torch.device("cuda", gpu(rank))
    total, own = torch.ones(4, device=device), torch.ones(4)
    dist.all_reduce(total)
    for wrong in (
        lambda: dist.all_reduce(own),
        lambda: dist.broadcast(own, 0),
        lambda: dist.all_gather_into_tensor(torch.empty(4 * world), own),
        lambda: dist.group.WORLD.send([own], 1 - rank, 0),
    ):
        with pytest.raises(InvalidArgumentError, match="the group has no backend for CPU tensors; help: name one"):
            wrong()
    dist.all_reduce(total)
    assert (total == world**2).all()
    dist.barrier(device_ids=[gpu(rank)])
    dist.destroy_process_group()


@as_ranks(WORLD)
def test_tensors_of_another_device_on_one_rank(rank, world, place):
    import warplink.torch
    from warplink.errors import InvalidArgumentError

    options = warplink.torch.Options(direct_messages=True, direct_collectives=True)
    dist = start_on_gpu(rank, world, place, pg_options=options)
    group, ops, device = dist.group.WORLD, torch.ops.warplink, torch.device("cuda", gpu(rank))
    name = group.group_name
    a, b = torch.ones(4, 8, device=device), torch.ones(8, 6, device=device)

    def right():
        _, (product,) = ops.fused_all_gather_matmul(a, [b], 0, name)
        assert (product == 8).all() and product.shape == (4 * world, 6)
        total = torch.ones(4, device=device)
        dist.all_reduce(total)
        assert (total == world).all()

    right()
    wrong = [
        (lambda: ops.fused_all_gather_matmul(a, [b.cpu()], 0, name), f"B is torch.float32 on cpu; expected .* on {device}"),
        (lambda: ops.fused_matmul_reduce_scatter(a, b.cpu(), "sum", 0, name), "B is torch.float32 on cpu"),
        (lambda: group.allgather([[torch.empty(4)] * world], [a[0], torch.ones(4)]), r"\['cpu', 'cuda'\]"),
        (lambda: dist.all_gather_into_tensor(torch.empty(8 * world), a[0]), r"the tensors are on \['cpu', 'cuda'\]"),
    ]
    if torch.cuda.device_count() > 1:
        other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
        there = [one.to(other) for one in (a, b)]
        wrong += [
            (lambda: ops.fused_all_gather_matmul(a, [there[1]], 0, name), f"B is torch.float32 on {other}; expected"),
            (lambda: ops.fused_all_gather_matmul(there[0], [there[1]], 0, name), f"the device is {other}; expected {device}"),
            (lambda: dist.all_reduce(there[0]), f"a tensor is on {other}; expected {device}"),
            (lambda: group.get_p2p_buffer(rank, (4,), torch.float32, device=other), f"the device is {other}; expected"),
        ]
    for call, says in wrong:
        # On one rank alone: the other one does not wait for it, and has its next call right.
        if rank == 1:
            with pytest.raises((InvalidArgumentError, ValueError), match=says):
                call()
        right()
    torch.cuda.synchronize(device)
    dist.barrier(device_ids=[gpu(rank)])
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@as_ranks(WORLD)
def test_another_type_on_one_rank_in_a_direct_collective(rank, world, place, kind):
    import warplink.torch
    from warplink.errors import MismatchError

    options = warplink.torch.Options(direct_collectives=True)
    dist = start_on_gpu(rank, world, place, pg_options=options)
    device = torch.device("cuda", gpu(rank))
    dist.all_reduce(torch.ones(4, device=device))
    torch.cuda.synchronize(device)
    assert dist.group.WORLD.collectives_path == "direct"
    # As many elements, of another type on rank 1.
    own = torch.ones(1000, device=device, dtype=torch.float16 if rank else torch.float32)
    work = {
        "all_reduce": lambda: dist.all_reduce(own, async_op=True),
        "all_gather": lambda: dist.all_gather_into_tensor(own.new_empty(1000 * world), own, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(own.new_empty(1000 // world), own, async_op=True),
        "broadcast": lambda: dist.broadcast(own, 0, async_op=True),
    }[kind]()
    with pytest.raises(MismatchError, match=f"the peer calls {kind}") as caught:
        work.wait(timedelta(seconds=30))
    assert (caught.value.kind, caught.value.peer) == ("mismatch", 1 - rank)
    meet(place, "told", rank, range(world))


@as_ranks(WORLD)
def test_another_type_on_one_rank_in_a_fused_operation(rank, world, place):
    from warplink.errors import MismatchError

    dist = start_on_gpu(rank, world, place)
    name, device = dist.group.WORLD.group_name, torch.device("cuda", gpu(rank))

    def gather(dtype, rows):
        a, b = (torch.ones(*sizes, device=device, dtype=dtype) for sizes in ((rows, 8), (8, 6)))
        return torch.ops.warplink.fused_all_gather_matmul(a, [b], 0, name)

    # Also one that Warplink does not fuse. Each of its own length: calls that were made before are not compared again.
    pairs = ((torch.float32, torch.bfloat16), (torch.float32, torch.float64), (torch.float64, torch.float32))
    for number, pair in enumerate(pairs):
        rows = 4 + number
        with pytest.raises(MismatchError, match="the peer calls fused_.*; expected fused_") as caught:
            gather(pair[rank], rows)
        assert (caught.value.rank, caught.value.peer) == (rank, 1 - rank)
        for dtype in pair:
            _, (product,) = gather(dtype, rows)
            assert (product == 8).all()
    torch.cuda.synchronize(device)
    dist.barrier(device_ids=[gpu(rank)])
    dist.destroy_process_group()

"""Wrong use of the process group and of the fused operations raises, and says what and where."""

import gc
import os

import pytest

torch = pytest.importorskip("torch")

from conftest import Stopwatch, as_ranks, meet, resident_bytes, start  # noqa: E402

#: A long run is WARPLINK_TEST_STEPS=10000.
STEPS = int(os.environ.get("WARPLINK_TEST_STEPS", "500"))


@as_ranks(2)
def test_operands_that_do_not_fit(dist, rank, world):
    ops, name = torch.ops.warplink, dist.group.WORLD.group_name
    gather, scatter = ops.fused_all_gather_matmul, ops.fused_matmul_reduce_scatter
    a, b = torch.ones(4, 8), torch.ones(8, 6)
    for wrong, says in (
        (lambda: gather(a, [b.to("meta")], 0, name), "B is torch.float32 on meta; expected .* on cpu"),
        (lambda: gather(a, [b.bfloat16()], 0, name), "B is torch.bfloat16 .*; expected torch.float32"),
        (lambda: gather(a, [], 0, name), "Bs is empty"),
        (lambda: gather(a[0], [b], 0, name), "A has 1 dimensions; expected at least 2"),
        (lambda: gather(a, [b[None]], 0, name), "B has 3 dimensions; expected 2"),
        (lambda: gather(a, [b], 2, name), "gather_dim is 2; expected a dimension of A, from 0 to 1"),
        (lambda: gather(a, [b], -1, name), "gather_dim is -1; expected a dimension"),
        (lambda: gather(a, [b[:5]], 0, name), "B has 5 rows; expected 8"),
        (lambda: scatter(a, b, "max", 0, name), "reduce_op is 'max'; expected sum or avg"),
        (lambda: scatter(a[:3], b, "sum", 0, name), "dimension 0 of the result is 3; expected a mult"),
        (lambda: scatter(a, b[:, :5], "sum", 1, name), "dimension 1 of the result is 5; expected a"),
        (lambda: dist.all_to_all_single(torch.ones(()), torch.ones(4)), "the output has no dimension; expected rows"),
        (lambda: dist.all_to_all_single(torch.ones(4), torch.ones(3)), "the input has 3 rows; expected a multiple of 2"),
        (lambda: dist.group.WORLD.get_p2p_buffer(9, (4,), torch.float32), "there is no rank 9"),
    ):
        with pytest.raises(ValueError, match=says):
            wrong()
    # Tensors that are not contiguous are right, here and in collectives.
    _, (got,) = gather(torch.ones(8, 4).t(), [torch.ones(6, 8).t()], 0, name)
    assert (got == 8).all()
    columns = torch.zeros(2 * world, 6)[:, ::2]
    dist.all_gather_into_tensor(columns, torch.full((2, 6), float(rank))[:, ::2])
    assert columns[:, 0].tolist() == [float(peer) for peer in range(world) for _ in range(2)]


def operations_by_case(name):
    """Each fused operation in each way that it runs, of a row count of A, or of columns, and a type."""
    ops, scale = torch.ops.warplink, torch.tensor(1.0)
    rest = (name, [None], [None], [torch.bfloat16], [False])

    def ones(rows, columns, dtype):
        return torch.ones(rows, columns).to(dtype)

    def gather(rows, dtype):
        return ops.fused_all_gather_matmul(ones(rows, 16, dtype), [ones(16, 6, dtype)], 0, name)

    def scatter(rows, dtype):
        return ops.fused_matmul_reduce_scatter(ones(rows, 16, dtype), ones(16, 6, dtype), "sum", 0, name)

    def gather_columns(rows, dtype):
        # As many bytes, whatever the rows.
        return ops.fused_all_gather_matmul(
            ones(rows, 192 // rows, dtype), [ones(384 // rows, 6, dtype)], 1, name
        )

    def scatter_columns(rows, dtype):
        return ops.fused_matmul_reduce_scatter(
            ones(rows, 8, dtype), ones(8, 384 // rows, dtype), "sum", 1, name
        )

    def gather_scaled(rows, dtype):
        return ops.fused_all_gather_scaled_matmul(
            ones(4 * rows, 3072 // rows, dtype),
            [ones(16, 3072 // rows, torch.float8_e4m3fn).t()], scale, [scale], 0, *rest,
        )  # fmt: skip

    def scatter_scaled(rows, dtype):
        a, b = ones(16 * rows, 32, torch.float8_e4m3fn), ones(3072 // rows, 32, torch.float8_e4m3fn).t()
        return ops.fused_scaled_matmul_reduce_scatter(
            a, b, scale, scale, "sum", 0, 0, name, None, None, None, dtype
        )

    halves = (torch.float16, torch.bfloat16)
    eights = (torch.float8_e4m3fn, torch.float8_e5m2)
    return [
        (gather, halves),
        (scatter, halves),
        (gather_columns, halves),
        (scatter_columns, halves),
        (gather_scaled, eights),
        (scatter_scaled, halves),
    ]


@as_ranks(2)
def test_another_type_size_or_operation_on_one_rank(dist, rank):
    from warplink.errors import MismatchError

    cases = operations_by_case(dist.group.WORLD.group_name)
    for operation, types in cases:
        for rows, dtype in ((4, types[rank]), ((4, 6)[rank], types[0])):
            with pytest.raises(MismatchError, match="the peer calls fused_.*; expected fused_.*") as caught:
                operation(rows, dtype)
            assert (caught.value.rank, caught.value.peer) == (rank, 1 - rank)
            assert str(dtype) in str(caught.value).partition("expected")[2]
        # Nothing is left behind: the next call is right.
        operation(4, types[0])
    # Of the same size and type.
    for turn in range(len(cases)):
        with pytest.raises(MismatchError, match="the peer calls fused_.*; expected fused_"):
            operation, types = cases[(turn + rank) % len(cases)]
            operation(8, types[0])


@as_ranks(2)
def test_a_destroyed_group(rank, world, place):
    from warplink.errors import ClosedError

    dist = start(rank, world, place)
    group, name = dist.group.WORLD, dist.group.WORLD.group_name
    a, b = torch.ones(4, 8), torch.ones(8, 6)
    torch.ops.warplink.fused_all_gather_matmul(a, [b], 0, name)
    dist.destroy_process_group()
    for use in (
        lambda: group.allreduce([a]),
        lambda: group.send([a], 0, 0),
        lambda: group.workspace("cpu"),
        lambda: group.get_p2p_buffer(0, (4,), torch.float32),
        group.intra_node_barrier,
        group.monitored_barrier,
        group.barrier,
    ):
        with pytest.raises(ClosedError, match="the process group was destroyed"):
            use()
    # Its name is gone too.
    with pytest.raises(RuntimeError, match="group"):
        torch.ops.warplink.fused_all_gather_matmul(a, [b], 0, name)


@as_ranks(3, dies=(2,))
def test_operations_after_a_lost_peer(dist, rank, place):
    name = dist.group.WORLD.group_name
    a, b = torch.ones(4, 8), torch.ones(8, 6)
    torch.ops.warplink.fused_all_gather_matmul(a, [b], 0, name)
    torch.ops.warplink.fused_matmul_reduce_scatter(torch.ones(6, 8), b, "sum", 0, name)
    torch.ops.warplink.fused_all_gather_matmul(a, [torch.cat([b] * 3)], 1, name)
    torch.ops.warplink.fused_matmul_reduce_scatter(a, b, "sum", 1, name)
    dist.barrier()
    meet(place, "past the barrier", rank, range(3))
    if rank == 2:
        os._exit(1)
    for operation in (
        lambda: torch.ops.warplink.fused_all_gather_matmul(a, [b], 0, name),
        lambda: torch.ops.warplink.fused_matmul_reduce_scatter(torch.ones(6, 8), b, "sum", 0, name),
        lambda: torch.ops.warplink.fused_all_gather_matmul(a, [torch.cat([b] * 3)], 1, name),
        lambda: torch.ops.warplink.fused_matmul_reduce_scatter(a, b, "sum", 1, name),
        # A plan that is not made yet.
        lambda: torch.ops.warplink.fused_all_gather_matmul(torch.ones(5, 8), [b], 0, name),
        dist.group.WORLD.intra_node_barrier,
    ):
        watch = Stopwatch()
        with pytest.raises(ConnectionError) as caught:
            for _ in range(1000):
                operation()
        assert watch.elapsed() < 5
        assert caught.value.kind == "peer_lost" and caught.value.peer == 2, caught.value


@as_ranks(2)
def test_tensors_that_are_freed_while_a_peer_reads_them(dist, rank, world):
    name = dist.group.WORLD.group_name
    # Nobody holds what is sent, and new tensors take its place at once.
    works = []
    for turn in range(50):
        works.append(dist.isend(torch.full((10_000,), float(turn)), 1 - rank))
        torch.full((10_000,), -1.0)
        received = torch.empty(10_000)
        dist.recv(received, 1 - rank)
        assert (received == turn).all()
    for work in works:
        work.wait()
    for turn in range(20):
        a = torch.full((64, 32), float(turn + rank))
        whole, (product,) = torch.ops.warplink.fused_all_gather_matmul(a, [torch.eye(32)], 0, name)
        del a
        torch.full((64, 32), -1.0)
        gc.collect()
        for peer in range(world):
            assert (whole[64 * peer : 64 * (peer + 1)] == turn + peer).all()
        assert torch.equal(whole, product)


@as_ranks(2, limit=120 + STEPS / 10)
def test_steps_of_random_sizes_take_constant_memory(dist, rank):
    name = dist.group.WORLD.group_name
    space = dist.group.WORLD.workspace("cpu")
    generator = torch.Generator().manual_seed(0)
    weights = torch.ones(32, 16)

    marks = []
    for turn in range(STEPS):
        rows = int(torch.randint(1, 2000, (1,), generator=generator))
        length = int(torch.randint(1, 50_000, (1,), generator=generator))
        total = torch.full((length,), float(rank))
        dist.all_reduce(total)
        a = torch.full((rows, 32), 1.0)
        whole, (product,) = torch.ops.warplink.fused_all_gather_matmul(a, [weights], 0, name)
        torch.ops.warplink.fused_matmul_reduce_scatter(whole, weights, "sum", 0, name)
        assert total[0] == 1 and product[0, 0] == 32
        if turn in (STEPS // 2, STEPS - 1):
            gc.collect()
            marks.append((resident_bytes(), sum(space.communicator.registrations_and_mappings())))
    (early, registered), (late, registered_late) = marks
    assert late < early + (24 << 20), marks
    # A leak of 250 sizes would be more than twice that.
    assert registered_late <= registered + 120, marks

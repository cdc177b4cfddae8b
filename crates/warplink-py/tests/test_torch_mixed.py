"""Fused operations and barriers of several groups in a random order, on GPUs also on several streams."""

import contextlib
import random

import pytest

torch = pytest.importorskip("torch")

from conftest import on_ranks, start  # noqa: E402

WORLD = 2

#: Columns of A, and of each rank's part of B.
K, N = 16, 8


def operations(rank, world, device, name, value):
    """Each operation by its name: given rows, its results and what they are to be. ``value`` tells what is in A of a
    rank; all numbers are small enough to be exact."""
    ops = torch.ops.warplink
    values = [value(peer) for peer in range(world)]

    def filled(number, *sizes):
        return torch.full(sizes, float(number), device=device)

    def parts(numbers, rows, columns, dim):
        return torch.cat([filled(number, rows, columns) for number in numbers], dim)

    def gather(rows):
        whole, (product,) = ops.fused_all_gather_matmul(filled(values[rank], rows, K), [filled(1, K, N)], 0, name)
        products = [K * one for one in values]
        return [(whole, parts(values, rows, K, 0)), (product, parts(products, rows, N, 0))]

    def gather_columns(rows):
        right = filled(1, K * world, N)
        whole, (product,) = ops.fused_all_gather_matmul(filled(values[rank], rows, K), [right], 1, name)
        return [(whole, parts(values, rows, K, 1)), (product, filled(K * sum(values), rows, N))]

    def scatter(rows):
        left = filled(values[rank], rows * world, K)
        result = ops.fused_matmul_reduce_scatter(left, filled(1, K, N), "sum", 0, name)
        return [(result, filled(K * sum(values), rows, N))]

    def scatter_columns(rows):
        left = filled(values[rank], rows, K)
        result = ops.fused_matmul_reduce_scatter(left, filled(1, K, N * world), "sum", 1, name)
        return [(result, filled(K * sum(values), rows, N))]

    def total(rows):
        given = filled(values[rank], rows, K), None, None, None, None
        (result,) = ops.fused_all_reduce(*given, ["sum"], name)
        return [(result, filled(sum(values), rows, K))]

    return [gather, gather_columns, scatter, scatter_columns, total]


def mixed(rank, world, _, place, steps, seed, device="cpu"):
    dist = start(rank, world, place)
    device = torch.device(device)
    groups = [dist.group.WORLD, dist.new_group(list(range(world)), backend="warplink")]
    streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
    # The same on every rank.
    chance = random.Random(seed)
    open_, works = [], []

    def check():
        for work in works:
            work.wait()
        works.clear()
        if streams:
            torch.cuda.synchronize(device)
        for step, got, wanted in open_:
            assert torch.equal(got, wanted), (step, got.flatten()[0], wanted.flatten()[0])
        open_.clear()

    for step in range(steps):
        group, rows = chance.choice(groups), chance.choice([1, 8, 257])
        kind, place_of_stream = chance.randrange(8), chance.randrange(2)
        with torch.cuda.stream(streams[place_of_stream]) if streams else contextlib.nullcontext():
            if kind < 5:
                found = operations(rank, world, device, group.group_name, lambda peer: 1 + (step + peer) % 5)
                open_ += [(step, *pair) for pair in found[kind](rows)]
            elif kind == 5:
                group.intra_node_barrier(device)
            elif kind == 6:
                # On GPUs a kernel of most multiprocessors on a stream of the group's, beside those of fused operations.
                reduced = torch.full((rows << 10,), float(step + rank), device=device)
                works.append(dist.all_reduce(reduced, group=group, async_op=True))
                total = float(sum(step + peer for peer in range(world)))
                open_.append((step, reduced, torch.full_like(reduced, total)))
            else:
                if streams:
                    # The buffer's data of the other stream's step has been read by now.
                    streams[place_of_stream].wait_stream(streams[1 - place_of_stream])
                group.get_p2p_buffer(rank, (rows,), torch.float32, device=device).fill_(step + rank)
                group.intra_node_barrier(device)
                for peer in range(world):
                    theirs = group.get_p2p_buffer(peer, (rows,), torch.float32, device=device).clone()
                    open_.append((step, theirs, torch.full((rows,), float(step + peer), device=device)))
                group.intra_node_barrier(device)
        if step % 10 == 9:
            check()
    check()
    dist.barrier(**({"device_ids": [device.index]} if streams else {}))
    dist.destroy_process_group()


def test_fused_operations_and_barriers_of_two_groups_in_a_random_order():
    on_ranks(mixed, WORLD, 150, 7)

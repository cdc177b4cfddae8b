"""Collectives on arrays."""

import numpy
import pytest
from conftest import as_ranks

from warplink.errors import InvalidArgumentError, MismatchError, UnsupportedError


@pytest.mark.parametrize("path", ["direct", "engine"])
@as_ranks(3, device="host")
def test_sums_of_values_that_are_multiplied_beforehand(comm, rank, world, path):
    collectives, stream = comm.collectives(path=path), comm.create_stream()
    everyone = world * (world + 1) // 2
    for dtype in (numpy.float16, numpy.float32, numpy.float64):
        for factor in (0.5, -2.0):
            source = numpy.full(2 * world, rank + 1, dtype)
            total, part = numpy.zeros(2 * world, dtype), numpy.zeros(2, dtype)
            rooted = numpy.zeros(2 * world, dtype)
            collectives.all_reduce(stream, total, source, factor=factor)
            collectives.reduce_scatter(stream, part, source, "sum", factor)
            collectives.reduce(stream, rooted, source, 1, factor=factor)
            stream.synchronize()
            assert (total == factor * everyone).all() and (part == factor * everyone).all()
            assert (rooted == (factor * everyone if rank == 1 else 0)).all()
    with pytest.raises(InvalidArgumentError, match="a factor for the operator 'max'; expected it for sum only"):
        collectives.all_reduce(stream, total, source, "max", 0.5)
    with pytest.raises(UnsupportedError, match="expected floats"):
        collectives.all_reduce(stream, numpy.zeros(3, numpy.int32), numpy.zeros(3, numpy.int32), factor=0.5)
    comm.barrier()


@as_ranks(2, device="host")
def test_a_target_of_another_type_is_refused_by_reductions(comm):
    collectives, stream = comm.collectives(), comm.create_stream()
    source = numpy.ones(4, numpy.float32)
    for target in (numpy.zeros(4, numpy.int32), numpy.zeros(2, numpy.float64), numpy.zeros(8, numpy.uint16)):
        with pytest.raises(InvalidArgumentError, match="the target has elements of .*; expected f32, as the source"):
            collectives.all_reduce(stream, target, source)
        with pytest.raises(InvalidArgumentError, match="the target has elements of .*; expected f32, as the source"):
            collectives.bind("all_reduce", target, source, op="sum")
    # Memory without a type takes any.
    region = comm.alloc(16)
    collectives.all_reduce(stream, region, source)
    stream.synchronize()
    assert (numpy.frombuffer(region.download(), numpy.float32) == 2).all()
    comm.barrier()


@as_ranks(2, device="host")
def test_the_path_and_the_algorithm_of_a_call_are_told(comm):
    collectives = comm.collectives()
    assert collectives.path_of("all_reduce", 100, "f32", "sum") == "direct" == collectives.path_of_messages
    choice = collectives.choice("all_reduce", 100, "f32", "sum")
    assert choice.algorithm in ("one-shot", "two-shot") and choice.lanes > 0 and choice.threads > 0
    assert choice.chunks == 1 and tuple(choice) == choice
    by_chunks = comm.collectives(algorithm="chunks", workspace_bytes=1 << 20)
    choice = by_chunks.choice("broadcast", 1 << 22, "u8", root=1)
    assert choice.algorithm == "chunks" and choice.chunks > 1
    with pytest.raises(InvalidArgumentError, match="requires an operator"):
        collectives.choice("all_reduce", 100, "f32")
    two_shot = comm.collectives(algorithm="two-shot")
    with pytest.raises(UnsupportedError, match="algorithm two-shot does not support"):
        two_shot.choice("all_gather", 100, "f32")
    by_library = comm.collectives(path="engine")
    assert by_library.path_of("all_gather", 100, "f32") == "engine" == by_library.path_of_messages
    with pytest.raises(UnsupportedError, match="the vendor's library does"):
        by_library.choice("all_gather", 100, "f32")
    comm.barrier()


@as_ranks(2, device="host")
def test_a_communicator_of_the_library_is_adopted(comm, rank, world):
    own, stream = comm.collectives(path="engine"), comm.create_stream()
    assert comm.collectives().communicator is None
    adopting = comm.collectives(path="engine", communicator=own.communicator)
    assert adopting.communicator == own.communicator
    for collectives in (adopting, own):
        total = numpy.zeros(5, numpy.int32)
        collectives.all_reduce(stream, total, numpy.full(5, rank + 1, numpy.int32))
        stream.synchronize()
        assert (total == world * (world + 1) // 2).all()
    with pytest.raises(InvalidArgumentError, match="the communicator is 0"):
        comm.collectives(communicator=0)
    # Of the same ranks in another order.
    other = comm.split(0, -rank)
    with pytest.raises(MismatchError, match="expected rank"):
        other.collectives(path="engine", communicator=own.communicator)
    other.close()
    comm.barrier()


@as_ranks(3, device="host")
def test_a_bound_call_is_made_again_and_again(comm, rank, world):
    copying, collectives = comm.collectives(algorithm="copy-engine"), comm.collectives()
    stream = comm.create_stream()
    source, target = comm.alloc(4 * 1000), comm.alloc(4 * 1000 * world)
    calls = [one.bind("all_gather", target, source) for one in (copying, collectives)]
    assert calls[0].choice.algorithm == "copy-engine" != calls[1].choice.algorithm
    assert repr(calls[0]) == "BoundCall('all_gather of 4000 bytes', by='copy-engine')"
    for number in range(6):
        source.upload(numpy.arange(1000, dtype=numpy.int32) + 1000 * rank + number)
        comm.barrier()
        calls[number % 2].enqueue(stream)
        stream.synchronize()
        got = numpy.frombuffer(target.download(), numpy.int32)
        assert (got == numpy.arange(1000 * world) + number).all()
        comm.barrier()
    # Of other memory and other collectives, what kernels do.
    total, part = numpy.zeros(10, numpy.float32), numpy.full(10, rank + 1, numpy.float32)
    summed = collectives.bind("all_reduce", total, part, op="sum", factor=0.5)
    for _ in range(2):
        summed.enqueue(stream)
        part[:] = total
        stream.synchronize()
    by_library = comm.collectives(path="engine").bind("broadcast", total, part, root=1)
    assert by_library.choice is None and "by='engine'" in repr(by_library)
    by_library.enqueue(stream)
    stream.synchronize()
    with pytest.raises(UnsupportedError, match="algorithm copy-engine does not support"):
        copying.bind("broadcast", total, part, root=1)
    bytes = 4 if rank else 400
    with pytest.raises(MismatchError, match="the peer calls all_gather of"):
        copying.bind("all_gather", target.slice(0, bytes * world), source.slice(0, bytes))
    comm.barrier()


@as_ranks(2)
def test_kernels_of_several_users_of_a_device_follow_one_another(comm, rank):
    import warplink

    streams = [comm.create_stream() for _ in range(3)]
    first, second, turns = comm.collectives(path="direct"), comm.collectives(path="direct"), comm.turns()
    order = warplink.Order()
    for user in (first, first, second, turns):
        order.add(user)
    if rank == 0:
        # Waits for the other rank.
        first.barrier(streams[0])
        order.follow(first, streams[1])
        streams[1].synchronize()
        order.follow(turns, streams[1])
        turns.begin(streams[1])
        turns.end(streams[1])
        order.remove(first)
        # Of the others, the turns alone have work.
        order.follow(turns, streams[2])
        streams[2].synchronize()
        order.follow(second, streams[2])
        behind = streams[2].mark()
        assert not behind.is_reached()
    comm.all_gather_bytes(b"")
    if rank == 1:
        first.barrier(streams[0])
    for stream in streams:
        stream.synchronize()
    assert rank or behind.is_reached()
    with pytest.raises(TypeError):
        order.add("neither"), order.follow(first, streams[0])

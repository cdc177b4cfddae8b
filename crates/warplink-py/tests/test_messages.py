"""Groups of sends and receives, and the all-to-all with a length for each pair of ranks."""

import os
import threading
from importlib.util import find_spec

import numpy
import pytest
from conftest import Stopwatch, as_ranks, join, meet
from held import Held, random_values, shared_seed

from warplink.errors import InvalidArgumentError, MismatchError, PeerLostError, UnsupportedError

TYPES = [numpy.uint8, numpy.float16, numpy.int32, numpy.float32, numpy.int64, numpy.complex128]


def joined(comm, path):
    """Collectives by one path; none where the library that they need is missing."""
    return comm.collectives(path=path, workspace_bytes=1 << 20)


def plan(random, world):
    """Messages between ranks at random: from, to, values. Some are empty, or of a rank to itself."""
    found = []
    for _ in range(int(random.integers(1, 4 * world))):
        length = int(random.choice([0, 1, 13, 4097, 70_001]))
        values = random_values(random, length, TYPES[random.integers(len(TYPES))])
        found.append((int(random.integers(world)), int(random.integers(world)), values))
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("path", ["direct", "engine"])
@as_ranks()
def test_groups_of_messages(comm, rank, world, path):
    collectives, stream = joined(comm, path), comm.create_stream()
    seed = shared_seed(comm)
    random = numpy.random.default_rng(seed)
    for turn in range(8):
        messages = plan(random, world)
        sends = [(to, Held(comm, values)) for of, to, values in messages if of == rank]
        receives = [
            (of, Held(comm, numpy.zeros_like(values)), values)
            for of, to, values in messages
            if to == rank
        ]
        collectives.send_receive(
            stream,
            [(to, held.array) for to, held in sends],
            [(of, held.array) for of, held, _ in receives],
        )
        stream.synchronize()
        for of, held, values in receives:
            assert numpy.array_equal(held.read(), values), (seed, turn, of)
    collectives.send_receive(stream)
    comm.barrier()


def cut(random, counts):
    """Displacements of parts in an order of their own, with gaps, and the length of it all."""
    displacements, end = [0] * len(counts), 0
    for part in random.permutation(len(counts)).tolist():
        end += int(random.integers(3))
        displacements[part] = end
        end += counts[part]
    return displacements, end


def one_after_the_other(counts):
    return [sum(counts[:part]) for part in range(len(counts))]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("path", ["direct", "engine"])
@as_ranks()
def test_an_all_to_all_with_a_length_for_each_pair(comm, rank, world, path):
    collectives, stream = joined(comm, path), comm.create_stream()
    seed = shared_seed(comm)
    for turn, dtype in enumerate(TYPES * 2):
        random = numpy.random.default_rng([seed, turn])
        # Lengths that rank `of` sends to rank `to`, on all ranks.
        lengths = random.choice([0, 0, 1, 5, 3000, 20_000], (world, world))
        values = [[random_values(random, n, dtype) for n in row] for row in lengths]
        sent, received = lengths[rank].tolist(), lengths[:, rank].tolist()
        if turn % 2:
            (source_at, source_length), (target_at, target_length) = cut(random, sent), cut(random, received)
        else:
            source_at, source_length = None, sum(sent)
            target_at, target_length = None, sum(received)
        starts, ends = source_at or one_after_the_other(sent), target_at or one_after_the_other(received)
        source = random_values(random, source_length, dtype)
        expected = random_values(random, target_length, dtype)
        target = Held(comm, expected)
        for peer in range(world):
            source[starts[peer] : starts[peer] + sent[peer]] = values[rank][peer]
            expected[ends[peer] : ends[peer] + received[peer]] = values[peer][rank]
        source = Held(comm, source)
        collectives.all_to_all_v(stream, target.array, source.array, received, sent, target_at, source_at)
        stream.synchronize()
        assert numpy.array_equal(target.read(), expected), (seed, turn)
    comm.barrier()


@pytest.mark.parametrize("world", [2, 3])
@as_ranks()
def test_an_all_to_all_with_lengths_that_only_the_device_knows(comm, rank, world):
    collectives, stream = comm.collectives(), comm.create_stream()
    seed, most = shared_seed(comm), 3001
    for turn, dtype in enumerate(TYPES):
        if numpy.dtype(dtype).itemsize > 8:
            continue
        random = numpy.random.default_rng([seed, turn])
        source = Held(comm, numpy.zeros(world * most, dtype))
        target = Held(comm, numpy.zeros(world * most, dtype))
        sent = Held(comm, numpy.zeros(world, [numpy.int64, numpy.uint64][turn % 2]))
        received = Held(comm, numpy.zeros(world, numpy.uint64))
        stream.begin_capture()
        collectives.all_to_all_v_on_device(
            stream, target.array, source.array, received.array, sent.array, max_count=most
        )
        graph = stream.end_capture()
        for _ in range(3):
            # Lengths that rank `of` sends to rank `to`, on all ranks.
            lengths = random.choice([0, 0, 1, 700, most], (world, world))
            values = [random_values(random, world * most, dtype) for _ in range(world)]
            expected = random_values(random, world * most, dtype)
            target.write(expected)
            source.write(values[rank])
            sent.write(lengths[rank].astype(numpy.int64))
            for peer in range(world):
                start, count, own = peer * most, lengths[peer, rank], rank * most
                expected[start : start + count] = values[peer][own : own + count]
            graph.launch(stream)
            stream.synchronize()
            assert numpy.array_equal(target.read(), expected), (seed, turn)
            assert (received.read() == lengths[:, rank]).all(), (seed, turn)
    comm.barrier()


@as_ranks(2, device="host")
def test_a_length_above_the_limit_is_told_on_both_ranks(job, comm, rank):
    collectives, stream = comm.collectives(), comm.create_stream()
    target, source = numpy.zeros(8, numpy.float32), numpy.ones(8, numpy.float32)
    received, sent = numpy.zeros(2, numpy.int64), numpy.full(2, 4, numpy.int64)

    def refused(says, *arguments, kind=InvalidArgumentError):
        with pytest.raises(kind, match=says):
            collectives.all_to_all_v_on_device(stream, *arguments)

    refused("expected 5 elements of u32", target, source, received, sent, 5)
    refused("the source's counts are i32; expected i64", target, source, received, sent.astype(numpy.int32), 4)
    refused("the target's counts are f64; expected i64", target, source, numpy.zeros(2), sent, 4)
    refused("elements of 16 bytes", numpy.zeros(2, complex), numpy.zeros(2, complex), received, sent, 1)
    refused("overlap", target, source, sent, sent, 4)
    by_library = comm.collectives(path="engine")
    with pytest.raises(UnsupportedError, match="cannot read counts from device memory"):
        by_library.all_to_all_v_on_device(stream, target, source, received, sent, 4)
    collectives.all_to_all_v_on_device(stream, target, source, received, sent, 4)
    stream.synchronize()
    assert received.tolist() == [4, 4] and (target == 1).all()
    if rank == 0:
        sent[1] = -1
    collectives.all_to_all_v_on_device(stream, target, source, received, sent, 4)
    with pytest.raises(MismatchError, match="expected at most 16, the limit") as caught:
        stream.synchronize()
    assert caught.value.peer == 1 - rank
    comm.all_gather_bytes(b"both were told")
    job.abort("the test is over")


@as_ranks(2)
def test_a_graph_repeats_messages(comm, rank, world):
    collectives, stream = comm.collectives(), comm.create_stream()
    right, left = (rank + 1) % world, (rank - 1) % world
    own, come = (Held(comm, numpy.zeros(5000, numpy.float32)) for _ in range(2))
    parts = [1000 * (peer + 1) // world for peer in range(world)]
    source = Held(comm, numpy.zeros(sum(parts), numpy.int32))
    target = Held(comm, numpy.zeros(world * parts[rank], numpy.int32))
    stream.begin_capture()
    collectives.send_receive(stream, [(right, own.array)], [(left, come.array)])
    collectives.all_to_all_v(stream, target.array, source.array, [parts[rank]] * world, parts)
    graph = stream.end_capture()
    for turn in range(5):
        own.write(numpy.full(5000, 10 * turn + rank, numpy.float32))
        source.write(numpy.repeat(100 * turn + 10 * rank + numpy.arange(world), parts).astype(numpy.int32))
        graph.launch(stream)
        stream.synchronize()
        assert (come.read() == 10 * turn + left).all()
        rows = target.read().reshape(world, -1)
        assert (rows == (100 * turn + 10 * numpy.arange(world) + rank)[:, None]).all()
    comm.barrier()


@pytest.mark.skipif(not find_spec("torch"), reason="there is no PyTorch")
@as_ranks(2, device="host")
def test_tensors_and_arrays_of_every_kind(comm, rank):
    import torch

    collectives, stream = comm.collectives(), comm.create_stream()
    peer = 1 - rank
    # Tensors and NumPy arrays as they are, without a copy.
    own = torch.randn(300).to(torch.bfloat16) + rank
    come, told = torch.empty(300, dtype=torch.bfloat16), numpy.zeros(300, numpy.uint16)
    collectives.send_receive(stream, [(peer, own), (peer, own)], [(peer, come), (peer, told)])
    stream.synchronize()
    assert told.tobytes() == come.view(torch.uint8).numpy().tobytes()
    back = torch.empty_like(own)
    collectives.send_receive(stream, [(peer, come)], [(peer, back)])
    # Of nothing: a rank that has none to give, and one that gets none.
    got = torch.full((3 if rank else 0,), -1.0)
    given = torch.arange(0 if rank else 3, dtype=torch.float32)
    got_counts, given_counts = ([3, 0], [0, 0]) if rank else ([0, 0], [0, 3])
    collectives.all_to_all_v(stream, got, given, got_counts, given_counts)
    stream.synchronize()
    assert torch.equal(back, own)
    assert got.tolist() == ([0.0, 1.0, 2.0] if rank else [])
    # Other collectives take what is empty as well.
    collectives.all_reduce(stream, torch.empty(0), torch.empty(0))
    # Memory without a type is counted in bytes.
    region = comm.alloc(8)
    region.upload(bytes(range(8)))
    halves = comm.alloc(8)
    collectives.all_to_all_v(stream, halves, region, [4, 4], [4, 4])
    stream.synchronize()
    assert halves.download() == bytes(range(4 * rank, 4 * rank + 4)) * 2
    comm.barrier()


@as_ranks(2, device="host")
def test_messages_that_cannot_be_are_refused(comm, rank):
    collectives, stream = comm.collectives(), comm.create_stream()
    peer, data, other = 1 - rank, numpy.zeros(8), numpy.zeros(8)

    def refused(says, call, *arguments, kind=InvalidArgumentError, at=None):
        with pytest.raises(kind, match=says) as caught:
            call(stream, *arguments)
        assert at is None or caught.value.peer == at

    send, v = collectives.send_receive, collectives.all_to_all_v
    refused("send and receive: rank 2 is out of range", send, [(2, data)], at=2)
    refused("overlaps", send, [(peer, data)], [(peer, data)], at=peer)
    refused("65 messages in one group; expected at most 64", send, [(peer, data)] * 65)
    refused("1 sends of this rank to itself; expected 0", send, [(rank, data)])
    refused("sends itself 64 bytes; expected 32", send, [(rank, data)], [(rank, other[:4])])
    refused(r"read sends\[1\]: dict is not an array", send, [(peer, data), (peer, {})], kind=TypeError)
    refused(r"read receives\[0\]: .* strides", send, [], [(peer, data[::2])])
    refused("1 counts and 1 displacements of the input; expected 2", v, data, other, [4, 4], [8])
    beyond = "3 elements from 6 on in the output; expected a part of its 8"
    refused(beyond, v, data, other, [3, 3], [4, 4], [0, 6], at=1)
    refused("9 elements from 0 on in the input", v, data, other, [4, 4], [9, 0], at=0)
    refused("elements of f64; expected f32", v, data, other.astype(numpy.float32), [4, 4], [4, 4])
    refused("overlaps", v, data, other, [4, 4], [4, 4], [0, 2])
    refused("read the target", v, "text", other, [4, 4], [4, 4], kind=TypeError)
    with pytest.raises(OverflowError):
        v(stream, data, other, [-1, 4], [4, 4])
    # Nothing of that was enqueued.
    v(stream, data, other + rank, [4, 4], [4, 4])
    stream.synchronize()
    assert data.tolist() == [0.0] * 4 + [1.0] * 4
    comm.barrier()


@as_ranks(2)
def test_ends_of_other_lengths_are_told_on_both_ranks(job, comm, rank):
    collectives, stream = comm.collectives(), comm.create_stream()
    held = Held(comm, numpy.zeros(4 + rank, numpy.float32))
    if rank == 0:
        collectives.send_receive(stream, sends=[(1, held.array)])
    else:
        collectives.send_receive(stream, receives=[(0, held.array)])
    with pytest.raises(MismatchError, match="16.*20|20.*16") as caught:
        stream.synchronize()
    assert caught.value.peer == 1 - rank
    comm.all_gather_bytes(b"both were told")
    job.abort("the test is over")


@as_ranks(3, dies=(2,))
def test_a_lost_rank_ends_messages_of_the_others(rank, world, meeting, place):
    job = join(rank, world, meeting)
    comm = job.world()
    collectives, stream = comm.collectives(), comm.create_stream()
    layer = collectives.experts(experts=world, top_k=1, max_tokens=4, elements=8, dtype="f32")
    held = Held(comm, numpy.zeros(100_000, numpy.float32))
    meet(place, "ready", rank, range(world))
    if rank == 2:
        os._exit(1)
    # Those that wait for it, and what they do afterwards.
    watch = Stopwatch()
    with pytest.raises(PeerLostError) as caught:
        # Where the loss is known already, the call itself says so.
        collectives.send_receive(stream, receives=[(2, held.array)])
        stream.synchronize()
    assert caught.value.peer == 2 and watch.elapsed() < 5
    nobody = numpy.zeros((0, 8), numpy.float32), numpy.zeros((0, 1), numpy.int32)
    tokens, experts = (Held(comm, values).array for values in nobody)
    with pytest.raises(PeerLostError):
        layer.dispatch(stream, layer.allocate(), tokens, experts)
        stream.synchronize()
    # The rest go on with collectives of their own.
    rest = comm.survivors()
    stream, peer = rest.create_stream(), 1 - rest.rank
    own, come = (Held(rest, numpy.full(10, value, numpy.int64)) for value in (rest.rank, -1))
    rest.collectives().send_receive(stream, [(peer, own.array)], [(peer, come.array)])
    stream.synchronize()
    assert (come.read() == peer).all()
    rest.close()


@as_ranks(2)
def test_a_wait_leaves_the_interpreter_to_other_threads(comm, rank):
    collectives, stream = comm.collectives(), comm.create_stream()
    held = Held(comm, numpy.full(64, rank, numpy.int32))
    if rank == 1:
        # Rank 0 gets here only if its wait does not hold the interpreter's lock.
        comm.barrier()
        collectives.send_receive(stream, sends=[(0, held.array)])
        stream.synchronize()
    else:
        collectives.send_receive(stream, receives=[(1, held.array)])
        begun, failures = threading.Event(), []

        def wait():
            begun.set()
            try:
                stream.synchronize()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        begun.wait()
        comm.barrier()
        thread.join()
        assert not failures and (held.read() == 1).all()
    comm.barrier()


@as_ranks(2)
def test_the_library_serves_no_experts(comm):
    collectives = joined(comm, "engine")
    with pytest.raises(UnsupportedError, match="cannot read counts from device memory"):
        collectives.experts(experts=2, top_k=1, max_tokens=1, elements=8, dtype="f32")
    comm.barrier()


@pytest.mark.parametrize("path", ["direct", "engine"])
@as_ranks(3)
def test_calls_on_memory_at_addresses(comm, rank, world, path):
    collectives, stream = joined(comm, path), comm.create_stream()
    ones = numpy.full(7, rank + 1, numpy.int64)
    total, parts = numpy.zeros_like(ones), numpy.zeros((world, 7), numpy.int64)
    collectives.call_at("all_reduce", stream, total.ctypes.data, ones.ctypes.data, 7, "i64", "sum")
    collectives.call_at("all_gather", stream, parts.ctypes.data, ones.ctypes.data, ones.nbytes, "u8")
    # Rank p gets p bytes of every rank, the first none.
    sent = numpy.full(sum(range(world)), rank + 10, numpy.uint8)
    received = numpy.zeros(world * rank, numpy.uint8)
    collectives.all_to_all_v_at(
        stream, received.ctypes.data, sent.ctypes.data, [rank] * world, list(range(world))
    )
    stream.synchronize()
    assert (total == sum(range(1, world + 1))).all()
    assert (parts == numpy.arange(1, world + 1)[:, None]).all()
    assert received.tolist() == [peer + 10 for peer in range(world) for _ in range(rank)]
    with pytest.raises(InvalidArgumentError, match="overflow"):
        collectives.all_to_all_v_at(stream, 0, 0, [2**63] * 2, [0] * world)
    with pytest.raises(InvalidArgumentError, match="overflow"):
        collectives.call_at("all_reduce", stream, 0, 0, 2**62, "i64", "sum")
    comm.barrier()

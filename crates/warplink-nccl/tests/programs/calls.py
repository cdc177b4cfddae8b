"""Collectives and messages: all types and operators, in place, in groups, on several streams and from several threads."""

import ctypes
import threading
from ctypes import byref, c_double, c_float, c_int, c_size_t, c_void_p

from nccl import (
    AVG,
    COUNT,
    FLOAT64,
    INT32,
    INVALID_ARGUMENT,
    MAX,
    MIN,
    PROD,
    SUM,
    join,
    memory,
    new_id,
    ok,
    on_threads,
    refused,
    stream_of,
    synchronize,
)


def floats(one, two, three, half, kind):
    return kind, {1: one, 2: two, 3: three, 1.5: half}


def whole(kind):
    return kind, {1: 1, 2: 2, 3: 3, 1.5: 1}


# For each type by its number, how C holds it, and the patterns of the numbers that come up.
TYPES = [
    whole(ctypes.c_int8),
    whole(ctypes.c_uint8),
    whole(ctypes.c_int32),
    whole(ctypes.c_uint32),
    whole(ctypes.c_int64),
    whole(ctypes.c_uint64),
    floats(0x3C00, 0x4000, 0x4200, 0x3E00, ctypes.c_uint16),
    floats(1.0, 2.0, 3.0, 1.5, c_float),
    floats(1.0, 2.0, 3.0, 1.5, c_double),
    floats(0x3F80, 0x4000, 0x4040, 0x3FC0, ctypes.c_uint16),
    floats(0x38, 0x40, 0x44, 0x3C, ctypes.c_uint8),
    floats(0x3C, 0x40, 0x42, 0x3E, ctypes.c_uint8),
]


def types_and_operators(comm, rank, ranks):
    """Two ranks give ones and twos."""
    for number, (kind, pattern) in enumerate(TYPES):
        given, _ = memory([pattern[rank + 1]] * COUNT, kind)
        place, found = memory([pattern[1]] * COUNT, kind)
        for op, expected in [(SUM, 3), (PROD, 2), (MAX, 2), (MIN, 1), (AVG, 1.5)]:
            arguments = (given, place, c_size_t(COUNT), number, op, comm, stream_of(7, rank))
            ok("AllReduce", *arguments, twin=op == PROD)
            synchronize(stream_of(7, rank))
            assert found[:] == [pattern[expected]] * COUNT, (number, op, found[0])
        ok("MemFree", given)
        ok("MemFree", place)


def collectives(comm, rank, ranks, config):
    """Each in one of its forms: plain, or with a configuration of the call, which may be null."""
    name = "Config" if config else ""
    stream = stream_of(8, rank)
    mine, values = memory([rank * 100 + i for i in range(ranks)])
    place, found = memory([-1] * ranks)
    one = c_size_t(1)
    tail = (comm, stream, *config)
    for what, arguments, expected in [
        ("AllReduce", (c_size_t(ranks), INT32, MAX), [(ranks - 1) * 100 + i for i in range(ranks)]),
        ("Broadcast", (c_size_t(ranks), INT32, 1), [100 + i for i in range(ranks)]),
        ("AllGather", (one, INT32), [r * 100 for r in range(ranks)]),
        ("AlltoAll", (one, INT32), [r * 100 + rank for r in range(ranks)]),
        ("ReduceScatter", (one, INT32, SUM), [sum(r * 100 + rank for r in range(ranks))]),
        ("Scatter", (one, INT32, 0), [rank]),
        ("Reduce", (c_size_t(ranks), INT32, MIN, 0), list(range(ranks)) if rank == 0 else []),
        ("Gather", (one, INT32, 1), [r * 100 for r in range(ranks)] if rank == 1 else []),
    ]:
        ok(what + name, mine, place, *arguments, *tail)
        synchronize(stream)
        assert found[: len(expected)] == expected, (what, found[:])
    if not config:
        ok("Bcast", mine, c_size_t(ranks), INT32, 1, comm, stream)
        synchronize(stream)
        assert values[:] == [100 + i for i in range(ranks)]
        other = (rank + 1) % ranks
        ok("GroupStart")
        ok("Send", mine, one, INT32, other, comm, stream)
        ok("Recv", place, one, INT32, (rank - 1) % ranks, comm, stream)
        ok("GroupEnd")
        synchronize(stream)
        assert found[0] == 100
    ok("MemFree", mine)
    ok("MemFree", place)


def in_place(comm, rank, ranks):
    """Every collective in the place that NCCL documents, and with no memory where a rank uses none."""
    part, stream = 100, stream_of(10, rank)
    place, values = memory([0] * part * ranks)
    own = slice(rank * part, (rank + 1) * part)
    mine = c_void_p(place.value + 4 * own.start)
    one, all_ = c_size_t(part), c_size_t(part * ranks)
    gathered = [r + 1 for r in range(ranks) for _ in range(part)]
    ours, total = [rank + 1] * part, ranks * (ranks + 1) // 2

    def check(name, *arguments, start, expected, at=slice(None)):
        values[:] = start
        ok(name, *arguments, comm, stream)
        synchronize(stream)
        assert values[at] == expected, (name, arguments, values[at][:3])

    before = [0] * own.start + ours + [0] * (part * ranks - own.stop)
    full = [rank + 1] * part * ranks
    check("AllGather", mine, place, one, INT32, start=before, expected=gathered)
    check("AllReduce", place, place, all_, INT32, SUM, start=full, expected=[total] * part * ranks)
    check("ReduceScatter", place, mine, one, INT32, SUM, start=full, expected=[total] * part, at=own)
    for root in range(ranks):
        is_root = rank == root
        seen = slice(None) if is_root else slice(0)
        check("Gather", mine, place, one, INT32, root, start=before, expected=gathered[seen], at=seen)
        start = gathered if is_root else [0] * part * ranks
        check("Scatter", place, mine, one, INT32, root, start=start, expected=ours, at=own)
        check("Broadcast", place, place, all_, INT32, root, start=full, expected=[root + 1] * part * ranks)
        expected = ([total] * part * ranks)[seen]
        check("Reduce", place, place, all_, INT32, SUM, root, start=full, expected=expected, at=seen)
        other, _ = memory([0] * part * ranks)
        at_root = other if is_root else None
        ok("Reduce", place, at_root, one, INT32, SUM, root, comm, stream)
        ok("Gather", place, at_root, one, INT32, root, comm, stream)
        ok("Scatter", at_root, place, one, INT32, root, comm, stream)
        ok("Broadcast", at_root, place, one, INT32, root, comm, stream)
        synchronize(stream)
        ok("MemFree", other)
    ok("MemFree", place)


def many_messages(comm, rank, ranks):
    """A group with more messages than one launch carries."""
    count, stream, other = 300, stream_of(11, rank), (rank + 1) % ranks
    (given, _), (place, found) = memory([rank + 1] * count), memory([0] * count)
    ok("GroupStart")
    for at in range(count):
        ok("Send", c_void_p(given.value + 4 * at), c_size_t(1), INT32, other, comm, stream)
        ok("Recv", c_void_p(place.value + 4 * at), c_size_t(1), INT32, other, comm, stream)
    ok("GroupEnd")
    synchronize(stream)
    assert found[:] == [other + 1] * count
    ok("MemFree", given)
    ok("MemFree", place)


def several_streams(comm, rank, ranks):
    """A group waits for all of its streams, and each goes on when the whole group is done."""
    count, first, second = 1_000_000, stream_of(12, rank), stream_of(13, rank)
    alone, number, length = join(0, 1, new_id()), [rank + 1] * count, c_size_t(count)
    total = [ranks * (ranks + 1) // 2] * count
    (source, _), (one, ones) = memory(number), memory([0] * count)
    (two, _), (place, found) = memory(number), memory([0] * count)

    def copy(from_, to, stream):
        ok("AllReduce", from_, to, length, INT32, SUM, alone, stream)

    for _ in range(10):
        copy(source, place, second)
    copy(place, one, second)
    ok("GroupStart")
    ok("AllReduce", one, one, length, INT32, SUM, comm, first)
    ok("AllReduce", two, two, length, INT32, SUM, comm, second)
    ok("GroupEnd")
    copy(two, place, first)
    synchronize(first)
    assert ones[:] == total and found[:] == total, (ones[0], ones[count - 1], found[0], found[count - 1])
    synchronize(second)
    ok("CommDestroy", alone)
    for used in (source, one, two, place):
        ok("MemFree", used)


def multiplied(comm, rank, ranks):
    op, factor = c_int(), c_double(0.5)
    ok("RedOpCreatePreMulSum", byref(op), byref(factor), FLOAT64, 1, comm)
    given, values = memory([float(rank + 1)] * COUNT, c_double)
    ok("AllReduce", given, given, c_size_t(COUNT), FLOAT64, op, comm, stream_of(9, rank))
    synchronize(stream_of(9, rank))
    assert values[:] == [ranks * (ranks + 1) / 4] * COUNT
    refused(INVALID_ARGUMENT, "AllReduce", given, given, c_size_t(1), INT32, op, comm, c_void_p(9))
    ok("RedOpDestroy", op, comm)
    refused(INVALID_ARGUMENT, "AllReduce", given, given, c_size_t(1), FLOAT64, op, comm, c_void_p(9))
    # By a factor of each rank's own in device memory, as it is when the stream comes to the call.
    stream, total = stream_of(9, rank), sum((r + 1) * (r + 2) for r in range(ranks))
    factors, factor = memory([0.0], c_double)
    ok("RedOpCreatePreMulSum", byref(op), factors, FLOAT64, 0, comm)
    factor[0] = rank + 2.0
    part = c_size_t(COUNT // ranks)
    place, found = memory([0.0] * COUNT, c_double)
    for grouped in (False, True):
        for name, arguments, expected in [
            ("AllReduce", (c_size_t(COUNT), FLOAT64, op), [total] * COUNT),
            ("Reduce", (c_size_t(COUNT), FLOAT64, op, 1), [total] * COUNT if rank == 1 else []),
            ("ReduceScatter", (part, FLOAT64, op), [total] * part.value),
        ]:
            values[:], found[:] = [rank + 1.0] * COUNT, [0.0] * COUNT
            if grouped:
                ok("GroupStart")
            ok(name, given, place, *arguments, comm, stream)
            if grouped:
                # A group's calls keep the operator that is destroyed before they are made.
                ok("RedOpDestroy", op, comm)
                ok("GroupEnd")
                ok("RedOpCreatePreMulSum", byref(op), factors, FLOAT64, 0, comm)
            synchronize(stream)
            assert found[: len(expected)] == expected, (name, grouped, found[:3])
    ok("RedOpDestroy", op, comm)
    for used in (given, factors, place):
        ok("MemFree", used)


def several_threads():
    """Two communicators of two ranks, each used by a thread of its own at the same time, in groups of the thread's own."""
    identifiers = [new_id(), new_id()]
    both = threading.Barrier(4)

    def one(rank, which):
        comm = join(rank, 2, identifiers[which])
        both.wait(60)
        place, values = memory([rank + which])
        for _ in range(50):
            values[0] = rank + which
            ok("GroupStart")
            ok("AllReduce", place, place, c_size_t(1), INT32, SUM, comm, stream_of(20 + which, rank))
            ok("GroupEnd")
            synchronize(stream_of(20 + which, rank))
            assert values[0] == 1 + 2 * which
        ok("MemFree", place)
        ok("CommDestroy", comm)

    on_threads([lambda r=r, w=w: one(r, w) for r in range(2) for w in range(2)])

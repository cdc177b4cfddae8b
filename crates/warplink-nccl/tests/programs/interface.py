"""Calls every function of NCCL's interface by ctypes, as bindings of other languages do, with ranks that are threads.

The arguments are the library and the names of all functions without their prefix.
"""

import ctypes
import os
import sys
import threading
import time
from ctypes import byref, c_char_p, c_double, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

from nccl import (
    COUNT,
    FLOAT64,
    INT32,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    IN_PROGRESS,
    MAX,
    MIN,
    AVG,
    PROD,
    SUCCESS,
    SUM,
    SYSTEM_ERROR,
    UniqueId,
    call,
    called,
    has_ended,
    join,
    last_error,
    memory,
    new_id,
    ok,
    on_threads,
    refused,
    stream_of,
    sum_of_ranks,
    synchronize,
)

NAMES = set(sys.argv[2].split())


class Team(ctypes.Structure):
    _fields_ = [("ranks", c_int), ("rank", c_int), ("stride", c_int)]


class Header(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("rest", ctypes.c_ubyte * 240)]


def header(bytes_=256):
    return Header(bytes_, 0xCAFEBEEF, 22907)


class CallConfig(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("extensions", c_void_p),
        ("blocks", c_int * 4),
        ("algorithms", c_char_p),
        ("must_follow", c_int),
        ("policy", c_int),
        ("tag", c_uint64),
        ("launched", c_void_p),
    ]


def simulation(magic=0x74685283):
    return Header(24, magic, 22907)


def on_ranks(ranks, body):
    identifier = new_id()

    def one(rank):
        comm = join(rank, ranks, identifier)
        body(comm, rank, ranks)
        ok("CommDestroy", comm)

    on_threads([lambda rank=rank: one(rank) for rank in range(ranks)])


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


def finalized(comm, rank, ranks):
    """The end of the calls is waited for."""
    place, values = memory([rank + 1])
    if rank == 1:
        time.sleep(0.3)
    ok("AllReduce", place, place, c_size_t(1), INT32, SUM, comm, stream_of(74, rank))
    ok("CommFinalize", comm)
    assert values[0] == 3
    ok("MemFree", place)


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


def properties(comm, rank, ranks):
    value, large, stated = c_int(-1), c_uint64(), header()
    for name, expected in [("CommCount", ranks), ("CommUserRank", rank), ("CommGetAsyncError", SUCCESS)]:
        ok(name, comm, byref(value))
        assert value.value == expected, name
        refused(INVALID_ARGUMENT, name, comm, None)
    ok("CommCuDevice", comm, byref(value))
    ok("CommQueryProperties", comm, byref(stated))
    assert [int.from_bytes(bytes(stated.rest[at : at + 4]), "little") for at in (0, 4)] == [rank, ranks]
    ok("CommMemStats", comm, 0, byref(large))
    everyone = [call("TeamWorld", comm, gives=Team), call("TeamLsa", comm, gives=Team)]
    alone = [
        call("TeamRail", comm, gives=Team),
        call("TeamCft", comm, 0, gives=Team),
        call("TeamCftMultimem", comm, gives=Team),
    ]
    for team in everyone:
        assert (team.ranks, team.rank, team.stride) == (ranks, rank, 1)
        for convert in ("TeamRankToWorld", "TeamRankToLsa"):
            assert call(convert, comm, team, ranks - 1) == ranks - 1
    for team in alone:
        assert (team.ranks, team.rank) == (1, 0)


def registrations(comm, rank, ranks):
    place, _ = memory([rank] * COUNT)
    handle, window, found = c_void_p(), c_void_p(), c_void_p()
    ok("CommRegister", comm, place, c_size_t(4 * COUNT), byref(handle))
    ok("CommDeregister", comm, handle)
    ok("CommWindowRegister", comm, place, c_size_t(4 * COUNT), byref(window), 0)
    ok("WinGetUserPtr", comm, window, byref(found))
    assert found.value == place.value
    # Kernels' windows are NCCL's, which is not there.
    zero, space = c_size_t(0), ctypes.create_string_buffer(256)
    team = call("TeamWorld", comm, gives=Team)
    for name, *arguments in [
        ("GetLsaMultimemDevicePointer", window, zero, byref(found)),
        ("GetMultimemDevicePointer", window, zero, zero, byref(found)),
        ("GetMultimemDeviceLeInfo", window, zero, space, space),
        ("GetPeerDeviceLeInfo", window, zero, 0, space, space),
        ("GetCftDeviceLeInfo", window, zero, 0, team, space, space),
        ("DevCommCreate", comm, space, space),
        ("DevCommDestroy", comm, space),
        ("LsaBarrierCreateRequirement", team, 1, space, space),
        ("GinBarrierCreateRequirement", comm, team, 1, space, space),
        ("GinOutboxCreateRequirement", 1, 4, space, space),
        ("GinInboxA2ACreateRequirement", team, 1, 4, space, space),
        ("LLA2ACreateRequirement", 1, 1, space, space),
    ]:
        code = call(name, *arguments)
        assert code in (SYSTEM_ERROR, INVALID_USAGE), f"nccl{name} gives {code}"
        assert "NCCL" in last_error(), f"{name}: {last_error()}"
    ok("CommWindowDeregister", comm, window)
    refused(INVALID_ARGUMENT, "WinGetUserPtr", comm, window, byref(found))
    ok("MemFree", place)


def waiting_for(*descriptions):
    """Signals to wait for, each a number of them, a peer, a signal and a context."""
    return (c_int * (4 * len(descriptions)))(*[number for one in descriptions for number in one])


def windows(comm, rank, ranks):
    """Addresses of peers' memory, puts and signals, each rank with the next and the one before."""
    stream, other = stream_of(80, rank), stream_of(81, rank)
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    zero, found, window = c_size_t(0), c_void_p(), c_void_p()
    refused(INVALID_USAGE, "Signal", following, 0, 0, 0, comm, stream)
    place, values = memory([100 + rank] * COUNT)
    given, sent = memory([0] * COUNT)
    ok("CommWindowRegister", comm, place, c_size_t(4 * COUNT), byref(window), 0)
    for name in ("GetPeerDevicePointer", "GetLsaDevicePointer"):
        for peer in range(ranks):
            ok(name, window, c_size_t(40), peer, byref(found))
            assert c_int.from_address(found.value).value == 100 + peer, (name, peer)
        assert peer != rank or found.value == place.value + 40
    # No rank puts before all have looked.
    sum_of_ranks(comm, rank, ranks, 80)

    def put(at, count, peer, stream, context=0, into=window):
        source = c_void_p(given.value + 4 * at)
        return "PutSignal", source, c_size_t(count), INT32, peer, into, c_size_t(4 * at), 0, context, 0, comm, stream

    for round in range(20):
        for i in range(3):
            sent[i] = 1000 * rank + 10 * round + i
        # On two streams in turn, and as two signals, of which one comes with nothing.
        ok(*put(0, 3, following, (stream, other)[round % 2]))
        ok(*(("Signal", following, 0, 0, 0, comm, stream) if round % 3 else put(0, 0, following, stream)))
        ok("WaitSignal", 1, waiting_for((2, before, 0, 0)), comm, stream)
        synchronize(stream)
        assert values[:3] == [1000 * before + 10 * round + i for i in range(3)], (round, values[:3])
        # Those that come next would overwrite what is read.
        sum_of_ranks(comm, rank, ranks, 80)
        synchronize(other)
    # In a group, in which the put goes out before the wait, wherever it is; a simulation puts nothing.
    sent[0] = 5000 + rank
    for end, arguments in [("GroupSimulateEnd", [byref(simulation())]), ("GroupEnd", [])]:
        ok("GroupStart")
        ok("WaitSignal", 1, waiting_for((1, before, 0, 0)), comm, stream)
        ok(*put(0, 1, following, stream))
        ok(end, *arguments)
    synchronize(stream)
    assert values[0] == 5000 + before, values[0]
    sum_of_ranks(comm, rank, ranks, 80)
    # To itself, by another context; a wait for several.
    sent[5] = 7
    ok(*put(5, 1, rank, stream, 1))
    ok("Signal", following, 0, 3, 0, comm, stream)
    ok("WaitSignal", 2, waiting_for((1, rank, 0, 1), (1, before, 0, 3)), comm, stream)
    synchronize(stream)
    assert values[5] == 7
    one, description = c_size_t(1), waiting_for((1, before, 0, 0))
    for name, *arguments in [
        put(COUNT - 1, 2, following, stream),
        put(2**61, 1, following, stream),
        put(0, 2**62, following, stream),
        put(0, 1, ranks, stream),
        put(0, 1, -1, stream),
        put(0, 1, following, stream, 8),
        put(0, 1, following, stream, -1),
        put(0, 1, following, stream, 0, None),
        put(0, 1, following, stream, 0, c_void_p(77)),
        ("PutSignal", None, one, INT32, following, window, zero, 0, 0, 0, comm, stream),
        ("PutSignal", given, one, 99, following, window, zero, 0, 0, 0, comm, stream),
        ("PutSignal", c_void_p(0x1238), one, INT32, following, window, zero, 0, 0, 0, comm, stream),
        ("Signal", following, 1, 0, 0, comm, stream),
        ("Signal", ranks, 0, 0, 0, comm, stream),
        ("WaitSignal", 1, None, comm, stream),
        ("WaitSignal", 0, description, comm, stream),
        ("WaitSignal", -1, description, comm, stream),
        ("WaitSignal", 1, waiting_for((-1, before, 0, 0)), comm, stream),
        ("WaitSignal", 1, waiting_for((1, ranks, 0, 0)), comm, stream),
        ("GetPeerDevicePointer", window, c_size_t(4 * COUNT + 1), following, byref(found)),
        ("GetPeerDevicePointer", window, zero, ranks, byref(found)),
        ("GetPeerDevicePointer", window, zero, following, None),
        ("CommWindowRegister", comm, None, one, byref(window), 0),
        ("CommWindowRegister", comm, place, one, None, 0),
    ]:
        refused(INVALID_ARGUMENT, name, *arguments)
    # Refused calls have counted no signal.
    ok("Signal", following, 0, 0, 0, comm, stream)
    ok("WaitSignal", 1, description, comm, stream)
    synchronize(stream)
    # Memory that no other process can map has windows that have no use; one rank's is enough.
    private = (c_int * 8)()
    mine = ctypes.cast(private, c_void_p) if rank == 0 else place
    useless = c_void_p()
    ok("CommWindowRegister", comm, mine, c_size_t(32), byref(useless), 0)
    refused(INVALID_USAGE, *put(0, 1, following, stream, 0, useless))
    ok("CommWindowDeregister", comm, useless)
    ok("CommWindowDeregister", comm, window)
    refused(INVALID_ARGUMENT, *put(0, 1, following, stream))
    # Left to the end of the communicator.
    ok("CommWindowRegister", comm, place, c_size_t(4 * COUNT), byref(window), 0)
    ok("MemFree", given)


def windows_of_one_thread():
    """Ranks of one thread register theirs in a group; a signal that never comes ends with its communicator."""
    comms, window = (c_void_p * 2)(), [c_void_p(), c_void_p()]
    ok("CommInitAll", comms, 2, None)
    places = [memory([rank + 1] * 4) for rank in range(2)]
    ok("GroupStart")
    for rank, (place, _) in enumerate(places):
        ok("CommWindowRegister", c_void_p(comms[rank]), place, c_size_t(16), byref(window[rank]), 0)
    ok("GroupEnd")
    assert all(one.value for one in window) and window[0].value != window[1].value
    streams = [stream_of(82, rank) for rank in range(2)]
    first, second = (c_void_p(comm) for comm in comms)
    ok("WaitSignal", 1, waiting_for((1, 0, 0, 0)), second, streams[1])
    data, rest = ("PutSignal", places[0][0], c_size_t(4), INT32, 1), (c_size_t(0), 0, 0, 0, first, streams[0])
    # The other window is of another communicator.
    refused(INVALID_ARGUMENT, *data, window[1], *rest)
    ok(*data, window[0], *rest)
    synchronize(streams[1])
    assert places[1][1][:] == [1] * 4
    ok("WaitSignal", 1, waiting_for((1, 0, 0, 0)), second, streams[1])
    ok("CommAbort", first)
    assert not has_ended(streams[1])
    ok("CommAbort", second)
    for place, _ in places:
        ok("MemFree", place)


def windows_in_order():
    """Ranks of one thread register several windows each in one group: the n-th of a rank is that of the others."""
    comms, number = (c_void_p * 2)(), 4
    ok("CommInitAll", comms, 2, None)
    streams = [stream_of(83, rank) for rank in range(2)]
    places = [[memory([10 * rank + n] * 4) for n in range(number)] for rank in range(2)]
    given, sent = memory([0])
    for round in range(10):
        window = [[c_void_p() for _ in range(number)] for _ in range(2)]
        ok("GroupStart")
        for rank in range(2):
            for n, (place, _) in enumerate(places[rank]):
                ok("CommWindowRegister", c_void_p(comms[rank]), place, c_size_t(16), byref(window[rank][n]), 0)
        ok("GroupEnd")
        for rank in range(2):
            comm, peer = c_void_p(comms[rank]), c_void_p(comms[1 - rank])
            for n in range(number):
                sent[0] = 1000 * round + 10 * rank + n
                arguments = (c_size_t(1), INT32, 1 - rank, window[rank][n], c_size_t(4), 0, 0, 0, comm)
                ok("PutSignal", given, *arguments, streams[rank])
                ok("WaitSignal", 1, waiting_for((1, rank, 0, 0)), peer, streams[1 - rank])
                synchronize(streams[1 - rank])
                assert places[1 - rank][n][1][1] == sent[0], (round, rank, n)
        for rank in range(2):
            for one in window[rank]:
                ok("CommWindowDeregister", c_void_p(comms[rank]), one)
    for comm in comms:
        ok("CommDestroy", c_void_p(comm))
    for place, _ in (*places[0], *places[1], (given, sent)):
        ok("MemFree", place)


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


def derived():
    """Split, shrunk, grown, made by several ids, by a configuration, and all at once."""
    first, grown, scalable = new_id(), UniqueId(), (UniqueId * 2)(new_id(), new_id())
    with_config, not_blocking = new_id(), new_id()
    has_grown = threading.Event()

    def old(rank):
        comm = join(rank, 2, first)
        if rank == 0:
            ok("CommGetUniqueId", comm, byref(grown))
            has_grown.set()
        more = c_void_p()
        ok("CommGrow", comm, 3, byref(grown) if rank == 0 else None, -1, byref(more), None)
        sum_of_ranks(more, rank, 3, 30)
        half = c_void_p()
        ok("CommSplit", more, 0, -rank, byref(half), None)
        own = c_int()
        ok("CommUserRank", half, byref(own))
        assert own.value == 2 - rank
        sum_of_ranks(half, own.value, 3, 31)
        ok("CommDestroy", half)
        # A revoked communicator makes no calls, and others can be made of it.
        ok("CommRevoke", more, 0)
        place, _ = memory([0])
        refused(INVALID_USAGE, "AllReduce", place, place, c_size_t(1), INT32, SUM, more, c_void_p(30))
        refused(INVALID_ARGUMENT, "CommRevoke", more, 0)
        refused(INVALID_ARGUMENT, "CommFinalize", more)
        left, excluded = c_void_p(), (c_int * 1)(2)
        ok("CommShrink", more, excluded, 1, byref(left), None, 0)
        sum_of_ranks(left, rank, 2, 32)
        for ended in (left, more):
            ok("CommDestroy", ended)
        # Suspended, it makes none either, until it goes on.
        ok("CommSuspend", comm, 0)
        refused(INVALID_USAGE, "AllReduce", place, place, c_size_t(1), INT32, SUM, comm, c_void_p(30))
        ok("CommResume", comm)
        sum_of_ranks(comm, rank, 2, 33)
        # A communicator that is still being created does not hold up the group's other calls.
        config = (c_int * 12)(48, 0, -0x35014111, 21800, 0, *[-(2**31)] * 2, 8, 0, 0, -(2**31), 0)
        later, (summed, values), code = c_void_p(), memory([rank + 1]), c_int(IN_PROGRESS)
        ok("GroupStart")
        ok("CommInitRankConfig", byref(later), 2, not_blocking, rank, config)
        ok("AllReduce", summed, summed, c_size_t(1), INT32, SUM, comm, c_void_p(36 + rank))
        assert call("GroupEnd") in (SUCCESS, IN_PROGRESS)
        synchronize(c_void_p(36 + rank))
        assert values[0] == 3
        while code.value == IN_PROGRESS:
            ok("CommGetAsyncError", later, byref(code))
        sum_of_ranks(later, rank, 2, 38)
        ok("CommDestroy", later)
        ok("MemFree", summed)
        ok("CommFinalize", comm)
        refused(INVALID_USAGE, "AllReduce", place, place, c_size_t(1), INT32, SUM, comm, c_void_p(30))
        refused(INVALID_ARGUMENT, "CommFinalize", comm)
        refused(INVALID_ARGUMENT, "CommRevoke", comm, 0)
        ok("CommDestroy", comm)
        other = c_void_p()
        ok("CommInitRankScalable", byref(other), 2, rank, 2, scalable, None)
        sum_of_ranks(other, rank, 2, 34)
        ok("CommDestroy", other)
        # Left alone but for blocking and the most blocks, as a configuration of NCCL 2.18.
        config = (c_int * 12)(48, 0, -0x35014111, 21800, 1, *[-(2**31)] * 2, 8, 0, 0, -(2**31), 0)
        ok("CommInitRankConfig", byref(other), 2, with_config, rank, config)
        sum_of_ranks(other, rank, 2, 35)
        ok("CommDestroy", other)
        ok("MemFree", place)

    def new():
        assert has_grown.wait(60)
        comm, half = c_void_p(), c_void_p()
        ok("CommGrow", None, 3, byref(grown), 2, byref(comm), None)
        sum_of_ranks(comm, 2, 3, 30)
        ok("CommSplit", comm, 0, -2, byref(half), None)
        sum_of_ranks(half, 0, 3, 31)
        for ended in (half, comm):
            ok("CommDestroy", ended)

    on_threads([lambda: old(0), lambda: old(1), new])
    comms = (c_void_p * 2)()
    ok("CommInitAll", comms, 2, None)
    places = [memory([rank + 1]) for rank in range(2)]
    # A simulation ends its group without its calls, so each rank's memory is multiplied once.
    for end, arguments in [("GroupSimulateEnd", [byref(simulation())]), ("GroupEnd", [])]:
        ok("GroupStart")
        for rank, (place, _) in enumerate(places):
            comm = c_void_p(comms[rank])
            ok("AllReduce", place, place, c_size_t(1), INT32, PROD, comm, c_void_p(40 + rank))
        ok(end, *arguments)
        refused(INVALID_USAGE, "GroupEnd")
    for rank, (place, values) in enumerate(places):
        synchronize(c_void_p(40 + rank))
        assert values[0] == 2
        ok("MemFree", place)
    for comm in comms:
        ok("CommDestroy", c_void_p(comm))


def hung():
    """A rank calls what the other never does; another thread aborts, and the process goes on."""
    identifier = new_id()
    made = threading.Barrier(2)

    def waiting():
        comm = join(0, 2, identifier)
        place, _ = memory([1])
        ok("AllReduce", place, place, c_size_t(1), INT32, SUM, comm, c_void_p(50))
        made.wait(60)
        started = time.monotonic()
        aborting = threading.Timer(0.2, lambda: ok("CommAbort", comm))
        aborting.start()
        assert not has_ended(c_void_p(50))
        aborting.join()
        assert time.monotonic() - started < 10
        ok("MemFree", place)

    def absent():
        comm = join(1, 2, identifier)
        made.wait(60)
        code, end = c_int(SUCCESS), time.monotonic() + 20
        while code.value == SUCCESS and time.monotonic() < end:
            time.sleep(0.01)
            ok("CommGetAsyncError", comm, byref(code))
        assert code.value not in (SUCCESS, IN_PROGRESS)
        ok("CommAbort", comm)

    on_threads([waiting, absent])


def wrong_arguments(comm, rank, ranks):
    """Each is refused, and the communicator goes on."""
    place, _ = memory([1] * COUNT)
    freed, _ = memory([1] * COUNT)
    other, stream, more, number = (rank + 1) % ranks, stream_of(70, rank), c_void_p(), c_int()
    # Ranks are threads, and none may allocate where another one has freed: all have what they need after a call.
    ok("AllReduce", place, place, c_size_t(1), INT32, SUM, comm, stream)
    synchronize(stream)
    ok("MemFree", freed)
    at = place.value
    for memory_, count in [
        (None, 1),
        (c_void_p(0x1238), 1),
        (freed, COUNT),
        (place, 2**40),
        (place, 2**62),
        (place, 2**64 - 1),
        (c_void_p(at + 2), 1),
        (c_void_p(at + 4 * COUNT - 4), 2),
    ]:
        length = c_size_t(count)
        for name, *rest in [("AllReduce", memory_, length, INT32, SUM), ("AllGather", place, length, INT32)]:
            refused(INVALID_ARGUMENT, name, memory_, *rest, comm, stream)
        # Messages are of bytes, aligned or not.
        if memory_ is None or memory_.value != at + 2:
            refused(INVALID_ARGUMENT, "Send", memory_, length, INT32, other, comm, stream)
    one, factor = c_size_t(1), c_double(1)
    for name, *arguments in [
        *(("AllReduce", place, place, one, kind, SUM, comm, stream) for kind in (-1, len(TYPES), 2**31 - 1)),
        *(("AllReduce", place, place, one, INT32, op, comm, stream) for op in (-1, 5, 2**31 - 1)),
        *(("Bcast", place, one, INT32, root, comm, stream) for root in (-1, ranks, 2**31 - 1)),
        *(("Recv", place, one, INT32, peer, comm, stream) for peer in (-1, ranks)),
        # In place in part.
        ("AllReduce", place, c_void_p(at + 4), c_size_t(2), INT32, SUM, comm, stream),
        ("AllGather", c_void_p(at + 4), place, c_size_t(2), INT32, comm, stream),
        ("CommSplit", comm, -5, 0, byref(more), None),
        ("CommSplit", comm, 0, 0, None, None),
        ("CommShrink", comm, byref(c_int(rank)), 1, byref(more), None, 0),
        ("CommShrink", comm, byref(c_int(ranks)), 1, byref(more), None, 0),
        ("CommShrink", comm, None, 1, byref(more), None, 0),
        ("CommGrow", comm, ranks, None, -1, byref(more), None),
        ("CommGrow", None, ranks, None, 0, byref(more), None),
        ("CommRevoke", comm, 1),
        ("RedOpCreatePreMulSum", byref(number), byref(factor), FLOAT64, 9, comm),
        ("RedOpCreatePreMulSum", byref(number), None, FLOAT64, 1, comm),
        ("RedOpDestroy", SUM, comm),
        ("CommWindowDeregister", comm, c_void_p(77)),
        ("CommMemStats", comm, 99, byref(c_uint64())),
    ]:
        refused(INVALID_ARGUMENT, name, *arguments)
    # To and from its own rank, without the other end.
    for name in ("Send", "Recv"):
        refused(INVALID_USAGE, name, place, one, INT32, rank, comm, stream)
    # Of nothing, no memory is needed.
    ok("AllReduce", None, None, c_size_t(0), INT32, SUM, comm, stream)
    ok("Send" if rank == 0 else "Recv", None, c_size_t(0), INT32, other, comm, stream)
    ok("MemFree", place)
    sum_of_ranks(comm, rank, ranks, 70)


def failed_groups(comm, rank, ranks):
    """A group fails by any of its functions, without its other calls, and leaves nothing to the next one."""
    place, values = memory([rank + 1])
    one, other, more = c_size_t(1), c_void_p(), c_void_p()
    call_ = ("AllReduce", place, place, one, INT32, PROD, comm, stream_of(71, rank))
    identifier = new_id()
    for wrong in [
        ("AllReduce", place, place, one, 99, SUM, comm, stream_of(71, rank)),
        ("CommInitRank", byref(more), 2, identifier, 7),
        ("CommSplit", comm, -7, 0, byref(more), None),
    ]:
        ok("GroupStart")
        ok("GroupStart")
        ok(*call_)
        ok("CommInitRank", byref(other), 2, identifier, rank)
        refused(INVALID_ARGUMENT, *wrong)
        ok("GroupEnd")
        refused(INVALID_ARGUMENT, "GroupEnd")
        assert not other.value
        refused(INVALID_USAGE, "GroupEnd")
    # With a requirement that only NCCL meets.
    event = CallConfig(ctypes.sizeof(CallConfig), 0xCAFEBEEF, 23200, launched=place.value)
    ok("GroupStart")
    ok(*call_)
    refused(INVALID_USAGE, "AllReduceConfig", *call_[1:], byref(event))
    refused(INVALID_USAGE, "GroupEnd")
    # Memory that does not exist is found before anything is enqueued.
    other_rank = (rank + 1) % ranks
    ok("GroupStart")
    ok(*call_)
    ok("Send", c_void_p(0x1238), one, INT32, other_rank, comm, stream_of(71, rank))
    refused(INVALID_ARGUMENT, "GroupEnd")
    synchronize(stream_of(71, rank))
    assert values[0] == rank + 1, values[0]
    # A call that cannot be enqueued does not keep those after it, which other ranks make too.
    both, numbers = memory([rank + 1] * 4)
    ok("GroupStart")
    ok("AllReduce", both, c_void_p(both.value + 4), c_size_t(2), INT32, SUM, comm, stream_of(71, rank))
    ok("AllReduce", both, both, one, INT32, SUM, comm, stream_of(71, rank))
    ok("Send", c_void_p(both.value + 4), one, INT32, other_rank, comm, stream_of(71, rank))
    ok("Recv", c_void_p(both.value + 8), one, INT32, other_rank, comm, stream_of(71, rank))
    refused(INVALID_ARGUMENT, "GroupEnd")
    synchronize(stream_of(71, rank))
    assert numbers[:] == [3, rank + 1, other_rank + 1, rank + 1], numbers[:]
    ok("MemFree", both)
    ok("GroupStart")
    ok(*call_)
    refused(INVALID_ARGUMENT, "GroupSimulateEnd", byref(simulation(0)))
    refused(INVALID_USAGE, "GroupEnd")
    # A communicator that a call of the group is for has ended.
    alone = join(0, 1, new_id())
    ok("GroupStart")
    ok("AllReduce", place, place, one, INT32, SUM, alone, stream_of(72, rank))
    ok("CommDestroy", alone)
    refused(INVALID_ARGUMENT, "GroupEnd")
    ok(*call_)
    synchronize(stream_of(71, rank))
    assert values[0] == 2, values[0]
    ok("MemFree", place)


def settled():
    """How many descriptors, threads and mappings the process has, once threads that close communicators have ended."""
    counted = []
    for _ in range(100):
        with open("/proc/self/maps") as maps:
            mappings = len(maps.readlines())
        counted.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings))
        if counted[-10:] == [min(counted)] * 10:
            break
        time.sleep(0.05)
    return counted[-1]


def many():
    """Communicators that end leave nothing behind, whether they are destroyed or aborted."""
    both = threading.Barrier(2)

    def rounds(count):
        identifiers = [new_id() for _ in range(count)]

        def one(rank):
            for number, identifier in enumerate(identifiers):
                comm = join(rank, 2, identifier)
                sum_of_ranks(comm, rank, 2, 73)
                both.wait(60)
                ok("CommAbort" if number % 2 else "CommDestroy", comm)

        on_threads([lambda rank=rank: one(rank) for rank in range(2)])

    rounds(2)
    before = settled()
    rounds(10)
    after = settled()
    # Mappings may be merged or not.
    slack = (0, 0, 10)
    assert all(now <= then + more for now, then, more in zip(after, before, slack, strict=True)), (before, after)


def without_communicator():
    version, value, place = c_int(), c_int(), c_void_p()
    ok("GetVersion", byref(version))
    assert version.value >= 21800
    for code in range(-1, 12):
        assert call("GetErrorString", code, gives=c_char_p)
    call("ResetDebugInit", gives=None)
    stray = c_void_p(0x1234560)
    one = c_size_t(1)
    for name, *arguments in [
        ("GetVersion", None),
        ("GetUniqueId", None),
        ("CommInitRank", None, 1, UniqueId(), 0),
        ("CommInitRank", byref(place), 2, new_id(), 2),
        ("CommInitRank", byref(place), 0, new_id(), 0),
        ("CommInitRank", byref(place), 1, UniqueId(), 0),
        ("CommInitAll", byref(place), 0, None),
        ("CommCount", stray, byref(value)),
        ("CommDestroy", stray),
        ("CommAbort", stray),
        ("AllReduce", stray, stray, one, INT32, SUM, stray, None),
        ("MemAlloc", None, one),
        ("MemFree", stray),
    ]:
        refused(INVALID_ARGUMENT, name, *arguments)
    refused(INVALID_USAGE, "GroupEnd")
    # As in NCCL, which has nothing to end here.
    for name, *arguments in [("CommFinalize",), ("CommDestroy",), ("CommAbort",), ("CommRevoke", 0), ("MemFree",)]:
        ok(name, None, *arguments)
    # The real library's alone.
    assert call("LLA2ACalcSlots", 1, 1) == 0
    call("ParamDumpAll", gives=None)
    space = ctypes.create_string_buffer(256)
    for name, *arguments in [
        ("SetEncryption", space),
        ("ParamBind", space, b"key"),
        ("ParamGet", space, space, 8, space),
        ("ParamGetParameter", b"key", space, space),
        ("ParamGetAllParameterKeys", space, space),
        *((f"ParamGet{kind}", space, space) for kind in "I8 I16 I32 I64 U8 U16 U32 U64 Str".split()),
    ]:
        refused(SYSTEM_ERROR, name, *arguments)
        assert "NCCL" in last_error()


def main():
    without_communicator()
    on_ranks(2, types_and_operators)
    for config in ([], [None], [byref(Header(256, 0xCAFEBEEF, 23200))]):
        on_ranks(3, lambda comm, rank, ranks, config=config: collectives(comm, rank, ranks, config))
    for body in (many_messages, several_streams, finalized, multiplied, properties, registrations, wrong_arguments, failed_groups):
        on_ranks(2, body)
    on_ranks(3, in_place)
    on_ranks(3, windows)
    windows_of_one_thread()
    windows_in_order()
    several_threads()
    derived()
    hung()
    many()
    missing = NAMES - called
    assert not missing, f"not called: {sorted(missing)}"
    # The process ends with a communicator that is not destroyed.
    alive = c_void_p()
    ok("CommInitRank", byref(alive), 1, new_id(), 0)
    print("done")


main()

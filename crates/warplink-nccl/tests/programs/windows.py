"""Registrations, windows, puts and signals."""

import ctypes
from ctypes import byref, c_int, c_size_t, c_void_p

from nccl import (
    COUNT,
    INT32,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    SYSTEM_ERROR,
    call,
    has_ended,
    last_error,
    memory,
    ok,
    refused,
    stream_of,
    sum_of_ranks,
    synchronize,
)
from structures import Team, simulation


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

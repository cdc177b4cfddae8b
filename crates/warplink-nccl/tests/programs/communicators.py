"""How communicators are made, derived, finalized and ended, and what they say of themselves."""

import ctypes
import os
import threading
import time
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from nccl import (
    IN_PROGRESS,
    INT32,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    PROD,
    SUCCESS,
    SUM,
    UniqueId,
    call,
    has_ended,
    join,
    memory,
    new_id,
    ok,
    on_threads,
    refused,
    stream_of,
    sum_of_ranks,
    synchronize,
)
from structures import CallConfig, Team, header, simulation


def finalized(comm, rank, ranks):
    """The end of the calls is waited for."""
    place, values = memory([rank + 1])
    if rank == 1:
        time.sleep(0.3)
    ok("AllReduce", place, place, c_size_t(1), INT32, SUM, comm, stream_of(74, rank))
    ok("CommFinalize", comm)
    assert values[0] == 3
    ok("MemFree", place)


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

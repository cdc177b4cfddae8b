"""Calls every function of NCCL's interface by ctypes, as bindings of other languages do, with ranks that are threads.

The arguments are the library and the names of all functions without their prefix.
"""

import ctypes
import sys
from ctypes import byref, c_char_p, c_double, c_int, c_size_t, c_uint64, c_void_p

from calls import (
    TYPES,
    collectives,
    in_place,
    many_messages,
    multiplied,
    several_streams,
    several_threads,
    types_and_operators,
)
from communicators import derived, failed_groups, finalized, hung, many, properties
from nccl import (
    COUNT,
    FLOAT64,
    INT32,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    SUM,
    SYSTEM_ERROR,
    UniqueId,
    call,
    called,
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
from structures import Header
from windows import registrations, windows, windows_in_order, windows_of_one_thread

NAMES = set(sys.argv[2].split())


def on_ranks(ranks, body):
    identifier = new_id()

    def one(rank):
        comm = join(rank, ranks, identifier)
        body(comm, rank, ranks)
        ok("CommDestroy", comm)

    on_threads([lambda rank=rank: one(rank) for rank in range(ranks)])


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

"""Calls that NCCL itself executes, by a stand-in for it (real.c) on the host device.

usage: real.py LIBRARY nccl|warplink

The last argument says which of the two executes the communicators' collectives.
"""

import ctypes
import os
import sys
import threading
import time
from ctypes import byref, c_char_p, c_double, c_int, c_size_t, c_void_p

from nccl import (
    FLOAT64,
    INT32,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    IN_PROGRESS,
    SUCCESS,
    SUM,
    call,
    join,
    last_error,
    memory,
    new_id,
    ok,
    on_threads,
    refused,
    sum_of_ranks,
)

UNDEFINED = -(2**31)

stand_in = ctypes.CDLL(os.environ["WARPLINK_NCCL_LIBRARY"])
stand_in.stand_in_log.restype = c_char_p

STREAM = c_void_p(1)


def log():
    """Calls of the stand-in since the last time."""
    return stand_in.stand_in_log().decode().splitlines()


def expect(*expected):
    """The log has these lines, in any order."""
    found = log()
    assert sorted(found) == sorted(expected), found


def pair():
    """Two ranks of this thread."""
    comms = (c_void_p * 2)()
    ok("CommInitAll", comms, 2, None)
    return [c_void_p(comm) for comm in comms]


def grouped(calls):
    ok("GroupStart")
    for name, *arguments in calls:
        ok(name, *arguments)
    ok("GroupEnd")


def inits(ranks=2):
    return [f"init {rank} of {ranks} in 0" for rank in range(ranks)]


def lines(text, depth=0):
    return [f"{text.format(rank)} in {depth}" for rank in range(2)]


def awaited(comm, code):
    code = c_int(code)
    while code.value == IN_PROGRESS:
        ok("CommGetAsyncError", comm, byref(code))
    assert code.value == SUCCESS, last_error(comm)


class Config(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("magic", c_int),
        ("version", c_int),
        ("blocking", c_int),
        ("cluster", c_int),
        ("least", c_int),
        ("most", c_int),
        ("network", c_char_p),
        ("share", c_int),
        ("traffic", c_int),
        ("name", c_char_p),
        ("rest", c_int * 4),
    ]


def configurations():
    """NCCL gets the caller's configuration as it was when it was passed, and those of derived communicators."""
    name, comm, child, own = ctypes.create_string_buffer(b"first"), c_void_p(), c_void_p(), c_void_p()
    config = Config(ctypes.sizeof(Config), -0x35014111, 22707, 0, *[UNDEFINED] * 2, 9, b"Socket", *[UNDEFINED] * 2)
    ctypes.memmove(ctypes.byref(config, Config.name.offset), byref(c_void_p(ctypes.addressof(name))), 8)
    ok("GroupStart")
    ok("CommInitRankConfig", byref(comm), 1, new_id(), 0, byref(config))
    config.most, name.value = 1, b"other"
    awaited(comm, call("GroupEnd"))
    first = "config 0: blocking 1 most 9 network Socket name first in 0"
    expect(first, *inits(1))
    awaited(child, call("CommSplit", comm, 0, 0, byref(child), None))
    awaited(comm, IN_PROGRESS)
    awaited(child, IN_PROGRESS)
    expect(first, *inits(1))
    awaited(own, call("CommSplit", comm, 0, 0, byref(own), byref(config)))
    awaited(own, IN_PROGRESS)
    expect("config 0: blocking 1 most 1 network Socket name other in 0", *inits(1))
    awaited(own, call("CommFinalize", own))
    expect("finalize 0 in 0")
    for ended in (own, child, comm):
        ok("CommAbort", ended)
    expect(*["abort 0 in 0"] * 3)


def operators():
    """An operator that is destroyed in a group is there until the group's calls are made."""
    comms, factor = pair(), c_double(2)
    ops, place = [c_int(), c_int()], memory([1.0], c_double)[0]
    for comm, op in zip(comms, ops, strict=True):
        ok("RedOpCreatePreMulSum", byref(op), byref(factor), FLOAT64, 1, comm)
    log()
    count = c_size_t(3)
    grouped(
        one
        for comm, op in zip(comms, ops, strict=True)
        for one in [
            ("AllReduce", place, place, count, FLOAT64, op, comm, STREAM),
            ("RedOpDestroy", op, comm),
            ("AllReduce", place, place, c_size_t(4), FLOAT64, SUM, comm, STREAM),
        ]
    )
    found = log()
    assert found == [
        *(f"all-reduce {rank} of {count} in 1" for rank in range(2) for count in (3, 4)),
        *(f"end of operator {rank} in 0" for rank in range(2)),
    ], found
    refused(INVALID_ARGUMENT, "RedOpDestroy", ops[0], comms[0])
    shrunk, excluded = c_void_p(), c_int(1)
    # NCCL's calls end before those of the others are waited for.
    ok("CommShrink", comms[0], byref(excluded), 1, byref(shrunk), None, 1)
    found = log()
    assert found == ["abort 0 in 0", *inits(1)], found
    for comm in (shrunk, *comms):
        ok("CommAbort", comm)
    expect("abort 0 in 0", "abort 1 in 0")


def one_thread():
    """Collective set-up calls work for ranks of one thread, in groups."""
    comms, place = pair(), memory([1, 2])[0]
    log()
    windows, made = [c_void_p(), c_void_p()], [c_int(), c_int()]
    register = [
        ("CommWindowRegister", comm, place, c_size_t(8), byref(window), 0)
        for comm, window in zip(comms, windows, strict=True)
    ]
    # Requirements may be changed after the call that passed them.
    wanted = Config(ctypes.sizeof(Config), -0x35014111, 22907, 0)
    create = [("DevCommCreate", comm, byref(wanted), byref(one)) for comm, one in zip(comms, made, strict=True)]
    ok("GroupStart")
    for number, (name, *arguments) in enumerate([*register, *create]):
        wanted.blocking = number
        ok(name, *arguments)
    ok("GroupEnd")
    assert all(window.value == place.value for window in windows) and all(one.value for one in made)
    first = [] if sys.argv[2] == "nccl" else inits()
    expect(*first, *lines("window {}"), *(f"device communicator {rank} with {rank + 2} in 0" for rank in range(2)))
    # Calls of NCCL's are part of the group.
    grouped(("Signal", 1 - rank, 0, 0, 0, comm, STREAM) for rank, comm in enumerate(comms))
    expect("signal 0 to 1 in 1", "signal 1 to 0 in 1")
    for comm in comms:
        ok("CommAbort", comm)
    expect(*lines("abort {}"))
    # The first such call may be a signal.
    comms = pair()
    grouped(("Signal", 1 - rank, 0, 0, 0, comm, STREAM) for rank, comm in enumerate(comms))
    expect(*inits(), "signal 0 to 1 in 1", "signal 1 to 0 in 1")
    for comm in comms:
        ok("CommAbort", comm)
    log()


def refused_windows():
    """Where NCCL refuses the first window of a rank, Warplink serves those of all."""
    stand_in.stand_in_set(0, 1)
    comms, place, windows = pair(), memory([1, 2])[0], [c_void_p(), c_void_p()]
    register = [
        ("CommWindowRegister", comm, place, c_size_t(8), byref(window), 0)
        for comm, window in zip(comms, windows, strict=True)
    ]
    grouped(register)
    stand_in.stand_in_set(0, -1)
    expect(*inits(), *lines("window {}"), "end of window 0 in 0")
    found = c_void_p()
    for comm, window in zip(comms, windows, strict=True):
        assert window.value not in (None, place.value)
        ok("WinGetUserPtr", comm, window, byref(found))
        assert found.value == place.value
        # The stand-in's memory cannot be mapped, so that the ranks have no signals.
        refused(INVALID_USAGE, "Signal", 0, 0, 0, 0, comm, STREAM)
        ok("CommWindowDeregister", comm, window)
    grouped(register)
    expect()
    for comm in comms:
        ok("CommAbort", comm)
    expect(*lines("abort {}"))


def ended_early():
    """A communicator can be asked for errors and aborted while another thread waits for NCCL's."""
    identifier, comms = new_id(), [None, None]
    place = memory([1, 2])[0]
    both, outcomes = threading.Barrier(3), []

    def waiting(rank):
        comms[rank], window = join(rank, 2, identifier), c_void_p()
        sum_of_ranks(comms[rank], rank, 2, 1)
        both.wait(30)
        outcomes.append(call("CommWindowRegister", comms[rank], place, c_size_t(8), byref(window), 0))

    def ending():
        both.wait(30)
        end = time.monotonic() + 20
        started = []
        while len(started) < 2 and time.monotonic() < end:
            time.sleep(0.01)
            started += log()
        assert sorted(started) == inits(), started
        begun, code = time.monotonic(), c_int(-1)
        ok("CommGetAsyncError", comms[0], byref(code))
        assert code.value == SUCCESS and time.monotonic() - begun < 5
        ok("CommRevoke", comms[1], 0)
        ok("CommAbort", comms[0])
        assert time.monotonic() - begun < 10, time.monotonic() - begun
        stand_in.stand_in_set(0, -1)

    stand_in.stand_in_set(1, -1)
    on_threads([lambda: waiting(0), lambda: waiting(1), ending])
    assert SUCCESS not in outcomes, outcomes
    expect(*lines("abort {}"))
    ok("CommAbort", comms[1])


def main():
    assert sys.argv[2] in ("nccl", "warplink")
    cases = (configurations, operators, one_thread) if sys.argv[2] == "nccl" else (one_thread, refused_windows, ended_early)
    for case in cases:
        case()
    print("done")


main()

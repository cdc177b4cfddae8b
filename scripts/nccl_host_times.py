#!/usr/bin/env python3
"""Host time of calls of NCCL's interface, by ctypes, on two GPUs or one, for scripts/device-nccl.sh.

usage: nccl_host_times.py LIBRARY

Each call's line has the median time until a call returns, of calls in a row, and those of the first calls after one
that has loaded their kernel, in which costs that occur once are to be seen. Calls alternate between rows of 20, as those
of nccl-tests, and waits for the stream. Like theirs, short calls of a row have addresses of their own each, whose setting
is a part of the time; `same` are those that repeat one call.
"""

import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from ctypes import c_int, c_size_t, c_void_p

sys.path.append(str(pathlib.Path(__file__).parents[1] / "crates/warplink-nccl/tests/programs"))
sys.dont_write_bytecode = True

import nccl  # noqa: E402

RANKS, ROWS, ROW = 2, 50, 20
BYTES = (1 << 10, 64 << 10, 4 << 20)
SHORT = 64 << 10


def prepared(name, *arguments):
    """A call without the costs of converting its arguments."""
    function = getattr(nccl.library, f"nccl{name}")
    function.argtypes = [type(argument) for argument in arguments]
    return lambda: function(*arguments)


def calls(comm, rank, stream, size, places):
    """Named calls of `size` bytes, each of which uses `places` addresses in turn."""
    step, words = size * RANKS, size // 4
    starts = [nccl.memory([0] * (words * RANKS * places))[0].value for _ in range(2)]
    memory = ([c_void_p(start + step * turn) for start in starts] for turn in range(places))
    turns = [list(calls_at(comm, rank, stream, words, *slices)) for slices in memory]
    for same in zip(*turns):
        names, prepared = zip(*same)
        turn = itertools.cycle(prepared)
        yield names[0], lambda turn=turn: next(turn)()


def calls_at(comm, rank, stream, count, given, place):
    own, root, peer = c_size_t(count), c_int(0), c_int(1 - rank)
    kind, tail = c_int(nccl.INT32), (comm, stream)
    start, end = prepared("GroupStart"), prepared("GroupEnd")
    send = prepared("Send", given, own, kind, peer, *tail)
    receive = prepared("Recv", place, own, kind, peer, *tail)

    def exchange():
        return start() or send() or receive() or end()

    yield "all_reduce", prepared("AllReduce", given, place, own, kind, c_int(0), *tail)
    yield "all_reduce in place", prepared("AllReduce", place, place, own, kind, c_int(0), *tail)
    yield "broadcast in place", prepared("Broadcast", place, place, own, kind, root, *tail)
    yield "all_gather", prepared("AllGather", given, place, own, kind, *tail)
    yield "send and receive", exchange


def rank_of_times(rank, path):
    nccl.select(rank)
    if rank == 0:
        with open(f"{path}.part", "wb") as file:
            file.write(bytes(nccl.new_id()))
        os.rename(f"{path}.part", path)
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path, "rb") as file:
        comm = nccl.join(rank, RANKS, nccl.UniqueId.from_buffer_copy(file.read()))
    stream = nccl.stream_of(1, rank)

    def row(called):
        """Host time of each of some calls, in microseconds."""
        times = []
        for _ in range(ROW):
            begun = time.perf_counter_ns()
            code = called()
            times.append((time.perf_counter_ns() - begun) / 1e3)
            assert code == nccl.SUCCESS, nccl.last_error()
        nccl.synchronize(stream)
        return times

    for size, places in itertools.product(BYTES, (1, ROW + 1)):
        if places > 1 and size > SHORT:
            continue
        same = " same" if places == 1 and size <= SHORT else ""
        for name, called in calls(comm, rank, stream, size, places):
            begun = time.perf_counter()
            assert called() == nccl.SUCCESS, nccl.last_error()
            nccl.synchronize(stream)
            loaded = time.perf_counter() - begun
            first = row(called)
            rows = [row(called) for _ in range(ROWS)]
            every = [one for times in rows for one in times]
            if rank == 0:
                means = statistics.median(statistics.mean(times) for times in rows)
                print(
                    f"{size >> 10} KiB {name}{same}: median {statistics.median(every):.1f}, of rows' means {means:.1f};"
                    f" first call {loaded * 1e3:.0f} ms, then {' '.join(f'{one:.0f}' for one in first)}",
                    flush=True,
                )
    nccl.ok("CommDestroy", comm)


def main():
    if sys.argv[2:3] == ["--rank"]:
        rank_of_times(int(sys.argv[3]), sys.argv[4])
        return
    # NCCL refuses two ranks on one GPU of one machine. What it transfers then goes through sockets.
    sharing = nccl.gpus and nccl.gpus.count < RANKS
    apart = [{"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"} if sharing else {} for rank in range(RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, __file__, sys.argv[1], "--rank"]
        path = os.path.join(folder, "id")
        ranks = [
            subprocess.Popen([*arguments, str(rank), path], env=os.environ | apart[rank]) for rank in range(RANKS)
        ]
        ended = [rank.wait() for rank in ranks]
    sys.exit(max(abs(code) for code in ended))


main()

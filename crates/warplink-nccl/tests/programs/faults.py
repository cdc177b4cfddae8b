"""Faults as users of NCCL meet them, with ranks that are processes, on the host device or on GPUs.

usage: faults.py LIBRARY [CASE...]

A line is printed for each case. On GPUs there are two ranks, else three. With WARPLINK_NCCL_LIBRARY, which names NCCL
itself, `orders` has NCCL's calls beside Warplink's.
"""

import _ctypes
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from ctypes import byref, c_int, c_size_t, c_void_p

from nccl import (
    COUNT,
    INT32,
    MAX,
    ON_HOST,
    INVALID_USAGE,
    REMOTE_ERROR,
    SUCCESS,
    SUM,
    UINT32,
    UniqueId,
    call,
    has_ended,
    join,
    last_error,
    library,
    memory,
    new_id,
    ok,
    on_threads,
    refused,
    select,
    stream_of,
    sum_of_ranks,
    synchronize,
)

RANKS = 3 if ON_HOST else 2

#: Seconds within which losses and aborts must have their effect, and those that a case may take.
REPORTED, LIMIT = 5, 60

#: Names of a rank's streams.
FIRST, SECOND, THIRD = range(1, 4)


def meet(rank, path, of=None):
    """The unique id that rank 0 has left in a file."""
    if rank == 0:
        identifier = new_id(of)
        with open(f"{path}.part", "wb") as file:
            file.write(bytes(identifier))
        os.rename(f"{path}.part", path)
        return identifier
    end = time.monotonic() + 30
    while not os.path.exists(path):
        assert time.monotonic() < end, "there is no unique id"
        time.sleep(0.01)
    with open(path, "rb") as file:
        return UniqueId.from_buffer_copy(file.read())


def joined(rank, path, of=None):
    return join(rank, RANKS, meet(rank, path, of), of)


def all_reduce(comm, rank, stream, place, count=COUNT, of=None):
    ok("AllReduce", place, place, c_size_t(count), INT32, SUM, comm, stream_of(stream, rank), of=of)


def reported(comm, limit):
    """The communicator's error, and after how many seconds it was there."""
    code, begun = c_int(SUCCESS), time.monotonic()
    while code.value == SUCCESS and time.monotonic() - begun < limit:
        time.sleep(0.01)
        ok("CommGetAsyncError", comm, byref(code))
    return code.value, time.monotonic() - begun


def is_usable(rank, path):
    """Whether the process can still make communicators and calls."""
    comm = joined(rank, f"{path}.next")
    sum_of_ranks(comm, rank, RANKS, FIRST)
    ok("CommDestroy", comm)


def alone():
    comm = join(0, 1, new_id())
    sum_of_ranks(comm, 0, 1, FIRST)
    ok("CommDestroy", comm)


def killed(rank, path):
    """The last rank dies in a collective: the others are told, and can go on."""
    comm = joined(rank, path)
    sum_of_ranks(comm, rank, RANKS, FIRST)
    place, _ = memory([1] * COUNT)
    if rank == RANKS - 1:
        # The others may still be in the first call, which would fail as well.
        time.sleep(1)
        with open(f"{path}.death", "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(comm, rank, FIRST, place)
    code, _ = reported(comm, 20)
    with open(f"{path}.death") as file:
        after = time.time() - float(file.read())
    assert code == REMOTE_ERROR and after < REPORTED, f"error {code} after {after:.1f} s: {last_error(comm)}"
    ok("CommAbort", comm)
    has_ended(stream_of(FIRST, rank))
    alone()
    return f"ncclRemoteError {after:.1f} s after the death"


def shrunk(rank, path):
    """The last rank dies before a collective: the others end it and go on without that rank."""
    comm, left = joined(rank, path), c_void_p()
    sum_of_ranks(comm, rank, RANKS, FIRST)
    place, _ = memory([1] * COUNT)
    if rank == RANKS - 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(comm, rank, FIRST, place)
    # At once, or when the loss is known.
    if rank > 0:
        assert reported(comm, 20)[0] == REMOTE_ERROR
    begun = time.monotonic()
    excluded = c_int(RANKS - 1)
    # NCCL_SHRINK_ABORT.
    ok("CommShrink", comm, byref(excluded), 1, byref(left), None, 1)
    has_ended(stream_of(FIRST, rank))
    sum_of_ranks(left, rank, RANKS - 1, SECOND)
    ok("CommDestroy", left)
    ok("CommAbort", comm)
    return f"{time.monotonic() - begun:.1f} s to go on"


def aborted(rank, path):
    """Rank 0 makes a call that no other makes; another thread aborts it, and the process goes on."""
    import threading

    comm = joined(rank, path)
    sum_of_ranks(comm, rank, RANKS, FIRST)
    if rank == 0:
        place, _ = memory([1] * COUNT)
        all_reduce(comm, rank, FIRST, place)
        begun = time.monotonic()
        aborting = threading.Timer(0.5, lambda: ok("CommAbort", comm))
        aborting.start()
        has_ended(stream_of(FIRST, rank))
        aborting.join()
        after = time.monotonic() - begun - 0.5
        assert after < REPORTED, f"the call ended {after:.1f} s after its abort"
        text = f"the call ended {after:.1f} s after its abort"
    else:
        code, _ = reported(comm, 20)
        assert code != SUCCESS, "the abort of another rank is not reported"
        ok("CommAbort", comm)
        text = ""
    is_usable(rank, path)
    return text


#: What rank 0 calls and what the others call, each with what the error says of it.
DIFFERENT = [
    (("AllReduce", COUNT, INT32, SUM), "all_reduce", ("AllGather", COUNT, INT32), "all_gather"),
    (("AllReduce", 10, INT32, SUM), "10 i32", ("AllReduce", 11, INT32, SUM), "11 i32"),
    (("AllReduce", 10, INT32, SUM), "i32", ("AllReduce", 10, UINT32, SUM), "u32"),
    (("AllReduce", 10, INT32, SUM), "sum", ("AllReduce", 10, INT32, MAX), "max"),
    (("Broadcast", 10, INT32, 0), "root 0", ("Broadcast", 10, INT32, 1), "root 1"),
    (("AlltoAll", 10, INT32), "all_to_all", ("Reduce", 10, INT32, SUM, 0), "reduce"),
]


def different(rank, path):
    """Ranks make different calls: all get an error that names both."""
    given, _ = memory([1] * COUNT * RANKS)
    place, _ = memory([0] * COUNT * RANKS)
    reports = []
    for number, (first, one, others, other) in enumerate(DIFFERENT):
        comm = joined(rank, f"{path}.{number}")
        name, count, *rest = first if rank == 0 else others
        stream = stream_of(FIRST, rank)
        ok(name, given, place, c_size_t(count), *rest, comm, stream)
        has_ended(stream)
        code, after = reported(comm, 10)
        text = last_error(comm)
        assert code == INVALID_USAGE, f"{name} of {count}: error {code}: {text}"
        assert one in text and other in text, text
        reports.append(f"{after:.1f} s")
        # The others may not have compared yet, and would learn of the abort instead.
        time.sleep(0.5)
        ok("CommAbort", comm)
    # Communicators are derived in different ways.
    comm, made = joined(rank, f"{path}.derived"), c_void_p()
    arguments = ("CommSplit", comm, 0, 0, byref(made), None)
    if rank > 0:
        arguments = ("CommGrow", comm, RANKS + 1, None, -1, byref(made), None)
    refused(INVALID_USAGE, *arguments)
    assert "ncclCommSplit" in last_error() and "ncclCommGrow" in last_error(), last_error()
    # It can still be used.
    sum_of_ranks(comm, rank, RANKS, FIRST)
    ok("CommDestroy", comm)
    alone()
    return f"{', '.join(reports)}: {text}"


def forked(rank, path):
    """Children that end, start other programs, or use what is their parent's, disturb neither rank."""
    comm = joined(rank, path)
    sum_of_ranks(comm, rank, RANKS, FIRST)
    place, _ = memory([1] * COUNT)
    value = c_int()
    for arguments in [
        None,
        ("AllReduce", place, place, c_size_t(COUNT), INT32, SUM, comm, stream_of(FIRST, rank)),
        ("CommGetAsyncError", comm, byref(value)),
        ("CommSplit", comm, 0, 0, byref(c_void_p()), None),
        ("CommInitRank", byref(c_void_p()), 1, new_id(), 0),
        ("CommFinalize", comm),
        ("CommDestroy", comm),
        ("CommAbort", comm),
    ]:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            if arguments and call(*arguments) != INVALID_USAGE:
                os._exit(1)
            # By the handlers that the library has registered.
            ctypes.CDLL(None).exit(0)
        assert os.waitpid(child, 0)[1] == 0, arguments
    assert subprocess.run(["true"], check=False).returncode == 0
    ok("MemFree", place)
    sum_of_ranks(comm, rank, RANKS, FIRST)
    ok("CommDestroy", comm)
    return ""


def left(rank, path):
    """The process ends without having destroyed its communicator."""
    comm = joined(rank, path)
    sum_of_ranks(comm, rank, RANKS, FIRST)
    return ""


def closed(rank, path):
    """The process closes the library after its last communicator, and ends."""

    def one():
        select(rank)
        ok("CommDestroy", joined(rank, path))

    # Threads with values of the library keep it open: this one, and those that it has started.
    on_threads([one])
    end = time.monotonic() + 2
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < end:
        time.sleep(0.01)
    _ctypes.dlclose(library._handle)
    return ""


def uneven(rank, path):
    """Rank 0 makes a call that no other makes; all destroy the communicator, and the call ends in an error."""
    os.environ["WARPLINK_TIMEOUT"] = "5"
    comm = joined(rank, path)
    place, _ = memory([1] * COUNT)
    for _ in range(4 if rank == 0 else 3):
        all_reduce(comm, rank, FIRST, place)
    ok("CommDestroy", comm)
    assert has_ended(stream_of(FIRST, rank)) == (rank > 0)
    return ""


def exits(rank, path):
    """The process ends with its code while a call waits for others, in a group, and in the middle of joining."""
    import threading

    comm = joined(rank, path)
    sum_of_ranks(comm, rank, RANKS, FIRST)
    if rank == 0:
        place, _ = memory([1] * COUNT)
        all_reduce(comm, rank, FIRST, place)
        for body in (lambda: has_ended(stream_of(FIRST, rank)), lambda: join(0, 2, new_id())):
            threading.Thread(target=body, daemon=True).start()
        time.sleep(0.5)
        ok("GroupStart")
        all_reduce(comm, rank, SECOND, place)
    else:
        time.sleep(2)
    return ""


def orders(rank, path):
    """Two communicators beside each other, and beside NCCL's kernels, in opposite orders on the ranks."""
    mine = [(None, joined(rank, f"{path}.{name}"), name) for name in (FIRST, SECOND)]
    real = os.environ.get("WARPLINK_NCCL_LIBRARY")
    if real and not ON_HOST:
        of = ctypes.CDLL(real, os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
        mine.append((of, joined(rank, f"{path}.{THIRD}", of), THIRD))
    calls = 0
    sizes = ((1000, 50), (100_000, 10)) if ON_HOST else ((1000, 200), (100_000, 100), (4_000_000, 20))
    for count, times in sizes:
        places = {name: memory([1] * count) for *_, name in mine}
        # The first call of a kind loads its kernel, which may wait for others'.
        for of, comm, name in mine:
            all_reduce(comm, rank, name, places[name][0], count, of)
            synchronize(stream_of(name, rank))
        for round in range(times):
            for of, comm, name in mine if rank == 0 else mine[::-1]:
                all_reduce(comm, rank, name, places[name][0], count, of)
                calls += 1
            # Some calls in flight at once.
            if round % 5 == 4:
                for *_, name in mine:
                    synchronize(stream_of(name, rank))
        for *_, name in mine:
            synchronize(stream_of(name, rank))
            place, values = places[name]
            # Sums of 32 bits, which wrap.
            expected = RANKS ** (times + 1) % 2**32
            assert values[0] % 2**32 == values[count - 1] % 2**32 == expected, (name, values[0])
            ok("MemFree", place)
    for of, comm, _ in mine:
        ok("CommDestroy", comm, of=of)
    return f"{calls} calls of {len(mine)} communicators{', one of NCCL' if len(mine) > 2 else ''}"


def grouped(rank, path):
    """A group of several streams waits for all of them, and each for all of it; a thread registers windows of all ranks."""
    comm, single, length = joined(rank, path), join(0, 1, new_id()), c_size_t(1_000_000)
    first, second = stream_of(FIRST, rank), stream_of(SECOND, rank)
    places = [memory([value] * length.value) for value in (rank + 1, 0, rank + 1, 0)]
    (source, _), (one, ones), (two, _), (other, others) = places

    def copy(from_, to, stream):
        ok("AllReduce", from_, to, length, INT32, SUM, single, stream)

    total = RANKS * (RANKS + 1) // 2
    # The first call of a kind loads its kernel, which would give the streams time.
    for begins in (False, True):
        for _ in range(10):
            copy(source, other, second)
        copy(other, one, second)
        copy(source, two, second)
        ok("GroupStart")
        ok("AllReduce", one, one, length, INT32, SUM, comm, first)
        ok("AllReduce", two, two, length, INT32, SUM, comm, second)
        ok("GroupEnd")
        copy(two, other, first)
        synchronize(first)
        assert set(ones[:]) == set(others[:]) == {total}, (begins, ones[0], others[0])
        synchronize(second)
    for ended in (single, comm):
        ok("CommDestroy", ended)
    if rank > 0:
        return ""
    comms, windows = (c_void_p * RANKS)(), [c_void_p() for _ in range(2 * RANKS)]
    ok("CommInitAll", comms, RANKS, None)
    mine = []
    for each in range(RANKS):
        select(each)
        mine += [memory([each + 1] * COUNT) for _ in range(2)]
    ok("GroupStart")
    for number, window in enumerate(windows):
        place, comm = mine[number][0], c_void_p(comms[number // 2])
        ok("CommWindowRegister", comm, place, c_size_t(4 * COUNT), byref(window), 1)
        all_reduce(comm, number // 2, FIRST, place)
    ok("GroupEnd")
    for number, window in enumerate(windows):
        select(number // 2)
        synchronize(stream_of(FIRST, number // 2))
        place, values = mine[number]
        assert set(values[:]) == {total}, (number, values[0])
        ok("CommWindowDeregister", c_void_p(comms[number // 2]), window)
        ok("MemFree", place)
    for comm in comms:
        ok("CommDestroy", c_void_p(comm))
    return ""


CASES = {case.__name__: case for case in (killed, shrunk, aborted, different, forked, left, closed, uneven, exits, grouped, orders)}


def rank_of_case(case, rank, path):
    select(rank)
    print(CASES[case](rank, path), "done", flush=True)


def run(case):
    """Runs a case with a process for each rank; returns whether it was right."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "id")
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, sys.argv[1], "--rank", case, str(rank), path],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(RANKS)
        ]
        outputs = []
        for rank in ranks:
            try:
                output, _ = rank.communicate(timeout=max(0.1, begun + LIMIT - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
                output = rank.communicate()[0] + "killed, since it did not end\n"
            outputs.append(output)
    taken = time.monotonic() - begun
    wrong = []
    for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        expected = -signal.SIGKILL if case in ("killed", "shrunk") and number == RANKS - 1 else 0
        if rank.returncode != expected or expected == 0 and "done" not in output:
            wrong.append(f"rank {number} ({rank.returncode}):\n{output[-1500:]}")
    if wrong:
        print(f"{case}: WRONG after {taken:.1f} s; {' '.join(wrong)}", flush=True)
        return False
    said = [line for line in outputs[0].splitlines() if line.endswith(" done")]
    print(f"{case}: right in {taken:.1f} s. {said[-1].removesuffix(' done') if said else ''}", flush=True)
    return True


def main():
    if sys.argv[2:3] == ["--rank"]:
        rank_of_case(sys.argv[3], int(sys.argv[4]), sys.argv[5])
        return
    chosen = sys.argv[2:] or list(CASES)
    # Each case runs, whatever came of those before.
    if not all([run(case) for case in chosen]):
        sys.exit(1)


main()

"""NCCL's interface by ctypes, for the programs beside it: on the host device if WARPLINK_DEVICE says so, else on GPUs.

The first argument of the program is the library.
"""

import ctypes
import os
import sys
import threading
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p

SUCCESS, SYSTEM_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 2, 4, 5, 6, 7
INT32, UINT32, FLOAT64 = 2, 3, 8
SUM, PROD, MAX, MIN, AVG = range(5)
COUNT = 3000
ON_HOST = os.environ.get("WARPLINK_DEVICE") == "host"

library = ctypes.CDLL(sys.argv[1])
called = set()


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


def call(name, *arguments, twin=False, gives=c_int, of=None):
    """Calls a function of `of`, or of the library. Numbers that are not wrapped are `int`s, `None` is a null pointer."""
    called.add(name)
    function = getattr(of or library, f"{'p' if twin else ''}nccl{name}")
    function.restype = gives
    function.argtypes = None
    wrapped = [c_void_p(None) if argument is None else argument for argument in arguments]
    return function(*wrapped)


def last_error(comm=None, of=None):
    return call("GetLastError", comm, gives=c_char_p, of=of).decode()


def ok(name, *arguments, **options):
    code = call(name, *arguments, **options)
    assert code == SUCCESS, f"nccl{name} gives {code}: {last_error(of=options.get('of'))}"


def refused(expected, name, *arguments, **options):
    code = call(name, *arguments, **options)
    assert code == expected, f"nccl{name} gives {code} instead of {expected}: {last_error()}"
    assert last_error(), name


class Gpus:
    """Streams and copies by the CUDA driver; the current GPU is that of the calling thread."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.ok("cuInit", 0)
        count = c_int()
        self.ok("cuDeviceGetCount", byref(count))
        self.count = count.value
        self.streams = {}

    def ok(self, name, *arguments):
        code = getattr(self.driver, name)(*arguments)
        assert code == 0, f"{name} gives {code}"

    def select(self, rank):
        context = c_void_p()
        self.ok("cuDevicePrimaryCtxRetain", byref(context), c_int(rank % self.count))
        self.ok("cuCtxSetCurrent", context)

    def stream(self, number, rank):
        """A stream of the current GPU, which does not wait for the default one."""
        if (number, rank) not in self.streams:
            made = c_void_p()
            self.ok("cuStreamCreate", byref(made), 1)
            self.streams[number, rank] = made
        return self.streams[number, rank]


class GpuValues:
    """Values in a GPU's memory, read and written as those of an array."""

    def __init__(self, place, kind, count):
        self.place, self.kind = place, kind * count

    def read(self):
        values = self.kind()
        gpus.ok("cuMemcpyDtoH_v2", byref(values), self.place, c_size_t(ctypes.sizeof(values)))
        return values

    def __getitem__(self, at):
        return self.read()[at]

    def __setitem__(self, at, new):
        values = self.read()
        values[at] = new
        gpus.ok("cuMemcpyHtoD_v2", self.place, byref(values), c_size_t(ctypes.sizeof(values)))


gpus = None if ON_HOST else Gpus()


def select(rank):
    """Makes the GPU of a rank the calling thread's."""
    if gpus:
        gpus.select(rank)


def has_ended(stream):
    """Waits for a stream; returns whether it ended without an error."""
    if gpus:
        return gpus.driver.cuStreamSynchronize(stream) == 0
    return library.warplink_nccl_host_stream_synchronize(stream) == SUCCESS


def synchronize(stream):
    assert has_ended(stream), last_error()


def stream_of(number, rank):
    """Ranks of one process need streams of their own: their calls wait for one another."""
    return gpus.stream(number, rank) if gpus else c_void_p(number * 100 + rank)


def new_id(of=None):
    made = UniqueId()
    ok("GetUniqueId", byref(made), of=of)
    return made


def memory(values, kind=c_int):
    place = c_void_p()
    ok("MemAlloc", byref(place), c_size_t(len(values) * ctypes.sizeof(kind)))
    array = GpuValues(place, kind, len(values)) if gpus else (kind * len(values)).from_address(place.value)
    array[:] = values
    return place, array


def on_threads(bodies):
    """Runs bodies at the same time; any failure is one of the caller's."""
    failures = []

    def guarded(body):
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=[body], daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank does not end"
    for failure in failures:
        raise failure


def join(rank, ranks, identifier, of=None):
    comm = c_void_p()
    ok("CommInitRank", byref(comm), ranks, identifier, rank, of=of)
    return comm


def sum_of_ranks(comm, rank, ranks, stream):
    given, values = memory([rank + 1] * COUNT)
    ok("AllReduce", given, given, c_size_t(COUNT), INT32, SUM, comm, stream_of(stream, rank))
    synchronize(stream_of(stream, rank))
    assert values[:] == [ranks * (ranks + 1) // 2] * COUNT
    ok("MemFree", given)

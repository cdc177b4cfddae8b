"""Misuse raises an exception that names it: forks, second interpreters, arrays that do not fit."""

import ctypes
import gc
import os

import numpy
import pytest
from conftest import Stopwatch, as_ranks, join

import warplink
from warplink.errors import InvalidArgumentError, TimeoutError, UnsupportedError


@as_ranks(2)
def test_a_forked_process_is_told_and_disturbs_nobody(rank, world, meeting):
    with join(rank, world, meeting, device="host") as job:
        comm = job.world()
        region, received = comm.alloc(64), comm.alloc(64)
        stream, event = comm.create_stream(), comm.create_event()
        peer = (rank + 1) % world
        transfers = comm.exchange(
            [warplink.Send(region, peer), warplink.Receive(received, (rank - 1) % world)]
        )
        collectives, barrier = comm.collectives(), comm.stream_barrier()
        layer = collectives.experts(experts=2, top_k=1, max_tokens=1, elements=4, dtype="f32")
        child = os.fork()
        if child == 0:
            # Not an assertion that pytest would report: the parent reads the exit status.
            uses = [
                job.world,
                comm.barrier,
                lambda: comm.alloc(64),
                lambda: stream.fill(region, 1),
                stream.synchronize,
                lambda: stream.record(event),
                event.is_reached,
                lambda: transfers[0].post(stream),
                lambda: warplink.wait_all(transfers, stream),
                lambda: barrier.enqueue(stream),
                lambda: collectives.all_reduce(stream, numpy.ones(2), numpy.ones(2)),
                lambda: collectives.send_receive(stream),
                lambda: layer.dispatch(stream, layer.allocate(), numpy.ones((1, 4)), numpy.ones(1)),
                lambda: region.slice(0, 8),
                lambda: comm.abort("the child's end"),
            ]
            for number, use in enumerate(uses):
                try:
                    use()
                except UnsupportedError as error:
                    if f"made in process {os.getppid()}" not in str(error) or "spawn" not in str(error):
                        os._exit(100 + number)
                else:
                    os._exit(1 + number)
            # Neither these nor letting go of everything reaches the peers.
            job.close()
            job.abort("the child's end")
            del uses, transfers, stream, event, region, received, collectives, layer, barrier, comm, job
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stream.fill(region, 7 + rank)
        warplink.post_all(transfers, stream)
        warplink.wait_all(transfers, stream)
        stream.synchronize()
        assert received.download() == bytes([7 + (rank - 1) % world]) * 64
        comm.barrier()


def run_in_another_interpreter(code):
    """The text of the failure of ``code`` in another interpreter of this process."""
    try:
        import _interpreters as interpreters
    except ImportError:
        import _xxsubinterpreters as interpreters
    other = interpreters.create()
    reader, writer = os.pipe()
    code = f"import os\ntry:\n {code}\n text = 'nothing'\nexcept BaseException as error:\n text = repr(error)\nos.write({writer}, text.encode())"
    try:
        run = getattr(interpreters, "run_string", None) or interpreters.exec
        run(other, code)
        return os.read(reader, 10_000).decode()
    finally:
        os.close(reader)
        os.close(writer)
        interpreters.destroy(other)


@as_ranks(1)
def test_a_second_interpreter_is_refused():
    import sys

    folder = os.path.dirname(os.path.dirname(warplink.__file__))
    path = f"import sys; sys.path.insert(0, {folder!r}); import warplink"
    told = run_in_another_interpreter(path)
    # From 3.13 on, Python itself refuses.
    refused = ("another interpreter of this process", "does not support loading in subinterpreters")
    assert "ImportError" in told and any(each in told for each in refused), told
    # The first goes on.
    assert sys.modules["warplink"].UniqueId.create().address


@as_ranks(1, device="host")
def test_arrays_that_do_not_fit_are_refused(comm, world):
    stream, region = comm.create_stream(), comm.alloc(64)
    with pytest.raises(ValueError, match=r"shape \[4, 2\] has strides \[4, 2\]; expected contiguous"):
        comm.borrow(numpy.zeros((4, 4), numpy.float32)[:, ::2])
    with pytest.raises(ValueError, match="empty; expected at least one element"):
        comm.borrow(numpy.zeros((0, 4)))
    with pytest.raises(TypeError, match="dict is not an array; expected a Region"):
        stream.copy(region, {})
    with pytest.raises(ValueError, match="64"):
        stream.copy(region, numpy.zeros(3))
    with pytest.raises(UnsupportedError, match="without a file; expected memory that the device"):
        comm.register(numpy.zeros(8))
    with pytest.raises(ValueError, match="not a valid timeout; expected seconds"):
        stream.synchronize(-1)
    with pytest.raises(ValueError, match="does not take the 64 bytes"):
        region.view([3], "f64")
    with pytest.raises(ValueError, match="unknown element type 'f65'"):
        region.view([8], "f65")
    with pytest.raises(ValueError, match="rank"):
        comm.exchange([warplink.Send(region, world)])
    with pytest.raises(ValueError, match="0 bytes"):
        comm.view_at(region.address, [0], "u8")


@as_ranks(1, device="host")
def test_arrays_whose_elements_are_no_values_are_refused(comm):
    stream, region = comm.create_stream(), comm.alloc(64)
    # Three characters of four bytes each, which are not 3 bytes; addresses; times; and bytes of strings.
    for array, kind in (
        (numpy.array(["abc"]), "<U3"),
        (numpy.array([None]), r"\|O"),
        (numpy.zeros(1, "datetime64[s]"), "<M8"),
        (numpy.array([b"abc"]), r"\|S3"),
    ):
        with pytest.raises(ValueError, match=f"read an array: .* NumPy's type '{kind}.*'; expected booleans, int"):
            comm.borrow(array)
    target = numpy.array(["ab"] * 8)
    with pytest.raises(ValueError, match="read the target: .*'<U2'"):
        stream.copy(target, region)
    for kind in ("?", "u2", ">i4", "f2", "f8", "c16", "V3", "V2"):
        array = numpy.frombuffer(bytes(range(48)), kind)
        assert comm.borrow(array).nbytes == array.nbytes
    stream.copy(region, target.view(numpy.uint8))
    stream.synchronize()
    assert region.download() == target.tobytes()


class Exported:
    """An array that is exported by DLPack alone, of version 1 where ``versioned``."""

    def __init__(self, array, versioned):
        self.array, self.versioned = array, versioned

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self.versioned and options.pop("max_version", None) is not None:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)


@as_ranks(1, device="host")
def test_read_only_arrays_are_sources_only(comm, world):
    stream, region = comm.create_stream(), comm.alloc(64)
    fixed, changed = numpy.arange(16, dtype=numpy.float32), numpy.zeros(16, numpy.float32)
    fixed.flags.writeable = False
    memory = comm.borrow(fixed)
    view = memory.slice(0, 64).view([16], "f32")
    collectives = comm.collectives()
    experts = collectives.experts(experts=world, top_k=1, max_tokens=4, elements=4, dtype="f32")
    rows, slots, weights = numpy.zeros((4, 4), "f4"), numpy.zeros((4, 1), "i4"), numpy.ones((4, 1), "f4")
    held, kept = experts.allocate(), numpy.zeros((4, 4), "f4")
    kept.flags.writeable = False
    executor = comm.executor()
    square = numpy.zeros((4, 4), "f4")

    def refused(name, call, *arguments, **options):
        with pytest.raises(ValueError, match=f"write {name}: the array is read-only; .*; help: pass a writable"):
            call(*arguments, **options)

    with_version = Exported(fixed, versioned=True)
    for array in (fixed, memory, view, with_version):
        refused("the target", stream.copy, array, region)
        refused("the target", stream.fill, array, 1)
        refused("the target", comm.register, array)
        refused("the target", collectives.all_reduce, stream, array, changed)
        refused("the target", collectives.all_to_all_v, stream, array, changed, [16], [16])
        refused(r"receives\[0\]", collectives.send_receive, stream, [(0, changed)], [(0, array)])
        refused(r"receives\[0\]", comm.collective_engine().exchange, stream, [(0, changed)], [(0, array)])
    refused("target", experts.combine, stream, kept, held, weights)
    refused("target.rows", experts.dispatch, stream, (kept, held.experts, held.counts), rows, slots)
    refused("the target", executor.all_gather_matmul, rows, [square], [kept])
    refused("the target", executor.all_gather_matmul, rows, [square], [square.copy()], gathered=kept)
    refused("the target", executor.matmul_reduce_scatter, rows, square, kept)
    with pytest.raises(ValueError, match="read-only"):
        memory.upload(bytes(64))
    for wrong in (64, [0] * 64, "text"):
        with pytest.raises(TypeError):
            region.upload(wrong)
    # Consumers are told, or get nothing.
    assert not numpy.asarray(view).flags.writeable
    with pytest.raises(BufferError, match="read-only"):
        view.__dlpack__()
    assert (fixed == range(16)).all()
    # DLPack tells it from version 1 on.
    stream.copy(Exported(changed, versioned=False), region)
    with pytest.raises(BufferError):
        stream.copy(region, Exported(fixed, versioned=False))
    # They are sources.
    for array in (fixed, memory, view, with_version):
        changed[:] = 0
        collectives.send_receive(stream, [(0, array)], [(0, changed)])
        stream.copy(region, array)
        stream.synchronize()
        assert (changed == fixed).all() and region.download() == fixed.tobytes()
    experts.dispatch(stream, held, kept, slots)
    experts.combine(stream, rows, held, weights)
    stream.synchronize()


@as_ranks(2, device="host")
def test_memory_is_not_used_again_while_a_peer_reads_it(comm, rank):
    peer = 1 - rank
    if rank == 0:
        # The owner lets go of an array while the peer has it mapped and reads it.
        region = comm.alloc(1 << 20)
        array = numpy.asarray(region.view([1 << 18], "f32"))
        array[:] = 3
        handle = comm.export_handle(region, peer)
        comm.all_gather_bytes(handle)
        del array, region
        gc.collect()
        # New allocations have other addresses as long as the peer maps this one.
        others = [comm.alloc(1 << 20) for _ in range(4)]
        for other in others:
            numpy.asarray(other.view([1 << 18], "f32"))[:] = 9
        comm.barrier()
        comm.barrier()
    else:
        remote = comm.open_handle(peer, comm.all_gather_bytes(b"")[peer])
        seen = numpy.asarray(remote.view([1 << 18], "f32"))
        comm.barrier()
        assert (seen == 3).all()
        del seen, remote
        comm.barrier()


@as_ranks(1, device="host")
def test_arguments_that_do_not_fit(comm):
    region, stream = comm.alloc(16), comm.create_stream()

    def refused(match, call, *given):
        with pytest.raises(InvalidArgumentError, match=match):
            call(*given)

    range_ = "-1 is out of range; expected whole numbers of 64 bits that are not negative"
    for call, given in [
        (comm.alloc, (-1,)),
        (comm.split, (-1,)),
        (region.slice, (-1, 2)),
        (region.memory.slice, (0, -1)),
        (warplink.Send, (region, -1)),
    ]:
        refused(range_, call, *given)
    refused("is out of range", region.view, [-1], "f32")
    for dtype in ("f32", "float32", "torch.float32"):
        assert region.view([4], dtype).dtype == "f32"
    for dtype in ("bfloat16", "torch.int16", "uint16"):
        assert region.view([8], dtype).nbytes == 16
    refused("unknown element type 'float33'", region.view, [4], "float33")
    records = numpy.zeros(4, dtype=[("a", "<f4"), ("b", "<i2")])
    refused("strides of \\[6\\] bytes", comm.borrow, records["a"])
    assert comm.borrow(records).nbytes == 24
    assert comm.borrow(records[:1]["a"]).nbytes == 4
    for fields in (
        [("a", "O")],
        [("a", "<f4"), ("b", [("c", "<i4"), ("d", "O")])],
        [("a", "O", (2,))],
        {"names": ["a", "b"], "formats": ["O", "<i4"], "offsets": [8, 0]},
    ):
        refused("Python objects", comm.borrow, numpy.zeros(2, dtype=fields))

    class Described:
        """An array without NumPy's type."""

        def __init__(self, fields):
            self.array = numpy.zeros(1, dtype="V16")
            self.__array_interface__ = {**self.array.__array_interface__, "descr": fields}

    assert comm.borrow(Described([("a", "<f8"), ("b", [("c", "|V8")])])).nbytes == 16
    refused("Python objects", comm.borrow, Described([("a", "<f8"), ("b", [("c", "|O")])]))
    stream.synchronize()


def test_joining_reads_the_variables_of_what_is_not_given(monkeypatch):
    monkeypatch.setenv("WARPLINK_TIMEOUT", "1")
    limit = Stopwatch()
    with pytest.raises(TimeoutError):
        warplink.Job.join(0, 2, warplink.UniqueId.create(), device="host")
    assert limit.elapsed() < 10
    monkeypatch.setenv("WARPLINK_TIMEOUT", "60")
    limit = Stopwatch()
    with pytest.raises(TimeoutError):
        warplink.Job.join(0, 2, warplink.UniqueId.create(), device="host", timeout=0.5)
    assert limit.elapsed() < 10
    monkeypatch.setenv("WARPLINK_SECRET", " ")
    with pytest.raises(InvalidArgumentError, match="WARPLINK_SECRET is blank"):
        warplink.Job.join(0, 1, "127.0.0.1:1", device="host")


class Packed:
    """Eight elements of 4 bits, which DLPack has packed in four bytes."""

    class Tensor(ctypes.Structure):
        _fields_ = [
            ("data", ctypes.c_void_p),
            ("device", ctypes.c_int32 * 2),
            ("ndim", ctypes.c_int32),
            ("code", ctypes.c_uint8),
            ("bits", ctypes.c_uint8),
            ("lanes", ctypes.c_uint16),
            ("shape", ctypes.POINTER(ctypes.c_int64)),
            ("strides", ctypes.c_void_p),
            ("byte_offset", ctypes.c_uint64),
            ("manager", ctypes.c_void_p * 2),
        ]

    def __init__(self):
        self._memory, self._shape = ctypes.create_string_buffer(4), (ctypes.c_int64 * 1)(8)
        device = (ctypes.c_int32 * 2)(1, 0)
        self._tensor = self.Tensor(ctypes.addressof(self._memory), device, 1, 1, 4, 1, self._shape)

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._tensor), b"dltensor", None)


@as_ranks(1, device="host")
def test_elements_of_less_than_a_byte_are_refused(comm):
    with pytest.raises(InvalidArgumentError, match="elements of 4 bits"):
        comm.borrow(Packed())

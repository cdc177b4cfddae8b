"""Collectives past the backend, as far as they can be tried without a GPU: on CPU tensors and the host device."""

import itertools
import pickle
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from conftest import as_ranks  # noqa: E402


def calls_on_host(comm):
    """The calls of a group, on the host device's memory and without a GPU's streams."""
    from torch.autograd import profiler

    import warplink
    from warplink.torch import profiling
    from warplink.torch.arithmetic import readable, settle, writable
    from warplink.torch.direct_collectives import GpuCollectives

    class Done:
        def __init__(self, result):
            self.result = result

    class Awaited:
        """Collectives that are done when they return, as what follows in a GPU's stream would find them."""

        def __init__(self, collectives):
            self._collectives = collectives

        def __getattr__(self, name):
            def call(*arguments):
                getattr(self._collectives, name)(*arguments)
                stream = next(one for one in arguments if isinstance(one, warplink.Stream))
                stream.synchronize(30.0)

            return call

    class HostCalls(GpuCollectives):
        def __init__(self):
            self.enqueued = []
            collectives = comm.collectives(path="direct")
            self._collectives = Awaited(collectives)
            self._rank, stream = comm.rank, comm.create_stream()
            self._space = SimpleNamespace(current_streams=lambda: (None, stream), stream=stream)
            self._order = warplink.Order()
            self._device, self._waits_block = torch.device("cpu"), False
            self._source = profiling.Source("warplink", comm.rank, comm.size)
            self._recorder, streams = None, {0: (None, stream)}
            # Of tensors that pass for those of GPU 0.
            self._quick = warplink.DirectCalls(
                collectives, self._order, None, 0, streams, lambda index: 0, profiler, torch.strided
            )

        def now(self, *arguments):
            made = super().now(*arguments)
            self._space.stream.synchronize(30.0)
            return made

        def all_to_all_single_now(self, *arguments):
            made = super().all_to_all_single_now(*arguments)
            self._space.stream.synchronize(30.0)
            return made

        def _check(self):
            pass

        def _enqueue(self, name, outputs, inputs, call, asynchronous, further=(), computes=False):
            self.enqueued.append(name)
            sources, targets = [readable(t) for t in inputs], [writable(t) for t in outputs]
            call(self._space.current_streams()[1], sources, targets)
            for tensor, target in zip(outputs, targets):
                settle(tensor, target)
            return Done([*outputs, *further])

    return HostCalls()


def numbers(rank, shape, dtype, turn):
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randint(0, 3, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("world", [1, 2, 3])
@as_ranks(device="host")
def test_each_call_gives_what_the_backend_would(comm, rank, world):
    from warplink.torch.direct_collectives import reduction

    import torch.distributed as dist

    kinds = dist.ReduceOp
    reduced = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    reduced += [torch.int64, torch.int32, torch.int8, torch.uint8]
    calls = calls_on_host(comm)
    for turn, dtype in enumerate([*reduced, torch.bool, torch.complex64, torch.int16]):
        shape = (3, 7 + turn)
        all_inputs = [numbers(r, shape, dtype, turn) for r in range(world)]
        own = all_inputs[rank]
        for op, expected in [
            (kinds.SUM, lambda t: t.sum(0)),
            (kinds.AVG, lambda t: t.sum(0) / world),
            (kinds.PRODUCT, lambda t: t.prod(0)),
            (kinds.MAX, lambda t: t.amax(0)),
            (kinds.MIN, lambda t: t.amin(0)),
            (kinds.BAND, None),
            (dist._make_nccl_premul_sum(0.5), lambda t: t.sum(0) / 2),
            (dist._make_nccl_premul_sum(torch.tensor(0.5)), None),
        ]:
            how = reduction(op, dtype)
            direct = dtype in reduced and expected is not None
            of_floats = op == kinds.AVG or op == kinds.PREMUL_SUM
            assert (how is not None) == (direct and (dtype.is_floating_point or not of_floats))
            if how is None:
                continue
            total = expected(torch.stack(all_inputs).to(torch.float64)).to(dtype)
            # As it is, and of every second column.
            for wide in (False, True):
                found = own.clone() if not wide else own.repeat_interleave(2, 1)[:, ::2]
                assert calls.collective("all_reduce", [found], [found], True, how).result[0] is found
                torch.testing.assert_close(found, total)
                found = own.clone() if not wide else own.repeat_interleave(2, 1)[:, ::2]
                calls.collective("reduce", [found], [found], False, how, world - 1)
                torch.testing.assert_close(found, total if rank == world - 1 else own)
            # Rank r's parts, each of one rank.
            parts = [torch.stack([numbers(r, shape, dtype, 50 * p + turn) for p in range(world)]) for r in range(world)]
            total = expected(torch.stack([part[rank] for part in parts]).to(torch.float64)).to(dtype)
            found = torch.empty(shape, dtype=dtype)
            calls.collective("reduce_scatter", [found], [parts[rank].clone()], True, how)
            torch.testing.assert_close(found, total)
            found = torch.empty(shape, dtype=dtype)
            calls.reduce_scatter(found, list(parts[rank]), how, True)
            torch.testing.assert_close(found, total)
        found = own.clone()
        calls.collective("broadcast", [found], [found], True, None, 1 % world)
        assert torch.equal(found, all_inputs[1 % world])
        found = torch.zeros(world, *shape, dtype=dtype)
        calls.collective("all_gather", [found], [own], True)
        assert torch.equal(found, torch.stack(all_inputs))
        # In place, as FSDP has it.
        found = torch.zeros(world, *shape, dtype=dtype)
        found[rank] = own
        calls.collective("all_gather", [found], [found[rank]], True)
        assert torch.equal(found, torch.stack(all_inputs))
        outputs = [torch.zeros(shape, dtype=dtype) for _ in range(world)]
        calls.all_gather(outputs, own, True)
        assert torch.equal(torch.stack(outputs), torch.stack(all_inputs))
        group, root = group_of(calls, rank, world), turn % world
        gathers, scatters = dist.GatherOptions(), dist.ScatterOptions()
        gathers.rootRank = scatters.rootRank = root
        # Of every second column on odd turns.
        wide = torch.zeros(world, *shape[:1], 2 * shape[1], dtype=dtype)[:, :, :: 1 + turn % 2][:, :, : shape[1]]
        group.gather([list(wide)] if rank == root else [], [own], gathers)
        assert torch.equal(wide, torch.stack(all_inputs) if rank == root else torch.zeros_like(wide))
        whole = torch.zeros(world, *shape, dtype=dtype)
        group.gather_single(whole, own, gathers)
        assert torch.equal(whole, torch.stack(all_inputs) if rank == root else torch.zeros_like(whole))
        found = torch.zeros(shape, dtype=dtype)
        group.scatter([found], [[one.flip(0) for one in all_inputs]] if rank == root else [], scatters)
        assert torch.equal(found, own.flip(0))
    empty = torch.empty(0)
    calls.collective("all_reduce", [empty], [empty], True, ("sum", "f32"))
    calls.all_gather([empty.clone() for _ in range(world)], empty, True)
    calls.collective("broadcast", [empty], [empty], True, None, 0)
    calls.all_gather([empty.clone() for _ in range(world)] if rank == 0 else [], empty, True, 0)
    calls.reduce_scatter(empty, [empty] * world if rank == 0 else [], None, True, 0)
    gathers, scatters = dist.GatherOptions(), dist.ScatterOptions()
    gathers.rootRank = scatters.rootRank = rank
    one, other = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    for says, wrong in [
        (f"expected one for each of {world} ranks", lambda: group.gather([[one] * (world + 1)], [one], gathers)),
        (f"expected one for each of {world} ranks", lambda: group.scatter([one], [[one] * (world + 1)], scatters)),
        ("torch.int32; expected the input's", lambda: group.gather([[other] * world], [one], gathers)),
        ("expected the input's 1 of torch.int32", lambda: group.scatter([one], [[other] * world], scatters)),
    ]:
        with pytest.raises(ValueError, match=says):
            wrong()


def group_of(direct, rank, world):
    """A group's calls, which ``direct`` does, of tensors of the host that pass for those of a GPU."""
    from warplink.torch.calls import GroupCalls
    from warplink.torch.works import Noted

    class Backend:
        """Gives what it was called with, in the place of NCCL."""

        supports_coalescing = False

        def __getattr__(self, name):
            return lambda *arguments: (name, *arguments)

    class Group(GroupCalls):
        _rank, _size, _direct_works = rank, world, Noted()

        def _backend_of(self, tensors, by_all=True):
            return Backend()

        def _direct(self, tensors):
            return direct

    return Group()


@as_ranks(2, device="host")
def test_coalesced_calls_are_enqueued_together(comm, rank, world):
    direct = calls_on_host(comm)
    group = group_of(direct, rank, world)
    owns = [torch.full((size,), rank + 1.0) for size in (2, 3000)]
    wholes = [torch.zeros(world * one.numel()) for one in owns]
    every = [torch.arange(1.0, world + 1).repeat_interleave(one.numel()) for one in owns]
    assert group.allgather_into_tensor_coalesced(wholes, owns).result == wholes
    assert all(map(torch.equal, wholes, every))
    parts = [torch.zeros_like(one) for one in owns]
    assert group.reduce_scatter_tensor_coalesced(parts, wholes).result == parts
    assert all(map(torch.equal, parts, [one * world for one in owns]))
    assert group.allreduce_coalesced(owns).result == owns
    assert all((one == sum(range(1, world + 1))).all() for one in owns)
    assert direct.enqueued == ["all_gather", "reduce_scatter", "all_reduce"]
    # Of different types, which have kernels of their own.
    mixed = [parts[0], parts[1].int()]
    works = group.reduce_scatter_tensor_coalesced(mixed, [wholes[0], wholes[1].int()])._works
    assert [work[:2] for work in works] == [("_reduce_scatter_base", one) for one in mixed]
    with pytest.raises(ValueError, match="expected one to have 2 times"):
        group.allgather_into_tensor_coalesced(wholes, wholes)
    assert len(direct.enqueued) == 3


def test_the_option_is_read_from_the_environment(monkeypatch):
    import warplink.torch

    options = warplink.torch.Options
    assert options().direct_collectives and options().direct_messages and not options().direct_host_messages
    assert options(direct_messages=True).direct_host_messages
    assert not options(direct_collectives=False).direct_collectives
    monkeypatch.setenv("WARPLINK_TORCH_DIRECT_COLLECTIVES", "0")
    assert not options().direct_collectives and options().direct_messages
    assert "direct_collectives=False" in options().told
    assert options(direct_collectives=True).direct_collectives
    assert "multiprocessors=4" in options(multiprocessors=4).told and "multiprocessors=None" in options().told


@pytest.mark.parametrize(
    ("given", "variables", "says"),
    [
        ({"buffer_size": 0}, {}, "buffer_size is 0; expected a number of bytes, at least 1"),
        ({"buffer_size": "1G"}, {}, "buffer_size is '1G'; expected a number of bytes"),
        ({"multiprocessors": 1}, {}, "multiprocessors is 1; expected a number of at least 2"),
        ({"nccl_options": 3}, {}, "nccl_options is a int; expected ProcessGroupNCCL.Options"),
        ({}, {"WARPLINK_TORCH_DIRECT_MESSAGES": "yes"}, "DIRECT_MESSAGES is 'yes'; expected 0 or 1, the same on every rank"),
        ({}, {"WARPLINK_TORCH_DIRECT_COLLECTIVES": "2"}, "DIRECT_COLLECTIVES is '2'; expected 0 or 1"),
    ],
)
def test_options_that_cannot_be_are_refused(given, variables, says, monkeypatch):
    import warplink.torch

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((TypeError, ValueError), match=says):
        warplink.torch.Options(**given)


@as_ranks(2, device="host")
def test_streams_of_asynchronous_calls(comm, rank, world):
    """What asynchronous calls do with a GPU's streams: follow the caller's, and have it wait for their end."""
    from warplink.torch.works import GpuWork

    collectives, count = comm.collectives(path="direct"), 1000
    current, side = comm.create_stream(), comm.create_stream()
    space = SimpleNamespace(device=torch.device("cpu"), stream=current)
    given, source, target = torch.full([count], rank + 1.0), torch.zeros(count), torch.zeros(count)
    found = [torch.zeros(count) for _ in range(2)]
    for known in (True, False):
        source.zero_()
        current.copy(source.numpy(), given.numpy())
        side.follow(current)
        collectives.call_at("all_reduce", side, target.data_ptr(), source.data_ptr(), count, "f32", "sum")
        event = side.mark() if known else None
        work = GpuWork([target], space, (None, side), event, lambda: None)
        assert work.wait()
        current.copy(found[known].numpy(), target.numpy())
        current.synchronize(30.0)
        assert work.is_completed() and work.is_success() and work.result()[0] is target
        assert found[known].eq(sum(range(world + 1))).all()
    event = side.mark()
    side.synchronize(30.0)
    assert event.is_reached()
    batch(comm, collectives, space, side)
    comm.barrier()


class Kept(torch.Tensor):
    """A tensor of the host that counts the streams that its memory is kept for."""

    kept = 0

    def record_stream(self, stream):
        self.kept += 1

    def get_device(self):
        return 0


def batch(comm, collectives, space, side):
    """A batch as on GPUs, of contiguous tensors, which need no current stream of PyTorch's."""
    from torch.autograd import profiler

    import warplink
    from warplink.torch import flight_recorder, profiling
    from warplink.torch.direct import Message
    from warplink.torch.direct_collectives import GpuCollectives

    calls = GpuCollectives.__new__(GpuCollectives)
    calls._collectives, calls._space, calls._side = collectives, space, (None, side)
    calls._device, calls._rank, calls._waits_block = space.device, comm.rank, False
    calls._source, calls._order = profiling.Source("warplink", comm.rank, comm.size), warplink.Order()
    calls._watch = SimpleNamespace(check=lambda: None, timeout=30.0)
    calls._recorder = flight_recorder.Recorder(4)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    streams = {0: (None, space.stream)}
    native = warplink.DirectCalls(
        collectives, calls._order, None, 0, streams, lambda index: 0, profiler, torch.strided
    )
    # The last ones by the path that the recorder sees.
    for calls._quick, length in itertools.product((native, None), (1, 5000)):
        vars(calls).pop("_enqueue", None)
        if calls._quick is not None:
            # Not used then.
            calls._enqueue = None
        given = torch.full([length], comm.rank + 1.0)
        sent, received = torch.zeros(length).as_subclass(Kept), torch.zeros(length).as_subclass(Kept)
        space.stream.copy(sent.numpy(), given.numpy())
        work = calls.exchange([Message(right, True, sent), Message(left, False, received)])
        work.wait()
        space.stream.synchronize(30.0)
        assert received.eq(left + 1.0).all() and work.is_completed()
        assert sent.kept == received.kept == 1
    calls.collective("all_reduce", [received], [received], True, ("sum", "f32")).wait()
    space.stream.synchronize(30.0)
    entries = pickle.loads(calls._recorder.dump())["entries"]
    found = [(entry["profiling_name"], entry["is_p2p"], entry["state"], entry["input_sizes"]) for entry in entries]
    send, receive = f"nccl:send {comm.rank}->{right}", f"nccl:recv {comm.rank}<-{left}"
    assert found == [
        (receive, True, "completed", [[1]]),
        (send, True, "completed", [[5000]]),
        (receive, True, "completed", [[5000]]),
        ("nccl:all_reduce", False, "completed", [[5000]]),
    ]

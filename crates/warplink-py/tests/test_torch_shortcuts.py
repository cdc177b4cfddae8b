"""Short ways of calls on CUDA tensors, without a GPU: tensors and NCCL are made up."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from conftest import as_ranks, start  # noqa: E402
from test_torch_direct_collectives import calls_on_host, numbers  # noqa: E402


class OnGpu:
    """The attributes of a CUDA tensor that are used."""

    is_cuda = True
    device = torch.device("cuda", 0)


class Library:
    """Gives what it was called with, in the place of NCCL."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments: (name, *arguments)


class Passing:
    """A tensor of the host that passes for one on a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, tensor):
        self._tensor = tensor

    def __getattr__(self, name):
        return getattr(self._tensor, name)

    def get_device(self):
        return self.device.index


class Long:
    """A group of which every call says that it took the long way."""

    def _call(self, *arguments):
        return "long"

    allreduce = broadcast = reduce = _allgather_base = _reduce_scatter_base = alltoall_base = _call


def now(options, op=None):
    """Options of a call that is not asynchronous."""
    options.asyncOp = False
    if op is not None:
        options.reduceOp = op
    return options


@as_ranks(2)
def test_calls_of_cuda_tensors_alone_take_the_short_way(rank, world, place):
    from torch.distributed import distributed_c10d as c10d

    from warplink.errors import ClosedError
    from warplink.torch import shortcuts

    dist = start(rank, world, place)
    group, gpu, library = dist.group.WORLD, OnGpu(), Library()
    assert "allreduce" not in vars(group)
    shortcuts.open_to(group, library)
    for name, options in [
        ("allreduce", c10d.AllreduceOptions()),
        ("broadcast", c10d.BroadcastOptions()),
        ("reduce", c10d.ReduceOptions()),
    ]:
        assert getattr(group, name)([gpu], options) == (name, [gpu], options)
    for name, newer, rest in [
        ("_allgather_base", "all_gather_single", [c10d.AllgatherOptions()]),
        ("_reduce_scatter_base", "reduce_scatter_single", [c10d.ReduceScatterOptions()]),
        ("alltoall_base", "all_to_all_single", [[], [], c10d.AllToAllOptions()]),
    ]:
        for method in (name, newer):
            assert getattr(group, method)(gpu, gpu, *rest) == (name, gpu, gpu, *rest)
    # All else as before: CPU tensors, older ways to call, and what is wrong.
    values = torch.full((3,), float(rank + 1))
    dist.all_reduce(values)
    group.allreduce(values).wait()
    assert values.tolist() == [world * sum(range(1, world + 1))] * 3
    gathered = torch.empty(world)
    group._allgather_base(output=gathered, input=torch.full((1,), float(rank))).wait()
    assert gathered.tolist() == list(range(world))
    for arguments in [([gpu, gpu], c10d.AllreduceOptions()), ([gpu],)]:
        # There is no NCCL here.
        with pytest.raises(ValueError, match="no backend for cuda"):
            group.allreduce(*arguments)
    with pytest.raises(ValueError, match="expected tensors of one device"):
        group._allgather_base(gpu, torch.ones(1), c10d.AllgatherOptions())
    dist.destroy_process_group()
    for call in (
        lambda: group.allreduce([gpu], c10d.AllreduceOptions()),
        lambda: group.all_gather_single(gpu, gpu, c10d.AllgatherOptions()),
    ):
        with pytest.raises(ClosedError):
            call()


def test_short_ways_hold_no_group():
    from warplink.torch import shortcuts

    class Group(Library):
        def allreduce(self, *_):
            return "long"

        broadcast = reduce = _allgather_base = _reduce_scatter_base = alltoall_base = allreduce

    group = Group()
    shortcuts.open_to(group, Library())
    kept, there = group.allreduce, weakref.ref(group)
    assert kept([torch.ones(1)]) == "long"
    gc.disable()
    try:
        del group
        assert there() is None
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="gone"):
        kept([torch.ones(1)])


@pytest.mark.parametrize("world", [1, 2, 3])
@as_ranks()
def test_calls_that_need_no_work_take_the_short_way(rank, world, meeting):
    from torch.distributed import distributed_c10d as c10d

    import warplink
    from warplink.torch import shortcuts
    from warplink.torch.works import Noted

    kinds = c10d.ReduceOp
    with warplink.Job.join(rank, world, meeting, device="host") as job:
        direct, works = calls_on_host(job.world()), Noted()
        group = Long()
        shortcuts.open_to(group, Library())
        shortcuts.open_past(group, direct, works, True, True)
        names = ("allreduce", "broadcast", "_allgather_base", "_reduce_scatter_base", "alltoall_base")
        names += ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
        assert sorted(vars(group)) == sorted(names)
        every = [numbers(r, (world, 5), torch.float32, 1) for r in range(world)]
        own, total = every[rank], torch.stack(every).sum(0)

        def reduced(options):
            return group.allreduce([Passing(found)], options)

        found = own.clone()
        assert reduced(now(c10d.AllreduceOptions())) is None
        assert torch.equal(found, total)
        rooted = now(c10d.BroadcastOptions())
        rooted.rootRank = world - 1
        found = own.clone()
        assert group.broadcast([Passing(found)], rooted) is None
        assert torch.equal(found, every[-1])
        for gathers in (group._allgather_base, group.all_gather_single):
            whole = torch.zeros(world, world, 5)
            assert gathers(Passing(whole), Passing(own), now(c10d.AllgatherOptions())) is None
            assert torch.equal(whole, torch.stack(every))
        for scatters in (group._reduce_scatter_base, group.reduce_scatter_single):
            part = torch.zeros(5)
            options = now(c10d.ReduceScatterOptions(), kinds.MAX)
            assert scatters(Passing(part), Passing(own), options) is None
            assert torch.equal(part, torch.stack(every).amax(0)[rank])
        for exchange in (group.alltoall_base, group.all_to_all_single):
            output = torch.zeros(world, 5)
            assert exchange(Passing(output), Passing(own), [], [], now(c10d.AllToAllOptions())) is None
            assert torch.equal(output, torch.stack([one[rank] for one in every]))
        # Rank r sends p + 1 rows to rank p.
        sent, received = [p + 1 for p in range(world)], [rank + 1] * world
        values = torch.full((sum(sent), 3), float(rank))
        output = torch.zeros(sum(received), 3)
        assert group.alltoall_base(Passing(output), Passing(values), received, sent, now(c10d.AllToAllOptions())) is None
        assert torch.equal(output, torch.arange(float(world)).repeat_interleave(rank + 1)[:, None].expand(-1, 3))
        # Other calls take the long path, alike on all ranks.
        alike = Passing(own)
        wide = Passing(torch.zeros(world, 10)[:, ::2])
        elsewhere = Passing(own)
        elsewhere.device = torch.device("cuda", 1)
        found = own.clone()
        assert reduced(c10d.AllreduceOptions()) == "long"
        assert reduced(now(c10d.AllreduceOptions(), kinds.BAND)) == "long"
        assert group.allreduce([alike, alike], now(c10d.AllreduceOptions())) == "long"
        assert group.allreduce([own], now(c10d.AllreduceOptions())) == "long"
        assert group.allreduce(alike) == "long"
        assert group.broadcast([alike], c10d.BroadcastOptions()) == "long"
        rooted.rootRank = world
        assert group.broadcast([alike], rooted) == "long"
        for odd in (wide, elsewhere, Passing(torch.empty(0)), Passing(own.to_sparse())):
            assert group.allreduce([odd], now(c10d.AllreduceOptions())) == "long"
        assert group.alltoall_base(wide, alike, [], [], now(c10d.AllToAllOptions())) == "long"
        assert group.alltoall_base(alike, alike, [], [], c10d.AllToAllOptions()) == "long"
        assert group.alltoall_base(own, own, [], []) == "long"
        works.works = []
        assert reduced(now(c10d.AllreduceOptions())) == "long"
        assert group.alltoall_base(alike, alike, [], [], now(c10d.AllToAllOptions())) == "long"
        works.works = None
        with torch.autograd.profiler.profile():
            assert reduced(now(c10d.AllreduceOptions())) == "long"
        quick, direct._quick = direct._quick, None
        assert reduced(now(c10d.AllreduceOptions())) == "long"
        direct._quick = quick
        assert torch.equal(found, own)
        # The long way raises what is wrong.
        wrong = [[world + 1] + [0] * (world - 1), [-1] * world, [1] * (world + 1), [1.5] * world]
        for rows in wrong:
            assert group.alltoall_base(alike, alike, rows, [], now(c10d.AllToAllOptions())) == "long"
            assert group.alltoall_base(alike, alike, [], rows, now(c10d.AllToAllOptions())) == "long"
        short, other = Passing(torch.zeros(1)), Passing(torch.zeros(world, world, 5, dtype=torch.int32))
        for output in (short, other):
            assert group._allgather_base(output, alike, now(c10d.AllgatherOptions())) == "long"
        assert group._reduce_scatter_base(short, alike, now(c10d.ReduceScatterOptions())) == "long"
        rooted.rootRank = -1
        assert group.broadcast([alike], rooted) == "long"
        shortcuts.close(group)
        assert not vars(group)


@pytest.mark.parametrize("messages", [False, True])
def test_what_does_not_go_direct_takes_the_short_way_to_nccl(messages):
    from torch.distributed import distributed_c10d as c10d

    from warplink.torch import shortcuts
    from warplink.torch.works import Noted

    group = Long()
    shortcuts.open_to(group, Library())
    shortcuts.open_past(group, None, Noted(), messages, not messages)
    one = Passing(torch.ones(2))
    # Asynchronous, so that it is not short where it goes direct.
    for call, arguments in [
        ("allreduce", ([one], c10d.AllreduceOptions())),
        ("broadcast", ([one], c10d.BroadcastOptions())),
        ("_allgather_base", (one, one, c10d.AllgatherOptions())),
        ("alltoall_base", (one, one, [], [], c10d.AllToAllOptions())),
    ]:
        goes_direct = messages if call == "alltoall_base" else not messages
        assert getattr(group, call)(*arguments) == ("long" if goes_direct else (call, *arguments))

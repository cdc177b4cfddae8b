"""Short ways to NCCL, without a GPU: tensors and NCCL are made up."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from test_torch_group import on_ranks, start  # noqa: E402


class OnGpu:
    """What is asked of a CUDA tensor."""

    is_cuda = True
    device = torch.device("cuda", 0)


class Library:
    """Gives what it was called with, in the place of NCCL."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments: (name, *arguments)


def short_and_long(rank, world, _, place):
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


def test_calls_of_cuda_tensors_alone_take_the_short_way():
    on_ranks(short_and_long, 2)


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

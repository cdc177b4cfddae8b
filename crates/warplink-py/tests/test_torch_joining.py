"""Members of a group decide alike what goes direct, also where joining fails on some of them."""

import resource
from datetime import timedelta
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import distributed_c10d as c10d  # noqa: E402

from conftest import Stopwatch, as_ranks, meet, start  # noqa: E402
from test_torch_direct import begin, go_on  # noqa: E402
from test_torch_shortcuts import Library, Passing, now  # noqa: E402

GPU = torch.device("cuda", 0)


@as_ranks(3)
def test_a_rank_without_room_for_the_workspace_leaves_all_with_the_backend(rank, world, place):
    """Rank 1 cannot make files as large as the workspace of the collectives."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    dist = begin(rank, world, place)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    go_on(rank, world, dist)


class Failing:
    """A communicator whose collectives cannot be used once the others have joined them."""

    def __init__(self, communicator, error):
        self._communicator, self._error = communicator, error
        self.all_gather_bytes = communicator.all_gather_bytes

    def collectives(self, **options):
        self._communicator.collectives(**options)
        raise self._error


class Asked:
    """A communicator that tells which collectives it was asked for."""

    def __init__(self, communicator, told):
        self._communicator, self._told = communicator, told

    def __getattr__(self, name):
        return getattr(self._communicator, name)

    def collectives(self, **options):
        self._told.append(options)
        return self._communicator.collectives(**options)


@as_ranks(2)
def test_a_rank_that_fails_when_others_have_joined_leaves_all_without(dist, rank):
    from warplink.errors import LibraryMissingError, PeerLostError
    from warplink.torch import direct

    whole = dist.group.WORLD._communicator
    communicator = Failing(whole, LibraryMissingError("a library is missing")) if rank == 1 else whole
    assert direct.join(communicator) is None
    assert direct.join(whole) is not None
    # The loss of a member is no reason to go on without it.
    with pytest.raises(PeerLostError):
        direct.join(Failing(whole, PeerLostError("rank 0 is lost")))
    dist.barrier()


def as_on_gpus(rank, world, place, monkeypatch, make_workspace):
    """A group that has yet to join for messages of CUDA tensors, and how often it tried."""
    from warplink.torch import routes as module, workspaces

    dist = start(rank, world, place, timeout=10)
    group = dist.group.WORLD
    tried = []

    def make(device):
        tried.append(device)
        return make_workspace(group)

    monkeypatch.setattr(group, "_may_go_direct", True)
    monkeypatch.setattr(group._options, "direct_collectives", False)
    monkeypatch.setattr(group, "_nccl", Library())
    monkeypatch.setattr(group, "_make_workspace", make)
    for place_of_it in (module, workspaces):
        monkeypatch.setattr(place_of_it, "is_recording", lambda device: False)
    return dist, group, tried


def on_the_host(group):
    """A workspace of the ranks on the host device, which passes for one on a GPU."""
    from warplink.torch.workspace import Workspace

    space = Workspace(group._communicator.subgroup(list(range(group.size()))), None, 1 << 20)
    space.device = GPU
    return space


@as_ranks(2)
def test_a_rank_that_cannot_make_a_workspace_leaves_all_without_and_none_tries_again(rank, world, place):
    from warplink.errors import OutOfMemoryError

    def make(group):
        if rank == 1:
            raise OutOfMemoryError("no memory for a context")
        return on_the_host(group)

    with pytest.MonkeyPatch.context() as patch:
        dist, group, tried = as_on_gpus(rank, world, place, patch, make)
        for _ in range(3):
            assert group.direct_messages(GPU) is None
        # None tries again, and none keeps a workspace that others lack.
        assert tried == [GPU] and not group._workspaces
    dist.barrier()
    dist.destroy_process_group()


@as_ranks(2)
def test_a_rank_that_fails_behind_the_workspace_leaves_all_without(rank, world, place):
    from warplink.errors import DriverError
    from warplink.torch import routes as module, workspaces

    def make(*_):
        if rank == 0:
            raise DriverError("no stream is left")
        return "messages"

    with pytest.MonkeyPatch.context() as patch:
        dist, group, tried = as_on_gpus(rank, world, place, patch, on_the_host)
        patch.setattr(module, "GpuCollectives", make)
        for _ in range(3):
            assert group.direct_messages(GPU) is None
        assert tried == [GPU] and group.messages_path == "backend"
        # All calls are NCCL's from then on, and go there by the short way.
        assert {"allreduce", "alltoall_base"} <= set(vars(group))
        # Buffers and fused operations have their workspace all the same.
        assert group.direct_workspace(GPU) is group._workspaces["cuda"] and group.is_direct
    dist.barrier()
    dist.destroy_process_group()


@as_ranks(2)
def test_calls_take_short_ways_once_it_is_known_which_go_direct(rank, world, place):
    from warplink.torch import routes as module

    class Made:
        def __init__(self, space, collectives, limit, source, high_priority):
            assert high_priority
            self.kept = collectives

        def all_to_all_single_now(self, *arguments):
            return True

        def close(self):
            pass

    joined = []

    def make(group):
        space = on_the_host(group)
        space.communicator = Asked(space.communicator, joined)
        return space

    with pytest.MonkeyPatch.context() as patch:
        dist, group, tried = as_on_gpus(rank, world, place, patch, make)
        patch.setattr(module, "GpuCollectives", Made)
        group._options.multiprocessors = 4
        group._options.nccl_options = SimpleNamespace(is_high_priority_stream=True)
        assert "alltoall_base" not in vars(group)
        made = group.direct_messages(GPU)
        assert isinstance(made, Made) and group.messages_path == "direct" and tried == [GPU]
        assert joined == [{"path": "direct", "multiprocessors": 4}]
        ways = vars(group)
        one = Passing(torch.ones(world))
        assert group.alltoall_base(one, one, [], [], now(c10d.AllToAllOptions())) is None
        assert group.allreduce([one], now(c10d.AllreduceOptions()))[0] == "allreduce"
        group.set_timeout(timedelta(seconds=10))
        dist.barrier()
        dist.destroy_process_group()
        assert "alltoall_base" not in ways and "allreduce" not in ways


@as_ranks(2)
def test_members_join_in_a_barrier_once_each_has_a_gpu(rank, world, place):
    from warplink.torch import routes as module

    class Made:
        def __init__(self, space, collectives, limit, source, high_priority):
            assert not high_priority
            self.kept = collectives

        def close(self):
            pass

    own = torch.device("cuda", rank)

    def make(group):
        space = on_the_host(group)
        space.device = own
        return space

    with pytest.MonkeyPatch.context() as patch:
        dist, group, tried = as_on_gpus(rank, world, place, patch, make)
        patch.setattr(module, "GpuCollectives", Made)
        in_use, current, count = [rank == 0], [0], [world]
        patch.setattr(torch.cuda, "is_initialized", lambda: in_use[0])
        patch.setattr(torch.cuda, "current_device", lambda: current[0])
        patch.setattr(torch.cuda, "device_count", lambda: count[0])
        # A member has no GPU yet; then both have the same, of as many as there are members.
        dist.barrier()
        in_use[0] = True
        dist.barrier()
        assert tried == [] and group.messages_path == "backend"
        # Of a batch it is not known whether all make it.
        assert group.direct_messages(own, by_all=False) is None
        current[0] = rank
        dist.barrier()
        assert tried == [own] and group.messages_path == "direct"
        # Only one of them has a message, to itself.
        if rank == 0:
            assert isinstance(group.direct_messages(own), Made)
        dist.barrier()
        assert len(tried) == 1
        dist.destroy_process_group()


@as_ranks(2)
def test_a_member_that_is_lost_meanwhile_is_told(rank, world, place):
    from warplink.errors import PeerLostError
    from warplink.torch import agreement

    def make(group):
        raise PeerLostError(f"rank {rank} lost the other")

    agreement.LOST_SECONDS = 0.5
    with pytest.MonkeyPatch.context() as patch:
        dist, group, tried = as_on_gpus(rank, world, place, patch, make)
        if rank == 0:
            # Rank 1 says nothing, as if it were gone: its loss is told, and not after the timeout of 10 s.
            watch = Stopwatch()
            with pytest.raises(PeerLostError, match="rank 0 lost the other"):
                group.direct_messages(GPU)
            assert watch.elapsed() < 9
            assert group.direct_messages(GPU) is None and tried == [GPU]
    meet(place, "told", rank, range(world))
    dist.destroy_process_group()


@as_ranks(2)
def test_members_tell_one_another_by_the_store(dist, rank, world):
    from warplink.errors import TimeoutError
    from warplink.torch import joining

    store = dist.group.WORLD.get_group_store()
    assert joining.Members(store, rank, world).all_gather("all", f"rank {rank}", 60) == ["rank 0", "rank 1"]
    if rank == 0:
        with pytest.raises(TimeoutError, match="the peer did not come in 0.1 s") as caught:
            joining.Members(store, rank, world).all_gather("one", "here", 0.1)
        assert (caught.value.rank, caught.value.peer) == (0, 1)
    dist.barrier()


@pytest.mark.parametrize("step", ["making", "opening"])
@as_ranks(3, timeout=20)
def test_fused_operations_run_unfused_where_a_rank_cannot_reach_the_memory_of_others(dist, rank, world, step):
    """Rank 1 cannot make a workspace, or map what others share, as where GPUs cannot map each other's memory."""
    import warplink.torch
    from warplink.errors import UnsupportedError
    from warplink.torch.workspace import Workspace

    group, ops = dist.group.WORLD, torch.ops.warplink
    name, tried = group.group_name, []
    a, b = torch.full((4, 8), float(rank)), torch.ones(8, 6)

    def fail(*given):
        tried.append(given)
        raise UnsupportedError("the peer's memory cannot be mapped")

    share = Workspace._share

    def unmapped(space, own):
        share(space, own)
        fail(own)

    def fused():
        whole, (product,) = ops.fused_all_gather_matmul(a, [b], 0, name)
        assert whole[:, 0].tolist() == [float(peer) for peer in range(world) for _ in range(4)]
        assert torch.equal(product, whole @ b)
        assert (ops.fused_matmul_reduce_scatter(whole, b, "sum", 0, name) == 8 * world * rank).all()
        one = torch.tensor(1.0)
        left, right = torch.ones(16, 32).to(torch.float8_e4m3fn), torch.ones(48, 32).to(torch.float8_e4m3fn).t()
        rest = (0, name, [None], [None], [torch.bfloat16], [False])
        _, (product,) = ops.fused_all_gather_scaled_matmul(left, [right], one, [one], *rest)
        assert (product == 32).all() and product.shape == (16 * world, 48)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(*{"making": (group, "_make_workspace", fail), "opening": (Workspace, "_share", unmapped)}[step])
        assert warplink.torch.is_direct_group() and group.get_buffer_size() > 0
        fused()
    # It is not tried again, also where it could be done now.
    fused()
    assert len(tried) == (1 if rank == 1 else 0)
    assert not group.is_direct and not warplink.torch.is_direct_group() and group.get_buffer_size() == 0
    with pytest.raises(UnsupportedError, match="a member could not share memory on cpu"):
        group.get_p2p_buffer(rank, (4,), torch.float32)
    with pytest.raises(UnsupportedError, match="a member could not share memory on cpu"):
        group.intra_node_barrier()
    dist.barrier()

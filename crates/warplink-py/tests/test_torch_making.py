"""How a process group is made, split and left."""

import sys
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from conftest import Stopwatch, as_ranks, meet, start  # noqa: E402


@as_ranks(1)
def test_a_group_is_not_waited_for_any_longer_than_its_timeout(place):
    import torch.distributed as dist

    import warplink.torch  # noqa: F401
    from warplink.errors import TimeoutError

    store = dist.FileStore(place, 2)
    watch = Stopwatch()
    with pytest.raises(TimeoutError, match="make a process group: the peer did not come in 1 s") as caught:
        dist.init_process_group("warplink", store=store, rank=0, world_size=2, timeout=timedelta(seconds=1))
    assert watch.elapsed() < 10
    assert (caught.value.rank, caught.value.peer, caught.value.kind) == (0, 1, "timeout")


@as_ranks(3)
def test_monitored_barriers(dist, rank, world, place):
    from warplink.errors import TimeoutError

    group = dist.group.WORLD
    before = group._store.num_keys()
    for _ in range(10):
        group.monitored_barrier()
    assert group._store.num_keys() <= before + world
    meet(place, "counted", rank, range(world))
    if rank != 1:
        with pytest.raises(TimeoutError) as caught:
            group.monitored_barrier(timedelta(seconds=0.5))
        error = caught.value
        assert (error.rank, error.peer) == (rank, 1 if rank == 0 else 0)
        assert error.kind == "timeout" and error.operation == "monitored_barrier"
    meet(place, "timed out", rank, range(world))


@as_ranks(2, dies=(1,))
def test_a_rank_that_exits_is_lost_to_the_others(rank, world, place):
    dist = start(rank, world, place)
    dist.barrier()
    if rank == 1:
        sys.exit(3)
    watch = Stopwatch()
    with pytest.raises(ConnectionError) as caught:
        dist.all_reduce(torch.ones(2))
    assert watch.elapsed() < 5 and caught.value.peer == 1


class NcclOptions:
    """Stands in for NCCL's options."""

    is_high_priority_stream = False


@as_ranks(2)
def test_groups_of_nccl_are_split_from_their_parent(rank, world, place):
    """NCCL's groups, with Gloo in its place."""
    from torch.distributed import distributed_c10d as c10d

    import warplink.torch

    made, outside = [], []

    class Nccl(c10d.ProcessGroupGloo):
        Options = NcclOptions
        supports_splitting = True

        def __init__(self, store, own_rank, size, options):
            super().__init__(store, own_rank, size, timedelta(seconds=20))
            self.given = options
            made.append(options)

        def eager_connect_single_device(self, device):
            pass

        def perform_nocolor_split(self, device):
            outside.append(device)

    c10d.ProcessGroupNCCL = Nccl
    torch.cuda.is_available = lambda: True
    torch.accelerator.device_count = lambda: world
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    own = NcclOptions()
    options = warplink.torch.Options(nccl_options=own, buffer_size=4096)
    dist = start(rank, world, place, device_id=torch.device("cuda", rank), pg_options=options)
    world_of_nccl = dist.group.WORLD._nccl
    dist.new_group([0])
    # All ranks of the parent split it, or none.
    if rank == 0:
        assert made[-1].split_from is world_of_nccl and made[-1].split_color == c10d._process_group_color([0])
    assert len(made) == (2 if rank == 0 else 1) and len(outside) == (0 if rank == 0 else 1)
    given = NcclOptions()
    given.split_from, given.split_color = "another", 3
    for passed in (None, given):
        part = dist.group.WORLD.split_group([0, 1], opts=passed, group_name=f"part {passed is None}")
        assert part.get_buffer_size() == 4096 and made[-1] is not passed
        assert getattr(made[-1], "split_from", None) is None
    assert not vars(own) and given.split_from == "another"
    assert world_of_nccl.given.group_name == dist.group.WORLD.group_name
    sys.stdout.flush()


# Older releases bind groups to GPUs alone.
@pytest.mark.skipif(torch.__version__ < "2.15", reason="PyTorch binds no group to the CPU")
@as_ranks(2, device_id=torch.device("cpu:0"))
def test_a_group_that_is_bound_to_the_cpu(dist, rank, world):
    part = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=part)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == world


def test_a_caller_that_does_not_tell_the_backends_is_logged(caplog):
    from warplink.torch import registration

    found = registration._configuration()
    assert found == ({"cpu": "warplink", "cuda": "warplink"}, None, None, None)
    assert "does not say which backend was asked for on each device" in caplog.text


@as_ranks(2)
def test_the_callers_of_this_release_tell_the_backends(rank, world, place):
    import logging

    warned = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("warplink.torch").addHandler(handler)
    dist = start(rank, world, place, "cpu:gloo,cuda:warplink")
    assert dist.group.WORLD._devices == {"cpu": "gloo", "cuda": "warplink"}
    dist.new_group(list(range(world)), backend="warplink")
    dist.destroy_process_group()
    assert not warned, warned


def test_no_property_of_the_host_backend_asks_itself():
    from torch._C._distributed_c10d import Backend

    from warplink.torch.host_backend import HostBackend

    if not isinstance(vars(Backend).get("options"), property):
        pytest.skip("PyTorch has no backends in Python")
    backend = HostBackend(0, 1)
    for name, value in vars(Backend).items():
        if isinstance(value, property):
            try:
                getattr(backend, name)
            except RecursionError:
                raise
            except RuntimeError as error:
                # Operations that backends need not have.
                assert "does not support" in str(error), name
    assert backend.options.backend == "warplink"

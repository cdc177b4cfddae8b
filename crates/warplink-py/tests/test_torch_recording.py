"""Members make nothing together while a stream records a graph: the call fails before it exchanges anything.
There is no graph of CPU tensors, so the tests say that a stream records one."""

import pytest

torch = pytest.importorskip("torch")

from test_torch_differing import gather, scatter  # noqa: E402
from conftest import as_ranks  # noqa: E402

WORLD = 2

#: What the error says behind the name of what is new.
HELP = ".*; help: call it once on every rank before capturing"


class Recording:
    """Says that the current stream records a graph, or not; on one rank alone, which so must not wait for the others."""

    def __init__(self, patch):
        from warplink.torch import ops, workspace, workspaces

        for module in (ops, workspace, workspaces):
            patch.setattr(module, "is_recording", lambda device: self.now)
        # Native code asks the stream, not these; it leaves all calls to Python while a profile is taken.
        patch.setattr(torch.autograd.profiler, "_is_profiler_enabled", False)

    @property
    def now(self):
        return torch.autograd.profiler._is_profiler_enabled

    @now.setter
    def now(self, records):
        torch.autograd.profiler._is_profiler_enabled = records


@as_ranks(WORLD, timeout=20)
def test_first_calls_in_a_graph_raise(dist, rank):
    from warplink.errors import InvalidArgumentError

    group = dist.group.WORLD
    name = group.group_name
    with pytest.MonkeyPatch.context() as patch:
        recording = Recording(patch)
        calls = [
            (lambda: gather(name, 4), "fused_all_gather_matmul of the sizes"),
            (lambda: gather(name, 4, dim=1), "fused_all_gather_matmul along the last dimension"),
            (lambda: scatter(name, 4), "fused_matmul_reduce_scatter of the sizes"),
            (lambda: scatter(name, 4, dim=1), "fused_matmul_reduce_scatter along the last dimension"),
            (group.intra_node_barrier, "intra_node_barrier"),
            (lambda: group.get_p2p_buffer(rank, (4,), torch.float32), "get_p2p_buffer"),
        ]
        for made, (call, what) in enumerate(calls):
            # Before the first one, the group has no workspace.
            what = what if made else "what needs memory of other members"
            if rank == 0:
                recording.now = True
                for _ in range(2):
                    with pytest.raises(InvalidArgumentError, match="records a graph.*" + what + HELP) as caught:
                        call()
                    assert caught.value.kind == "invalid_argument" and caught.value.rank == 0
                recording.now = False
            # Nothing is left behind: the call is right, and so is a recorded one behind it.
            call()
            recording.now = True
            call()
            recording.now = False
    space = group.workspace()
    assert len(space.plans) == len(space._recorded) == 4


@as_ranks(WORLD, timeout=20)
def test_what_runs_as_a_collective_and_a_matmul_may_be_recorded_at_once(dist):
    name = dist.group.WORLD.group_name
    with pytest.MonkeyPatch.context() as patch:
        recording = Recording(patch)
        recording.now = True
        for dtype in (torch.float64, torch.int32):
            _, (product,) = gather(name, 4, dtype)
            assert (product == 8).all()
        assert not dist.group.WORLD._workspaces

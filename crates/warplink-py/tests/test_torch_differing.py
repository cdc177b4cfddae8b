"""Ranks that make different calls of fused operations are told what both call, fused or not, new or not."""

import pytest

torch = pytest.importorskip("torch")

from conftest import Stopwatch, as_ranks, meet, on_ranks, start  # noqa: E402

WORLD = 2

FP8 = torch.float8_e4m3fn


def gather(name, rows, dtype=torch.float32, dim=0):
    a, b = torch.ones(rows, 8, dtype=dtype), torch.ones(8 * (WORLD if dim else 1), 6, dtype=dtype)
    return torch.ops.warplink.fused_all_gather_matmul(a, [b], dim, name)


def scatter(name, rows, dtype=torch.float32, dim=0):
    a, b = torch.ones(rows, 8, dtype=dtype), torch.ones(8, 6, dtype=dtype)
    return torch.ops.warplink.fused_matmul_reduce_scatter(a, b, "sum", dim, name)


def gather_scaled(name, scale):
    """Of one row a rank, whose scale is gathered where it has as many dimensions as a part."""
    a, b = torch.ones(1, 32).to(FP8), torch.ones(48, 32).to(FP8).t()
    rest = (0, name, [None], [None], [torch.bfloat16], [False])
    return torch.ops.warplink.fused_all_gather_scaled_matmul(a, [b], scale, [torch.tensor(1.0)], *rest)


@as_ranks(WORLD, timeout=20)
def test_another_type_or_size_on_a_rank_that_does_not_fuse(dist, rank):
    from warplink.errors import MismatchError

    name, watch = dist.group.WORLD.group_name, Stopwatch()
    for operation in (gather, scatter):
        for dim in (0, 1):
            for own, other in (
                ((4, torch.float32), (4, torch.float64)),
                ((4, torch.float64), (4, torch.float32)),
                ((4, torch.float64), (6, torch.float64)),
                ((4, torch.bfloat16), (0, torch.bfloat16)),
                ((0, torch.int32), (4, torch.float64)),
            ):
                rows, dtype = (own, other)[rank]
                with pytest.raises(MismatchError, match="the peer calls fused_.*; expected fused_") as caught:
                    operation(name, rows, dtype, dim)
                assert (caught.value.rank, caught.value.peer) == (rank, 1 - rank)
                asked, _, expected = str(caught.value).partition("expected")
                assert str(dtype) in expected and str((other, own)[rank][1]) in asked
            # Nothing is left behind: the next call is right.
            operation(name, 4, torch.float64, dim)
            operation(name, 4, torch.float32, dim)
    scale = torch.ones(1, 1) if rank else torch.tensor(1.0)
    with pytest.raises(MismatchError, match="A_scale of this part"):
        gather_scaled(name, scale)
    gather_scaled(name, torch.ones(1, 1))
    # None of them waited for the timeout.
    assert watch.elapsed() < 15


@as_ranks(WORLD)
def test_repeated_calls_are_not_compared_again(dist):
    from warplink.torch import workspace

    name, compared = dist.group.WORLD.group_name, []

    def check_alike(communicator, call):
        compared.append(call)
        original(communicator, call)

    original = workspace.check_alike
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "check_alike", check_alike)
        for _ in range(3):
            for rows in (4, 0):
                gather(name, rows, torch.float64)
                scatter(name, rows, torch.float64)
            gather_scaled(name, torch.ones(1, 1))
    assert len(compared) == 6, compared


#: Calls of rank 0 and rank 1, and those that both make before.
DIFFERENT = {
    "new on one": (("gather", 4), ("gather", 5), [("gather", 4)]),
    "new on none": (("gather", 4), ("gather", 5), [("gather", 4), ("gather", 5)]),
    "operations": (("gather", 4), ("scatter", 4), [("gather", 4), ("scatter", 4)]),
    "unfused": (("unfused", 4), ("unfused", 5), [("unfused", 4), ("unfused", 5)]),
    "unfused on one": (("unfused", 4), ("scatter", 4), [("unfused", 4), ("scatter", 4)]),
    "unfused and new on one": (("scatter", 4), ("unfused", 4), [("scatter", 4)]),
    "a barrier": (("scatter", 4), ("barrier", 0), [("scatter", 4), ("barrier", 0)]),
}


def made_before(rank, world, _, place, case):
    from warplink.errors import MismatchError

    dist = start(rank, world, place, timeout=3)
    name = dist.group.WORLD.group_name
    calls = {
        "gather": lambda rows: gather(name, rows),
        "scatter": lambda rows: scatter(name, rows),
        "unfused": lambda rows: gather(name, rows, torch.float64),
        "barrier": lambda _: dist.group.WORLD.intra_node_barrier(),
    }

    *different, before = DIFFERENT[case]
    for kind, rows in before:
        calls[kind](rows)
    watch = Stopwatch()
    kind, rows = different[rank]
    with pytest.raises(MismatchError, match="the peer calls .*; expected .*; help: call the same .* on every rank") as caught:
        # A rank may send all that it has to, and wait in the next call.
        for _ in range(3):
            calls[kind](rows)
    assert watch.elapsed() < 20
    assert (caught.value.rank, caught.value.peer) == (rank, 1 - rank)
    # Those that wait for each other end alike.
    meet(place, "told", rank, range(world))
    told = str(caught.value).partition("calls ")[2].partition(" (peer")[0]
    return told.split("; expected ")


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_call_that_one_rank_made_before_and_the_other_does_not_make(case):
    (theirs, own), (own_to_other, other) = on_ranks(made_before, WORLD, case)
    assert own == own_to_other != theirs == other


@as_ranks(WORLD)
def test_a_rank_that_does_not_call_at_all(rank, world, place):
    from warplink.errors import TimeoutError

    dist = start(rank, world, place, timeout=2)
    name = dist.group.WORLD.group_name
    for rows in (4, 5):
        gather(name, rows)
    if rank == 0:
        watch = Stopwatch()
        with pytest.raises(TimeoutError):
            for _ in range(2):
                gather(name, 4)
        assert watch.elapsed() < 20
        # The other one may come to it, and this one do it again: what is counted behind this proves nothing.
        assert dist.group.WORLD.workspace()._history is None
    meet(place, "timed out", rank, range(world))

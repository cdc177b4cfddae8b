"""A wrong call of a scaled operation raises before other ranks wait for it, and later calls are right."""

import pytest

torch = pytest.importorskip("torch")

from conftest import Stopwatch, as_ranks, meet  # noqa: E402

WORLD = 2

FP8 = torch.float8_e4m3fn


def calls(name):
    """The scaled operations of a matrix of ones, each with arguments of the product's that may be replaced."""
    ops = torch.ops.warplink
    one = torch.tensor(1.0)

    def given(a_rows, changed):
        return {
            "a": torch.ones(a_rows, 32).to(FP8),
            "b": torch.ones(48, 32).to(FP8).t(),
            "a_scale": one,
            "b_scale": one,
            "bias": None,
            "result_scale": None,
            "out": torch.bfloat16,
            **changed,
        }

    def gather(**changed):
        of = given(16, changed)
        _, (result,) = ops.fused_all_gather_scaled_matmul(
            of["a"], [of["b"]], of["a_scale"], [of["b_scale"]], 0, name,
            [of["bias"]], [of["result_scale"]], [of["out"]], [False],
        )  # fmt: skip
        assert (result == 32).all()

    def scatter(**changed):
        of = given(32, changed)
        result = ops.fused_scaled_matmul_reduce_scatter(
            of["a"], of["b"], of["a_scale"], of["b_scale"], "sum", 0, 0, name, [32, 48],
            of["bias"], of["result_scale"], of["out"],
        )  # fmt: skip
        assert (result == 32 * WORLD).all()

    return gather, scatter


#: Arguments that are wrong, and what is said of them.
WRONG = [
    ({"bias": torch.ones(40, dtype=torch.bfloat16)}, "bias has 40 elements; expected 48, the columns of B"),
    ({"bias": torch.ones(48).to(FP8)}, "bias is torch.float8_e4m3fn; expected a float type of 16 bits or more"),
    ({"a": torch.ones(32, 32)}, "A is torch.float32; expected a float type of 8 bits"),
    ({"b": torch.ones(32, 48, dtype=torch.int8)}, "B is torch.int8; expected a float type of 8 bits"),
    ({"b_scale": torch.ones(3)}, "B_scale has 3 elements; expected one, or one for each of 48 columns of B"),
    ({"a_scale": torch.ones(3)}, "A_scale has .*; expected one"),
    ({"result_scale": torch.ones(3)}, "result_scale has 3 elements; expected one"),
    ({"out": torch.int32}, "the results' element type .*; expected a float type"),
]


def test_scales_and_biases_of_another_device():
    from warplink.torch.scaled_checks import check_scaling

    a, b, one = torch.ones(16, 32), torch.ones(32, 48), torch.ones(())
    for name, given in (
        ("A_scale", ((one.to("meta"), one), None, None)),
        ("B_scale", ((one, one.to("meta")), None, None)),
        ("bias", ((one, one), torch.ones(48, device="meta"), None)),
        ("result_scale", ((one, one), None, one.to("meta"))),
    ):
        with pytest.raises(ValueError, match=f"{name} is on meta; expected cpu, as A is"):
            check_scaling(a, b, *given)


@as_ranks(WORLD, timeout=20)
def test_wrong_arguments_on_all_ranks(dist):
    for call in calls(dist.group.WORLD.group_name):
        for made in (False, True):
            for changed, says in WRONG:
                with pytest.raises((ValueError, RuntimeError), match=says):
                    call(**changed)
            # A plan is made with the first one.
            call()


@as_ranks(WORLD, timeout=20)
def test_wrong_arguments_on_one_rank(dist, rank):
    for call in calls(dist.group.WORLD.group_name):
        call()
        for changed, says in WRONG:
            if rank == 1:
                # The other one has begun by now, or begins later.
                with pytest.raises((ValueError, RuntimeError), match=says):
                    call(**changed)
            call()


@pytest.mark.parametrize("number", range(2), ids=["gather", "scatter"])
@as_ranks(WORLD)
def test_an_exception_in_the_middle_ends_the_communicator_on_all_ranks(dist, rank, world, place, number):
    from warplink.errors import WarplinkError

    call = calls(dist.group.WORLD.group_name)[number]
    call()
    # A rank that is done with the first call could end it on the other one.
    dist.barrier()

    def fail(*given, **named):
        raise torch.OutOfMemoryError("no memory for the product")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch, "_scaled_mm", fail)
        watch = Stopwatch()
        if rank == 1:
            with pytest.raises(torch.OutOfMemoryError, match="no memory for the product"):
                call()
        else:
            # It may have all of the first call, which it gathers.
            with pytest.raises(ConnectionError, match="left in the middle: OutOfMemoryError: no memory") as caught:
                call()
                call()
            assert caught.value.kind == "peer_lost" and caught.value.peer == 1
    # Later calls fail at once, on both, and the group can be destroyed.
    with pytest.raises(WarplinkError) as caught:
        call()
    assert watch.elapsed() < 20
    meet(place, "told", rank, range(world))
    assert "left in the middle" in str(caught.value)
    assert rank == 1 or caught.value.kind == "peer_lost"

"""Collectives inside programs of JAX: on the host device, or, with WARPLINK_TEST_DEVICE=cuda, on GPUs."""

import os

import numpy as np
import pytest
import warplink

jax = pytest.importorskip("jax")

from conftest import Stopwatch, as_ranks, meet  # noqa: E402
from gpus import gpu, prepare_sharing  # noqa: E402

WORLD = 2
ON_GPUS = os.environ.get("WARPLINK_TEST_DEVICE") == "cuda"
WORLDS = [1, 2] if ON_GPUS else [1, 2, 3]
# Errors reach JAX in another way from GPUs, and processors are divided into devices.
on_host = pytest.mark.skipif(ON_GPUS, reason="of the host device")


def join(rank, world, meeting):
    jax.config.update("jax_platforms", "cuda" if ON_GPUS else "cpu")
    if ON_GPUS:
        # Each process would take most of the memory of its GPU.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        prepare_sharing(rank)
        jax.config.update("jax_cuda_visible_devices", str(gpu(rank)))
    device = {"device": "cuda", "ordinal": gpu(rank)} if ON_GPUS else {"device": "host"}
    return warplink.Job.join(rank, world, meeting, timeout=60.0, **device)


def inputs(world, dtype, shape=(4, 3)):
    """What each rank has."""
    rows = [np.arange(np.prod(shape)).reshape(shape) % 5 + rank + 1 for rank in range(world)]
    return [row.astype(dtype) for row in rows]


def expected(given, rank):
    """The results of every call on ``rank``, by the name of the call and its operator."""
    world, stacked = len(given), np.stack(given)
    parts = [np.split(one, world) for one in given]
    total = stacked.sum(0, dtype=stacked.dtype)
    return {
        ("all_reduce", "sum"): total,
        ("all_reduce", "product"): stacked.prod(0, dtype=stacked.dtype),
        ("all_reduce", "max"): stacked.max(0),
        ("all_reduce", "min"): stacked.min(0),
        ("reduce_scatter", "sum"): np.split(total, world)[rank],
        ("all_gather",): np.concatenate(given),
        ("all_to_all",): np.concatenate([one[rank] for one in parts]),
    }


@pytest.mark.parametrize("world", WORLDS)
@as_ranks()
def test_calls_give_what_numpy_does(rank, world, meeting):
    import jax.numpy as jnp
    import warplink.jax

    with join(rank, world, meeting) as job:
        group = warplink.jax.Group(job.world())
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8):
            given = inputs(world, dtype, (2 * world, 3))
            results = expected(given, rank)
            found = jax.jit(lambda x: [getattr(group, name)(x, *op) for name, *op in results])(given[rank])
            for call, result, got in zip(results, results.values(), found, strict=True):
                assert got.dtype == dtype and got.shape == result.shape, (call, dtype)
                assert (np.asarray(got) == result).all(), (call, dtype)
        # Types that are only moved, arrays without elements, and calls outside of programs.
        for dtype in (bool, np.int16, np.complex64):
            mine = np.full((2, 2), rank).astype(dtype)
            whole = group.all_gather(mine)
            assert whole.dtype == dtype and (np.asarray(whole[2 * rank : 2 * rank + 2]) == mine).all()
        assert group.all_gather(jnp.zeros((0, 3))).shape == (0, 3)
        assert group.all_reduce(jnp.float32(1)) == world
        for op in ("average", "avg"):
            assert (group.all_reduce(jnp.full(3, float(rank)), op) == (world - 1) / 2).all()


def loss(group, given, world):
    """A loss whose parts go through every collective with a gradient."""
    import jax.numpy as jnp

    def body(x):
        x = group.all_gather(x)
        x = group.all_to_all(x * x)
        x = group.reduce_scatter(jnp.sin(x))
        x = group.reduce_scatter(group.all_gather(x), "average")
        return group.all_reduce(x * given, "average").sum() + group.all_reduce(x).sum() / world

    return body


@as_ranks(WORLD)
def test_gradients_are_those_of_the_sum_of_losses(rank, world, meeting):
    import jax.numpy as jnp
    import warplink.jax

    with join(rank, world, meeting) as job:
        group = warplink.jax.Group(job.world())
        body = loss(group, 1.0 + rank, world)
        x = jnp.linspace(0.1, 1, 4).reshape(2, 2) + rank
        found = jax.jit(jax.grad(body))(x)
        # The loss of all ranks, where one rank differs by a little in one element.
        for peer in range(world):
            for at in np.ndindex(x.shape):
                step = jnp.zeros_like(x).at[at].set(1e-2 if peer == rank else 0)
                above, below = (float(group.all_reduce(body(x + sign * step))) for sign in (1, -1))
                if peer == rank:
                    assert abs((above - below) / 2e-2 - float(found[at])) < 2e-2 * max(1, abs(float(found[at])))
        with pytest.raises((ValueError, NotImplementedError)):
            jax.grad(lambda x: group.all_reduce(x, "max").sum())(x)


@as_ranks(WORLD)
def test_calls_run_in_one_order(rank, world, meeting):
    import jax.numpy as jnp
    import warplink.jax

    with join(rank, world, meeting) as job:
        group = warplink.jax.Group(job.world())

        # Calls that need nothing of each other, large enough for XLA to run them at the same time.
        @jax.jit
        def many(xs):
            return [group.all_reduce(jnp.sin(x) + 2) for x in xs]

        xs = [jnp.full((300, 300), float(number)) for number in range(16)]
        for _ in range(20):
            for number, got in enumerate(many(xs)):
                assert np.allclose(got, world * (np.sin(number) + 2), rtol=1e-5), number

        def step(carry, x):
            carry = group.all_reduce(carry) / world + x
            return carry, group.all_gather(x)

        carry, gathered = jax.jit(lambda xs: jax.lax.scan(step, jnp.zeros(2), xs))(jnp.ones((5, 2)) * (rank + 1))
        # Each adds its own, and the last addition is not averaged.
        assert np.allclose(carry, 4 * (world + 1) / 2 + rank + 1)
        assert (np.asarray(gathered) == np.repeat(np.arange(1, world + 1), 2)).all() and gathered.shape == (5, 2 * world)
        # Programs that need nothing of each other, which JAX runs in the background.
        one = jax.jit(lambda x: group.all_reduce(jnp.sin(x) + 2))
        for number, got in enumerate([one(x) for x in xs]):
            assert np.allclose(got, world * (np.sin(number) + 2), rtol=1e-5), number

        # Gradients through layers in a loop, recomputed.
        def layers(weights, x):
            return jax.lax.scan(jax.checkpoint(lambda x, w: (group.all_reduce(jnp.tanh(w * x)), None)), x, weights)[0].sum()

        # A rank's weights have their part of the gradient of all ranks' losses.
        found = jax.jit(jax.grad(layers))(jnp.full((3, 2), 0.1), jnp.ones(2))
        same = jax.grad(lambda w: jax.lax.scan(lambda x, w: (world * jnp.tanh(w * x), None), jnp.ones(2), w)[0].sum())
        assert np.allclose(found, same(jnp.full((3, 2), 0.1)), rtol=1e-5)


@on_host
@as_ranks(3, dies=(2,))
def test_errors_name_what_is_wrong_and_survivors_go_on(rank, world, meeting, place):
    import jax.numpy as jnp
    import warplink.jax

    job = join(rank, world, meeting)
    group = warplink.jax.Group(job.world())
    for wrong, says in (
        (lambda: group.all_reduce(jnp.ones(2), "median"), "the operator is 'median'; expected one of sum, average"),
        (lambda: group.reduce_scatter(jnp.ones(world + 1)), f"first dimension is {world + 1}; expected a multiple of"),
        (lambda: group.all_reduce(jnp.ones(2), ""), "the operator is ''"),
        (lambda: group.all_gather(1.0), "has no dimension"),
        (lambda: warplink.jax.Group([]), "no communicators"),
    ):
        with pytest.raises(ValueError, match=says):
            wrong()
    with pytest.raises(jax.errors.JaxRuntimeError, match="type 15 cannot be reduced"):
        jax.block_until_ready(group.all_reduce(jnp.ones(2, jnp.complex64)))
    # The program outlives its group.
    other = warplink.jax.Group(job.world())
    program = jax.jit(other.all_reduce).lower(jnp.ones(2)).compile()
    assert (program(jnp.ones(2)) == world).all()
    other._native = None
    with pytest.raises(jax.errors.JaxRuntimeError, match="group . does not exist in this process.*keep the"):
        jax.block_until_ready(program(jnp.ones(2)))
    step = jax.jit(group.all_reduce)
    step(jnp.ones(5)).block_until_ready()
    meet(place, "before", rank, range(world))
    if rank == world - 1:
        os._exit(1)
    watch = Stopwatch()
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"UNAVAILABLE.*rank {world - 1}"):
        jax.block_until_ready(step(jnp.ones(5)))
    assert watch.elapsed() < 5
    # The survivors go on in a new group.
    rest = warplink.jax.Group(job.world().survivors())
    assert (jax.jit(rest.all_reduce)(jnp.ones(5)) == world - 1).all()


@on_host
@as_ranks(WORLD)
def test_ranks_that_differ_are_told(rank, world, meeting):
    import jax.numpy as jnp
    import warplink.jax

    with join(rank, world, meeting) as job:
        group = warplink.jax.Group(job.world())
        with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*all_reduce|all-reduce"):
            jax.block_until_ready(group.all_reduce(jnp.ones(3 + rank)))


@on_host
@as_ranks(1)
def test_a_process_with_several_devices_is_several_ranks(meeting):
    from concurrent.futures import ThreadPoolExecutor

    jax.config.update("jax_num_cpu_devices", WORLD)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    import jax.numpy as jnp
    from jax.sharding import Mesh, PartitionSpec
    import warplink.jax

    # A process with two devices is two ranks.
    with ThreadPoolExecutor(WORLD) as threads:
        jobs = list(threads.map(lambda own: join(own, WORLD, meeting), range(WORLD)))
    group = warplink.jax.Group([job.world() for job in jobs])
    mesh, rows = Mesh(jax.devices(), ("rank",)), PartitionSpec("rank")

    def both(x):
        return group.all_reduce(x), group.all_gather(x)

    def loss(x):
        return (group.all_reduce(jnp.sin(x)) * group.reduce_scatter(group.all_gather(x))).sum()[None]

    mapped = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=rows, out_specs=(rows, rows), check_vma=False))
    x = jnp.arange(8.0)
    for _ in range(10):
        total, whole = mapped(x)
        assert (total == jnp.tile(x[:4] + x[4:], 2)).all() and (whole == jnp.tile(x, 2)).all()
    specs = {"mesh": mesh, "in_specs": rows, "out_specs": rows, "check_vma": False}
    found = jax.jit(jax.grad(lambda x: jax.shard_map(loss, **specs)(x).sum()))(x)
    expected = jax.grad(lambda x: ((jnp.sin(x[:4]) + jnp.sin(x[4:])) * WORLD * (x[:4] + x[4:])).sum())(x)
    assert jnp.allclose(found, expected, rtol=1e-5)
    with ThreadPoolExecutor(WORLD) as threads:
        list(threads.map(lambda job: job.close(), jobs))


@on_host
@as_ranks(1)
def test_maps_whose_programs_run_in_any_order_are_refused(rank, world, meeting):
    import jax.numpy as jnp
    from jax.sharding import Mesh, PartitionSpec
    import warplink.jax

    with join(rank, world, meeting) as job:
        group = warplink.jax.Group(job.world())
        rows = PartitionSpec("rank")
        mapped = jax.shard_map(
            group.all_reduce, mesh=Mesh(jax.devices(), ("rank",)), in_specs=rows, out_specs=rows, check_vma=False
        )
        with pytest.raises(RuntimeError, match="jax_cpu_enable_async_dispatch', False"):
            mapped(jnp.ones(2))

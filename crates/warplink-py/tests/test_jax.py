"""JAX's arrays on the host device: in without copies, out by DLPack, and never written."""

import gc

import pytest

jax = pytest.importorskip("jax")

from conftest import as_ranks  # noqa: E402

COUNT = 1000

# Ranks have no other backend than the one in the processor's memory.
jax.config.update("jax_platforms", "cpu")


@as_ranks(2, device="host")
def test_arrays_go_in_and_out_in_place(comm, rank):
    import jax.numpy as jnp

    peer = 1 - rank
    stream, collectives = comm.create_stream(), comm.collectives()
    for name, dtype in (("f32", jnp.float32), ("bf16", jnp.bfloat16), ("i32", jnp.int32)):
        own = jnp.arange(COUNT, dtype=dtype) % 100 + rank
        assert comm.borrow(own).address == own.unsafe_buffer_pointer()
        total, come = (comm.alloc(own.nbytes).view([COUNT], name) for _ in range(2))
        collectives.all_reduce(stream, total, own)
        collectives.send_receive(stream, [(peer, own)], [(peer, come)])
        stream.synchronize()
        sums, received = jax.dlpack.from_dlpack(total), jax.dlpack.from_dlpack(come)
        assert [sums.unsafe_buffer_pointer(), received.unsafe_buffer_pointer()] == [total.address, come.address]
        assert sums.dtype == received.dtype == dtype
        # The memory is kept by what JAX has of it.
        del total, come
        gc.collect()
        assert (received == own - rank + peer).all() and (sums == own + received).all(), name


@as_ranks(1, device="host")
def test_arrays_are_waited_for(comm):
    import jax.numpy as jnp

    stream, one = comm.create_stream(), jnp.eye(512)
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, x: x @ one, x))
    slow(one).block_until_ready()
    region = comm.alloc(one.nbytes)
    for turn in range(3):
        # JAX returns before this is computed.
        stream.copy(region, slow(turn * one))
        stream.synchronize()
        assert (jax.dlpack.from_dlpack(region.view([512, 512], "f32")) == turn * one).all()


@as_ranks(2, device="host")
def test_arrays_are_inputs_of_matmuls(comm, rank, world):
    import jax.numpy as jnp

    stream = comm.create_stream()
    a, b = comm.alloc(8 * 16 * 4).view([8, 16], "f32"), jnp.ones((16, 4))
    stream.copy(a, jnp.full((8, 16), rank + 1.0))
    c = comm.alloc(world * 8 * 4 * 4).view([world * 8, 4], "f32")
    plan = comm.executor().all_gather_matmul(a, [b], [c])
    for factor in (1, 2):
        # Other inputs for a run, where the plan takes them.
        plan.run(stream, {"B[0]": factor * b})
        stream.synchronize()
        rows = jnp.repeat(jnp.arange(1.0, world + 1), 8)[:, None]
        assert (jax.dlpack.from_dlpack(c) == 16 * factor * rows).all()
        comm.barrier()
    with pytest.raises(ValueError, match=r"write the target: the array is read-only"):
        comm.executor().all_gather_matmul(a, [b], [jnp.zeros((world * 8, 4))])


@as_ranks(1, device="host")
def test_arrays_are_sources_only(comm):
    import jax.numpy as jnp

    stream, collectives = comm.create_stream(), comm.collectives()
    fixed, region = jnp.arange(16.0), comm.alloc(64)
    changed = region.view([16], "f32")

    def refused(call, *arguments):
        with pytest.raises(ValueError, match="the array is read-only"):
            call(*arguments)

    # Memory that is named, and views of it, are as the array is.
    memory = comm.borrow(fixed)
    for array in (fixed, memory, memory.view([16], "f32")):
        refused(stream.copy, array, region)
        refused(stream.fill, array, 1)
        refused(comm.register, array)
        refused(collectives.all_reduce, stream, array, changed)
        refused(collectives.send_receive, stream, [(0, changed)], [(0, array)])
        stream.copy(changed, array)
    stream.synchronize()
    assert (fixed == jnp.arange(16)).all() and (jax.dlpack.from_dlpack(changed) == fixed).all()

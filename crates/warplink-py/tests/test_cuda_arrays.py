"""Arrays of other libraries on GPUs, in and out without copies and in the order of their streams."""

import os

import pytest

torch = pytest.importorskip("torch")

from conftest import as_ranks, run_ranks  # noqa: E402
from gpus import gpu, needs_gpus  # noqa: E402

WORLD = 2

pytestmark = needs_gpus(WORLD)


@as_ranks(WORLD)
def test_tensors_go_in_and_out_in_place(rank, world, meeting):
    import warplink

    torch.cuda.set_device(gpu(rank))
    with warplink.Job.join(rank, world, meeting, device="cuda", ordinal=gpu(rank)) as job:
        comm = job.world()
        own = torch.full((1 << 16,), float(rank), device="cuda")
        received = torch.empty_like(own)
        current = torch.cuda.current_stream()
        stream = comm.borrow_stream(current.cuda_stream, current)
        regions = [comm.register(tensor, stream) for tensor in (own, received)]
        assert regions[0].address == own.data_ptr()
        transfers = comm.exchange(
            [warplink.Send(regions[0], 1 - rank), warplink.Receive(regions[1], 1 - rank)]
        )
        for turn in range(5):
            own.fill_(10 * turn + rank)
            warplink.post_all(transfers, stream)
            warplink.wait_all(transfers, stream)
            # In stream order, without a wait on the host.
            assert (received == 10 * turn + 1 - rank).all()
            comm.barrier()
        view = comm.alloc(64).view([16], "f32")
        tensor = torch.from_dlpack(view)
        assert (tensor.data_ptr(), tensor.device.index) == (view.address, gpu(rank))
        with pytest.raises(ValueError, match="the processor's memory"):
            comm.register(torch.ones(4))


@as_ranks(WORLD)
def test_messages_and_experts_on_the_current_stream(rank, world, meeting):
    import warplink

    torch.cuda.set_device(gpu(rank))
    with warplink.Job.join(rank, world, meeting, device="cuda", ordinal=gpu(rank)) as job:
        comm = job.world()
        collectives = comm.collectives()
        side = torch.cuda.Stream()
        stream = comm.borrow_stream(side.cuda_stream, side)
        layer = collectives.experts(experts=world, top_k=1, max_tokens=64, elements=256, dtype="bf16")
        dispatched = layer.allocate()
        counts = torch.from_dlpack(dispatched.counts)
        generator = torch.Generator(device="cuda").manual_seed(rank)
        with torch.cuda.stream(side):
            for turn in range(10):
                # All in stream order: what was written before, and what is read behind.
                own = torch.full((100_000 + turn,), 10.0 * turn + rank, device="cuda")
                come = torch.empty_like(own)
                collectives.send_receive(stream, [(1 - rank, own)], [(1 - rank, come)])
                parts, sizes = [1000, 3000], [[1000, 3000][rank]] * world
                gathered = torch.empty(sum(sizes), device="cuda")
                collectives.all_to_all_v(stream, gathered, own[: sum(parts)].clone(), sizes, parts)
                tokens = torch.randn(64, 256, device="cuda", generator=generator).bfloat16()
                experts = torch.randint(0, world, (64, 1), device="cuda", generator=generator).int()
                weights = torch.full((64, 1), 2.0, device="cuda")
                target = torch.empty_like(tokens)
                layer.dispatch(stream, dispatched, tokens, experts)
                layer.combine(stream, target, dispatched, weights)
                assert (come == 10 * turn + 1 - rank).all()
                rows = gathered.view(world, -1).mean(1).round().tolist()
                assert rows == [10.0 * turn + peer for peer in range(world)]
                assert torch.equal(target, 2 * tokens) and counts[rank] == (experts == rank).sum()
        comm.barrier()


def cupy_streams(rank, world, meeting):
    import cupy
    import warplink

    cupy.cuda.Device(gpu(rank)).use()
    with warplink.Job.join(rank, world, meeting, device="cuda", ordinal=gpu(rank)) as job:
        comm, peer = job.world(), 1 - rank
        collectives, side = comm.collectives(), cupy.cuda.Stream(non_blocking=True)
        view = comm.alloc(64).view([16], "f32")
        assert cupy.from_dlpack(view).data.ptr == view.address
        large, own, come = (cupy.empty(count, "u1") for count in (1 << 29, 1 << 20, 1 << 20))
        assert comm.borrow(own).address == own.data.ptr
        done = cupy.cuda.Event(disable_timing=True)
        # CuPy's current stream itself, and one that CuPy has wait for it when it is asked for an array.
        for stream in (comm.borrow_stream(side.ptr, side), comm.create_stream()):
            found = []
            with side:
                for turn in range(10):
                    # Without kernels that CuPy would compile. What takes long is before the rest.
                    for _ in range(40):
                        large.data.memset_async(turn, large.nbytes)
                    own.data.memset_async(10 * turn + rank, own.nbytes)
                    collectives.send_receive(stream, [(peer, own)], [(peer, come)])
                    cupy.cuda.runtime.eventRecord(done.ptr, stream.raw)
                    side.wait_event(done)
                    found.append(cupy.empty_like(come))
                    found[-1].data.copy_from_device_async(come.data, come.nbytes)
                    come.data.memset_async(255, come.nbytes)
                    # The first call makes memory known to the peer.
                    assert turn == 0 or not side.done, "a call waited for the stream"
            side.synchronize()
            for turn, received in enumerate(found):
                assert (received.get() == 10 * turn + peer).all(), turn
        comm.barrier()


def test_cupys_current_stream_orders_its_arrays():
    pytest.importorskip("cupy")
    run_ranks(cupy_streams, WORLD)


def jax_arrays(rank, world, meeting):
    # Ranks may share the GPU, of which JAX would take most.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp
    import warplink

    with (
        jax.default_device(jax.devices("gpu")[gpu(rank)]),
        warplink.Job.join(rank, world, meeting, device="cuda", ordinal=gpu(rank)) as job,
    ):
        comm, peer = job.world(), 1 - rank
        collectives, stream, one = comm.collectives(), comm.create_stream(), jnp.eye(2048)
        slow = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, x: x @ one, x))
        come = comm.alloc(one.nbytes).view([2048, 2048], "f32")
        for turn in range(5):
            # JAX has no current stream: ours waits for what computes the array.
            own = slow((10 * turn + rank) * one)
            collectives.send_receive(stream, [(peer, own)], [(peer, come)])
            # The first call loads code, and waits for the GPU.
            assert turn == 0 or not own.is_ready(), "a call waited for the array"
            assert comm.borrow(own).address == own.unsafe_buffer_pointer()
            stream.synchronize()
            received = jax.dlpack.from_dlpack(come)
            assert received.unsafe_buffer_pointer() == come.address
            assert (received == (10 * turn + peer) * one).all(), turn
            for stale in (own, comm.borrow(own)):
                with pytest.raises(ValueError, match="the array is read-only"):
                    stream.copy(stale, come)
        comm.barrier()


def test_arrays_of_jax_are_waited_for_and_never_written():
    pytest.importorskip("jax")
    run_ranks(jax_arrays, WORLD)

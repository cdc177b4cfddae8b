"""Channels, with kernels of the caller's: Python functions on the host device, CUDA C++ on GPUs."""

import ctypes
import os

import numpy
import pytest
from conftest import Stopwatch, as_ranks, join, meet

import warplink


#: What `exchange` below does, for GPUs, by one block.
EXCHANGE = r"""
#include <warplink/device.cuh>

extern "C" __global__ void exchange(
    warplink::Channel channel, unsigned long long bytes, unsigned turns, float *total) {
    const warplink::Block block;
    float *own = (float *)channel.here(0, bytes);
    const float *received = (const float *)channel.here(bytes, bytes);
    for (unsigned turn = 0; turn < turns; turn++) {
        for (unsigned long long i = threadIdx.x; i < bytes / 4; i += blockDim.x)
            own[i] = 10.0f * turn + channel.peer;
        if (channel.put_with_signal(block, bytes, 0, bytes) != warplink::Status::ok) return;
        if (channel.wait(block) != warplink::Status::ok) return;
        for (unsigned long long i = threadIdx.x; i < bytes / 4; i += blockDim.x)
            total[i] += received[i];
        // The peer's may be overwritten when it has read.
        if (channel.signal(block) != warplink::Status::ok) return;
        if (channel.wait(block) != warplink::Status::ok) return;
    }
}
"""


def exchange(block):
    """Puts the first half of the region to the peer's second half, and adds up what arrives."""
    channel, nbytes, turns, total = block.channel(0), block.integer(1), block.integer(2), block.memory(3)
    own = numpy.asarray(channel.here(0, nbytes).view([nbytes // 4], "f32"))
    received = numpy.asarray(channel.here(nbytes, nbytes).view([nbytes // 4], "f32"))
    total = numpy.asarray(total.view([nbytes // 4], "f32"))
    for turn in range(turns):
        own[:] = 10 * turn + channel.peer()
        channel.put_with_signal(nbytes, 0, nbytes)
        channel.wait()
        total += received
        # The peer's may be overwritten when it has read.
        channel.signal()
        channel.wait()


@pytest.mark.parametrize("transport", ["direct", "proxied"])
@as_ranks(2)
def test_kernels_exchange_by_a_channel(comm, rank, transport):
    peer, nbytes, turns = 1 - rank, 4096, 20
    region, total = comm.alloc(2 * nbytes), comm.alloc(nbytes)
    total.upload(bytes(nbytes))
    module = comm.load_module("exchange", cuda=EXCHANGE, host={"exchange": exchange})
    kernel, stream = module.kernel("exchange"), comm.create_stream()
    connections = comm.connect([warplink.Connect(region, peer, tag=3, transport=transport)])
    (connection,) = connections
    assert (connection.peer, connection.tag, connection.transport) == (peer, 3, transport)
    assert connection.peer_nbytes == 2 * nbytes and len(connections) == 1
    assert connections.find(peer, 3).peer == peer
    for _ in range(2):
        kernel.launch(stream, [connection, nbytes, ctypes.c_uint32(turns), total], threads=128)
    stream.synchronize()
    # Each puts the number of the other's peer: its own.
    expected = 2 * sum(10 * turn + rank for turn in range(turns))
    assert (numpy.frombuffer(total.download(), numpy.float32) == expected).all()
    # The host writes to the peer's region, and reads it.
    written, read = comm.alloc(64), comm.alloc(64)
    written.upload(bytes([rank + 1]) * 64)
    connection.write(stream, written, offset=64)
    stream.synchronize()
    comm.barrier()
    assert region.download()[64:128] == bytes([peer + 1]) * 64
    connection.read(stream, read, offset=64)
    stream.synchronize()
    assert read.download() == bytes([rank + 1]) * 64
    comm.barrier()


def gather(block):
    """Every rank's part to all others by packets and by puts, a part for each block."""
    channels, part, flag = block.channels(0), block.integer(1), block.integer(2)
    at = part * block.index
    whole = part * block.blocks
    for channel in channels:
        channel.put_packets(whole * 4 + 2 * at, at, part, flag)
    for place, channel in enumerate(channels):
        channel.read_packets(whole * (1 + place) + at, whole * 4 + 2 * at, part, flag)
    assert block.threads == 32


@as_ranks(3, device="host")
def test_several_channels_and_blocks(comm, rank, world):
    blocks, part = 2, 256
    whole = blocks * part
    regions = {
        peer: comm.alloc(6 * whole) for peer in range(world) if peer != rank
    }
    for region in regions.values():
        region.upload(bytes([rank + 1]) * whole + bytes(5 * whole))
    connections = comm.connect([warplink.Connect(region, peer) for peer, region in regions.items()])
    module = comm.load_module("gather", host={"gather": gather})
    stream = comm.create_stream()
    arguments = [connections, numpy.uint64(part), numpy.uint32(7)]
    module.kernel("gather").launch(stream, arguments, blocks=blocks, threads=32)
    stream.synchronize()
    for place, (peer, region) in enumerate(regions.items()):
        got = region.download()[whole * (1 + place) : whole * (2 + place)]
        assert got == bytes([peer + 1]) * whole, (rank, peer)
    comm.barrier()


def wrong(block):
    number = block.integer(0)
    if number == -1:
        kept.append(number)
        return
    if number == 0:
        raise KeyError("nothing here")
    if number == 1:
        block.channel(0)
    kept.append(block)


kept = []


@as_ranks(1, device="host")
def test_wrong_use_of_kernels(comm, rank):
    with pytest.raises(TypeError, match="the host kernel mine is not callable"):
        comm.load_module("wrong", host={"mine": 3})
    for image in (b"nonsense", b"\x7fELF\x02\x01", b""):
        with pytest.raises(ValueError, match="load 'wrong': .*expected a whole cubin, a whole fat binary, or PTX"):
            comm.load_module("wrong", image=image)
    with pytest.raises(NotImplementedError, match="host"):
        comm.load_module("wrong", cuda="extern \"C\" __global__ void f() {}").kernel("f").launch(
            comm.create_stream(), []
        )
    module = comm.load_module("wrong", host={"wrong": wrong})
    with pytest.raises(ValueError, match="unknown kernel 'right'; expected wrong"):
        module.kernel("right")
    kernel, stream = module.kernel("wrong"), comm.create_stream()
    with pytest.raises(ValueError, match="0 blocks"):
        kernel.launch(stream, [0], blocks=0)
    with pytest.raises(TypeError, match="numpy.int16 cannot be a kernel argument"):
        kernel.launch(stream, [numpy.int16(1)])
    with pytest.raises(ValueError, match="unknown transport 'carrier'"):
        warplink.Connect(comm.alloc(8), rank, transport="carrier")
    with pytest.raises(ValueError, match="for the proxied transport; expected network"):
        warplink.Connect(comm.alloc(8), rank, transport="proxied", network_devices="eth0")
    for transport in (None, "network"):
        warplink.Connect(comm.alloc(8), rank, transport=transport, network_devices="eth0")
    kernel.launch(stream, [2])
    stream.synchronize()
    with pytest.raises(ValueError, match="the block does not run on this thread"):
        kept[0].integer(0)
    kernel.launch(stream, [numpy.int64(-1)])
    stream.synchronize()
    assert kept[1:] == [-1]


@pytest.mark.parametrize(
    "number, says",
    [(0, "the function of a host kernel raised KeyError: 'nothing here'"), (1, "expected a channel")],
)
@as_ranks(1)
def test_what_a_function_raises_fails_the_stream(rank, world, meeting, number, says):
    job = join(rank, world, meeting, device="host")
    comm = job.world()
    stream = comm.create_stream()
    comm.load_module("wrong", host={"wrong": wrong}).kernel("wrong").launch(stream, [number])
    with pytest.raises(ValueError, match=says):
        stream.synchronize()
    job.abort("the test is done")


def waiting(block):
    block.channel(0).wait()


@as_ranks(2, dies=(1,))
def test_a_kernel_that_waits_for_a_lost_peer_ends(rank, world, meeting, place):
    job = join(rank, world, meeting, device="host")
    comm = job.world()
    (connection,) = comm.connect([warplink.Connect(comm.alloc(64), 1 - rank)])
    comm.barrier()
    if rank == 1:
        meet(place, "launched", rank, range(2))
        os._exit(1)
    stream = comm.create_stream()
    module = comm.load_module("waiting", host={"waiting": waiting})
    module.kernel("waiting").launch(stream, [connection])
    meet(place, "launched", rank, range(2))
    watch = Stopwatch()
    with pytest.raises(warplink.errors.PeerLostError) as caught:
        stream.synchronize()
    assert caught.value.peer == 1 and watch.elapsed() < 5
    job.abort("the test is done")

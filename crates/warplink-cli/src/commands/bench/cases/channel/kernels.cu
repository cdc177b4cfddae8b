// The kernels of `warplink bench channel`; closures for the host device are in kernels.rs.

#include <warplink/device.cuh>

using warplink::At;
using warplink::Block;
using warplink::Channel;
using warplink::Grid;
using warplink::Status;
using warplink::Thread;
using warplink::u32;
using warplink::u64;

// Every region begins with words of the benchmark's own.
static constexpr u64 data = 256;

// Signals back and forth.
extern "C" __global__ void signals(Channel channel, u32 rank, u32 rounds, u64) {
    for (u32 round = 0; round < rounds; round++) {
        if (rank == 0 && channel.signal(Thread()) != Status::ok) return;
        if (channel.wait(Thread()) != Status::ok) return;
        if (rank != 0 && channel.signal(Thread()) != Status::ok) return;
    }
}

// The same by a plain store and a plain loop, which nothing can end: what the hardware gives.
extern "C" __global__ void words(Channel channel, u32 rank, u32 rounds, u64) {
    const u64 own = channel.here(0, 16), peers = channel.there(0, 16);
    // How far earlier launches counted.
    u64 *counted = (u64 *)(own + 8);
    u64 count = *counted;
    for (u32 round = 0; round < rounds; round++) {
        count++;
        u64 seen;
        if (rank == 0) asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(peers), "l"(count) : "memory");
        do asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(own) : "memory");
        while (seen < count);
        if (rank != 0) asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(peers), "l"(count) : "memory");
    }
    *counted = count;
}

// Puts with a signal, back and forth.
extern "C" __global__ void puts(Channel channel, u32 rank, u32 rounds, u64 bytes) {
    const Block block;
    for (u32 round = 0; round < rounds; round++) {
        if (rank == 0 && channel.put_with_signal(block, data + bytes, data, bytes) != Status::ok) return;
        if (channel.wait(block) != Status::ok) return;
        if (rank != 0 && channel.put_with_signal(block, data + bytes, data, bytes) != Status::ok) return;
    }
}

// Packets back and forth.
extern "C" __global__ void packets(Channel channel, u32 rank, u32 rounds, u64 bytes) {
    const Block block;
    u32 *counted = (u32 *)channel.here(16, 4);
    u32 flag = *counted;
    const u64 arrived = data + bytes, packed = data + 2 * bytes;
    for (u32 round = 0; round < rounds; round++) {
        flag++;
        if (rank == 0) channel.put_packets16(block, packed, data, bytes, flag);
        if (channel.read_packets16(block, arrived, packed, bytes, flag) != Status::ok) return;
        if (rank != 0) channel.put_packets16(block, packed, data, bytes, flag);
    }
    if (threadIdx.x == 0) *counted = flag;
}

// One put by all blocks; `rounds` is not used.
extern "C" __global__ void put_once(Channel channel, u32, u32, u64 bytes) { channel.put(Grid(), data, data, bytes); }

// The same by a plain loop over 16-byte loads and stores.
extern "C" __global__ void copy_once(Channel channel, u32, u32, u64 bytes) {
    const uint4 *from = (const uint4 *)channel.here(data, bytes);
    uint4 *to = (uint4 *)channel.there(data, bytes);
    const u64 stride = (u64)gridDim.x * blockDim.x, count = bytes / 16;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < count; i += 4 * stride) {
        const uint4 a = from[i], b = from[i + stride], c = from[i + 2 * stride], d = from[i + 3 * stride];
        to[i] = a, to[i + stride] = b, to[i + 2 * stride] = c, to[i + 3 * stride] = d;
    }
    for (; i < count; i += stride) to[i] = from[i];
}

// Proxied puts, one after another, until all are done.
extern "C" __global__ void put_and_flush(Channel channel, u32, u32 rounds, u64 bytes) {
    for (u32 round = 0; round < rounds; round++) channel.put(Thread(), data, data, bytes);
    channel.flush(Thread());
}

// Triggers of every block, as fast as the proxy reads them.
extern "C" __global__ void triggers(Channel channel, u32, u32 rounds, u64) {
    for (u32 round = 0; round < rounds; round++)
        if (channel.signal(Thread()) != Status::ok) return;
    channel.flush(Thread());
}

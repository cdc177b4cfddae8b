// Kernels in which groups of threads use one channel at the same time; their closures for the host device are in
// group_closures.rs, and what they leave in memory is checked by groups.rs.

#include <warplink/device.cuh>

using warplink::Block;
using warplink::Channel;
using warplink::Grid;
using warplink::Status;
using warplink::Thread;
using warplink::u32;
using warplink::u64;
using warplink::Warp;

// Must match groups.rs.
constexpr unsigned char spoilt = 0x5a;
constexpr u32 read_by_peer = 1u << 16;

// Byte `i` of piece `piece` of what is sent with `seed`.
static __device__ unsigned char byte_at(u32 seed, u32 piece, u64 i) {
    u32 x = seed * 2654435761u + piece * 2246822519u + (u32)i * 3266489917u;
    x ^= x >> 15;
    return (unsigned char)(x * 2654435761u >> 24);
}

// Where piece `at` lies in the areas that it is sent from and arrives in, which have `slot` bytes for each: at any
// distance from multiples of 16, at the same, and at one that multiples of 4 share.
struct Piece {
    u64 target, source, bytes;
    __device__ Piece(u32 at, u32 variant, u64 slot) {
        const u32 kind = at % 3;
        const u32 first = kind == 0 ? (5 * at + variant) % 16 : kind == 1 ? (7 * at + 1) % 16 : 4 * (at % 4);
        const u32 second = kind == 0 ? first : kind == 1 ? (3 * at + variant) % 16 : 4 * ((at / 4 + 1) % 4);
        target = at * slot + 16 + first;
        source = at * slot + 16 + second;
        bytes = 1 + ((u64)at * 30011 + (u64)variant * 7919 + 12345) % (slot - 64);
    }
};

// The same for packets, of data that comes in units, and of more than `least` bytes.
struct PacketPiece {
    u64 target, source, bytes;
    __device__ PacketPiece(u32 at, u32 variant, u64 slot, u64 unit, u64 least) {
        target = at * slot + unit * (1 + (at + variant) % 7);
        source = at * slot + unit * (1 + at % 5);
        bytes = least + unit * (1 + ((u64)at * 30011 + (u64)variant * 7919 + 12345) % ((slot - least) / unit - 16));
    }
};

// By other threads than those that copy it.
template <typename Group> static __device__ void fill(Group group, u64 to, u64 bytes, u32 seed, u32 piece) {
    for (u64 i = group.rank(); i < bytes; i += group.size())
        ((unsigned char *)to)[bytes - 1 - i] = byte_at(seed, piece, bytes - 1 - i);
}

template <typename Group> static __device__ u32 differences(Group group, u64 at, u64 bytes, u32 seed, u32 piece) {
    u32 wrong = 0;
    for (u64 i = group.rank(); i < bytes; i += group.size())
        wrong += ((unsigned char *)at)[bytes - 1 - i] != byte_at(seed, piece, bytes - 1 - i);
    return wrong;
}

static __device__ void note(u32 *result, u32 wrong, Status status) {
    if (wrong != 0) atomicAdd(&result[0], wrong);
    if (status != Status::ok) result[1] = (u32)status;
}

// Ends the kernel where a call failed.
#define CHECK(call)                                           \
    do {                                                      \
        const Status made = (call);                           \
        if (made != Status::ok) return note(result, 0, made); \
    } while (false)

// Every group puts a piece each round, in each of the ways, and takes one of the peer's signals for it. When all have
// come, each checks what another group was sent, and gets what lies at the peer. Four areas follow one another: what is
// put, what arrives, what the peer gets and what is got.
template <typename Group>
static __device__ void pieces(
    Group group, const Channel &channel, u64 slot, u32 rounds, u32 variant, u32 rank, u64 before, u32 *result) {
    const u32 groups = gridDim.x * blockDim.x / group.size();
    const u32 number = (blockIdx.x * blockDim.x + threadIdx.x) / group.size();
    const u32 own = 2 * variant + rank, peers = 2 * variant + 1 - rank;
    const u64 area = slot * groups * rounds;
    for (u32 round = 0; round < rounds; round++) {
        const u32 at = round * groups + number, manner = (round + number) % 3;
        const Piece piece(at, variant, slot);
        const u64 target = area + piece.target;
        fill(group, channel.here(piece.source, piece.bytes), piece.bytes, own, at);
        if (manner == 0) {
            CHECK(channel.put(group, target, piece.source, piece.bytes));
            CHECK(channel.signal(group));
        } else if (manner == 1) {
            CHECK(channel.put_with_signal(group, target, piece.source, piece.bytes));
            CHECK(channel.flush(group));
        } else {
            CHECK(channel.put_with_signal_and_flush(group, target, piece.source, piece.bytes));
        }
        if (manner != 0)
            for (u64 i = group.rank(); i < piece.bytes; i += group.size())
                ((unsigned char *)channel.here(piece.source, piece.bytes))[i] = spoilt;
        bool arrived = false;
        if (round % 2 == 0) CHECK(channel.wait(group));
        while (round % 2 == 1 && !arrived) CHECK(channel.poll(group, arrived));
    }
    CHECK(channel.wait_until(group, before + (u64)groups * rounds));
    u32 wrong = 0;
    for (u32 round = 0; round < rounds; round++) {
        const u32 at = round * groups + (number + 1) % groups;
        const Piece piece(at, variant, slot);
        wrong += differences(group, channel.here(area + piece.target, piece.bytes), piece.bytes, peers, at);
    }
    for (u32 round = 0; round < rounds; round++) {
        const Piece piece(round * groups + number, variant, slot);
        CHECK(channel.get(group, 3 * area + piece.target, 2 * area + piece.source, piece.bytes));
    }
    CHECK(channel.flush(group));
    for (u32 round = 0; round < rounds; round++) {
        const u32 at = round * groups + number;
        const Piece piece(at, variant, slot);
        wrong += differences(group, channel.here(3 * area + piece.target, piece.bytes), piece.bytes, peers, at | read_by_peer);
    }
    note(result, wrong, Status::ok);
}

extern "C" __global__ void pieces_by_threads(
    Channel channel, u64 slot, u32 rounds, u32 variant, u32 rank, u64 before, u32 *result) {
    pieces(Thread(), channel, slot, rounds, variant, rank, before, result);
}

extern "C" __global__ void pieces_by_warps(
    Channel channel, u64 slot, u32 rounds, u32 variant, u32 rank, u64 before, u32 *result) {
    pieces(Warp(), channel, slot, rounds, variant, rank, before, result);
}

extern "C" __global__ void pieces_by_blocks(
    Channel channel, u64 slot, u32 rounds, u32 variant, u32 rank, u64 before, u32 *result) {
    pieces(Block(), channel, slot, rounds, variant, rank, before, result);
}

// All threads of the grid put and get each piece together, of sources that the host stored. A grid cannot signal: each
// of its blocks says that it has put its part.
extern "C" __global__ void pieces_by_grid(
    Channel channel, u64 slot, u32 rounds, u32 variant, u32 rank, u64 before, u32 *result) {
    const Grid grid;
    const u32 peers = 2 * variant + 1 - rank;
    const u64 area = slot * rounds;
    for (u32 at = 0; at < rounds; at++) {
        const Piece piece(at, variant, slot);
        CHECK(channel.put(grid, area + piece.target, piece.source, piece.bytes));
        CHECK(channel.get(grid, 3 * area + piece.target, 2 * area + piece.source, piece.bytes));
        CHECK(channel.signal(Block()));
    }
    CHECK(channel.wait_until(Block(), before + (u64)gridDim.x * rounds));
    u32 wrong = 0;
    for (u32 at = 0; at < rounds; at++) {
        const Piece piece(at, variant, slot);
        wrong += differences(grid, channel.here(area + piece.target, piece.bytes), piece.bytes, peers, at);
    }
    note(result, wrong, Status::ok);
}

// Packets of one kind, put to where the peer reads them, and the peer's read. Behind what is sent and what was read,
// `packed` is where packets come to.
template <typename Group>
static __device__ Status exchange(
    Group group, const Channel &channel, const PacketPiece &piece, u32 kind, u64 area, u64 packed, u32 at, u32 flag) {
    const u64 target = area + piece.target, lines = packed + at % 2 * (kind == 0 ? 8 : kind == 1 ? 16 : 128);
    const u64 long_flag = (u64)flag << 32 | flag;
    Status status;
    if (kind == 0) {
        status = channel.put_packets8(group, lines, piece.source, piece.bytes, flag);
        return status != Status::ok ? status : channel.read_packets8(group, target, lines, piece.bytes, flag);
    }
    if (kind == 1) {
        status = channel.put_packets16(group, lines, piece.source, piece.bytes, flag);
        return status != Status::ok ? status : channel.read_packets16(group, target, lines, piece.bytes, flag);
    }
    status = channel.put_packets128(group, lines, piece.source, piece.bytes, long_flag);
    return status != Status::ok ? status : channel.read_packets128(group, target, lines, piece.bytes, long_flag);
}

// Every warp with one of the peer's, of each kind in turn. Who has read the packets of a round knows that its own of the
// round before were read, so two places of each kind are enough.
extern "C" __global__ void packets_by_warps(
    Channel channel, u64 slot, u32 rounds, u32 variant, u32 rank, u64 before, u32 *result) {
    const Warp warp;
    const u32 groups = gridDim.x * blockDim.x / 32, number = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const u64 area = slot * groups * rounds, room = 2 * slot + 128;
    u32 wrong = 0;
    for (u32 round = 0; round < rounds; round++) {
        const u32 at = round * groups + number, kind = round % 3;
        const u64 packed = 2 * area + (number * 6 + kind * 2 + round / 3 % 2) * room;
        const PacketPiece piece(at, variant, slot, kind == 0 ? 4 : 8, 0);
        CHECK(exchange(warp, channel, piece, kind, area, packed, at, variant * rounds + round + 1));
        wrong += differences(warp, channel.here(area + piece.target, piece.bytes), piece.bytes, 2 * variant + 1 - rank, at);
    }
    note(result, wrong, Status::ok);
}

// The same by the whole grid, whose blocks say when they have read their parts. Each has one: what the blocks of the peer
// have said together then tells that all of them were there.
extern "C" __global__ void packets_by_grid(
    Channel channel, u64 slot, u32 rounds, u32 variant, u32 rank, u64 before, u32 *result) {
    const u64 area = slot * rounds, room = 2 * slot + 128;
    for (u32 round = 0; round < rounds; round++) {
        const u32 kind = round % 3;
        const u64 packed = 2 * area + (kind * 2 + round / 3 % 2) * room;
        const PacketPiece piece(round, variant, slot, kind == 0 ? 4 : 8, slot / 2);
        CHECK(exchange(Grid(), channel, piece, kind, area, packed, round, variant * rounds + round + 1));
        CHECK(channel.signal(Block()));
        CHECK(channel.wait_until(Block(), before + (u64)gridDim.x * (round + 1)));
    }
}

// Barriers of all ranks, of every warp on channels of its own, with a value that each writes to each before.
extern "C" __global__ void barriers_by_warps(const Channel *channels, u32 count, u32 rank, u32 rounds, u32 *result) {
    const Warp warp;
    const u32 number = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const Channel *own = channels + number * count;
    u32 wrong = 0;
    for (u32 round = 0; round < rounds; round++) {
        const u64 value = (u64)(round + 1) << 8 | number;
        Status put = Status::ok;
        for (u32 i = warp.rank(); i < count && put == Status::ok; i += warp.size()) {
            *(u64 *)own[i].here(0, 8) = value;
            put = own[i].put(Thread(), 8 + 8 * rank, 0, 8);
        }
        note(result, 0, put);
        CHECK(warplink::barrier(warp, own, count));
        for (u32 i = warp.rank(); i < count; i += warp.size())
            wrong += *(volatile u64 *)own[i].here(8 + 8 * own[i].peer, 8) != value;
        CHECK(warplink::barrier(warp, own, count));
    }
    note(result, wrong, Status::ok);
}

// Calls that a kind of channel, or a group, does not have, by blocks of a warp and a half.
extern "C" __global__ void unsupported_calls(Channel channel, u32 *result) {
    const Block block;
    const Grid grid;
    const Thread thread;
    u32 made = 0;
    if (channel.proxied) {
        made += channel.put(grid, 0, 0, 8) != Status::unsupported;
        made += channel.get(grid, 0, 0, 8) != Status::unsupported;
        made += channel.put_packets8(block, 0, 0, 8, 1) != Status::unsupported;
        made += channel.put_packets16(block, 0, 0, 8, 1) != Status::unsupported;
        made += channel.put_packets128(block, 0, 0, 8, 1) != Status::unsupported;
    } else {
        made += channel.put_packets128(thread, 0, 0, 8, 1) != Status::unsupported;
        made += channel.put_packets128(block, 0, 0, 8, 1) != Status::unsupported;
        made += channel.put_packets128(grid, 0, 0, 8, 1) != Status::unsupported;
        made += channel.read_packets128(thread, 0, 0, 8, 1) != Status::unsupported;
        made += channel.read_packets128(block, 0, 0, 8, 1) != Status::unsupported;
        made += channel.read_packets128(grid, 0, 0, 8, 1) != Status::unsupported;
    }
    note(result, made, Status::ok);
}

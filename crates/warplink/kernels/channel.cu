// Instantiates every call of warplink/device.cuh with every group, so that all of them are compiled for every
// architecture.

#include <warplink/device.cuh>

using namespace warplink;

template <typename Group>
static __device__ Status calls(const Channel &channel, Group group, u64 bytes, u32 flag) {
    u32 failed = 0;
    const auto note = [&](Status status) { failed |= (u32)status; };
    note(channel.put(group, At(1, 64), 0, bytes));
    note(channel.get(group, 0, At(1, 64), bytes));
    note(channel.put_packets8(group, 0, 0, bytes, flag));
    note(channel.read_packets8(group, 0, 0, bytes, flag));
    note(channel.put_packets16(group, 0, 0, bytes, flag));
    note(channel.read_packets16(group, 0, 0, bytes, flag));
    note(channel.put_packets128(group, 0, 0, bytes, flag));
    note(channel.read_packets128(group, 0, 0, bytes, flag));
    if constexpr (Group::synchronizes) {
        bool arrived;
        note(channel.signal(group));
        note(channel.put_with_signal(group, 0, 0, bytes));
        note(channel.put_with_signal_and_flush(group, 0, 0, bytes));
        note(channel.flush(group));
        note(channel.wait(group));
        note(channel.wait_until(group, channel.epoch()));
        note(channel.poll(group, arrived));
        note(barrier(group, &channel, 1));
    }
    return (Status)failed;
}

// The same for signals without a connection.
template <typename Group>
static __device__ Status waits(const Signals &own, const RemoteSignals &peers, Group group, u32 number) {
    bool arrived;
    peers.add(group, number);
    const Status first = own.wait(group, number), second = own.poll(group, number, arrived);
    const Status third = own.wait_until(group, number, own.epoch(number));
    return (Status)((u32)first | (u32)second | (u32)third);
}

extern "C" __global__ void warplink_channel_calls(
    const __grid_constant__ Channel channel, u32 *status, u64 bytes, u32 flag) {
    u32 failed = (u32)calls(channel, Grid(), bytes, flag) | (u32)calls(channel, Block(), bytes, flag);
    failed |= (u32)calls(channel, Warp(), bytes, flag) | (u32)calls(channel, Thread(), bytes, flag);
    if (failed != 0) *status = failed;
}

extern "C" __global__ void warplink_signal_calls(Signals own, RemoteSignals peers, u32 *status, u32 number) {
    u32 failed = (u32)waits(own, peers, Block(), number) | (u32)waits(own, peers, Warp(), number);
    failed |= (u32)waits(own, peers, Thread(), number);
    if (failed != 0) *status = failed;
}

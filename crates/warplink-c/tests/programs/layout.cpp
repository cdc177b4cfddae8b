// The structs that kernels take as arguments have the same layout in warplink.h and in warplink/device.cuh.

#include "cuda.h"

#include <warplink/device.cuh>

#include <cstddef>
#include <type_traits>
#include <warplink.h>

#define SAME(member)                                                                             \
    static_assert(offsetof(warplink::Channel, member) == offsetof(warplink_channel, member) &&   \
                      sizeof(warplink::Channel::member) == sizeof(warplink_channel::member),     \
                  #member)

static_assert(sizeof(warplink::Channel) == sizeof(warplink_channel), "size");
static_assert(alignof(warplink::Channel) == alignof(warplink_channel), "alignment");
static_assert(std::is_trivially_copyable<warplink::Channel>::value, "a kernel takes it by value");
SAME(local);
SAME(local_bytes);
SAME(remote);
SAME(remote_bytes);
SAME(inbound);
SAME(awaited);
SAME(outbound);
SAME(completed);
SAME(abort);
SAME(windows);
SAME(ring);
SAME(head);
SAME(tail);
SAME(tag);
SAME(slots);
SAME(connection);
SAME(peer);
SAME(proxied);

static_assert(offsetof(warplink::At, region) == offsetof(warplink_at, region), "region");
static_assert(offsetof(warplink::At, offset) == offsetof(warplink_at, offset), "offset");

//! Values that C passes.

use crate::handles::Region;

/// What the ranks of a job meet by: an address and the secret that admits to it. A process that holds it can
/// join, so treat it as a password. Plain bytes: hand it to the other ranks in any way.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UniqueId {
    /// Private to the library.
    pub bytes: [u8; 128],
}

/// How the bytes of a connection reach the peer; the same on both ranks.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Chosen by where the peer is: direct where its memory can be mapped, the network where it is on another
    /// machine.
    Auto = 0,
    /// The kernel itself stores to and loads from the peer's memory.
    Direct = 1,
    /// A thread of the host, the proxy, has the copy engine move the bytes when kernels ask it to.
    Proxied = 2,
    /// The proxy sends the bytes over the network (UCX), when kernels ask it to or a stream comes to a
    /// `warplink_write`, `warplink_read` or `warplink_registered_write`.
    Network = 3,
}

/// Which collective. The text behind each says what the output becomes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveKind {
    /// The reduction of all inputs.
    AllReduce = 0,
    /// All inputs, in the order of the ranks.
    AllGather = 1,
    /// This rank's part of the reduction of all inputs.
    ReduceScatter = 2,
    /// For each rank, this rank's part of its input.
    AllToAll = 3,
    /// The root's input.
    Broadcast = 4,
    /// On the root, the reduction of all inputs.
    Reduce = 5,
    /// On the root, all inputs.
    Gather = 6,
    /// This rank's part of the root's input.
    Scatter = 7,
    /// There is none: what follows in the stream waits for all ranks.
    Barrier = 8,
}

/// What ranks have of the rows of a fused collective. Where a rank owns rows, these are as many on each, in rank order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FusedKind {
    /// Every rank has all rows of everything.
    AllReduce = 0,
    /// The same, but residual, `sum` and `residual_out` are of the rows that a rank owns.
    AllReduceSharded = 1,
    /// The input is of all rows, all else of those that a rank owns.
    ReduceScatter = 2,
    /// Inputs are not added up: input, residual, `sum` and `residual_out` are of the rows that a rank owns, and the others of
    /// all rows.
    AllGather = 3,
}

/// How rows are normalised.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// They are not.
    None = 0,
    /// By the root of the mean of squares.
    Rms = 1,
    /// By mean and variance.
    Layer = 2,
}

/// How rows become F8E4M3. Scales that are computed are at least 1e-10.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// They do not.
    None = 0,
    /// Divided by one scale, which is read.
    Static = 1,
    /// Divided by a scale of each row, its largest magnitude / 448.
    PerToken = 2,
    /// The same of each 128 elements of a row.
    PerBlock = 3,
    /// The same with the next power of two from that on.
    PerBlockPowerOfTwo = 4,
}

/// The type of elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// `float`.
    F32 = 0,
    /// `double`.
    F64 = 1,
    /// Half precision.
    F16 = 2,
    /// bfloat16.
    Bf16 = 3,
    /// A float of 8 bits with 4 of exponent.
    F8e4m3 = 4,
    /// A float of 8 bits with 5 of exponent.
    F8e5m2 = 5,
    /// `int8_t`.
    I8 = 6,
    /// `uint8_t`.
    U8 = 7,
    /// `int32_t`.
    I32 = 8,
    /// `uint32_t`.
    U32 = 9,
    /// `int64_t`.
    I64 = 10,
    /// `uint64_t`.
    U64 = 11,
}

/// How inputs are reduced.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Nothing is reduced.
    None = 0,
    /// Their sum.
    Sum = 1,
    /// The largest.
    Max = 2,
    /// The smallest.
    Min = 3,
    /// Their product.
    Product = 4,
    /// Their sum, divided by how many they are; of integers, without the remainder.
    Average = 5,
    /// The sum of what they are multiplied by the call's factor; of floats.
    ScaledSum = 6,
}

/// Which way a message goes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From this rank to the peer.
    Send = 0,
    /// From the peer to this rank.
    Receive = 1,
}

/// A place in one of a connection's regions.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// 0 is the region that the connection was made with; registered buffers follow.
    pub region: u32,
    /// Bytes from its start.
    pub offset: u64,
}

/// A part of a region of this rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The region.
    pub region: Region,
    /// Bytes from its start.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A channel as kernels have it: the same bytes as `warplink::Channel` in `warplink/device.cuh`. Pass it by
/// value to a kernel that is launched by other means than `warplink_launch`. `peer` and `tag` say which connection
/// it is; its other members are private to the library.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channel {
    local: u64,
    local_bytes: u64,
    remote: u64,
    remote_bytes: u64,
    inbound: u64,
    awaited: u64,
    outbound: u64,
    completed: u64,
    abort: u64,
    windows: u64,
    ring: u64,
    head: u64,
    tail: u64,
    tag: u64,
    slots: u32,
    connection: u32,
    peer: u32,
    proxied: u32,
}

impl Transport {
    /// All of them.
    pub(crate) const ALL: [Self; 4] = [Self::Auto, Self::Direct, Self::Proxied, Self::Network];
}

impl From<At> for warplink::device::At {
    fn from(at: At) -> Self {
        (at.region, at.offset).into()
    }
}

impl From<[u64; 16]> for Channel {
    /// The library's words, of which the last two hold two members each, the first one in the low half.
    fn from(words: [u64; 16]) -> Self {
        let [
            local,
            local_bytes,
            remote,
            remote_bytes,
            inbound,
            awaited,
            outbound,
            completed,
            abort,
            windows,
            ring,
            head,
            tail,
            tag,
            fifo,
            ends,
        ] = words;
        let (low, high) = (|word: u64| word as u32, |word: u64| (word >> 32) as u32);
        Self {
            local,
            local_bytes,
            remote,
            remote_bytes,
            inbound,
            awaited,
            outbound,
            completed,
            abort,
            windows,
            ring,
            head,
            tail,
            tag,
            slots: low(fifo),
            connection: high(fifo),
            peer: low(ends),
            proxied: high(ends),
        }
    }
}

// The library gives these words, and kernels take them.
const _: () = {
    assert!(size_of::<Channel>() == 128 && align_of::<Channel>() == 8);
    assert!(std::mem::offset_of!(Channel, tag) == 104);
    assert!(std::mem::offset_of!(Channel, slots) == 112);
    assert!(std::mem::offset_of!(Channel, connection) == 116);
    assert!(std::mem::offset_of!(Channel, peer) == 120);
    assert!(std::mem::offset_of!(Channel, proxied) == 124);
    assert!(cfg!(target_endian = "little"));
};

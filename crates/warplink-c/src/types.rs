//! Values that C passes.

use crate::handles::Region;
use crate::status::{Failure, Outcome, Status};
use warplink::named::Named;
use warplink::{DType, channel, collective, device, p2p};

/// What the ranks of a job meet by: an address and the secret that admits to it. A process that holds it can
/// join, so treat it as a password. Plain bytes: hand it to the other ranks in any way.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UniqueId {
    /// Private to the library.
    pub bytes: [u8; 128],
}

/// A value of an enumeration, as the header has it.
/// cbindgen:ignore
#[derive(Clone, Copy, Debug)]
pub struct Value {
    /// Its number.
    pub number: i32,
    /// Its name, without that of the enumeration.
    pub name: &'static str,
    /// What it stands for.
    pub about: &'static str,
}

/// An enumeration of the header. Functions take its values as `int32_t`.
/// cbindgen:ignore
#[derive(Clone, Debug)]
pub struct Enumeration {
    /// Its name, as cbindgen.toml has it.
    pub name: &'static str,
    /// What it is for.
    pub about: &'static str,
    /// Its values.
    pub values: Vec<Value>,
}

impl Value {
    /// That of the library.
    pub(crate) fn of<T: Named>(value: &T) -> Self {
        Self {
            number: value.number(),
            name: value.name(),
            about: value.about(),
        }
    }
}

impl Enumeration {
    fn of<T: Named>(name: &'static str, about: &'static str, own: Option<Value>) -> Self {
        let values = own.into_iter().chain(T::ALL.iter().map(Value::of));
        Self {
            name,
            about,
            values: values.collect(),
        }
    }

    /// Those of the library's values, from which the header is made.
    pub fn all() -> Vec<Self> {
        let zero = |name, about| {
            Some(Value {
                number: 0,
                name,
                about,
            })
        };
        vec![
            Self {
                name: "Status",
                about: "What a function returns. `warplink_last_error` says more.",
                values: Status::all(),
            },
            Self::of::<channel::Transport>(
                "Transport",
                "How the bytes of a connection reach the peer; the same on both ranks.",
                zero(
                    "auto",
                    "Chosen by where the peer is: direct where its memory can be mapped, the network where it is on \
                     another machine.",
                ),
            ),
            Self::of::<collective::CollectiveKind>("CollectiveKind", "Which collective.", None),
            Self::of::<DType>("ElementType", "The type of elements.", None),
            Self::of::<device::ReduceOp>(
                "ReduceOp",
                "How inputs are reduced.",
                zero("none", "Nothing is reduced."),
            ),
            Self::of::<p2p::Direction>("Direction", "Which way a message goes.", None),
        ]
    }
}

/// The library's value for a number of the enumeration that C calls `name`.
pub(crate) fn numbered<T: Named>(number: i32, name: &str) -> Outcome<T> {
    T::numbered(number).ok_or_else(|| unknown(T::TERM, number, name))
}

/// The error of a `value` that is none of the enumeration `name`.
pub(crate) fn unknown(what: &str, value: i32, name: &str) -> Failure {
    Failure::invalid(
        format!("unknown {what} {value}; expected a {name}"),
        format!("use a value of {name}"),
    )
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

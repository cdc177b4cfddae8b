//! Types of values passed by C.

use crate::handles::Region;
use crate::status::{Failure, Outcome, Status};
use warplink::named::Named;
use warplink::{DType, channel, collective, device, p2p};

/// Rendezvous of the ranks of a job: an address and the secret that authenticates ranks. A process that holds it can
/// join, so treat it as a password. Plain bytes: distribute it to the other ranks by any means.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UniqueId {
    /// Private to the library.
    pub bytes: [u8; 128],
}

/// A value of an enumeration of the header. cbindgen:ignore
#[derive(Clone, Copy, Debug)]
pub struct Value {
    /// The number.
    pub number: i32,
    /// The name, without the name of the enumeration as prefix.
    pub name: &'static str,
    /// The documentation.
    pub about: &'static str,
}

/// An enumeration of the header. Functions take its values as `int32_t`.
/// cbindgen:ignore
#[derive(Clone, Debug)]
pub struct Enumeration {
    /// The name, as in cbindgen.toml.
    pub name: &'static str,
    /// The documentation.
    pub about: &'static str,
    /// The values.
    pub values: Vec<Value>,
}

impl Value {
    /// Converts a value of the library's enumeration.
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

    /// All enumerations of the header, generated from the library's enumerations.
    pub fn all() -> Vec<Self> {
        // Only for enumerations whose values in the library begin at 1.
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
                about: "Result of a function. `warplink_last_error` returns the details.",
                values: Status::all(),
            },
            Self::of::<channel::Transport>(
                "Transport",
                "Transport of a connection; the same on both ranks.",
                zero(
                    "auto",
                    "Selected by the peer's location: direct if its memory can be mapped, the network if it is on \
                     another machine.",
                ),
            ),
            Self::of::<collective::CollectiveKind>("CollectiveKind", "Kind of a collective.", None),
            Self::of::<DType>("ElementType", "Type of elements.", None),
            Self::of::<device::ReduceOp>(
                "ReduceOp",
                "Operator of a reduction.",
                zero("none", "No reduction."),
            ),
            Self::of::<p2p::Direction>("Direction", "Direction of a message.", None),
            Self::of::<collective::FusedKind>(
                "FusedKind",
                "Distribution of the rows of a fused collective over ranks. Where ranks own rows, each owns the same number, in rank \
                 order.",
                None,
            ),
            Self::of::<collective::Norm>(
                "Norm",
                "Normalisation of rows.",
                zero("none", "No normalisation."),
            ),
            Self::of::<collective::Quantization>(
                "Quantization",
                "Quantisation of rows. Computed scales are at least 1e-10.",
                zero("none", "No quantisation."),
            ),
            Self::of::<collective::RowLayout>(
                "RowLayout",
                "Order of the rows that a rank receives for its experts.",
                None,
            ),
            Self::of::<collective::Overflow>(
                "Overflow",
                "Treatment of rows from one rank to another beyond the maximum of a layer of experts.",
                None,
            ),
            Self::of::<collective::Wire>(
                "Wire",
                "Wire format of the rows of a fused collective. All ranks get bit-identical results with either.",
                None,
            ),
        ]
    }
}

/// Converts a number of the enumeration that C calls `name`.
pub(crate) fn numbered<T: Named>(number: i32, name: &str) -> Outcome<T> {
    T::numbered(number).ok_or_else(|| unknown(T::TERM, number, name))
}

/// As [`numbered`], where 0 is `None`.
pub(crate) fn numbered_or_none<T: Named>(number: i32, name: &str) -> Outcome<Option<T>> {
    (number != 0).then(|| numbered(number, name)).transpose()
}

/// The error of a `value` that is not in the enumeration `name`.
fn unknown(what: &str, value: i32, name: &str) -> Failure {
    Failure::invalid(
        format!("unknown {what} {value}; expected a {name}"),
        format!("use a value of {name}"),
    )
}

/// A position in one of a connection's regions.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// 0 is the region that the connection was declared with; registered buffers follow.
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

/// A channel as passed to kernels: the same bytes as `warplink::Channel` in `warplink/device.cuh`. Pass it by value to
/// a kernel launched by other means than `warplink_launch`. `peer` and `tag` identify the connection; the other members
/// are private to the library.
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
    /// Unpacks the library's words. The last two hold two members each, the first one in the low half.
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

// The layout must match the words written by the library and read by kernels.
const _: () = {
    assert!(size_of::<Channel>() == 128 && align_of::<Channel>() == 8);
    assert!(std::mem::offset_of!(Channel, tag) == 104);
    assert!(std::mem::offset_of!(Channel, slots) == 112);
    assert!(std::mem::offset_of!(Channel, connection) == 116);
    assert!(std::mem::offset_of!(Channel, peer) == 120);
    assert!(std::mem::offset_of!(Channel, proxied) == 124);
    assert!(cfg!(target_endian = "little"));
};

//! Values that C passes.

use crate::handles::Region;
use crate::status::{Failure, Outcome, Status};
use warplink::named::Named;
use warplink::{DType, channel, collective, device, p2p};

/// Rendezvous of the ranks of a job: an address and the secret that admits to it. A process that holds it can
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
    /// Its meaning.
    pub about: &'static str,
}

/// An enumeration of the header. Functions take its values as `int32_t`.
/// cbindgen:ignore
#[derive(Clone, Debug)]
pub struct Enumeration {
    /// Its name, as cbindgen.toml has it.
    pub name: &'static str,
    /// Its purpose.
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
            Self::of::<collective::FusedKind>(
                "FusedKind",
                "What ranks have of the rows of a fused collective. Where a rank owns rows, these are as many on each, in rank \
                 order.",
                None,
            ),
            Self::of::<collective::Norm>(
                "Norm",
                "How rows are normalised.",
                zero("none", "They are not."),
            ),
            Self::of::<collective::Quantization>(
                "Quantization",
                "How rows are quantised. Scales that are computed are at least 1e-10.",
                zero("none", "They are not."),
            ),
            Self::of::<collective::Wire>(
                "Wire",
                "How rows of a fused collective travel between ranks. All ranks get the same bits either way.",
                None,
            ),
        ]
    }
}

/// The library's value for a number of the enumeration that C calls `name`.
pub(crate) fn numbered<T: Named>(number: i32, name: &str) -> Outcome<T> {
    T::numbered(number).ok_or_else(|| unknown(T::TERM, number, name))
}

/// The same where 0 is none.
pub(crate) fn numbered_or_none<T: Named>(number: i32, name: &str) -> Outcome<Option<T>> {
    (number != 0).then(|| numbered(number, name)).transpose()
}

/// The error of a `value` that is none of the enumeration `name`.
fn unknown(what: &str, value: i32, name: &str) -> Failure {
    Failure::invalid(
        format!("unknown {what} {value}; expected a {name}"),
        format!("use a value of {name}"),
    )
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

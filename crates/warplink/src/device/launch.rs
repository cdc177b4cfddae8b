//! Kernel launches: shape and arguments.

use super::channel::{ChannelArray, ChannelHandle};
use super::config::DeviceKind;
use super::fault::Fault;
use super::slice::DeviceSlice;
use super::stream::Stream;
use crate::error::Result;
use std::fmt;
use std::sync::Arc;

/// Shape of a launch: a one-dimensional grid of one-dimensional blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) together: bool,
    pub(crate) early: bool,
}

impl Launch {
    /// `blocks` blocks of `threads` threads. The host device runs a closure for each block and passes the
    /// number of threads to it.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self {
            blocks,
            threads,
            shared_bytes: 0,
            together: false,
            early: false,
        }
    }

    /// Sets the dynamic shared memory of each block.
    pub fn with_shared_bytes(mut self, bytes: u32) -> Self {
        self.shared_bytes = bytes;
        self
    }

    /// Requires all blocks to be resident at the same time, so that they may wait for one another; a launch
    /// that does not fit is an error. Always the case on the host device.
    pub fn with_all_blocks_together(mut self) -> Self {
        self.together = true;
        self
    }

    /// Allows the blocks to start while the preceding kernel in the stream is still running, once all of its
    /// blocks have permitted that or ended. The kernel must call `await_preceding` (`memory.cuh`) before it
    /// accesses memory.
    pub(crate) fn with_early_start(mut self, early: bool) -> Self {
        self.early = early;
        self
    }
}

/// An argument of a kernel.
#[derive(Clone)]
#[non_exhaustive]
pub enum Argument {
    /// `unsigned int`.
    U32(u32),
    /// `int`.
    I32(i32),
    /// `unsigned long long`.
    U64(u64),
    /// `long long`.
    I64(i64),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
    /// Pointer to the first byte.
    Slice(DeviceSlice),
    /// `warplink::Channel`, by value.
    Channel(Arc<dyn ChannelHandle>),
    /// `const warplink::Channel *`: the first of several.
    Channels(Arc<ChannelArray>),
    /// A structure of `unsigned long long`, by value: at most 4,000 bytes.
    Words(Arc<[u64]>),
    /// Memory whose addresses are among the words. Closures of the host device find it here; GPU kernels have
    /// no parameter for it.
    Memory(Arc<[DeviceSlice]>),
}

impl Argument {
    /// Argument value in 8-byte words, the last of which may be partial, and its length in bytes.
    pub(crate) fn words(&self) -> (Vec<u64>, usize) {
        match self {
            Self::U32(value) => (vec![u64::from(*value)], 4),
            Self::I32(value) => (vec![u64::from(*value as u32)], 4),
            Self::F32(value) => (vec![u64::from(value.to_bits())], 4),
            Self::U64(value) => (vec![*value], 8),
            Self::I64(value) => (vec![*value as u64], 8),
            Self::F64(value) => (vec![value.to_bits()], 8),
            Self::Slice(slice) => (vec![slice.address()], 8),
            Self::Channel(channel) => {
                let words = channel.memory().descriptor();
                (words.to_vec(), 8 * words.len())
            }
            Self::Channels(channels) => (vec![channels.table().address()], 8),
            Self::Words(words) => (words.to_vec(), 8 * words.len()),
            Self::Memory(_) => (Vec::new(), 0),
        }
    }

    /// Whether all memory that it references belongs to devices of `kind`.
    pub(crate) fn is_of(&self, kind: DeviceKind) -> bool {
        match self {
            Self::Slice(slice) => slice.kind() == kind,
            Self::Channel(channel) => channel.memory().kind() == kind,
            Self::Channels(channels) => channels.table().kind() == kind,
            Self::Memory(slices) => slices.iter().all(|slice| slice.kind() == kind),
            _ => true,
        }
    }

    /// Whether GPU kernels have a parameter for it.
    pub(crate) fn is_parameter(&self) -> bool {
        !matches!(self, Self::Memory(_))
    }

    /// Faults that abort waits of a kernel with this argument.
    pub(crate) fn faults(&self) -> Vec<&Arc<Fault>> {
        match self {
            Self::Slice(slice) => slice.backing().fault().into_iter().collect(),
            Self::Channel(channel) => channel.memory().fault().into_iter().collect(),
            Self::Channels(channels) => {
                let faults = channels.handles().iter();
                faults
                    .filter_map(|channel| channel.memory().fault())
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    /// Fails if the proxy of one of its channels has failed.
    pub(crate) fn check(&self) -> Result<()> {
        match self {
            Self::Channel(channel) => channel.check(),
            Self::Channels(channels) => channels.handles().iter().try_for_each(|one| one.check()),
            _ => Ok(()),
        }
    }

    /// Keeps its memory alive until `stream` has completed the work enqueued so far.
    pub(crate) fn note(&self, stream: &Stream) {
        match self {
            Self::Channel(channel) => channel.note(stream),
            Self::Channels(channels) => {
                channels.handles().iter().for_each(|one| one.note(stream));
            }
            _ => {}
        }
    }

    /// Type name in messages.
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F32(_) => "f32",
            Self::F64(_) => "f64",
            Self::Slice(_) => "a slice",
            Self::Channel(_) => "a channel",
            Self::Channels(_) => "channels",
            Self::Words(_) => "words",
            Self::Memory(_) => "memory",
        }
    }
}

impl fmt::Debug for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::U32(value) => write!(f, "{value}"),
            Self::I32(value) => write!(f, "{value}"),
            Self::U64(value) => write!(f, "{value}"),
            Self::I64(value) => write!(f, "{value}"),
            Self::F32(value) => write!(f, "{value}"),
            Self::F64(value) => write!(f, "{value}"),
            Self::Slice(slice) => slice.fmt(f),
            Self::Channel(channel) => channel.memory().fmt(f),
            Self::Channels(channels) => channels.fmt(f),
            Self::Words(words) => write!(f, "{} words", words.len()),
            Self::Memory(slices) => slices.fmt(f),
        }
    }
}

/// Conversions from plain values.
macro_rules! from_values {
    ($($type:ty => $variant:ident),* $(,)?) => {$(
        impl From<$type> for Argument {
            fn from(value: $type) -> Self {
                Self::$variant(value)
            }
        }
    )*};
}

from_values!(
    u32 => U32, i32 => I32, u64 => U64, i64 => I64, f32 => F32, f64 => F64,
    DeviceSlice => Slice, Arc<ChannelArray> => Channels, Arc<[u64]> => Words,
);

impl From<&DeviceSlice> for Argument {
    fn from(slice: &DeviceSlice) -> Self {
        Self::Slice(slice.clone())
    }
}

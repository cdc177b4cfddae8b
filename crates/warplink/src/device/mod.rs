//! What a device does, as traits, and the two devices that do it.
//!
//! `cuda` drives a GPU through the driver, loaded at run time. `host` needs no GPU: a rank is a
//! process (or a thread), device memory is a shared-memory file, a stream is a thread. Everything
//! above this module is written over these traits and runs on either.
//!
//! # What holds on every device
//! 1. Operations enqueued on one stream happen in order; on two streams, in no order unless an
//!    event or a word orders them.
//! 2. Enqueuing does not block the caller.
//! 3. A write to a word becomes visible after everything that was enqueued before it on its
//!    stream, also in a peer's memory and to a peer. What follows a wait on its stream sees what
//!    preceded the write that ended the wait.
//! 4. Memory that is dropped while an enqueued operation names it is neither freed nor used again until
//!    streams are past it. Borrowed memory is its owner's to keep until then.
//! 5. After [`Fault::raise`] of the device's fault, waits in streams end, and everything that can
//!    fail on the device fails with the error that was raised. After that of a communicator's, so do
//!    the waits for its signals, the streams that wait for them, and those that follow such a stream
//!    by an event; all else goes on.
//! 6. A launched kernel is an operation of its stream. Its waits, by the channels and signals that it was
//!    given, end as rule 5 says, with a status or an error. The blocks of a launch may run one after
//!    another, unless it asked for all of them together.

mod attachment;

mod buffer;
pub(crate) mod channel;
mod collective;
mod compute;
mod config;
pub mod cuda;
mod elementwise;
mod fault;
mod fault_set;
pub(crate) mod host;
mod identity;
mod image;
mod in_flight;
mod interface;
mod launch;
mod library;
mod links;
mod module;
pub mod network;
mod packet_block;
mod packets;
mod pci;
mod properties;
mod reduce_op;
mod serial;
mod slice;
mod staging_memory;
mod stream;
mod turns;

pub use attachment::{Attachment, NetworkDevice, NetworkKind, PciDistance};
pub use buffer::DeviceBuffer;
pub use channel::{At, ChannelArray, ChannelHandle, ChannelMemory, Fifo, FifoReader};
use collective::check_adopted;
pub use collective::{
    AllGatherBytes, Collective, CollectiveEngine, CollectiveRequest, RankCall, Reduction, Said,
    VendorCommunicator,
};
pub use compute::{Compute, MatmulSpec, PreparedLaunch};
pub use config::{Delays, DeviceConfig, DeviceKind, Pretend};
pub use elementwise::{
    Elementwise, ElementwiseOp, MAX_ELEMENTWISE_AXES, MAX_ELEMENTWISE_SOURCES, Operand,
};
pub use fault::Fault;
pub(crate) use fault_set::{FaultSet, Noted};
pub use host::channel::BlockChannel;
pub use host::kernel::Block;
pub(crate) use host::lane::{Values, combine};
pub use host::signals::BlockSignals;
pub use identity::DeviceIdentity;
pub(crate) use identity::{combined_identity, machine_identity};
pub(crate) use in_flight::{InFlight, InUse};
pub use interface::{AllocationKind, Device, Export, Opening, Piece, Segment};
pub use launch::{Argument, Launch};
pub use links::{DeviceLink, DeviceLinks, LinkEnd, LinkQuery, PeerAccess};
pub(crate) use module::{HostLanes, LaneFuture};
pub use module::{Kernel, KernelResources, Module, ModuleSource};
pub(crate) use packets::{MAX_BLOCKS as MAX_PACKET_BLOCKS, PACKET, PacketShape};
pub use packets::{PacketLine, PacketPart};
pub use pci::PciAddress;
pub use properties::DeviceProperties;
pub use reduce_op::{Factor, ReduceOp};
pub(crate) use serial::{Readying, SerialArguments, SerialBackend, SerialKernel, SerialKernels};
pub use slice::{Backing, DeviceSlice, Word};
pub use staging_memory::StagingMemory;
pub(crate) use stream::sequence_apart;
pub use stream::{
    Event, EventBackend, Graph, GraphBackend, KernelCopy, MemoryOp, Priority, Stream,
    StreamBackend, StreamOp, Unit,
};
pub use turns::Turns;

use crate::error::Result;
use std::sync::Arc;

impl DeviceKind {
    /// `Cuda` where the driver loads and shows at least one GPU, else `Host`.
    pub fn detect() -> Self {
        if cuda::device_count().is_ok_and(|count| count > 0) {
            Self::Cuda
        } else {
            Self::Host
        }
    }
}

/// How many devices of `kind` this process sees. The host device is always there, once.
///
/// # Errors
/// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without a driver,
/// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if it does not start.
pub fn count(kind: DeviceKind) -> Result<usize> {
    match kind {
        DeviceKind::Host => Ok(1),
        DeviceKind::Cuda => cuda::device_count(),
    }
}

/// Opens a device. Each rank opens its own, also where ranks are threads of one process.
///
/// # Errors
/// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) or
/// [`ErrorKind::Driver`](crate::ErrorKind::Driver) for a GPU that cannot be used,
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for an ordinal that is not
/// there.
pub fn open(config: &DeviceConfig) -> Result<Arc<dyn Device>> {
    match config.kind {
        DeviceKind::Host => Ok(host::HostDevice::open(config.delays, config.pretend)),
        DeviceKind::Cuda => cuda::open_as(config.ordinal, config.pretend),
    }
}

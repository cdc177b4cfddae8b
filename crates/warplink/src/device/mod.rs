//! Device interface as traits, and its two implementations.
//!
//! `cuda` drives a GPU through the driver, loaded at run time. `host` needs no GPU: a rank is a process or
//! thread, device memory is a shared-memory file, a stream is a thread. All code above this module uses only
//! these traits and runs on either.
//!
//! # Rules for every device
//! 1. Operations enqueued on one stream execute in order; those on two streams are unordered unless an event
//!    or a word orders them.
//! 2. Enqueuing does not block the caller.
//! 3. A write to a word becomes visible after everything enqueued before it on its stream, also in a peer's
//!    memory and to a peer. Work after a wait on its stream observes everything that preceded the write that
//!    satisfied the wait.
//! 4. Memory dropped while an enqueued operation uses it is neither freed nor reused until streams have
//!    completed. Borrowed memory must be kept by its owner until then.
//! 5. After [`Fault::raise`] of the device's fault, waits in streams are aborted, and every fallible call on
//!    the device fails with that error. After that of a communicator's fault, the same holds for waits on its
//!    signals, the streams that wait for them, and streams that follow such a stream by an event; all other
//!    work continues.
//! 6. A launched kernel is an operation of its stream. Its waits on channels and signals among its arguments
//!    are aborted as in rule 5, with a status or an error. Blocks of a launch may run one after another
//!    unless it requests all of them together.

mod attachment;

mod buffer;
pub(crate) mod channel;
mod collective;
mod compute;
mod config;
pub mod cuda;
mod elementwise;
mod exit;
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
mod peer_process;
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
    AllGatherBytes, CallHeader, Collective, CollectiveEngine, CollectiveKind, CollectiveRequest,
    RankCall, Reduction, VendorCommunicator,
};
pub use compute::{Compute, MatmulSpec, PreparedLaunch};
pub use config::{Delays, DeviceConfig, DeviceKind, Pretend};
pub use elementwise::{
    Elementwise, ElementwiseOp, MAX_ELEMENTWISE_AXES, MAX_ELEMENTWISE_SOURCES, Operand,
};
pub use exit::before_exit;
pub use fault::Fault;
pub(crate) use fault_set::{FaultSet, Noted};
pub use host::channel::BlockChannel;
pub use host::kernel::Block;
pub(crate) use host::lane::{Values, combine};
pub use host::signals::BlockSignals;
pub use identity::DeviceIdentity;
pub(crate) use identity::{combined_identity, machine_identity, network_namespace};
pub(crate) use in_flight::{InFlight, InUse};
pub use interface::{AllocationKind, Device, Export, Opening, Piece, Segment};
pub use launch::{Argument, Launch};
pub use links::{DeviceLink, DeviceLinks, LinkEnd, LinkQuery, PeerAccess};
pub(crate) use module::{HostLanes, LaneFuture};
pub use module::{Kernel, KernelResources, Module, ModuleSource};
pub(crate) use packets::{MAX_BLOCKS as MAX_PACKET_BLOCKS, PACKET, PacketShape};
pub use packets::{PacketLine, PacketPart};
pub use pci::PciAddress;
pub(crate) use peer_process::PeerProcess;
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
    /// `Cuda` if the driver loads and reports at least one GPU, else `Host`.
    pub fn detect() -> Self {
        if cuda::device_count().is_ok_and(|count| count > 0) {
            Self::Cuda
        } else {
            Self::Host
        }
    }
}

/// Number of devices of `kind` visible to this process. There is always exactly one host device.
///
/// # Errors
/// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without a driver,
/// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if it fails to initialize.
pub fn count(kind: DeviceKind) -> Result<usize> {
    match kind {
        DeviceKind::Host => Ok(1),
        DeviceKind::Cuda => cuda::device_count(),
    }
}

/// Opens a device. Each rank opens its own, even if ranks are threads of one process.
///
/// # Errors
/// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) or
/// [`ErrorKind::Driver`](crate::ErrorKind::Driver) for an unusable GPU,
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for an unknown ordinal.
pub fn open(config: &DeviceConfig) -> Result<Arc<dyn Device>> {
    match config.kind {
        DeviceKind::Host => Ok(host::HostDevice::open(config.delays, config.pretend)),
        DeviceKind::Cuda => cuda::open_as(config.ordinal, config.pretend),
    }
}

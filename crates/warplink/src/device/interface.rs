//! A device as used by one rank, and sharing its memory with peers.

use super::channel::{Fifo, FifoReader};
use super::collective::{AllGatherBytes, CollectiveEngine, VendorCommunicator};
use super::compute::Compute;
use super::config::DeviceKind;
use super::fault::Fault;
use super::identity::DeviceIdentity;
use super::links::LinkQuery;
use super::module::{Module, ModuleSource};
use super::properties::DeviceProperties;
use super::slice::DeviceSlice;
use super::staging_memory::StagingMemory;
use super::stream::{Event, Priority, Stream};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// How to allocate memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AllocationKind {
    /// Plain allocation; on a GPU it is shared by CUDA IPC.
    Plain,
    /// Virtual memory; on a GPU it is shared by file descriptor.
    Virtual,
    /// Pinned host memory that every device of the machine can map, even devices that cannot map each other's
    /// memory. Accessed over PCIe.
    Host,
}

/// Everything that a peer needs to open an allocation, created by its owner.
#[derive(Debug)]
pub struct Export {
    /// The whole allocation, kept allocated.
    pub allocation: DeviceSlice,
    /// CUDA IPC handle, if the allocation has one.
    pub ipc: Option<[u8; 64]>,
    /// Its physical pieces in order, if they can be shared by descriptor.
    pub pieces: Vec<Piece>,
    /// Whether it is host memory that every device of the machine can map ([`AllocationKind::Host`]).
    pub host: bool,
}

/// A piece of physical memory.
#[derive(Debug)]
pub struct Piece {
    /// Descriptor that can be mapped.
    pub descriptor: OwnedFd,
    /// Length.
    pub bytes: usize,
}

impl Piece {
    /// Duplicates the descriptor.
    pub(crate) fn try_clone(&self) -> Result<Self> {
        let descriptor = self
            .descriptor
            .try_clone()
            .map_err(|error| Error::io("duplicate a descriptor", &error))?;
        Ok(Self {
            descriptor,
            bytes: self.bytes,
        })
    }
}

/// A reserved address range into which memory is mapped piece by piece, as other allocators do (PyTorch's
/// expandable segments). Views of it are [borrowed](Device::borrow). Dropping it frees the memory once no
/// view holds it.
pub trait Segment: Send + Sync + fmt::Debug {
    /// Address of the first byte.
    fn address(&self) -> u64;

    /// Length of the part that has memory.
    fn bytes(&self) -> usize;

    /// Maps another piece of at least `bytes` at the end.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::ErrorKind::OutOfMemory), and
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) past the end of the range.
    fn grow(&self, bytes: usize) -> Result<()>;
}

/// How to open a peer's allocation.
#[derive(Debug)]
pub enum Opening {
    /// The owner is in this process: the slice itself (a GPU enables peer access).
    SameProcess(DeviceSlice),
    /// By CUDA IPC handle.
    Ipc([u8; 64]),
    /// By descriptors of its pieces, which are mapped contiguously.
    Pieces(Vec<Piece>),
    /// By the descriptor of its single piece, which is host memory.
    Host(Piece),
}

/// A device as used by one rank.
pub trait Device: LinkQuery + Send + Sync + fmt::Debug {
    /// Kind of device.
    fn kind(&self) -> DeviceKind;

    /// Name in messages: kind, ordinal, model.
    fn name(&self) -> String;

    /// Properties known without measuring.
    fn properties(&self) -> DeviceProperties;

    /// Identity of the physical device.
    fn identity(&self) -> DeviceIdentity;

    /// Whether several processes can use the device concurrently, so that ranks in them may wait for one
    /// another on it.
    fn is_shareable(&self) -> bool;

    /// Raised when a peer is lost; see [`Fault`].
    fn fault(&self) -> &Arc<Fault>;

    /// Allocates `bytes` (nonzero), freed when the last slice of it is dropped. Contents are undefined.
    fn allocate(&self, bytes: usize, kind: AllocationKind) -> Result<DeviceSlice>;

    /// Allocates `bytes` of zeroed signal words. The device's fault aborts waits for them.
    fn allocate_signals(&self, bytes: usize) -> Result<DeviceSlice> {
        self.allocate_signals_for(bytes, AllocationKind::Plain, self.fault())
    }

    /// As [`allocate_signals`](Self::allocate_signals), but `fault` too aborts waits for the words and fails
    /// the streams that wait. The memory is plain or host memory.
    fn allocate_signals_for(
        &self,
        bytes: usize,
        kind: AllocationKind,
        fault: &Arc<Fault>,
    ) -> Result<DeviceSlice>;

    /// Reserves an address range of `bytes` for a growable segment.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if the device does not support it.
    fn reserve_segment(&self, bytes: usize) -> Result<Arc<dyn Segment>>;

    /// A view of `bytes` at `address` that other code allocated (PyTorch, for example); `owner` is held as
    /// long as the view or its export. The range may span several physical pieces.
    /// [`Backing::identity`](super::Backing::identity) distinguishes successive allocations at one address.
    ///
    /// # Safety
    /// `address` must be device memory of this device, allocated for as long as `owner` is held, and all other
    /// accesses must follow Rust's rules for shared memory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the range is not within one
    /// allocation or segment.
    unsafe fn borrow(
        &self,
        address: u64,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<DeviceSlice>;

    /// As [`borrow`](Self::borrow), without an owner, for the operands of a call that only enqueues. A device may assume
    /// that the allocation is the one of earlier calls at these addresses: where peers access it, that is checked when
    /// the call is enqueued.
    ///
    /// # Safety
    /// As [`borrow`](Self::borrow), with memory that stays allocated until the stream of the call has completed it.
    ///
    /// # Errors
    /// As [`borrow`](Self::borrow).
    unsafe fn borrow_operand(&self, address: u64, bytes: usize) -> Result<DeviceSlice> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.borrow(address, bytes, Arc::new(())) }
    }

    /// Copies `bytes` to `target` (of the same length). Blocks until done; not ordered with any stream.
    fn upload(&self, target: &DeviceSlice, bytes: &[u8]) -> Result<()>;

    /// Copies `source` to `bytes` (of the same length). Blocks until done; not ordered with any stream.
    fn download(&self, source: &DeviceSlice, bytes: &mut [u8]) -> Result<()>;

    /// Creates a stream.
    fn create_stream(&self, priority: Priority) -> Result<Stream>;

    /// Borrows a stream that other code created; `owner` is held as long. A per-thread default stream can be
    /// used on the calling thread only.
    ///
    /// # Safety
    /// `raw` must be a valid stream of this device's context for as long as `owner` is held.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) on the host device, whose streams have no
    /// raw handle.
    unsafe fn borrow_stream(&self, raw: u64, owner: Arc<dyn Any + Send + Sync>) -> Result<Stream>;

    /// Creates an event; `timing` is required to measure time.
    fn create_event(&self, timing: bool) -> Result<Event>;

    /// Exports the allocation that contains `slice`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if the allocation cannot be shared.
    fn export(&self, slice: &DeviceSlice) -> Result<Export>;

    /// Maps a peer's allocation of `bytes`. It is unmapped when the last slice of it is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) or [`ErrorKind::Io`](crate::ErrorKind::Io) if it
    /// cannot be opened, [`ErrorKind::InvalidHandle`](crate::ErrorKind::InvalidHandle) if it is smaller than
    /// `bytes`.
    fn import(&self, opening: Opening, bytes: usize) -> Result<DeviceSlice>;

    /// Runs `then` once everything dropped so far is unmapped and freed, which a device may do
    /// asynchronously. Does not block.
    fn after_unmapping(&self, then: Box<dyn FnOnce() + Send>) {
        then();
    }

    /// Runs `then` once streams of this process have completed the uses of `slice`'s allocation enqueued so
    /// far. Does not block. Immediate if enqueued operations hold their memory themselves.
    fn after_uses(&self, _slice: &DeviceSlice, then: Box<dyn FnOnce() + Send>) {
        then();
    }

    /// Called before freed memory is reused, when no slice of it exists.
    fn prepare_reuse(&self, _slice: &DeviceSlice) {}

    /// Memory available for allocations in bytes, if the device has its own memory.
    fn available_memory(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Returns pooled memory to the system. Blocks until done, up to `deadline`.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) if streams were busy until then.
    fn trim(&self, _deadline: Deadline) -> Result<()> {
        Ok(())
    }

    /// Whether kernels can be compiled for this device, without compiling one.
    ///
    /// # Errors
    /// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without the compiler,
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if it has no such device.
    fn check_compiler(&self) -> Result<()> {
        Ok(())
    }

    /// Loads user code: on a GPU compiles CUDA C++ (or takes the result from the on-disk cache) or takes
    /// machine code; on the host device takes closures. Blocks, on a GPU possibly until all running kernels
    /// are done, so load modules before anything waits for a peer.
    ///
    /// # Safety
    /// On a GPU, kernels of the module must be free of undefined behaviour when launched with arguments of
    /// their parameters' types; in particular they access only memory that their arguments reference. Always
    /// sound on the host device.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for invalid or truncated machine
    /// code, [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if the source has no code for this
    /// device, [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without the compiler,
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver), with the compiler's messages, if compiling or loading
    /// fails.
    unsafe fn load_module(&self, source: &ModuleSource) -> Result<Module>;

    /// Creates a FIFO of `slots` (a power of two) through which kernels of this device pass triggers to a
    /// thread of this process.
    fn create_fifo(&self, slots: usize) -> Result<(Arc<Fifo>, FifoReader)>;

    /// Allocates `bytes` of zeroed host memory that streams of this device and a network can access.
    fn allocate_staging(&self, bytes: usize) -> Result<StagingMemory>;

    /// Makes the device current on the calling thread, for libraries that access its memory and ask the
    /// driver for the current device. Permanent; the caller must hold the device as long.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if writes of network cards cannot be made
    /// visible to running kernels.
    fn attach_thread(&self) -> Result<()> {
        Ok(())
    }

    /// Makes earlier writes of network cards to the device's memory visible to running kernels. Blocks
    /// briefly; waits for no kernel.
    fn settle_network_writes(&self) -> Result<()> {
        Ok(())
    }

    /// CPUs local to the device; empty if unknown.
    fn local_cpus(&self) -> Vec<usize> {
        Vec::new()
    }

    /// Matmuls and element-wise operations.
    ///
    /// # Errors
    /// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without the vendor's
    /// libraries.
    fn compute(&self) -> Result<Arc<dyn Compute>>;

    /// Joins the vendor's collectives. Collective: all `world` ranks call it at the same time, with an
    /// `all_gather` of bytes among them. Raising `fault` aborts the collectives and fails their streams; it
    /// is also raised if they fail by themselves, which is detected while some thread waits for a stream.
    /// Blocks until all have joined.
    ///
    /// # Errors
    /// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without the vendor's library;
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) at the deadline.
    fn collective_engine(
        &self,
        rank: usize,
        world: usize,
        fault: &Arc<Fault>,
        deadline: Deadline,
        all_gather: AllGatherBytes<'_>,
    ) -> Result<Arc<dyn CollectiveEngine>>;

    /// Wraps a communicator of the vendor's library that the application owns. Does not block. Calls fail
    /// once `fault` is raised.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch) if its rank, world or device differs;
    /// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without the vendor's library.
    fn adopt_collective_engine(
        &self,
        communicator: VendorCommunicator,
        rank: usize,
        world: usize,
        fault: &Arc<Fault>,
    ) -> Result<Arc<dyn CollectiveEngine>>;
}

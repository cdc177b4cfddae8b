//! A device as one rank uses it, and how its memory is handed to peers.

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

/// How memory is to be allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AllocationKind {
    /// The device's plain allocation; on a GPU it is shared by CUDA IPC.
    Plain,
    /// Memory from the virtual memory interface; on a GPU it is shared by file descriptor.
    Virtual,
    /// Memory of the host, pinned, that every device of the machine maps: also where two cannot map each
    /// other's. Kernels and copies reach it over the bus.
    Host,
}

/// What a peer needs to open an allocation, made by its owner.
#[derive(Debug)]
pub struct Export {
    /// The whole allocation; holding it keeps the memory allocated.
    pub allocation: DeviceSlice,
    /// The CUDA IPC handle, where the allocation has one.
    pub ipc: Option<[u8; 64]>,
    /// The pieces of physical memory that it consists of, in order, where they can be shared by
    /// descriptor.
    pub pieces: Vec<Piece>,
    /// Whether it is memory of the host that every device of the machine maps ([`AllocationKind::Host`]).
    pub host: bool,
}

/// A piece of physical memory.
#[derive(Debug)]
pub struct Piece {
    /// What maps it.
    pub descriptor: OwnedFd,
    /// Its length.
    pub bytes: usize,
}

impl Piece {
    /// The same piece, with another descriptor.
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

/// A range of addresses in which memory is added piece by piece at the end of what is there, as the
/// allocators of others do (PyTorch's expandable segments). Views of it are
/// [borrowed](Device::borrow). Dropping it frees it when no view is left that holds it.
pub trait Segment: Send + Sync + fmt::Debug {
    /// Address of the first byte.
    fn address(&self) -> u64;

    /// Bytes from there that have memory.
    fn bytes(&self) -> usize;

    /// Adds a piece of at least `bytes`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::ErrorKind::OutOfMemory), and
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) past the end of the range.
    fn grow(&self, bytes: usize) -> Result<()>;
}

/// One way to open a peer's allocation.
#[derive(Debug)]
pub enum Opening {
    /// The owner is this process: its slice itself (a GPU enables peer access).
    SameProcess(DeviceSlice),
    /// By CUDA IPC handle.
    Ipc([u8; 64]),
    /// By the descriptors of its pieces, which are mapped one behind the other.
    Pieces(Vec<Piece>),
    /// By the descriptor of its one piece, which is memory of the host.
    Host(Piece),
}

/// A device as one rank uses it.
pub trait Device: LinkQuery + Send + Sync + fmt::Debug {
    /// Which of the devices.
    fn kind(&self) -> DeviceKind;

    /// Name for people: kind, ordinal, model.
    fn name(&self) -> String;

    /// What is known of it without measuring.
    fn properties(&self) -> DeviceProperties;

    /// Which physical device.
    fn identity(&self) -> DeviceIdentity;

    /// Whether the device serves several processes at the same time, so that ranks in them may wait for
    /// one another on it.
    fn is_shareable(&self) -> bool;

    /// Raised when a peer is lost; see [`Fault`].
    fn fault(&self) -> &Arc<Fault>;

    /// Allocates `bytes` (more than zero), freed when the last slice of it is dropped. The content
    /// is undefined.
    fn allocate(&self, bytes: usize, kind: AllocationKind) -> Result<DeviceSlice>;

    /// Allocates `bytes` of words for signals, all zero. Waits on them end when the device's fault
    /// is raised.
    fn allocate_signals(&self, bytes: usize) -> Result<DeviceSlice> {
        self.allocate_signals_for(bytes, AllocationKind::Plain, self.fault())
    }

    /// As [`allocate_signals`](Self::allocate_signals); waits on the words end, and the streams that
    /// wait for them fail, also when `fault` is raised. They are plain memory, or memory of the host.
    fn allocate_signals_for(
        &self,
        bytes: usize,
        kind: AllocationKind,
        fault: &Arc<Fault>,
    ) -> Result<DeviceSlice>;

    /// Reserves addresses for `bytes` of memory that is added piece by piece.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where the device cannot.
    fn reserve_segment(&self, bytes: usize) -> Result<Arc<dyn Segment>>;

    /// A view of `bytes` at `address` that somebody else allocated (PyTorch, say); `owner` is held
    /// as long as the view, or its export, is. The range may span several pieces of physical memory. [`Backing::identity`](super::Backing::identity)
    /// tells two allocations at one address apart.
    ///
    /// # Safety
    /// `address` must be device memory of this device, allocated for as long as `owner` is held,
    /// and nothing may access it in a way that Rust forbids for shared memory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the range is not
    /// inside one allocation or segment.
    unsafe fn borrow(
        &self,
        address: u64,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<DeviceSlice>;

    /// Copies `bytes` to `target` (of the same length), and returns when that is done. Ordered
    /// after nothing that is in a stream.
    fn upload(&self, target: &DeviceSlice, bytes: &[u8]) -> Result<()>;

    /// Copies `source` (of the same length) to `bytes`, and returns when that is done. Ordered
    /// after nothing that is in a stream.
    fn download(&self, source: &DeviceSlice, bytes: &mut [u8]) -> Result<()>;

    /// Makes a stream.
    fn create_stream(&self, priority: Priority) -> Result<Stream>;

    /// A stream that somebody else made; `owner` is held as long as it. The default stream of the
    /// calling thread can be borrowed, and used on that thread.
    ///
    /// # Safety
    /// `raw` must be a valid stream of this device's context for as long as `owner` is held.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) on the host device, whose streams
    /// have no raw form.
    unsafe fn borrow_stream(&self, raw: u64, owner: Arc<dyn Any + Send + Sync>) -> Result<Stream>;

    /// Makes an event; only one with `timing` can measure time.
    fn create_event(&self, timing: bool) -> Result<Event>;

    /// Makes what a peer needs to open the allocation that `slice` lies in.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where the allocation cannot be
    /// shared.
    fn export(&self, slice: &DeviceSlice) -> Result<Export>;

    /// Maps a peer's allocation of `bytes`. It is unmapped when the last slice of it is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) or [`ErrorKind::Io`](crate::ErrorKind::Io)
    /// where it cannot be opened, [`ErrorKind::InvalidHandle`](crate::ErrorKind::InvalidHandle)
    /// where it is smaller than `bytes`.
    fn import(&self, opening: Opening, bytes: usize) -> Result<DeviceSlice>;

    /// Runs `then` when everything of this device that was dropped so far is unmapped and freed,
    /// which a device may do later than the drop. Does not block.
    fn after_unmapping(&self, then: Box<dyn FnOnce() + Send>) {
        then();
    }

    /// Runs `then` when streams of this process are past every use of the allocation of `slice` that
    /// was enqueued so far. Does not block. Where enqueued operations hold their memory themselves,
    /// that is at once.
    fn after_uses(&self, _slice: &DeviceSlice, then: Box<dyn FnOnce() + Send>) {
        then();
    }

    /// Told before memory that was freed is used again, of which nobody has a slice any more.
    fn prepare_reuse(&self, _slice: &DeviceSlice) {}

    /// Bytes of memory that an allocation may find, where the device has memory of its own.
    fn available_memory(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Gives memory that was freed and is kept for later allocations back to the system. Blocks until
    /// that is done, at most until `deadline`.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) where streams had work until then.
    fn trim(&self, _deadline: Deadline) -> Result<()> {
        Ok(())
    }

    /// Loads code of the user's: on a GPU compiles CUDA C++ (from the disk where that was done before, by
    /// the same compiler) or takes machine code; on the host device takes the closures. Blocks, on a GPU
    /// perhaps until all kernels that run are done, so load modules before anything waits for a peer.
    ///
    /// # Safety
    /// On a GPU, kernels of the module must be free of undefined behaviour when they are launched with
    /// arguments of their parameters' types: in particular, they reach no memory but what their arguments
    /// name. On the host device it is always sound.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for machine code that is cut off or none,
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where the source has no code for this
    /// device, [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without the compiler,
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver), with the compiler's messages, where it does not
    /// compile, or cannot be loaded.
    unsafe fn load_module(&self, source: &ModuleSource) -> Result<Module>;

    /// Makes a FIFO of `slots` (a power of two) through which kernels of this device hand triggers to a
    /// thread of this process.
    fn create_fifo(&self, slots: usize) -> Result<(Arc<Fifo>, FifoReader)>;

    /// Allocates `bytes` of memory of the host that streams of this device copy to and from and a network
    /// reaches, all zero.
    fn allocate_staging(&self, bytes: usize) -> Result<StagingMemory>;

    /// Makes the device that of the calling thread, for a library that reaches the device's memory by itself and asks the
    /// driver which device is the thread's. It stays so; the caller holds the device as long.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where no call makes sure that kernels that run see
    /// what a network card has written.
    fn attach_thread(&self) -> Result<()> {
        Ok(())
    }

    /// Makes what network cards have written to the device's memory visible to kernels that run. Blocks for moments,
    /// and waits for no kernel.
    fn settle_network_writes(&self) -> Result<()> {
        Ok(())
    }

    /// The CPUs that are near the device; none where that is not known.
    fn local_cpus(&self) -> Vec<usize> {
        Vec::new()
    }

    /// Matmuls and sums.
    ///
    /// # Errors
    /// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without the vendor's
    /// libraries.
    fn compute(&self) -> Result<Arc<dyn Compute>>;

    /// Joins the vendor's collectives. Every one of `world` ranks calls this at the same time, with
    /// an `all_gather` of bytes among them. When `fault` is raised, the collectives end, and the
    /// streams that do them fail; it is raised when they fail by themselves, too, as soon as somebody
    /// waits for a stream. Blocks until all have joined.
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

    /// The collectives of a communicator of the vendor's library that the application has. Does not block. When
    /// `fault` is raised, calls fail.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch) for one in which this process is not `rank` of `world`, or
    /// that is of another device; [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without the
    /// vendor's library.
    fn adopt_collective_engine(
        &self,
        communicator: VendorCommunicator,
        rank: usize,
        world: usize,
        fault: &Arc<Fault>,
    ) -> Result<Arc<dyn CollectiveEngine>>;
}

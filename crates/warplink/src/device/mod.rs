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
//! 4. Memory that an enqueued operation names must stay allocated until the operation is done. The
//!    host device sees to that itself; on a GPU, freeing while in use is the caller's to avoid, by
//!    synchronizing first.
//! 5. After [`Fault::raise`], waits in streams end, and everything that can fail on the device
//!    fails with the error that was raised.

mod buffer;
mod collective;
mod compute;
pub mod cuda;
mod fault;
pub(crate) mod host;
mod in_flight;
mod properties;
mod slice;
mod stream;

pub use buffer::DeviceBuffer;
pub use collective::{AllGatherBytes, Collective, CollectiveEngine, CollectiveRequest, ReduceOp};
pub use compute::{Compute, MatmulSpec, PreparedLaunch};
pub use fault::Fault;
pub(crate) use in_flight::InFlight;
pub use properties::DeviceProperties;
pub use slice::{Backing, DeviceSlice, Word};
pub(crate) use stream::sequence_apart;
pub use stream::{
    Event, EventBackend, Graph, GraphBackend, MemoryOp, Priority, Stream, StreamBackend, StreamOp,
};

use crate::error::{Error, ErrorKind, Result};
use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// Which of the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// Shared memory and threads of this machine's processors.
    Host,
    /// An NVIDIA GPU.
    Cuda,
}

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

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        })
    }
}

impl FromStr for DeviceKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "host" => Ok(Self::Host),
            "cuda" => Ok(Self::Cuda),
            _ => Err(Error::new(
                ErrorKind::Parse,
                format!("unknown device '{text}'; expected host or cuda"),
            )
            .help("use host or cuda")),
        }
    }
}

/// How many devices of `kind` this process sees. The host device is always there, once.
///
/// # Errors
/// [`ErrorKind::LibraryMissing`] without a driver, [`ErrorKind::Driver`] if it does not start.
pub fn count(kind: DeviceKind) -> Result<usize> {
    match kind {
        DeviceKind::Host => Ok(1),
        DeviceKind::Cuda => cuda::device_count(),
    }
}

/// What to open.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Which device.
    pub kind: DeviceKind,
    /// Which of the GPUs that this process sees; the host device ignores it.
    pub ordinal: usize,
    /// Random delays before (and inside) operations of the host device, to bring out missing waits.
    pub delays: Option<Delays>,
}

impl DeviceConfig {
    /// The device of `kind` with `ordinal`, without delays.
    pub fn new(kind: DeviceKind, ordinal: usize) -> Self {
        Self {
            kind,
            ordinal,
            delays: None,
        }
    }
}

/// Random delays of the host device's operations.
#[derive(Clone, Copy, Debug)]
pub struct Delays {
    /// Seed of the delays; streams of one device draw different ones.
    pub seed: u64,
    /// The longest delay.
    pub max: Duration,
}

/// Opens a device. Each rank opens its own, also where ranks are threads of one process.
///
/// # Errors
/// [`ErrorKind::LibraryMissing`] or [`ErrorKind::Driver`] for a GPU that cannot be used,
/// [`ErrorKind::InvalidArgument`] for an ordinal that is not there.
pub fn open(config: &DeviceConfig) -> Result<Arc<dyn Device>> {
    match config.kind {
        DeviceKind::Host => Ok(host::HostDevice::open(config.delays)),
        DeviceKind::Cuda => cuda::open(config.ordinal),
    }
}

/// Which physical device, whatever ordinal a process sees it under: a GPU's UUID, the machine's
/// boot id for the host device.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceIdentity(pub [u8; 16]);

impl fmt::Debug for DeviceIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The machine's boot id, the same for every process on it: ranks that agree on it can share memory.
/// Zero where the kernel gives none.
pub(crate) fn machine_identity() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes()
}

/// How memory is to be allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AllocationKind {
    /// The device's plain allocation; on a GPU it is shared by CUDA IPC.
    Plain,
    /// Memory from the virtual memory interface; on a GPU it is shared by file descriptor.
    Virtual,
}

/// What a peer needs to open an allocation, made by its owner.
#[derive(Debug)]
pub struct Export {
    /// The whole allocation; holding it keeps the memory allocated.
    pub allocation: DeviceSlice,
    /// The CUDA IPC handle, where the allocation has one.
    pub ipc: Option<[u8; 64]>,
    /// A descriptor that maps the allocation, where there is one.
    pub descriptor: Option<OwnedFd>,
}

/// One way to open a peer's allocation.
#[derive(Debug)]
pub enum Opening {
    /// The owner is this process: its slice itself (a GPU enables peer access).
    SameProcess(DeviceSlice),
    /// By CUDA IPC handle.
    Ipc([u8; 64]),
    /// By descriptor.
    Descriptor(OwnedFd),
}

/// A device as one rank uses it.
pub trait Device: Send + Sync + fmt::Debug {
    /// Which of the devices.
    fn kind(&self) -> DeviceKind;

    /// Name for people: kind, ordinal, model.
    fn name(&self) -> String;

    /// What is known of it without measuring.
    fn properties(&self) -> DeviceProperties;

    /// Which physical device.
    fn identity(&self) -> DeviceIdentity;

    /// Raised when a peer is lost; see [`Fault`].
    fn fault(&self) -> &Arc<Fault>;

    /// Allocates `bytes` (more than zero), freed when the last slice of it is dropped. The content
    /// is undefined.
    fn allocate(&self, bytes: usize, kind: AllocationKind) -> Result<DeviceSlice>;

    /// Allocates `bytes` of words for signals, all zero. Waits on them end when the device's fault
    /// is raised.
    fn allocate_signals(&self, bytes: usize) -> Result<DeviceSlice>;

    /// A view of `bytes` at `address` that somebody else allocated (PyTorch, say); `owner` is held
    /// as long as the view, or its export, is. [`Backing::identity`] tells two allocations at one
    /// address apart.
    ///
    /// # Safety
    /// `address` must be device memory of this device, allocated for as long as `owner` is held,
    /// and nothing may access it in a way that Rust forbids for shared memory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] where the range is not inside one allocation.
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

    /// A stream that somebody else made; `owner` is held as long as it.
    ///
    /// # Safety
    /// `raw` must be a valid stream of this device's context for as long as `owner` is held.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] on the host device, whose streams have no raw form.
    unsafe fn borrow_stream(&self, raw: u64, owner: Arc<dyn Any + Send + Sync>) -> Result<Stream>;

    /// Makes an event; only one with `timing` can measure time.
    fn create_event(&self, timing: bool) -> Result<Event>;

    /// Makes what a peer needs to open the allocation that `slice` lies in.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the allocation cannot be shared.
    fn export(&self, slice: &DeviceSlice) -> Result<Export>;

    /// Maps a peer's allocation of `bytes`. It is unmapped when the last slice of it is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] or [`ErrorKind::Io`] where it cannot be opened,
    /// [`ErrorKind::InvalidHandle`] where it is smaller than `bytes`.
    fn import(&self, opening: Opening, bytes: usize) -> Result<DeviceSlice>;

    /// Matmuls and sums.
    ///
    /// # Errors
    /// [`ErrorKind::LibraryMissing`] without the vendor's libraries.
    fn compute(&self) -> Result<Arc<dyn Compute>>;

    /// Joins the vendor's collectives. Every one of `world` ranks calls this at the same time, with
    /// an `all_gather` of bytes among them.
    ///
    /// # Errors
    /// [`ErrorKind::LibraryMissing`] without the vendor's library.
    fn collective_engine(
        &self,
        rank: usize,
        world: usize,
        all_gather: AllGatherBytes<'_>,
    ) -> Result<Arc<dyn CollectiveEngine>>;
}

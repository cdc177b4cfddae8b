//! RDMA network: writes into memory of processes on other machines.
//!
//! Each process opens the [`Network`] once and passes its [address](Network::address) to its peers, by any
//! channel. It registers memory and passes them the key. A peer connects to the address, opens the key, and
//! can then write to that memory and signal words in it, without involving the owner.
//!
//! # Guarantees
//! 1. [`put`](NetworkConnection::put), [`get`](NetworkConnection::get) and
//!    [`signal`](NetworkConnection::signal) do not block. Puts that precede a signal on a connection reach
//!    the peer's memory before the word does.
//! 2. Words of successive signals on a connection appear in order.
//! 3. After [`flush`](NetworkConnection::flush), everything before it has reached the peer's memory, or local
//!    memory for a get.
//! 4. An unreachable peer fails its own connection only: flushes return an error that names it, and queued
//!    operations are dropped. Waits always end at their deadline.
//! 5. Memory that is being sent or registered is held as long as the network may use it.
//! 6. Device memory can be used for puts and gets if the network library can access it
//!    ([`register_device_memory`](Network::register_device_memory)). It holds no signal words: after a flush
//!    the data has arrived, but running kernels may see it only after the owner has called
//!    [`Device::settle_network_writes`].

mod access;
mod ucx;

pub use access::DeviceAccess;

use super::interface::Device;
use super::slice::DeviceSlice;
use crate::deadline::Deadline;
use crate::debug::{debug_fields, debug_text};
use crate::error::{Error, Rank, Result};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Default of [`NetworkOptions::patience`].
const PATIENCE: Duration = Duration::from_secs(60);

/// Options for opening the network.
#[derive(Clone, Debug)]
pub struct NetworkOptions {
    /// Comma-separated network devices as the network library names them, such as `mlx5_0:1` or `eth0`; all
    /// if not set.
    pub devices: Option<String>,
    /// A connection fails if nothing in flight completes for this long; 60 seconds by default.
    pub patience: Duration,
    /// Whether the network library accesses device memory directly.
    pub access: DeviceAccess,
    /// The device that owns such memory; `None` to use host memory only.
    pub device: Option<Arc<dyn Device>>,
}

impl Default for NetworkOptions {
    fn default() -> Self {
        Self {
            devices: None,
            patience: PATIENCE,
            access: DeviceAccess::default(),
            device: None,
        }
    }
}

/// Completion callback, called once on the network's thread; must not block.
pub type OnDone = Box<dyn FnOnce(Result<()>) + Send>;

/// Failure callback, called on the network's thread; must not block.
pub type OnFailure = Box<dyn FnOnce(&Error) + Send>;

/// This process's endpoint of the network.
pub trait Network: Send + Sync + fmt::Debug {
    /// Name and version of the transport library.
    fn name(&self) -> String;

    /// Address that peers [connect](Self::connect) to.
    fn address(&self) -> &[u8];

    /// Whether it can access `memory`, to send it and to let peers write to it.
    fn reaches(&self, memory: &DeviceSlice) -> bool;

    /// Registers `memory` for access by peers, until the result is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for memory that the network cannot access,
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if its library refuses.
    fn register(&self, memory: &DeviceSlice) -> Result<NetworkRegion>;

    /// Registers device memory for direct puts and gets by peers, subject to [`NetworkOptions::access`],
    /// until the result is dropped. Words in it must not be signalled.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if direct access is impossible or disabled;
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if the library refuses.
    fn register_device_memory(&self, memory: &DeviceSlice) -> Result<NetworkRegion>;

    /// Connects to `peer` at `address`. Does not wait for the peer; unreachability is reported later.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) for an invalid address, or one that no network device
    /// can reach.
    fn connect(&self, peer: Rank, address: &[u8]) -> Result<Arc<dyn NetworkConnection>>;

    /// Closes all connections and the network. Blocks until the deadline at most; dropping it does the same,
    /// with a deadline of two seconds.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) at the deadline.
    fn close(&self, deadline: Deadline) -> Result<()>;
}

/// A connection to one peer.
pub trait NetworkConnection: Send + Sync + fmt::Debug {
    /// Opens memory that the peer registered, by its [key](NetworkRegion::key).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidHandle`](crate::ErrorKind::InvalidHandle) for an invalid key, and the connection's
    /// error if it has failed.
    fn open(&self, key: &[u8]) -> Result<RemoteMemory>;

    /// Writes `source` to `offset` in the peer's memory. `source` must not change until a flush. Device
    /// memory must be registered, and stay so until then; otherwise the connection fails.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) outside the peer's memory or for
    /// memory of another connection, [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for a source
    /// that the network cannot access, and [`ErrorKind::Closed`](crate::ErrorKind::Closed) after the network
    /// was closed. Connection failures are reported by [`flush`](Self::flush).
    fn put(&self, source: &DeviceSlice, target: &RemoteMemory, offset: usize) -> Result<()>;

    /// Reads the peer's memory at `offset` into `target`, which may be read after a flush.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    fn get(&self, target: &DeviceSlice, source: &RemoteMemory, offset: usize) -> Result<()>;

    /// Calls `then` when everything so far is complete, as after a flush, or with the connection's error if
    /// it has failed.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed) after the network was closed.
    fn when_done(&self, then: OnDone) -> Result<()>;

    /// Calls `handler` when the connection fails, or at once if it has failed.
    ///
    /// # Errors
    /// As [`when_done`](Self::when_done).
    fn when_failed(&self, handler: OnFailure) -> Result<()>;

    /// Writes `value` to the word at `offset`, a multiple of 8, in the peer's memory, after all earlier puts.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    fn signal(&self, target: &RemoteMemory, offset: usize, value: u64) -> Result<()>;

    /// Blocks until everything so far has reached the peer's memory.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) at the deadline, and
    /// [`ErrorKind::PeerLost`](crate::ErrorKind::PeerLost) if the connection has failed; both name the peer.
    fn flush(&self, deadline: Deadline) -> Result<()>;

    /// Flushes and closes the connection. It is closed even if the flush fails; data not sent by the deadline
    /// is lost.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    fn close(&self, deadline: Deadline) -> Result<()>;
}

/// Memory of this process that peers may access.
pub struct NetworkRegion {
    key: Vec<u8>,
    /// Unregisters the memory when dropped.
    _registration: Box<dyn Any + Send + Sync>,
}

/// A peer's memory, opened on one connection.
pub struct RemoteMemory {
    /// Number of the key among those opened in this process.
    number: u64,
    /// Number of the connection.
    connection: u64,
    bytes: usize,
    /// Closes the key when dropped.
    _opened: Box<dyn Any + Send + Sync>,
}

#[cfg(all(test, not(loom)))]
impl NetworkRegion {
    /// Fake region with this key, for tests.
    pub(crate) fn of_nobody(key: &[u8]) -> Self {
        Self {
            key: key.to_vec(),
            _registration: Box::new(()),
        }
    }
}

impl NetworkRegion {
    /// Key by which a peer [opens](NetworkConnection::open) the memory.
    pub fn key(&self) -> &[u8] {
        &self.key
    }
}

#[cfg(all(test, not(loom)))]
impl RemoteMemory {
    /// Fake peer memory, for tests.
    pub(crate) fn of_nobody(bytes: usize) -> Self {
        Self {
            number: 0,
            connection: 0,
            bytes,
            _opened: Box::new(()),
        }
    }
}

impl RemoteMemory {
    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Fails unless `bytes` at `offset` are within bounds.
    fn check(&self, offset: usize, bytes: usize) -> Result<()> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(Error::invalid(format!(
                "{bytes} bytes at {offset} are outside the peer's memory; expected an end of at most {}",
                self.bytes
            ))),
        }
    }
}

debug_fields!(NetworkRegion);

debug_text!(
    RemoteMemory,
    |it| "RemoteMemory({}, {} bytes)",
    it.number,
    it.bytes
);

/// Opens the network of this process: UCX, over any network device that it finds.
///
/// # Errors
/// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without UCX,
/// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if it fails to start.
pub fn open(options: &NetworkOptions) -> Result<Arc<dyn Network>> {
    Ok(Arc::new(ucx::UcxNetwork::open(options)?))
}

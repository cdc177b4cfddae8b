//! A network by which a process writes into the memory of processes on other machines.
//!
//! Each process opens the [`Network`] once and gives its peers its [address](Network::address), by
//! whatever way. It registers memory and gives them the key. A peer connects to the address, opens the
//! key, and from then on puts into that memory and signals words in it, without the owner's part.
//!
//! # What holds
//! 1. [`put`](NetworkConnection::put), [`get`](NetworkConnection::get) and
//!    [`signal`](NetworkConnection::signal) return at once. What was put before a signal on a connection is
//!    in the peer's memory before the word is.
//! 2. Words of successive signals on a connection appear in their order.
//! 3. After [`flush`](NetworkConnection::flush), everything before it is in the peer's memory, or here if it
//!    was got.
//! 4. A peer that cannot be reached fails its connection and no other: flushes give an error that names
//!    it, and what is enqueued is dropped. A wait ends at its deadline in any case.
//! 5. Memory that is sent or registered is held for as long as the network may use it.
//! 6. Memory that only the device reaches may be put to and got from where the network's library reaches it by itself
//!    ([`register_device_memory`](Network::register_device_memory)). No word lies in it: after a flush the data has
//!    arrived, but a kernel that runs may see it only when the owner of the memory has called
//!    [`Device::settle_network_writes`].

mod access;
mod ucx;

pub use access::DeviceAccess;

use super::interface::Device;
use super::slice::DeviceSlice;
use crate::deadline::Deadline;
use crate::error::{Error, Rank, Result};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// How long something may be under way while nothing arrives, unless told otherwise.
const PATIENCE: Duration = Duration::from_secs(60);

/// How to open the network.
#[derive(Clone, Debug)]
pub struct NetworkOptions {
    /// The network devices to use, as the network's library names them and separated by commas, such as
    /// `mlx5_0:1` or `eth0`; all of them if not given.
    pub devices: Option<String>,
    /// How long something may be under way while the peer takes nothing, until the connection fails; 60
    /// seconds if not told otherwise.
    pub patience: Duration,
    /// Which of the device's memory the network's library reaches by itself.
    pub access: DeviceAccess,
    /// The device whose memory that is; none to reach memory of the host alone.
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

/// Called once, on the network's thread: it must not block.
pub type OnDone = Box<dyn FnOnce(Result<()>) + Send>;

/// Called with the error of a connection that fails, on the network's thread: it must not block.
pub type OnFailure = Box<dyn FnOnce(&Error) + Send>;

/// This process's end of the network.
pub trait Network: Send + Sync + fmt::Debug {
    /// Name and version of what carries the bytes.
    fn name(&self) -> String;

    /// What a peer needs to [connect](Self::connect) to this process.
    fn address(&self) -> &[u8];

    /// Whether it reaches `memory`: sends it and lets peers write to it.
    fn reaches(&self, memory: &DeviceSlice) -> bool;

    /// Lets peers write to `memory`, until what is returned is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for memory that the network does not
    /// reach, [`ErrorKind::Driver`](crate::ErrorKind::Driver) where its library refuses.
    fn register(&self, memory: &DeviceSlice) -> Result<NetworkRegion>;

    /// Lets peers put to `memory` and get from it by what the network's library can do itself, as
    /// [`NetworkOptions::access`] says, until what is returned is dropped. Its words are not to be signalled.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where the library cannot, or is not to;
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) where it refuses.
    fn register_device_memory(&self, memory: &DeviceSlice) -> Result<NetworkRegion>;

    /// Connects to `peer` at `address`. Does not wait for the peer: that it cannot be reached shows later.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) for an address that is none, or that no network
    /// device leads to.
    fn connect(&self, peer: Rank, address: &[u8]) -> Result<Arc<dyn NetworkConnection>>;

    /// Ends the connections that are still open, and the network. Blocks until the deadline at most;
    /// dropping it does the same, with a deadline of two seconds.
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
    /// [`ErrorKind::InvalidHandle`](crate::ErrorKind::InvalidHandle) for a key that is none, and the
    /// error of the connection where that has failed.
    fn open(&self, key: &[u8]) -> Result<RemoteMemory>;

    /// Writes `source` to `offset` in the peer's memory. `source` must not change until a flush. Memory that only the
    /// device reaches is registered as such, and stays so until then; the connection fails where it is not.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) outside the peer's memory or for
    /// memory of another connection, [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for a
    /// source that the network does not reach, and [`ErrorKind::Closed`](crate::ErrorKind::Closed) where
    /// the network was closed. A failure of the connection is told by [`flush`](Self::flush).
    fn put(&self, source: &DeviceSlice, target: &RemoteMemory, offset: usize) -> Result<()>;

    /// Reads the peer's memory from `offset` on into `target`, which may be read after a flush.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    fn get(&self, target: &DeviceSlice, source: &RemoteMemory, offset: usize) -> Result<()>;

    /// Calls `then` when everything so far is done, as after a flush, or with the error of the connection
    /// where that has failed.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed) where the network was closed.
    fn when_done(&self, then: OnDone) -> Result<()>;

    /// Calls `handler` when the connection fails, at once where it has.
    ///
    /// # Errors
    /// As [`when_done`](Self::when_done).
    fn when_failed(&self, handler: OnFailure) -> Result<()>;

    /// Writes `value` into the word at `offset`, which is a multiple of 8, in the peer's memory, after
    /// everything that was put before.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    fn signal(&self, target: &RemoteMemory, offset: usize, value: u64) -> Result<()>;

    /// Blocks until everything so far is in the peer's memory.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) at the deadline, and
    /// [`ErrorKind::PeerLost`](crate::ErrorKind::PeerLost) where the connection has failed; both name the
    /// peer.
    fn flush(&self, deadline: Deadline) -> Result<()>;

    /// Flushes and ends the connection. It is ended also where that fails; what was not sent by the
    /// deadline is lost.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    fn close(&self, deadline: Deadline) -> Result<()>;
}

/// Memory of this process that peers may write to.
pub struct NetworkRegion {
    key: Vec<u8>,
    /// Unregisters the memory when it is dropped.
    _registration: Box<dyn Any + Send + Sync>,
}

/// Memory of a peer, opened on one connection.
pub struct RemoteMemory {
    /// Which of the keys that were opened in this process.
    number: u64,
    /// The number of the connection.
    connection: u64,
    bytes: usize,
    /// Forgets the key when it is dropped.
    _opened: Box<dyn Any + Send + Sync>,
}

#[cfg(all(test, not(loom)))]
impl NetworkRegion {
    /// Memory with this key, for tests of what uses a network.
    pub(crate) fn of_nobody(key: &[u8]) -> Self {
        Self {
            key: key.to_vec(),
            _registration: Box::new(()),
        }
    }
}

impl NetworkRegion {
    /// What a peer needs to [open](NetworkConnection::open) the memory.
    pub fn key(&self) -> &[u8] {
        &self.key
    }
}

#[cfg(all(test, not(loom)))]
impl RemoteMemory {
    /// Memory that nobody has, for tests of what uses a connection.
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
    /// How many bytes there are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Fails unless `bytes` at `offset` are inside.
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

impl fmt::Debug for NetworkRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetworkRegion").finish_non_exhaustive()
    }
}

impl fmt::Debug for RemoteMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteMemory({}, {} bytes)", self.number, self.bytes)
    }
}

/// Opens the network of this process: UCX, over what network devices it finds.
///
/// # Errors
/// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without UCX,
/// [`ErrorKind::Driver`](crate::ErrorKind::Driver) where it does not start.
pub fn open(options: &NetworkOptions) -> Result<Arc<dyn Network>> {
    Ok(Arc::new(ucx::UcxNetwork::open(options)?))
}

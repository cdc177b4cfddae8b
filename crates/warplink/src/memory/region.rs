//! Registered memory here, and peers' regions mapped here.

use super::exports::{EnteredPool, RegionNumbers};
use super::shared::Shared;
use crate::deadline::Deadline;
use crate::device::DeviceSlice;
use crate::error::{Error, Rank, Result};
use std::ops::Range;
use std::sync::Arc;

/// Local memory registered for peers. Clones share the registration, which ends with the last of them. Memory
/// [allocated](crate::Communicator::alloc) with the region is then pooled for reuse once no stream and no
/// peer uses it; other memory is released when no peer maps it.
#[derive(Clone, Debug)]
pub struct Region {
    pub(super) slice: DeviceSlice,
    pub(super) registration: Arc<Registration>,
}

#[derive(Debug)]
pub(super) struct Registration {
    pub(super) shared: Arc<Shared>,
    pub(super) numbers: RegionNumbers,
}

/// A peer's region, mapped here as long as the value, a clone or a slice of it exists.
#[derive(Clone, Debug)]
pub struct RemoteRegion {
    pub(super) owner: Rank,
    pub(super) slice: DeviceSlice,
    pub(super) atomics: bool,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let ended = self.shared.exports.unregister(self.numbers);
        self.shared.ask_to_unmap(ended.unwanted);
        if let Some(EnteredPool { slice, numbers }) = ended.pooled {
            // Weak: the callback waits for streams, which may take longer than the job.
            let shared = Arc::downgrade(&self.shared);
            let past = move || {
                if let Some(shared) = shared.upgrade() {
                    shared.exports.streams_are_past(numbers);
                }
            };
            self.shared.device.after_uses(&slice, Box::new(past));
        }
    }
}

impl Region {
    /// The memory.
    pub fn memory(&self) -> &DeviceSlice {
        &self.slice
    }

    /// Whether anyone holds the memory besides this region and `others` known slices.
    pub(crate) fn is_held_elsewhere(&self, others: usize) -> bool {
        // Held by the region itself and by its registration.
        Arc::strong_count(self.slice.backing()) > 2 + others
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.slice.bytes()
    }

    /// Copies `bytes` in; the length must match. Blocks until done; not ordered with any stream.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the length differs; the device's
    /// fault once raised.
    pub fn upload(&self, bytes: &[u8]) -> Result<()> {
        self.registration.shared.device.upload(&self.slice, bytes)
    }

    /// Copies all bytes out. Blocks until done; not ordered with any stream.
    ///
    /// # Errors
    /// The device's fault once raised.
    pub fn download(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.slice.bytes()];
        let device = &self.registration.shared.device;
        device.download(&self.slice, &mut bytes)?;
        Ok(bytes)
    }

    /// Sub-region `range`, of the same registration.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the range
    /// passes the end.
    pub fn slice(&self, range: Range<usize>) -> Result<Self> {
        Ok(Self {
            slice: self.slice.slice(range)?,
            registration: self.registration.clone(),
        })
    }

    /// Generation of the allocation's registration; changes after the allocation was freed or had no region.
    pub fn generation(&self) -> u64 {
        self.registration.numbers.generation
    }

    /// Ends the registration and waits until no peer maps the memory, which is freed rather than pooled. No
    /// clones may exist.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the region has clones,
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout), with the peer, if one still uses a mapping; the
    /// memory then stays allocated until it is released.
    pub fn close(self, deadline: Deadline) -> Result<()> {
        let numbers = self.registration.numbers;
        let shared = self.registration.shared.clone();
        if Arc::strong_count(&self.registration) > 1 {
            return Err(Error::invalid("the region is still in use here")
                .with_operation("close a region")
                .with_help("drop the other clones of the region and the transfers that hold it"));
        }
        // Before the drop below, which would pool the memory, and a pooled allocation never counts as freed.
        shared.exports.keep_out_of_pool(numbers.generation);
        drop(self);
        let Some(peers) = shared.exports.wait_freed(numbers, deadline.remaining()) else {
            return Ok(());
        };
        let late = held(
            deadline.expired("the release of the region by a peer that uses it"),
            &peers,
        );
        Err(late.with_operation("close a region").with_rank(shared.rank))
    }
}

/// Adds the first of `peers`, which hold the memory, to a timeout error.
pub(super) fn held(late: Error, peers: &[Rank]) -> Error {
    let late = match peers.first() {
        Some(peer) => late.with_peer(*peer),
        None => late,
    };
    late.with_help("drop the transfers that use it on the peer first")
}

impl RemoteRegion {
    /// Rank that owns the memory.
    pub fn owner(&self) -> Rank {
        self.owner
    }

    /// Whether this rank's device supports atomic operations on it.
    pub fn has_atomics(&self) -> bool {
        self.atomics
    }

    /// The memory, at an address of this process.
    pub fn memory(&self) -> &DeviceSlice {
        &self.slice
    }

    /// Sub-region `range`, of the same mapping.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the range
    /// passes the end.
    pub fn slice(&self, range: Range<usize>) -> Result<Self> {
        Ok(Self {
            slice: self.slice.slice(range)?,
            ..self.clone()
        })
    }
}

impl AsRef<DeviceSlice> for Region {
    fn as_ref(&self) -> &DeviceSlice {
        &self.slice
    }
}

impl AsRef<DeviceSlice> for RemoteRegion {
    fn as_ref(&self) -> &DeviceSlice {
        &self.slice
    }
}

//! Registered memory here, and peers' regions mapped here.

use super::exports::{EnteredPool, RegionNumbers};
use super::shared::Shared;
use crate::deadline::Deadline;
use crate::device::DeviceSlice;
use crate::error::{Error, Rank, Result};
use std::ops::Range;
use std::sync::Arc;

/// Local memory registered for peers. Clones are the same registration; with the last of them it
/// ends. Memory that was [allocated](crate::Communicator::alloc) with the region is then used for a
/// later one, once no stream and no peer uses it; other memory is let go of when no peer maps it.
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

/// A peer's region, mapped here as long as this, a clone or a slice of it is there.
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
    /// Its memory.
    pub fn memory(&self) -> &DeviceSlice {
        &self.slice
    }

    /// Whether anybody but this region, without clones, holds the memory as it was registered. `others` say how many
    /// slices of it are known of.
    pub(crate) fn is_held_elsewhere(&self, others: usize) -> bool {
        // Of the region itself, and of its registration.
        Arc::strong_count(self.slice.backing()) > 2 + others
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.slice.bytes()
    }

    /// Copies `bytes` (as many as the region has) in. Blocks until that is done; it is ordered after
    /// nothing in a stream.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for another
    /// length; the device's fault when it is raised.
    pub fn upload(&self, bytes: &[u8]) -> Result<()> {
        self.registration.shared.device.upload(&self.slice, bytes)
    }

    /// Copies all bytes out. Blocks until that is done; it is ordered after nothing in a stream.
    ///
    /// # Errors
    /// The device's fault when it is raised.
    pub fn download(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.slice.bytes()];
        let device = &self.registration.shared.device;
        device.download(&self.slice, &mut bytes)?;
        Ok(bytes)
    }

    /// The bytes `range` of this region, as a region of the same registration.
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

    /// Number of the registration of the allocation that it lies in; another one after that was freed
    /// or no region of it was registered meanwhile.
    pub fn generation(&self) -> u64 {
        self.registration.numbers.generation
    }

    /// Ends the registration and waits until no peer maps the memory, which is freed and not kept for
    /// later. Other clones must be gone.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the region
    /// has clones, [`ErrorKind::Timeout`](crate::ErrorKind::Timeout), with the peer, where one
    /// still uses a mapping of it; the memory then stays allocated until it lets go.
    pub fn close(self, deadline: Deadline) -> Result<()> {
        let numbers = self.registration.numbers;
        let shared = self.registration.shared.clone();
        if Arc::strong_count(&self.registration) > 1 {
            return Err(Error::invalid("the region is still in use here")
                .with_operation("close a region")
                .with_help("drop the other clones of the region and the transfers that hold it"));
        }
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

/// `late`, with the first of the `peers` that hold what was not freed.
pub(super) fn held(late: Error, peers: &[Rank]) -> Error {
    let late = match peers.first() {
        Some(peer) => late.with_peer(*peer),
        None => late,
    };
    late.with_help("drop the transfers that use it on the peer first")
}

impl RemoteRegion {
    /// The rank whose memory it is.
    pub fn owner(&self) -> Rank {
        self.owner
    }

    /// Whether this rank's device has atomic operations on it.
    pub fn has_atomics(&self) -> bool {
        self.atomics
    }

    /// Its memory, at an address of this process.
    pub fn memory(&self) -> &DeviceSlice {
        &self.slice
    }

    /// The bytes `range` of this region, of the same mapping.
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

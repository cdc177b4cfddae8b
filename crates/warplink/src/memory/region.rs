//! Registered memory here, and mappings of peers' memory: what holds them, and what happens when
//! the last holder lets go.

use super::cache::Counted;
use super::{Message, Shared};
use crate::deadline::Deadline;
use crate::device::{Backing, DeviceKind, DeviceSlice};
use crate::error::{Error, Rank, Result};
use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Local memory registered for peers. Clones are the same registration; with the last of them it
/// ends, and the memory is freed when no peer maps it any more.
#[derive(Clone, Debug)]
pub struct Region {
    pub(super) slice: DeviceSlice,
    pub(super) registration: Arc<Registration>,
}

#[derive(Debug)]
pub(super) struct Registration {
    pub(super) shared: Arc<Shared>,
    pub(super) generation: u64,
}

/// A peer's region, mapped here.
#[derive(Clone, Debug)]
pub struct RemoteRegion {
    pub(super) owner: Rank,
    pub(super) slice: DeviceSlice,
    pub(super) _mapped: crate::sync::Arc<Mapped>,
}

/// A mapping and the count of handles that led to it.
#[derive(Debug)]
pub(super) struct Mapped {
    pub(super) whole: DeviceSlice,
    pub(super) handles: Arc<AtomicU64>,
}

/// The device's mapping, which tells its owner when it is closed. Slices hold this one, so the
/// owner is told only when nothing here can reach its memory any more.
#[derive(Debug)]
pub(super) struct RemoteBacking {
    pub(super) mapping: Option<Arc<dyn Backing>>,
    pub(super) base: u64,
    pub(super) bytes: usize,
    pub(super) identity: u64,
    pub(super) kind: DeviceKind,
    pub(super) shared: Weak<Shared>,
    pub(super) owner: Rank,
    pub(super) generation: u64,
    pub(super) handles: Arc<AtomicU64>,
}

impl Counted for Mapped {
    fn count(&self) {
        self.handles.fetch_add(1, Ordering::Relaxed);
    }
}

impl Backing for RemoteBacking {
    fn base(&self) -> u64 {
        self.base
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn identity(&self) -> u64 {
        self.identity
    }
    fn kind(&self) -> DeviceKind {
        self.kind
    }
    fn as_any(&self) -> &dyn Any {
        match &self.mapping {
            Some(mapping) => mapping.as_any(),
            None => self,
        }
    }
}

impl Drop for RemoteBacking {
    fn drop(&mut self) {
        // Unmapped first: the owner may free as soon as it is told.
        self.mapping = None;
        if let Some(shared) = self.shared.upgrade() {
            let message = Message::HandlesReleased {
                generation: self.generation,
                handles: self.handles.load(Ordering::Relaxed),
            };
            shared.outbox.tell(self.owner, message);
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some((allocation, holders)) = self.shared.exports.unregister(self.generation) else {
            return;
        };
        let message = Message::Unmap {
            allocation,
            generation: self.generation,
        };
        for peer in holders {
            self.shared.outbox.tell(peer, message);
        }
    }
}

impl Region {
    /// Its memory.
    pub fn memory(&self) -> &DeviceSlice {
        &self.slice
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

    /// Number of the registration; another one after the memory was registered anew.
    pub fn generation(&self) -> u64 {
        self.registration.generation
    }

    /// Ends the registration and waits until no peer maps the memory. Other clones must be gone.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the region
    /// has clones, [`ErrorKind::Timeout`](crate::ErrorKind::Timeout), with the peer, where one
    /// still uses a mapping of it; the memory then stays allocated until it lets go.
    pub fn close(self, deadline: Deadline) -> Result<()> {
        let generation = self.generation();
        let shared = self.registration.shared.clone();
        if Arc::strong_count(&self.registration) > 1 {
            return Err(Error::invalid("the region is still in use here")
                .during("close a region")
                .help("drop the other clones of the region and the transfers that hold it"));
        }
        drop(self);
        match shared
            .exports
            .wait_freed(generation, deadline.remaining())
            .first()
        {
            None => Ok(()),
            Some(peer) => Err(deadline
                .expired("the release of the region by a peer that maps it")
                .during("close a region")
                .on_rank(shared.rank)
                .with_peer(*peer)
                .help("drop the transfers that use it on the peer first")),
        }
    }
}

impl RemoteRegion {
    /// The rank whose memory it is.
    pub fn owner(&self) -> Rank {
        self.owner
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

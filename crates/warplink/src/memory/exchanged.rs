//! Handles in transit between their owner and the peer that opens them. The owner counts each until the peer
//! returns it, so a handle that is not delivered must be uncounted: dropping the value on either side does
//! that.

use super::handle::HANDLE_BYTES;
use super::mapping::RemoteBacking;
use super::opening;
use super::region::{Registration, RemoteRegion};
use super::shared::Shared;
use crate::error::{Rank, Result};
use std::sync::Arc;

/// A handle of a region of this rank, issued for one peer. Dropping it cancels the handle, which must not
/// have been sent.
#[derive(Debug)]
#[must_use]
pub(crate) struct ExportedHandle {
    registration: Arc<Registration>,
    peer: Rank,
    wire: [u8; HANDLE_BYTES],
    is_sent: bool,
}

/// A handle received from a peer. Dropping it without opening it returns it to its owner.
#[derive(Debug)]
#[must_use]
pub(crate) struct PeerHandle {
    shared: Arc<Shared>,
    peer: Rank,
    /// Empty once consumed.
    wire: Vec<u8>,
}

impl ExportedHandle {
    pub(super) fn new(
        registration: &Arc<Registration>,
        peer: Rank,
        wire: [u8; HANDLE_BYTES],
    ) -> Self {
        Self {
            registration: registration.clone(),
            peer,
            wire,
            is_sent: false,
        }
    }

    /// The encoded handle.
    pub(crate) fn wire(&self) -> &[u8; HANDLE_BYTES] {
        &self.wire
    }

    /// Transfers ownership of the handle to the peer, which has it or may still receive it.
    pub(crate) fn sent(mut self) -> [u8; HANDLE_BYTES] {
        self.is_sent = true;
        self.wire
    }
}

impl Drop for ExportedHandle {
    fn drop(&mut self) {
        if !self.is_sent {
            let Registration { shared, numbers } = &*self.registration;
            shared.exports.cancel_handle(*numbers, self.peer);
        }
    }
}

impl PeerHandle {
    pub(super) fn new(shared: &Arc<Shared>, peer: Rank, wire: Vec<u8>) -> Self {
        Self {
            shared: shared.clone(),
            peer,
            wire,
        }
    }

    /// Maps the region exported by the peer, or takes its mapping from the cache.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidHandle`](crate::ErrorKind::InvalidHandle) if the handle is truncated, altered or
    /// not the peer's, or its region is gone; the device's error if it cannot be opened.
    pub(crate) fn open(mut self) -> Result<RemoteRegion> {
        let (shared, peer) = (&self.shared, self.peer);
        // Taken first: a handle that cannot be decoded cannot be returned either, so `drop` must not try
        // again.
        let handle = shared.decode(peer, &std::mem::take(&mut self.wire))?;
        let key = (peer, handle.allocation);
        let lease = shared
            .mappings
            .open(key, handle.generation, || opening::open(shared, &handle))
            // The cache does not own the handle after a failure.
            .inspect_err(|_| shared.release_handle(&handle))?;
        let whole = RemoteBacking::slice(shared, &handle, lease);
        let (start, bytes) = (handle.offset as usize, handle.bytes as usize);
        Ok(RemoteRegion {
            owner: peer,
            slice: whole.slice(start..start + bytes)?,
            atomics: shared.peers()?.access(peer)?.atomics,
        })
    }
}

impl Drop for PeerHandle {
    fn drop(&mut self) {
        if self.wire.is_empty() {
            return;
        }
        match self.shared.decode(self.peer, &self.wire) {
            Ok(handle) => self.shared.release_handle(&handle),
            Err(error) => {
                tracing::warn!(%error, "an invalid handle cannot be returned");
            }
        }
    }
}

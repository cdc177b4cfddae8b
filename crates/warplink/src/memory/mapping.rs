//! A peer's allocation mapped here, and its users.

use super::cache::{Lease, Mapping};
use super::handle::Handle;
use super::message::Message;
use super::shared::{MappingKey, Shared};
use crate::device::{Backing, DeviceKind, DeviceSlice};
use crate::error::Rank;
use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// A mapping of a peer's allocation. The owner gets its handles back after the mapping was closed, and not
/// before.
#[derive(Debug)]
pub(super) struct Mapped {
    // Drop order matters: unmap, then return the handles.
    mapping: Arc<dyn Backing>,
    handles: OpenedHandles,
    same_process: bool,
}

/// Handles of one registration that resolved to a mapping, returned to the owner on drop.
#[derive(Debug)]
struct OpenedHandles {
    shared: Weak<Shared>,
    owner: Rank,
    generation: u64,
    count: AtomicU64,
}

/// Backing of slices of a peer's region: keeps its mapping in use.
#[derive(Debug)]
pub(super) struct RemoteBacking {
    lease: Lease<MappingKey, Mapped>,
    /// Reports the end of the use, if the owner tracks it.
    region_use: Option<RegionUse>,
}

/// One handle's use of a region that the owner tracks.
#[derive(Debug)]
struct RegionUse {
    shared: Weak<Shared>,
    owner: Rank,
    generation: u64,
    region: u64,
}

impl Mapped {
    pub(super) fn new(
        shared: &Arc<Shared>,
        handle: &Handle,
        mapping: &DeviceSlice,
        same_process: bool,
    ) -> Self {
        Self {
            mapping: mapping.backing().clone(),
            handles: OpenedHandles {
                shared: Arc::downgrade(shared),
                owner: handle.owner,
                generation: handle.generation,
                count: AtomicU64::new(0),
            },
            same_process,
        }
    }
}

impl Mapping for Mapped {
    fn count_handle(&self) {
        // Relaxed: a plain counter; the cache's lock orders it before the drop.
        self.handles.count.fetch_add(1, Ordering::Relaxed);
    }

    fn bytes(&self) -> u64 {
        self.mapping.bytes() as u64
    }

    /// Memory of this process is free to open again, and would be kept allocated.
    fn is_kept_idle(&self) -> bool {
        !self.same_process
    }
}

impl Drop for OpenedHandles {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        let message = Message::Released {
            generation: self.generation,
            region: 0,
            // Relaxed: `drop` has exclusive access.
            handles: self.count.load(Ordering::Relaxed),
        };
        let (outbox, owner) = (shared.outbox.clone(), self.owner);
        // The owner may free immediately, so wait until the device has unmapped.
        shared
            .device
            .after_unmapping(Box::new(move || outbox.notify(owner, message)));
    }
}

impl RemoteBacking {
    /// The whole allocation of `handle`, mapped as `lease`.
    pub(super) fn slice(
        shared: &Arc<Shared>,
        handle: &Handle,
        lease: Lease<MappingKey, Mapped>,
    ) -> DeviceSlice {
        DeviceSlice::whole(Arc::new(Self {
            lease,
            region_use: (handle.region != 0).then(|| RegionUse {
                shared: Arc::downgrade(shared),
                owner: handle.owner,
                generation: handle.generation,
                region: handle.region,
            }),
        }))
    }
}

impl Backing for RemoteBacking {
    fn base(&self) -> u64 {
        self.lease.mapping.base()
    }

    fn bytes(&self) -> usize {
        self.lease.mapping.bytes()
    }

    fn identity(&self) -> u64 {
        self.lease.mapping.identity()
    }

    fn kind(&self) -> DeviceKind {
        self.lease.mapping.kind()
    }

    fn as_any(&self) -> &dyn Any {
        self.lease.mapping.as_any()
    }
}

impl Drop for RemoteBacking {
    fn drop(&mut self) {
        let Some(region_use) = self.region_use.take() else {
            return;
        };
        let Some(shared) = region_use.shared.upgrade() else {
            return;
        };
        let message = Message::Released {
            generation: region_use.generation,
            region: region_use.region,
            handles: 1,
        };
        let (outbox, owner) = (shared.outbox.clone(), region_use.owner);
        // The owner may reuse the memory immediately, so wait for local streams first.
        let mapping = DeviceSlice::whole(self.lease.mapping.clone());
        let notify = move || outbox.notify(owner, message);
        shared.device.after_uses(&mapping, Box::new(notify));
    }
}

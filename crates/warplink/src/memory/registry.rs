//! A rank's registrations and mappings, as the rest of the library uses them.

use super::cache::{CacheLimits, MappingCache};
use super::exchanged::{ExportedHandle, PeerHandle};
use super::exports::{Exports, RegionNumbers};
use super::handle::{Handle, HandleKey};
use super::limits::IdleMappings;
use super::message::Message;
use super::notifier::{self, Notifier};
use super::opening::{self, process_identity};
use super::peers::{PeerInfo, Peers};
use super::publications::{Heard, Publications};
use super::region::{self, Region, Registration};
use super::service::Service;
use super::shared::Shared;
use crate::deadline::Deadline;
use crate::device::{AllocationKind, Device, DeviceSlice, Fault, PeerAccess};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// The longest that an allocation waits for peers to let go of memory that it could use.
const MAX_RECLAIM: Duration = Duration::from_secs(2);

/// Between two attempts of such an allocation.
const RECLAIM_INTERVAL: Duration = Duration::from_millis(20);

/// A rank's registrations, and its mappings of peers' memory.
#[derive(Debug)]
pub(crate) struct MemoryRegistry {
    pub(super) shared: Arc<Shared>,
    service: Service,
    notifier: Notifier,
}

impl MemoryRegistry {
    /// Starts the table, its service and its notifier. `secret` is the communicator's; `all_gather`
    /// collects every rank's bytes. Every rank calls this at the same time.
    pub(crate) fn start(
        rank: Rank,
        device: &Arc<dyn Device>,
        secret: &[u8],
        idle: IdleMappings,
        max_pooled_bytes: u64,
        all_gather: impl Fn(Vec<u8>) -> Result<Vec<Vec<u8>>>,
    ) -> Result<Self> {
        let (outbox, queue) = notifier::queue()?;
        let key = HandleKey::new(secret)?;
        let shared = Arc::new(Shared {
            rank,
            device: device.clone(),
            token: key.token(),
            key,
            peers: OnceLock::new(),
            exports: Exports::new(max_pooled_bytes),
            mappings: MappingCache::new(CacheLimits {
                idle_count: idle.max_count,
                idle_bytes: idle.max_bytes,
            }),
            outbox: outbox.clone(),
            heard: Mutex::default(),
            slot_released: OnceLock::new(),
            publications: Publications::default(),
            reclaimers: Mutex::default(),
            waited: Mutex::default(),
        });
        let answering = Arc::downgrade(&shared);
        let service = Service::start(
            shared.token,
            Box::new(move |request| match answering.upgrade() {
                Some(shared) => shared.answer(request),
                None => Err(Error::new(ErrorKind::Closed, "the communicator is closed")),
            }),
        )?;
        let own = PeerInfo::of_this_rank(&**device, service.name());
        // Set once, here; nobody else has the table yet.
        let peers = Peers::gather(rank, &own, &**device, all_gather)?;
        let _ = shared.peers.set(peers);
        let notifier = Notifier::start(outbox, queue, Arc::downgrade(&shared), idle.max_age)?;
        Ok(Self {
            shared,
            service,
            notifier,
        })
    }

    /// Allocates `bytes` and registers them: in an allocation that was freed and kept, if one fits. Where a peer's
    /// device cannot map this one's memory, it is memory of the host, which that maps too.
    /// Where there is not enough memory, has everything let go of that is kept for later, asks peers
    /// to unmap what is only theirs any more, and waits for them, for two seconds at most.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`].
    pub(crate) fn allocate(&self, bytes: usize, kind: AllocationKind) -> Result<Region> {
        let shared = &self.shared;
        let kind = self.shareable_kind(kind)?;
        if let Some((slice, numbers)) = shared.exports.reuse(bytes, kind) {
            shared.device.prepare_reuse(&slice);
            return Ok(self.region(slice, numbers));
        }
        self.register_as(&self.allocate_fresh(bytes, kind)?, Some(kind))
    }

    /// Allocates and registers `bytes` of words for signals, all zero, which every peer on the machine maps. Waits on
    /// them end when `fault`, or the device's, is raised.
    pub(crate) fn allocate_signals(&self, bytes: usize, fault: &Arc<Fault>) -> Result<Region> {
        let kind = self.shareable_kind(AllocationKind::Plain)?;
        let device = &self.shared.device;
        self.register(&device.allocate_signals_for(bytes, kind, fault)?)
    }

    /// Whether all peers of this machine can map the memory of this rank's device.
    pub(crate) fn all_map_device_memory(&self) -> Result<bool> {
        Ok(self.shared.peers()?.all_map_device_memory())
    }

    /// `kind`, or what all peers of the machine can map instead.
    fn shareable_kind(&self, kind: AllocationKind) -> Result<AllocationKind> {
        if self.all_map_device_memory()? {
            return Ok(kind);
        }
        Ok(AllocationKind::Host)
    }

    fn allocate_fresh(&self, bytes: usize, kind: AllocationKind) -> Result<DeviceSlice> {
        let shared = &self.shared;
        let enough = |result: &Result<DeviceSlice>| !matches!(result, Err(error) if error.kind() == ErrorKind::OutOfMemory);
        let first = shared.device.allocate(bytes, kind);
        if enough(&first) {
            return first;
        }
        self.let_go_of_unused();
        let deadline = Deadline::after(MAX_RECLAIM);
        loop {
            let nothing_left = shared.exports.unregistered_at().is_none();
            let again = shared.device.allocate(bytes, kind);
            if enough(&again) {
                return again;
            }
            if nothing_left || deadline.passed() {
                return again.map_err(|error| error.with_rank(shared.rank));
            }
            let interval = RECLAIM_INTERVAL.min(deadline.remaining());
            shared.exports.wait_for_change(interval);
        }
    }

    /// Lets go of everything that is kept for later, and asks peers to unmap what is only theirs.
    fn let_go_of_unused(&self) {
        let shared = &self.shared;
        shared.publications.reclaim();
        lock(&shared.reclaimers)
            .iter()
            .for_each(|reclaim| reclaim());
        shared.mappings.release_idle();
        // Those that left just now are not registered any more either.
        shared.exports.empty_pool();
        shared.ask_to_unmap(shared.exports.unregistered());
    }

    /// Gives memory that is kept for later back to the system, and unmaps what nobody uses; peers are
    /// asked to unmap it too. Blocks until that is done, at most until `deadline`.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`], with a peer that still maps memory, or where streams still had work.
    pub(crate) fn trim(&self, deadline: Deadline) -> Result<()> {
        let shared = &self.shared;
        self.let_go_of_unused();
        shared.outbox.flush();
        let late = |error: Error| error.with_operation("trim memory").with_rank(shared.rank);
        while let Some(peers) = shared.exports.unregistered_at() {
            if deadline.passed() {
                let what = "the release of freed memory by a peer that uses it";
                return Err(late(region::held(deadline.expired(what), &peers)));
            }
            let interval = RECLAIM_INTERVAL.min(deadline.remaining());
            shared.exports.wait_for_change(interval);
        }
        shared.device.trim(deadline).map_err(late)
    }

    /// Calls `reclaim` when memory runs out, to let go of what is kept for later.
    pub(crate) fn when_out_of_memory(&self, reclaim: impl Fn() + Send + Sync + 'static) {
        lock(&self.shared.reclaimers).push(Box::new(reclaim));
    }

    /// Registers `slice` for peers. What it registers stays allocated as long as a region of it, or
    /// a peer's mapping, is there.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the memory cannot be shared.
    pub(crate) fn register(&self, slice: &DeviceSlice) -> Result<Region> {
        self.register_as(slice, None)
    }

    fn register_as(&self, slice: &DeviceSlice, reusable: Option<AllocationKind>) -> Result<Region> {
        if slice.bytes() == 0 {
            return Err(
                Error::invalid("the slice has no bytes; expected at least one")
                    .with_operation("register memory")
                    .with_rank(self.shared.rank),
            );
        }
        let shared = &self.shared;
        let numbers = shared
            .exports
            .register(slice, reusable, || shared.device.export(slice))
            .map_err(|error| {
                error
                    .with_operation("register memory")
                    .with_rank(shared.rank)
            })?;
        opening::publish_in_process(slice.backing());
        Ok(self.region(slice.clone(), numbers))
    }

    fn region(&self, slice: DeviceSlice, numbers: RegionNumbers) -> Region {
        Region {
            slice,
            registration: Arc::new(Registration {
                shared: self.shared.clone(),
                numbers,
            }),
        }
    }

    /// A handle of `region` for `peer`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a region of another rank or job.
    pub(crate) fn export_handle(&self, region: &Region, peer: Rank) -> Result<ExportedHandle> {
        let shared = &self.shared;
        if !Arc::ptr_eq(shared, &region.registration.shared) {
            return Err(Error::invalid(
                "the region is registered by another rank, or in another job",
            )
            .with_rank(shared.rank)
            .with_peer(peer)
            .with_help("register the memory with a communicator of this rank"));
        }
        let slice = &region.slice;
        let handle =
            shared
                .exports
                .issue_handle(region.registration.numbers, peer, |allocation| Handle {
                    owner: shared.rank,
                    kind: shared.device.kind(),
                    device: shared.device.identity(),
                    process: process_identity(),
                    allocation: allocation.identity,
                    generation: region.generation(),
                    region: allocation.region,
                    allocation_bytes: allocation.bytes,
                    offset: slice.offset() as u64,
                    bytes: slice.bytes() as u64,
                    ipc: allocation.ipc,
                    pieces: allocation.pieces,
                    host: allocation.host,
                })?;
        let wire = handle.encode(&shared.key);
        Ok(ExportedHandle::new(&region.registration, peer, wire))
    }

    /// The handle that `peer` sent as `wire`.
    pub(crate) fn peer_handle(&self, peer: Rank, wire: impl Into<Vec<u8>>) -> PeerHandle {
        PeerHandle::new(&self.shared, peer, wire.into())
    }

    /// Whether `peer` runs on this machine, where its memory can be mapped.
    pub(crate) fn is_near(&self, peer: Rank) -> Result<bool> {
        self.shared.peers()?.is_near(peer)
    }

    /// What the devices of this rank and of `peer`, on the same machine, can both do with each other's memory.
    pub(crate) fn access(&self, peer: Rank) -> Result<PeerAccess> {
        self.shared.peers()?.access(peer)
    }

    /// The most of `ranks` that share one device, of which each should have its own; the same on every rank.
    pub(crate) fn ranks_per_device(&self, ranks: &[Rank]) -> Result<usize> {
        self.shared.peers()?.ranks_per_device(ranks)
    }

    /// Has `peer` told by the notifier. Does not block.
    pub(crate) fn tell(&self, peer: Rank, message: Message) {
        self.shared.outbox.tell(peer, message);
    }

    /// Calls `handler` with the peer and the slot's number when a peer releases a signal slot.
    pub(crate) fn when_slot_released(&self, handler: impl Fn(Rank, u64) + Send + Sync + 'static) {
        if self.shared.slot_released.set(Box::new(handler)).is_err() {
            tracing::error!("two handlers for released signal slots");
        }
    }

    /// A new publication of this rank, by which `listener` is told what peers say of entries of it and of theirs, and
    /// before an allocation finds no memory. The number under which peers reach it.
    pub(crate) fn listen(&self, listener: impl Fn(Heard) + Send + Sync + 'static) -> u64 {
        self.shared.publications.add(Arc::new(listener))
    }

    /// Ends a publication: what peers say of it from now on is not heard.
    pub(crate) fn stop_listening(&self, publication: u64) {
        self.shared.publications.remove(publication);
    }

    /// Whether `peer` is a thread of this process, in which a mapping is the memory itself.
    pub(crate) fn is_in_process(&self, peer: Rank) -> Result<bool> {
        self.shared.peers()?.is_in_process(peer)
    }

    /// A rank died or left: what it maps is not waited for any more.
    pub(crate) fn forget_peer(&self, peer: Rank) {
        self.shared.outbox.forget(peer);
        self.shared.forget_peer(peer);
    }

    /// Unmaps what nobody uses, and returns when its owners have been told.
    pub(crate) fn release_idle(&self) {
        self.shared.mappings.release_idle();
        self.shared.outbox.flush();
    }

    /// How many allocations are registered (or still mapped by a peer), and how many are mapped. What
    /// is kept for later does not count.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.shared.exports.len(), self.shared.mappings.len())
    }

    /// How many freed allocations are kept for later, and their bytes.
    pub(crate) fn pooled(&self) -> (usize, u64) {
        self.shared.exports.pooled()
    }

    /// Frees what is kept for later, unmaps what nobody uses and stops the threads. What peers still
    /// map is not waited for.
    pub(crate) fn stop(&self) {
        self.shared.exports.close_pool();
        self.shared.mappings.release_idle();
        self.notifier.stop();
        self.service.stop();
    }
}

impl Drop for MemoryRegistry {
    fn drop(&mut self) {
        self.stop();
    }
}

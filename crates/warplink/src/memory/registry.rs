//! A rank's registrations and mappings: entry point for the rest of the library.

use super::cache::{CacheLimits, MappingCache};
use super::exchanged::{ExportedHandle, PeerHandle};
use super::exports::{Exports, RegionNumbers};
use super::handle::{Handle, HandleKey};
use super::limits::IdleMappings;
use super::message::Message;
use super::notifier::Notifier;
use super::outbox;
use super::peers::{PeerInfo, Peers};
use super::process;
use super::publications::Heard;
use super::region::{self, Region, Registration};
use super::requests::RequestHandler;
use super::service::Service;
use super::shared::Shared;
use crate::deadline::Deadline;
use crate::debug::debug_fields;
use crate::device::{AllocationKind, Device, DeviceSlice, Fault, PeerAccess};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Maximum wait of an allocation for peers to release memory.
const MAX_RECLAIM: Duration = Duration::from_secs(2);

/// Retry interval of such an allocation.
const RECLAIM_INTERVAL: Duration = Duration::from_millis(20);

type Reclaimer = Box<dyn Fn() + Send + Sync>;

/// A rank's registrations, and its mappings of peers' memory.
pub(crate) struct MemoryRegistry {
    pub(super) shared: Arc<Shared>,
    pub(super) requests: Arc<RequestHandler>,
    reclaimers: Mutex<Vec<Reclaimer>>,
    service: Service,
    notifier: Notifier,
}

impl MemoryRegistry {
    /// Starts table, service and notifier. `secret` is the job's; `all_gather` exchanges bytes among the
    /// ranks. Collective.
    pub(crate) fn start(
        rank: Rank,
        device: &Arc<dyn Device>,
        secret: &[u8],
        idle: IdleMappings,
        max_pooled_bytes: u64,
        all_gather: impl Fn(Vec<u8>) -> Result<Vec<Vec<u8>>>,
    ) -> Result<Self> {
        // Created before the threads that use it, since the service may queue notices before the notifier
        // runs.
        let (outbox, queue) = outbox::queue()?;
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
            waited: Mutex::default(),
        });
        let requests = Arc::new(RequestHandler::new(&shared));
        // A weak reference: the service must not keep the registry alive.
        let answering = Arc::downgrade(&requests);
        let service = Service::start(
            shared.token,
            Box::new(move |request| match answering.upgrade() {
                Some(requests) => requests.answer(request),
                None => Err(Error::closed("the communicator is closed")),
            }),
        )?;
        let own = PeerInfo::of_this_rank(&**device, service.name());
        // Set only here, before anybody else has the table.
        let peers = Peers::gather(rank, &own, &**device, all_gather)?;
        let _ = shared.peers.set(peers);
        let notifier = Notifier::start(outbox, queue, Arc::downgrade(&shared), idle.max_age)?;
        Ok(Self {
            shared,
            requests,
            reclaimers: Mutex::default(),
            service,
            notifier,
        })
    }

    /// Allocates and registers `bytes`, from the pool if an allocation fits. If a peer's device cannot map
    /// this device's memory, allocates host memory, which all can map. If memory is exhausted, releases
    /// pooled and cached memory, asks peers to unmap memory that only they use, and waits for that up to two
    /// seconds.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`].
    pub(crate) fn allocate(&self, bytes: usize, kind: AllocationKind) -> Result<Region> {
        let shared = &self.shared;
        let kind = self.shareable_kind(kind)?;
        if let Some((slice, numbers)) = shared.exports.reuse(bytes, kind) {
            // The device may have to remove protections from the previous use.
            shared.device.prepare_reuse(&slice);
            return Ok(self.region(slice, numbers));
        }
        self.register_as(&self.allocate_fresh(bytes, kind)?, Some(kind))
    }

    /// Allocates and registers `bytes` of zeroed signal words, which every peer on the machine can map.
    /// `fault` and the device's fault abort waits for them.
    pub(crate) fn allocate_signals(&self, bytes: usize, fault: &Arc<Fault>) -> Result<Region> {
        let kind = self.shareable_kind(AllocationKind::Plain)?;
        let device = &self.shared.device;
        self.register(&device.allocate_signals_for(bytes, kind, fault)?)
    }

    /// Whether all peers of this machine can map the memory of this rank's device.
    pub(crate) fn all_map_device_memory(&self) -> Result<bool> {
        Ok(self.shared.peers()?.all_map_device_memory())
    }

    /// `kind`, or a kind that all peers of the machine can map.
    fn shareable_kind(&self, kind: AllocationKind) -> Result<AllocationKind> {
        if self.all_map_device_memory()? {
            return Ok(kind);
        }
        // Host memory is the only kind that devices without peer access have in common.
        Ok(AllocationKind::Host)
    }

    fn allocate_fresh(&self, bytes: usize, kind: AllocationKind) -> Result<DeviceSlice> {
        let shared = &self.shared;
        // Other errors would not be fixed by freeing memory.
        let enough = |result: &Result<DeviceSlice>| !matches!(result, Err(error) if error.kind() == ErrorKind::OutOfMemory);
        let first = shared.device.allocate(bytes, kind);
        if enough(&first) {
            return first;
        }
        self.release_unused();
        let deadline = Deadline::after(MAX_RECLAIM);
        loop {
            // Checked before the attempt: memory released in between makes the attempt succeed.
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

    /// Releases everything pooled or cached, and asks peers to unmap memory that only they use.
    fn release_unused(&self) {
        let shared = &self.shared;
        // From the users towards the pool: each step may return memory that the next one releases.
        self.requests.publications.reclaim();
        lock(&self.reclaimers).iter().for_each(|reclaim| reclaim());
        shared.mappings.release_idle();
        // Allocations evicted just now are no longer registered either.
        shared.exports.empty_pool();
        shared.ask_to_unmap(shared.exports.unregistered());
    }

    /// Returns pooled memory to the system, and closes idle mappings; peers are asked to unmap it too. Blocks
    /// until done, up to `deadline`.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`], with a peer that still maps memory, or if streams were busy.
    pub(crate) fn trim(&self, deadline: Deadline) -> Result<()> {
        let shared = &self.shared;
        self.release_unused();
        // Peers must have received the requests to unmap before waiting for them.
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

    /// Registers a callback for when memory is exhausted, to release cached memory.
    pub(crate) fn when_out_of_memory(&self, reclaim: impl Fn() + Send + Sync + 'static) {
        lock(&self.reclaimers).push(Box::new(reclaim));
    }

    /// Registers `slice` for peers. Its memory stays allocated as long as a region or a peer's mapping of it
    /// exists.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the memory cannot be shared.
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
        // Ranks that are threads of this process find it without a handle's descriptors.
        process::publish(slice.backing());
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

    /// Issues a handle of `region` for `peer`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a region of another rank or job.
    pub(crate) fn export_handle(&self, region: &Region, peer: Rank) -> Result<ExportedHandle> {
        let shared = &self.shared;
        // Generation and region numbers are unique only within a registry.
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
                    process: process::identity(),
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

    /// Whether `peer` is on this machine, so that its memory can be mapped.
    pub(crate) fn is_near(&self, peer: Rank) -> Result<bool> {
        self.shared.peers()?.is_near(peer)
    }

    /// Mutual access between the devices of this rank and of `peer`, on the same machine.
    pub(crate) fn access(&self, peer: Rank) -> Result<PeerAccess> {
        self.shared.peers()?.access(peer)
    }

    /// Maximum number of `ranks` on one device; equal on every rank.
    pub(crate) fn ranks_per_device(&self, ranks: &[Rank]) -> Result<usize> {
        self.shared.peers()?.ranks_per_device(ranks)
    }

    /// Queues a notice to `peer`. Does not block.
    pub(crate) fn notify(&self, peer: Rank, message: Message) {
        self.shared.outbox.notify(peer, message);
    }

    /// Registers the handler for peers' releases of signal slots; it receives the peer and the slot number.
    pub(crate) fn when_slot_released(&self, handler: impl Fn(Rank, u64) + Send + Sync + 'static) {
        if self.requests.slot_released.set(Box::new(handler)).is_err() {
            tracing::error!("two handlers for released signal slots");
        }
    }

    /// Adds a publication, whose `listener` receives peers' notices and is called when memory is exhausted.
    /// Returns its number, by which peers address it.
    pub(crate) fn listen(&self, listener: impl Fn(Heard) + Send + Sync + 'static) -> u64 {
        self.requests.publications.add(Arc::new(listener))
    }

    /// Ends a publication: later notices about it are ignored.
    pub(crate) fn stop_listening(&self, publication: u64) {
        self.requests.publications.remove(publication);
    }

    /// Whether `peer` is a thread of this process, in which a mapping is the memory itself.
    pub(crate) fn is_in_process(&self, peer: Rank) -> Result<bool> {
        self.shared.peers()?.is_in_process(peer)
    }

    /// A rank died or left: stops waiting for it to unmap memory.
    pub(crate) fn forget_peer(&self, peer: Rank) {
        // The outbox first, so that no notice is sent to it meanwhile.
        self.shared.outbox.forget(peer);
        self.shared.forget_peer(peer);
    }

    /// Closes idle mappings, and returns once their owners have been notified.
    pub(crate) fn release_idle(&self) {
        self.shared.mappings.release_idle();
        self.shared.outbox.flush();
    }

    /// Number of allocations registered (or still mapped by a peer), and of mappings, excluding pooled ones.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.shared.exports.len(), self.shared.mappings.len())
    }

    /// Number of pooled allocations, and their bytes.
    pub(crate) fn pooled(&self) -> (usize, u64) {
        self.shared.exports.pooled()
    }

    /// Frees pooled memory, closes idle mappings and stops the threads. Does not wait for peers to unmap.
    pub(crate) fn stop(&self) {
        // Closed rather than emptied: regions that end later are not pooled any more.
        self.shared.exports.close_pool();
        self.shared.mappings.release_idle();
        // The notifier goes first, as it still sends notices about the mappings closed above.
        self.notifier.stop();
        self.service.stop();
    }
}

debug_fields!(MemoryRegistry, |it| shared: it.shared);

impl Drop for MemoryRegistry {
    fn drop(&mut self) {
        self.stop();
    }
}

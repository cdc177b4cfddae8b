//! Regions that peers may reach, handles of them on the wire, and mappings of peers' regions.
//!
//! # What holds
//! 1. A region's memory is not freed while a peer maps it: its registration outlives the region
//!    until every handle that was given out has come back, or the peer is gone.
//! 2. A mapping is closed when its last user is gone and the owner asks, the cache's bound asks, or
//!    the communicator closes; then the owner is told how many handles came back.
//! 3. A freed and reallocated buffer at the same address is another allocation, with another
//!    identity and generation; a mapping of the old one is never used for it.
//! 4. An allocation that is kept for reuse is not freed: it stays registered, and mapped by peers. It
//!    is used again when no stream and no peer uses it.

mod cache;
#[cfg(all(test, loom))]
mod cache_loom;
#[cfg(all(test, not(loom)))]
mod cache_tests;
mod exports;
mod handle;
mod limits;
mod mapping;
mod message;
mod notifier;
#[cfg(test)]
mod notifier_tests;
mod opening;
mod peers;
mod publications;
mod region;
mod releaser;
mod service;

pub use handle::{HANDLE_BYTES, Handle, HandleKey};
pub use limits::IdleMappings;
pub(crate) use message::{Message, Notice};
pub use region::{Region, RemoteRegion};

use crate::deadline::Deadline;
use crate::device::{AllocationKind, Device, DeviceSlice, Piece};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use cache::{CacheLimits, MappingCache};
use exports::{Exports, RegionNumbers, Unwanted};
use mapping::{Mapped, RemoteBacking};
use message::Request;
use notifier::{Notifier, Outbox};
use opening::process_identity;
use peers::{PeerInfo, Peers};
pub(crate) use publications::Heard;
use publications::Publications;
use region::Registration;
use service::Service;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// The longest that an allocation waits for peers to let go of memory that it could use.
const MAX_RECLAIM: Duration = Duration::from_secs(2);

/// Between two attempts of such an allocation.
const RECLAIM_INTERVAL: Duration = Duration::from_millis(20);

/// The key of a mapping: whose memory, and which allocation of it.
type MappingKey = (Rank, u64);

type SlotReleasedHandler = Box<dyn Fn(Rank, u64) + Send + Sync>;

type Reclaimer = Box<dyn Fn() + Send + Sync>;

/// A rank's registrations, and its mappings of peers' memory.
#[derive(Debug)]
pub(crate) struct MemoryRegistry {
    shared: Arc<Shared>,
    service: Service,
    notifier: Notifier,
}

/// What regions, mappings and the threads share.
struct Shared {
    rank: Rank,
    device: Arc<dyn Device>,
    key: HandleKey,
    token: [u8; message::TOKEN_BYTES],
    peers: OnceLock<Peers>,
    exports: Exports,
    mappings: MappingCache<MappingKey, Mapped>,
    outbox: Outbox,
    /// The last notice of each peer that was handled.
    heard: Mutex<BTreeMap<Rank, u64>>,
    slot_released: OnceLock<SlotReleasedHandler>,
    publications: Publications,
    reclaimers: Mutex<Vec<Reclaimer>>,
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
        all_gather: impl FnOnce(Vec<u8>) -> Result<Vec<Vec<u8>>>,
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
        let _ = shared.peers.set(Peers::gather(rank, &own, all_gather)?);
        let notifier = Notifier::start(outbox, queue, Arc::downgrade(&shared), idle.max_age)?;
        Ok(Self {
            shared,
            service,
            notifier,
        })
    }

    /// Allocates `bytes` and registers them: in an allocation that was freed and kept, if one fits.
    /// Where there is not enough memory, has everything let go of that is kept for later, asks peers
    /// to unmap what is only theirs any more, and waits for them, for two seconds at most.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`].
    pub(crate) fn allocate(&self, bytes: usize, kind: AllocationKind) -> Result<Region> {
        let shared = &self.shared;
        if let Some((slice, numbers)) = shared.exports.reuse(bytes, kind) {
            shared.device.prepare_reuse(&slice);
            return Ok(self.region(slice, numbers));
        }
        self.register_as(&self.allocate_fresh(bytes, kind)?, Some(kind))
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

    /// A handle of `region` for `peer`, which must either open it or decline it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a region of another communicator.
    pub(crate) fn export_handle(&self, region: &Region, peer: Rank) -> Result<[u8; HANDLE_BYTES]> {
        let shared = &self.shared;
        if !Arc::ptr_eq(shared, &region.registration.shared) {
            return Err(
                Error::invalid("the region is registered with another communicator")
                    .with_rank(shared.rank)
                    .with_peer(peer)
                    .with_help("register the memory with the communicator that transfers it"),
            );
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
                })?;
        Ok(handle.encode(&shared.key))
    }

    /// Takes back a handle that was made for `peer` and never reached it.
    pub(crate) fn cancel_handle(&self, region: &Region, peer: Rank) {
        self.shared
            .exports
            .cancel_handle(region.registration.numbers, peer);
    }

    /// Maps the region that `peer` exported, from the cache where it is there.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidHandle`] where the handle is truncated, altered or not `peer`'s, or its
    /// region is gone; what the device says where it cannot be opened.
    pub(crate) fn open_handle(&self, peer: Rank, wire: &[u8]) -> Result<RemoteRegion> {
        let shared = &self.shared;
        let handle = shared.decode(peer, wire)?;
        let key = (peer, handle.allocation);
        let lease = shared
            .mappings
            .open(key, handle.generation, || opening::open(shared, &handle))
            .inspect_err(|_| shared.release_handle(&handle))?;
        let whole = RemoteBacking::slice(shared, &handle, lease);
        let (start, bytes) = (handle.offset as usize, handle.bytes as usize);
        Ok(RemoteRegion {
            owner: peer,
            slice: whole.slice(start..start + bytes)?,
        })
    }

    /// Gives back a handle that will not be opened.
    pub(crate) fn decline_handle(&self, peer: Rank, wire: &[u8]) {
        self.shared.decline(peer, wire);
    }

    /// Whether `peer` runs on this machine, where its memory can be mapped.
    pub(crate) fn is_near(&self, peer: Rank) -> Result<bool> {
        self.shared.peers()?.is_near(peer)
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

impl Shared {
    fn peers(&self) -> Result<&Peers> {
        self.peers.get().ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                "peers are asked before their information was gathered",
            )
        })
    }

    /// Gives back a handle that will not be opened.
    fn decline(&self, peer: Rank, wire: &[u8]) {
        match self.decode(peer, wire) {
            Ok(handle) => self.release_handle(&handle),
            Err(error) => {
                tracing::warn!(%error, "a handle that cannot be read cannot be given back")
            }
        }
    }

    fn release_handle(&self, handle: &Handle) {
        let message = Message::HandlesReleased {
            generation: handle.generation,
            handles: 1,
        };
        self.outbox.tell(handle.owner, message);
        if handle.region != 0 {
            let message = Message::RegionReleased {
                region: handle.region,
                handles: 1,
            };
            self.outbox.tell(handle.owner, message);
        }
    }

    fn decode(&self, peer: Rank, wire: &[u8]) -> Result<Handle> {
        let handle = Handle::decode(wire, &self.key)
            .map_err(|error| error.with_rank(self.rank).with_peer(peer))?;
        let kind = self.device.kind();
        if handle.owner != peer || handle.kind != kind {
            let what = format!(
                "the handle is of rank {} on device {}; expected rank {peer} on device {kind}",
                handle.owner, handle.kind
            );
            return Err(Error::new(ErrorKind::InvalidHandle, what)
                .with_operation("read a handle")
                .with_rank(self.rank)
                .with_peer(peer));
        }
        Ok(handle)
    }

    fn forget_peer(&self, peer: Rank) {
        self.ask_to_unmap(self.exports.forget_peer(peer));
    }

    /// Has peers asked to unmap what is not to be used again. Does not block.
    fn ask_to_unmap(&self, unwanted: Vec<Unwanted>) {
        for Unwanted {
            peer,
            allocation,
            generation,
        } in unwanted
        {
            let message = Message::Unmap {
                allocation,
                generation,
            };
            self.outbox.tell(peer, message);
        }
    }

    /// Asks `peer`'s service and waits for the answer, which may carry a piece of memory.
    fn ask(&self, peer: Rank, message: Message) -> Result<Option<Piece>> {
        let request = Request {
            from: self.rank,
            number: 0,
            message,
        };
        service::ask(self.peers()?.service(peer)?, &self.token, request)
            .map_err(|error| error.with_rank(self.rank).with_peer(peer))
    }

    /// Sends the notice `number` to `peer`'s service, and does not wait for the answer.
    fn begin_telling(&self, peer: Rank, number: u64, message: Message) -> Result<service::Asked> {
        let request = Request {
            from: self.rank,
            number,
            message,
        };
        service::begin(self.peers()?.service(peer)?, &self.token, request)
            .map_err(|error| error.with_rank(self.rank).with_peer(peer))
    }

    /// Does what a peer asks for, unless it is a notice that was handled before: then the peer has not
    /// had the answer.
    fn answer(&self, request: Request) -> Result<Option<Piece>> {
        let Request {
            from,
            number,
            message,
        } = request;
        if number != 0 {
            let mut heard = lock(&self.heard);
            let last = heard.entry(from).or_default();
            if number <= *last {
                return Ok(None);
            }
            *last = number;
        }
        match message {
            Message::Piece {
                allocation,
                generation,
                index,
            } => {
                let piece = self.exports.piece(generation, allocation, index);
                return piece.map(Some);
            }
            Message::Unmap {
                allocation,
                generation,
            } => {
                self.mappings.revoke((from, allocation), generation);
            }
            Message::HandlesReleased {
                generation,
                handles,
            } => self.exports.handles_released(generation, from, handles),
            Message::RegionReleased { region, handles } => {
                self.exports.region_released(region, from, handles);
            }
            Message::SlotReleased { slot } => {
                if let Some(handler) = self.slot_released.get() {
                    handler(from, slot);
                }
            }
            Message::Published {
                publication,
                entry,
                notice,
            } => {
                let heard = Heard::Notice {
                    from,
                    entry,
                    notice,
                };
                if !self.publications.tell(publication, heard)
                    && let Notice::Offer(handle) = notice
                {
                    self.decline(from, &handle);
                }
            }
        }
        Ok(None)
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryRegistry")
            .field("rank", &self.rank)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

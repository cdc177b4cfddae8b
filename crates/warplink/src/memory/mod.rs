//! Regions that peers may reach, handles of them on the wire, and mappings of peers' regions.
//!
//! # What holds
//! 1. A region's memory is not freed while a peer maps it: its registration outlives the region
//!    until every handle that was given out has come back, or the peer is gone.
//! 2. A mapping is closed when its last user is gone and the owner asks, the cache's bound asks, or
//!    the communicator closes; then the owner is told how many handles came back.
//! 3. A freed and reallocated buffer at the same address is another allocation, with another
//!    identity and generation; a mapping of the old one is never used for it.

mod cache;
mod exports;
mod handle;
mod region;
mod service;

pub use handle::{HANDLE_BYTES, Handle, fuzz_decode};
pub use region::{Region, RemoteRegion};
pub(crate) use service::Subject;

use crate::device::{
    Backing, Device, DeviceIdentity, DeviceKind, DeviceSlice, Opening, machine_identity,
};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use cache::MappingCache;
use exports::Exports;
use handle::HandleKey;
use region::{Mapped, Registration, RemoteBacking};
use serde::{Deserialize, Serialize};
use service::{Request, Service};
use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::time::Duration;

/// Mappings that are kept though nobody uses them.
const IDLE_MAPPINGS: usize = 256;

/// What a rank tells every other when it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Card {
    process: [u8; 16],
    host: [u8; 16],
    device: [u8; 16],
    cuda: bool,
    service: Vec<u8>,
}

/// The key of a mapping: whose memory, and which allocation of it.
type Key = (Rank, u64);

type NoticeHandler = Box<dyn Fn(Rank, u64) + Send + Sync>;

/// A rank's registrations, and its mappings of peers' memory.
#[derive(Debug)]
pub(crate) struct Memory {
    inner: Arc<Inner>,
    service: Service,
    janitor: Mutex<Option<std::thread::JoinHandle<()>>>,
}

struct Inner {
    rank: Rank,
    device: Arc<dyn Device>,
    key: HandleKey,
    token: [u8; 16],
    host: [u8; 16],
    cards: OnceLock<Vec<Card>>,
    exports: Exports,
    mappings: MappingCache<Key, Mapped>,
    errands: mpsc::Sender<Errand>,
    slot_released: OnceLock<NoticeHandler>,
}

/// What is told to peers from a thread of its own, so that dropping never waits for a peer.
enum Errand {
    Tell(Rank, Subject, u64, u64),
    // Answers when every errand before it is done.
    Flush(mpsc::Sender<()>),
    Stop,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory")
            .field("rank", &self.rank)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Inner {
    fn tell(&self, peer: Rank, subject: Subject, first: u64, second: u64) {
        // The janitor is gone only when the communicator is closed; then peers know that anyway.
        let _ = self
            .errands
            .send(Errand::Tell(peer, subject, first, second));
    }

    fn card(&self, peer: Rank) -> Result<&Card> {
        let cards = self.cards.get().and_then(|cards| cards.get(peer));
        cards.ok_or_else(|| Error::invalid("there is no such rank").peer(peer))
    }

    fn ask(
        &self,
        peer: Rank,
        subject: Subject,
        first: u64,
        second: u64,
    ) -> Result<Option<OwnedFd>> {
        let request = Request {
            subject,
            from: self.rank,
            first,
            second,
        };
        service::ask(&self.card(peer)?.service, &self.token, request)
            .map_err(|error| error.peer(peer))
    }

    fn handle(&self, request: Request) -> Result<Option<OwnedFd>> {
        match request.subject {
            Subject::Descriptor => {
                return self
                    .exports
                    .descriptor(request.second, request.first)
                    .map(Some);
            }
            Subject::Revoke => {
                self.mappings
                    .revoke((request.from, request.first), request.second);
            }
            Subject::Released => self
                .exports
                .released(request.first, request.from, request.second),
            Subject::SlotReleased => {
                if let Some(handler) = self.slot_released.get() {
                    handler(request.from, request.first);
                }
            }
        }
        Ok(None)
    }

    fn open(self: &Arc<Self>, handle: &Handle, handles: &Arc<AtomicU64>) -> Result<DeviceSlice> {
        let bytes = usize::try_from(handle.allocation_bytes).map_err(|_| {
            Error::new(
                ErrorKind::InvalidHandle,
                "the allocation is larger than this machine's memory",
            )
        })?;
        let mapped = self.opening(handle, bytes).map_err(|error| {
            error
                .during("open a peer's region")
                .on_rank(self.rank)
                .peer(handle.owner)
        })?;
        let mapping = mapped.backing().clone();
        Ok(DeviceSlice::whole(Arc::new(RemoteBacking {
            base: mapping.base(),
            bytes: mapping.bytes(),
            identity: mapping.identity(),
            kind: mapping.kind(),
            mapping: Some(mapping),
            inner: Arc::downgrade(self),
            owner: handle.owner,
            generation: handle.generation,
            handles: handles.clone(),
        })))
    }

    /// The three ways, in the order that the design gives.
    fn opening(&self, handle: &Handle, bytes: usize) -> Result<DeviceSlice> {
        let card = self.card(handle.owner)?;
        if handle.process == process_number() {
            let found = lock(&IN_PROCESS)
                .get(&handle.allocation)
                .and_then(Weak::upgrade);
            let backing = found
                .ok_or_else(|| Error::new(ErrorKind::InvalidHandle, "its memory was freed"))?;
            return self
                .device
                .import(Opening::SameProcess(DeviceSlice::whole(backing)), bytes);
        }
        if card.host != self.host {
            return Err(Error::new(ErrorKind::Unsupported, "the peer is on another machine")
                .help("transfers reach the ranks of one machine; use a collective engine between machines"));
        }
        let mut failed = None;
        if let Some(ipc) = handle.ipc {
            match self.device.import(Opening::Ipc(ipc), bytes) {
                Ok(mapped) => return Ok(mapped),
                Err(error) => failed = Some(error),
            }
        }
        if handle.descriptor {
            let descriptor = self.ask(
                handle.owner,
                Subject::Descriptor,
                handle.allocation,
                handle.generation,
            )?;
            let descriptor = descriptor.ok_or_else(|| {
                Error::new(ErrorKind::Protocol, "the answer carried no descriptor")
            })?;
            return self.device.import(Opening::Descriptor(descriptor), bytes);
        }
        Err(failed.unwrap_or_else(|| {
            Error::new(
                ErrorKind::InvalidHandle,
                "the handle gives no way to open it",
            )
        }))
    }
}

// Registered allocations of this process, for ranks that are threads of it.
static IN_PROCESS: Mutex<std::collections::BTreeMap<u64, Weak<dyn Backing>>> =
    Mutex::new(std::collections::BTreeMap::new());

/// A random number that tells this process from every other.
fn process_number() -> [u8; 16] {
    static NUMBER: OnceLock<[u8; 16]> = OnceLock::new();
    *NUMBER.get_or_init(|| {
        let mut number = [0; 16];
        if getrandom::fill(&mut number).is_err() {
            // Without randomness: the process id and the time, unique on this machine.
            let now = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap_or_default();
            number[..8].copy_from_slice(&u64::from(std::process::id()).to_le_bytes());
            number[8..].copy_from_slice(&(now.as_nanos() as u64).to_le_bytes());
        }
        number
    })
}

impl Memory {
    /// Starts the table and its service. `secret` is the communicator's; `gather` collects every
    /// rank's card. Every rank calls this at the same time.
    pub(crate) fn start(
        rank: Rank,
        device: &Arc<dyn Device>,
        secret: &[u8],
        gather: impl FnOnce(Vec<u8>) -> Result<Vec<Vec<u8>>>,
    ) -> Result<Self> {
        let (errands, queue) = mpsc::channel();
        let key = HandleKey::new(secret)?;
        let host = machine_identity();
        let inner = Arc::new(Inner {
            rank,
            device: device.clone(),
            token: key.token(),
            key,
            host,
            cards: OnceLock::new(),
            exports: Exports::default(),
            mappings: MappingCache::new(IDLE_MAPPINGS),
            errands,
            slot_released: OnceLock::new(),
        });
        let answering = Arc::downgrade(&inner);
        let service = Service::start(
            inner.token,
            Box::new(move |request| match answering.upgrade() {
                Some(inner) => inner.handle(request),
                None => Err(Error::new(ErrorKind::Closed, "the communicator is closed")),
            }),
        )?;
        let DeviceIdentity(identity) = device.identity();
        let own = Card {
            process: process_number(),
            host,
            device: identity,
            cuda: device.kind() == DeviceKind::Cuda,
            service: service.name().to_vec(),
        };
        let encoded = postcard::to_stdvec(&own).map_err(|error| {
            Error::new(ErrorKind::Internal, error.to_string()).during("encode a card")
        })?;
        let mut cards = Vec::new();
        for (peer, bytes) in gather(encoded)?.into_iter().enumerate() {
            let card: Card = postcard::from_bytes(&bytes).map_err(|error| {
                Error::new(ErrorKind::Protocol, error.to_string())
                    .during("read a card")
                    .peer(peer)
            })?;
            if card.cuda != own.cuda {
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    "one rank uses a GPU and another the host device",
                )
                .on_rank(rank)
                .peer(peer)
                .help("give every rank the same --device"));
            }
            cards.push(card);
        }
        // Set once, here; nobody else has the table yet.
        let _ = inner.cards.set(cards);
        let working = Arc::downgrade(&inner);
        let janitor = std::thread::Builder::new()
            .name("warplink-janitor".to_owned())
            .spawn(move || run_errands(&queue, &working))
            .map_err(|error| Error::io("start the janitor thread", &error))?;
        Ok(Self {
            inner,
            service,
            janitor: Mutex::new(Some(janitor)),
        })
    }

    /// Registers `slice` for peers. What it registers stays allocated as long as a region of it, or
    /// a peer's mapping, is there.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the memory cannot be shared.
    pub(crate) fn register(&self, slice: &DeviceSlice) -> Result<Region> {
        if slice.bytes() == 0 {
            return Err(Error::invalid("a region of no bytes").during("register memory"));
        }
        let generation = self.inner.exports.register(slice, || {
            let export = self.inner.device.export(slice)?;
            let backing = export.allocation.backing();
            let mut known = lock(&IN_PROCESS);
            known.retain(|_, weak| weak.strong_count() > 0);
            known.insert(backing.identity(), Arc::downgrade(backing));
            Ok(export)
        });
        let generation =
            generation.map_err(|error| error.during("register memory").on_rank(self.inner.rank))?;
        Ok(Region {
            slice: slice.clone(),
            registration: Arc::new(Registration {
                inner: self.inner.clone(),
                generation,
            }),
        })
    }

    /// The handle of `region` for `peer`, which must either open it or decline it.
    pub(crate) fn describe(&self, region: &Region, peer: Rank) -> Result<[u8; HANDLE_BYTES]> {
        let inner = &self.inner;
        if !Arc::ptr_eq(inner, &region.registration.inner) {
            return Err(
                Error::invalid("the region is registered with another communicator")
                    .on_rank(inner.rank)
                    .help("register the memory with the communicator that transfers it"),
            );
        }
        let slice = &region.slice;
        let handle = inner
            .exports
            .describe(region.generation(), peer, |export| {
                let backing = export.allocation.backing();
                Handle {
                    owner: inner.rank,
                    kind: inner.device.kind(),
                    device: inner.device.identity(),
                    process: process_number(),
                    allocation: backing.identity(),
                    generation: region.generation(),
                    allocation_bytes: backing.bytes() as u64,
                    offset: slice.offset() as u64,
                    bytes: slice.bytes() as u64,
                    ipc: export.ipc,
                    descriptor: export.descriptor.is_some(),
                }
            })?;
        Ok(handle.encode(&inner.key))
    }

    /// Takes a handle back that was described to `peer` and never reached it.
    pub(crate) fn take_back(&self, region: &Region, peer: Rank) {
        self.inner.exports.released(region.generation(), peer, 1);
    }

    /// Maps the region that `peer` described, from the cache where it is there.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidHandle`] where the handle is truncated, altered or not `peer`'s, or its
    /// region is gone; what the device says where it cannot be opened.
    pub(crate) fn open(&self, peer: Rank, wire: &[u8]) -> Result<RemoteRegion> {
        let handle = self.decode(peer, wire)?;
        let handles = Arc::new(AtomicU64::new(0));
        let opened = self
            .inner
            .mappings
            .open((peer, handle.allocation), handle.generation, || {
                Ok(Mapped {
                    whole: self.inner.open(&handle, &handles)?,
                    handles: handles.clone(),
                })
            });
        let mapped = opened.inspect_err(|_| self.give_back(&handle))?;
        let (start, bytes) = (handle.offset as usize, handle.bytes as usize);
        let slice = mapped.whole.slice(start..start + bytes)?;
        Ok(RemoteRegion {
            owner: peer,
            slice,
            _mapped: mapped,
        })
    }

    /// Gives back a handle that will not be opened.
    pub(crate) fn decline(&self, peer: Rank, wire: &[u8]) {
        match self.decode(peer, wire) {
            Ok(handle) => self.give_back(&handle),
            Err(error) => {
                tracing::warn!(%error, "a handle that cannot be read cannot be given back")
            }
        }
    }

    fn give_back(&self, handle: &Handle) {
        self.inner
            .tell(handle.owner, Subject::Released, handle.generation, 1);
    }

    fn decode(&self, peer: Rank, wire: &[u8]) -> Result<Handle> {
        let handle = Handle::decode(wire, &self.inner.key)
            .map_err(|error| error.on_rank(self.inner.rank).peer(peer))?;
        if handle.owner != peer || handle.kind != self.inner.device.kind() {
            return Err(Error::new(
                ErrorKind::InvalidHandle,
                format!(
                    "it is of rank {} on {}, not of this peer",
                    handle.owner, handle.kind
                ),
            )
            .on_rank(self.inner.rank)
            .peer(peer));
        }
        Ok(handle)
    }

    /// Tells `peer` something from the janitor's thread.
    pub(crate) fn tell(&self, peer: Rank, subject: Subject, first: u64) {
        self.inner.tell(peer, subject, first, 0);
    }

    /// Calls `handler` with the peer and the number when a peer releases a signal slot.
    pub(crate) fn when_slot_released(&self, handler: impl Fn(Rank, u64) + Send + Sync + 'static) {
        if self.inner.slot_released.set(Box::new(handler)).is_err() {
            tracing::error!("two handlers for released signal slots");
        }
    }

    /// A rank died or left: nothing of it is mapped any more on its side.
    pub(crate) fn forget(&self, peer: Rank) {
        self.inner.exports.forget(peer);
    }

    /// Unmaps what nobody uses, and returns when its owners have been told.
    pub(crate) fn release_idle(&self) {
        self.inner.mappings.release_idle();
        self.flush();
    }

    /// Waits until peers were told everything so far.
    pub(crate) fn flush(&self) {
        let (done, wait) = mpsc::channel();
        if self.inner.errands.send(Errand::Flush(done)).is_ok() {
            // Each errand is bounded by the service's patience; a closed channel means no janitor.
            let _ = wait.recv_timeout(Duration::from_secs(30));
        }
    }

    /// How many allocations are registered (or still mapped by a peer), and how many are mapped.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.inner.exports.len(), self.inner.mappings.len())
    }

    /// Stops the threads. What peers still map is not waited for.
    pub(crate) fn stop(&self) {
        let Some(janitor) = lock(&self.janitor).take() else {
            return;
        };
        self.release_idle();
        let _ = self.inner.errands.send(Errand::Stop);
        if janitor.thread().id() != std::thread::current().id() && janitor.join().is_err() {
            tracing::error!("the janitor thread panicked");
        }
        self.service.stop();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run_errands(queue: &mpsc::Receiver<Errand>, working: &Weak<Inner>) {
    let mut gone: HashSet<Rank> = HashSet::new();
    while let Ok(errand) = queue.recv() {
        match errand {
            Errand::Tell(peer, subject, first, second) => {
                let Some(inner) = working.upgrade() else {
                    return;
                };
                if gone.contains(&peer) {
                    inner.exports.forget(peer);
                    continue;
                }
                match inner.ask(peer, subject, first, second) {
                    Ok(_) => {}
                    // A peer that does not listen any more maps nothing any more.
                    Err(error) if error.kind() == ErrorKind::PeerLost => {
                        gone.insert(peer);
                        inner.exports.forget(peer);
                    }
                    Err(error) => tracing::warn!(%error, ?subject, "a peer could not be told"),
                }
            }
            Errand::Flush(done) => {
                let _ = done.send(());
            }
            Errand::Stop => return,
        }
    }
}

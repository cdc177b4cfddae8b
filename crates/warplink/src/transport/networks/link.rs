//! A connection to a peer over a network.

use super::exposed::{ExposedMemory, reached};
use super::{GONE, INBOUND, Networks, Told};
use crate::device::Fault;
use crate::device::network::{NetworkConnection, NetworkRegion, RemoteMemory};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::Region;
use crate::sync::lock;
use crate::transport::staging::{Incoming, Service, Shape, StagedEnd};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// How a connection over the network moves bytes of the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkPath {
    /// The network's library reads and writes the memory itself.
    Direct,
    /// Through staging memory of the host.
    Staged,
}

/// Bytes of the words that a peer writes to.
const WORDS_BYTES: usize = 16;

/// What a peer tells of its end: its address, and the keys of its words and of its region. Where it stages, they are
/// those of the rings' control memory and of the ring.
pub(crate) struct Offered<'a> {
    pub(crate) address: &'a [u8],
    pub(crate) words: &'a [u8],
    pub(crate) region: &'a [u8],
    pub(crate) staging: Option<OfferedRings<'a>>,
}

/// The rings that a peer receives through.
pub(crate) struct OfferedRings<'a> {
    pub(crate) shape: Shape,
    /// Bytes of the region behind them.
    pub(crate) region_bytes: u64,
    /// Its key, where the peer's library reaches it by itself; else empty.
    pub(crate) region: &'a [u8],
}

/// The peer's end of a connection.
pub(super) struct PeerEnd {
    rank: Rank,
    connection: Arc<dyn NetworkConnection>,
    words: RemoteMemory,
    region: RemoteMemory,
    rings: Option<Shape>,
    /// Its region, where both ends' libraries reach their memory by themselves.
    memory: Option<Arc<RemoteMemory>>,
}

/// A connection to a peer over the network, with what either side may write to.
pub(crate) struct NetworkLink {
    networks: Arc<Networks>,
    peer: Rank,
    connection: Arc<dyn NetworkConnection>,
    /// The peer's words and regions; the latter by number.
    words: Arc<RemoteMemory>,
    regions: Mutex<BTreeMap<u32, Arc<RemoteMemory>>>,
    exposed: Mutex<Option<ExposedMemory>>,
    staged: Option<(Arc<Incoming>, Shape)>,
    /// The peer's first region, where what goes over the link goes past the staging memory.
    peers_memory: Option<Arc<RemoteMemory>>,
    staged_end: OnceLock<Arc<StagedEnd>>,
    /// Held as long as it matters that the connection works.
    used: Arc<()>,
}

impl PeerEnd {
    /// Connects to the rank `peer`, to which this one has `exposed` memory, and opens what it offered.
    pub(super) fn open(peer: Rank, exposed: &ExposedMemory, offered: &Offered<'_>) -> Result<Self> {
        let connection = exposed.network.connect(peer, offered.address)?;
        let words = connection.open(offered.words)?;
        let region = connection.open(offered.region)?;
        let staging = offered.staging.as_ref();
        let rings = staging.map(|staging| staging.shape);
        check_words(&words, &region, rings).map_err(|error| error.with_peer(peer))?;
        let reached = staging.filter(|_| !exposed.reached.is_empty());
        let memory = reached
            .and_then(|staging| open_reached(&*connection, staging.region, staging.region_bytes));
        Ok(Self {
            rank: peer,
            connection,
            words,
            region,
            rings,
            memory,
        })
    }
}

impl NetworkLink {
    pub(super) fn new(networks: &Arc<Networks>, end: PeerEnd, exposed: ExposedMemory) -> Self {
        Self {
            networks: networks.clone(),
            peer: end.rank,
            connection: end.connection,
            words: Arc::new(end.words),
            regions: Mutex::new(BTreeMap::from([(0, Arc::new(end.region))])),
            staged: exposed.staged.clone().zip(end.rings),
            exposed: Mutex::new(Some(exposed)),
            peers_memory: end.memory,
            staged_end: OnceLock::new(),
            used: Arc::default(),
        }
    }

    pub(crate) fn connection(&self) -> &Arc<dyn NetworkConnection> {
        &self.connection
    }

    /// The peer's words, and where its inbound word is in them.
    pub(crate) fn inbound(&self) -> (&RemoteMemory, usize) {
        (&self.words, INBOUND)
    }

    /// The peer's words.
    pub(crate) fn words(&self) -> &Arc<RemoteMemory> {
        &self.words
    }

    /// Where this end receives, if what goes over the link is staged.
    pub(in crate::transport) fn incoming(&self) -> Option<&Arc<Incoming>> {
        self.staged.as_ref().map(|(incoming, _)| incoming)
    }

    /// The rings of the peer, if what goes over the link is staged.
    pub(in crate::transport) fn peer_shape(&self) -> Option<Shape> {
        self.staged.as_ref().map(|(_, shape)| *shape)
    }

    /// Whether what goes over the link is staged.
    pub(crate) fn is_staged(&self) -> bool {
        self.staged.is_some()
    }

    /// The peer's first region, where what goes over the link goes past the staging memory.
    pub(in crate::transport) fn peers_memory(&self) -> Option<&Arc<RemoteMemory>> {
        self.peers_memory.as_ref()
    }

    /// Whether the network's library reaches this rank's first region by itself.
    pub(in crate::transport) fn is_reached(&self) -> bool {
        let exposed = lock(&self.exposed);
        exposed
            .as_ref()
            .is_some_and(|exposed| !exposed.reached.is_empty())
    }

    /// How bytes of the device's memory go over the link.
    pub(crate) fn path(&self) -> NetworkPath {
        match (&self.staged, &self.peers_memory) {
            (Some(_), None) => NetworkPath::Staged,
            _ => NetworkPath::Direct,
        }
    }

    /// Keeps the link's staged end as long as the peer may write; what serves it.
    pub(in crate::transport) fn keep_end(&self, staged_end: &Arc<StagedEnd>) -> &Arc<Service> {
        // There is one at most, made with the connection.
        let _ = self.staged_end.set(staged_end.clone());
        if let Some(exposed) = &mut *lock(&self.exposed) {
            exposed.held.push(Box::new(staged_end.clone()));
        }
        &self.networks.service
    }

    /// Fails `fault` when the connection breaks while it is used. The peer may not know of it, nor do others.
    pub(in crate::transport) fn fail_when_broken(&self, fault: &Arc<Fault>) -> Result<()> {
        let failed = Arc::downgrade(fault);
        self.when_broken(move |error| {
            if let Some(fault) = failed.upgrade() {
                fault.fail(error.clone());
            }
        })
    }

    /// The peer's region `number`.
    pub(crate) fn region(&self, number: u32) -> Result<Arc<RemoteMemory>> {
        let found = lock(&self.regions).get(&number).cloned();
        found.ok_or_else(|| Error::invalid(format!("unknown region {number} of the peer")))
    }

    /// Calls `handler` with the error when the connection breaks while it is used.
    fn when_broken(&self, handler: impl FnOnce(&Error) + Send + 'static) -> Result<()> {
        let (used, networks) = (Arc::downgrade(&self.used), Arc::downgrade(&self.networks));
        let leaving = move || {
            let networks = networks.upgrade();
            networks.is_none_or(|networks| networks.is_leaving())
        };
        self.connection.when_failed(Box::new(move |error| {
            if used.strong_count() > 0 && !leaving() {
                handler(error);
            }
        }))
    }

    /// Lets the peer write to one more region, under `number`; what the peer needs to open it.
    pub(crate) fn expose(&self, region: &Region, number: u32) -> Result<Vec<u8>> {
        let mut exposed = lock(&self.exposed);
        let exposed = exposed
            .as_mut()
            .ok_or_else(|| Error::invalid("the connection is closed"))?;
        if let Some(staged_end) = self.staged_end.get() {
            let reached = self
                .peers_memory
                .as_ref()
                .and_then(|_| reached(&*exposed.network, region.memory()));
            staged_end.set_region(number, region.memory(), reached.is_some());
            let mut told = (region.bytes() as u64).to_le_bytes().to_vec();
            told.extend_from_slice(reached.as_ref().map_or(&[], NetworkRegion::key));
            exposed.reached.extend(reached);
            exposed.held.push(Box::new(region.clone()));
            return Ok(told);
        }
        exposed.add(region)?;
        let [_, _, key] = exposed.keys();
        Ok(key.to_vec())
    }

    /// Opens one more region of the peer's, which gets `number`; its bytes.
    pub(crate) fn open(&self, key: &[u8], number: u32) -> Result<u64> {
        if self.is_staged() {
            let Some((bytes, key)) = key.split_first_chunk() else {
                let text = format!(
                    "the peer's region is told in {} bytes; expected at least 8",
                    key.len()
                );
                return Err(Error::new(ErrorKind::Protocol, text).with_peer(self.peer));
            };
            let bytes = u64::from_le_bytes(*bytes);
            // Past the rings goes what does so from the first region on.
            if let (Some(staged_end), Some(_)) = (self.staged_end.get(), &self.peers_memory)
                && let Some(opened) = open_reached(&*self.connection, key, bytes)
            {
                staged_end.set_peers_region(number, opened);
            }
            return Ok(bytes);
        }
        let region = self.connection.open(key)?;
        let bytes = region.bytes() as u64;
        lock(&self.regions).insert(number, Arc::new(region));
        Ok(bytes)
    }
}

impl Drop for NetworkLink {
    /// Tells the peer that nothing follows, and keeps what the peer may write to.
    fn drop(&mut self) {
        let done = Arc::new(AtomicBool::new(false));
        let (telling, connection) = (done.clone(), &self.connection);
        let told = match self.staged_end.get() {
            // It tells the peer when neither end has anything to do.
            Some(staged_end) => {
                staged_end.close(&telling);
                self.networks.service.wake();
                Ok(())
            }
            None => connection.signal(&self.words, GONE, 1).and_then(|()| {
                connection.when_done(Box::new(move |_| telling.store(true, Ordering::Release)))
            }),
        };
        if let Err(error) = told {
            tracing::debug!(%error, "a peer was not told that a connection is gone");
        }
        if let Some(exposed) = lock(&self.exposed).take() {
            let told = Told::new(done, connection, &self.words);
            self.networks.part(exposed, Some(told));
        }
    }
}

/// Opens memory of the peer's, of `bytes`, that its library reaches by itself, if it gave a key of it. Without one that
/// fits, what goes there is staged, which the peer takes as well.
fn open_reached(
    connection: &dyn NetworkConnection,
    key: &[u8],
    bytes: u64,
) -> Option<Arc<RemoteMemory>> {
    if key.is_empty() {
        return None;
    }
    let opened = connection.open(key).and_then(|opened| {
        if opened.bytes() as u64 == bytes {
            return Ok(opened);
        }
        let text = format!("the key is of {} bytes; expected {bytes}", opened.bytes());
        Err(Error::new(ErrorKind::Protocol, text))
    });
    opened
        .inspect_err(|error| tracing::debug!(%error, "what goes to the peer's region is staged"))
        .map(Arc::new)
        .ok()
}

/// Fails where the memory that a peer offers is not what it says, or not what is needed.
fn check_words(words: &RemoteMemory, region: &RemoteMemory, staging: Option<Shape>) -> Result<()> {
    if let Some(shape) = staging {
        return shape.check(words.bytes(), region.bytes());
    }
    if words.bytes() >= WORDS_BYTES {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Protocol,
        format!(
            "the peer offers words of {} bytes; expected {WORDS_BYTES}",
            words.bytes()
        ),
    )
    .with_help("run the same version of Warplink on every rank"))
}

impl fmt::Debug for NetworkLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NetworkLink")
            .field(&self.connection)
            .field(&self.path())
            .finish()
    }
}

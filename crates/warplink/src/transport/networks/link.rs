//! A network connection to a peer.

use super::exposed::{ExposedMemory, reached};
use super::{GONE, GoneNotice, INBOUND, Networks};
use crate::device::Fault;
use crate::device::network::{NetworkConnection, NetworkRegion, RemoteMemory};
use crate::error::{Error, Rank, Result};
use crate::memory::Region;
use crate::sync::lock;
use crate::transport::staging::{Incoming, RingShape, Service, StagedEnd};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// How a network connection moves bytes of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkPath {
    /// The network library accesses the memory itself.
    Direct,
    /// Through host staging memory.
    Staged,
}

/// Size of the words that a peer writes to.
const WORDS_BYTES: usize = 16;

/// Offer of an end to its peer: its address, and the keys of its words and region, or of the control memory and ring if it
/// stages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NetworkOffer {
    pub(crate) address: Vec<u8>,
    pub(crate) words: Vec<u8>,
    pub(crate) region: Vec<u8>,
    /// Staging rings, if the network cannot reach the region.
    pub(crate) staging: Option<StagingOffer>,
}

/// Rings of staging memory, for a region that the network cannot reach.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StagingOffer {
    pub(crate) shape: RingShape,
    /// Length of the region itself, in bytes.
    pub(crate) region_bytes: u64,
    /// Its key, if the network library can reach it without staging; else empty.
    pub(crate) region: Vec<u8>,
}

/// Peer's end of a connection.
pub(super) struct PeerEnd {
    rank: Rank,
    connection: Arc<dyn NetworkConnection>,
    words: RemoteMemory,
    region: RemoteMemory,
    rings: Option<RingShape>,
    /// The peer's region, if both ends' libraries access their memory directly.
    memory: Option<Arc<RemoteMemory>>,
}

/// Network connection to a peer, with the memory exposed on both sides.
pub(crate) struct NetworkLink {
    networks: Arc<Networks>,
    peer: Rank,
    connection: Arc<dyn NetworkConnection>,
    /// The peer's words, and its regions by number.
    words: Arc<RemoteMemory>,
    regions: Mutex<BTreeMap<u32, Arc<RemoteMemory>>>,
    exposed: Mutex<Option<ExposedMemory>>,
    staged: Option<(Arc<Incoming>, RingShape)>,
    /// The peer's first region, if data bypasses staging.
    peers_memory: Option<Arc<RemoteMemory>>,
    staged_end: OnceLock<Arc<StagedEnd>>,
    /// Held as long as a failure of the connection matters.
    used: Arc<()>,
}

impl PeerEnd {
    /// Connects to rank `peer`, to which this one has `exposed` memory, and opens its offer.
    pub(super) fn open(
        peer: Rank,
        exposed: &ExposedMemory,
        offered: &NetworkOffer,
    ) -> Result<Self> {
        let connection = exposed.network.connect(peer, &offered.address)?;
        let words = connection.open(&offered.words)?;
        let region = connection.open(&offered.region)?;
        let staging = offered.staging.as_ref();
        let rings = staging.map(|staging| staging.shape);
        check_words(&words, &region, rings).map_err(|error| error.with_peer(peer))?;
        // Direct access requires that both ends' libraries support it.
        let reached = staging.filter(|_| !exposed.reached.is_empty());
        let memory = reached
            .and_then(|staging| open_reached(&*connection, &staging.region, staging.region_bytes));
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

    /// The peer's words, and the offset of its inbound word.
    pub(crate) fn inbound(&self) -> (&RemoteMemory, usize) {
        (&self.words, INBOUND)
    }

    /// The peer's words.
    pub(crate) fn words(&self) -> &Arc<RemoteMemory> {
        &self.words
    }

    /// Receiving rings of this end, if the link is staged.
    pub(in crate::transport) fn incoming(&self) -> Option<&Arc<Incoming>> {
        self.staged.as_ref().map(|(incoming, _)| incoming)
    }

    /// Rings of the peer, if the link is staged.
    pub(in crate::transport) fn peer_shape(&self) -> Option<RingShape> {
        self.staged.as_ref().map(|(_, shape)| *shape)
    }

    /// Whether the link is staged.
    pub(crate) fn is_staged(&self) -> bool {
        self.staged.is_some()
    }

    /// The peer's first region, if data bypasses staging.
    pub(in crate::transport) fn peers_memory(&self) -> Option<&Arc<RemoteMemory>> {
        self.peers_memory.as_ref()
    }

    /// Whether the network library accesses this rank's first region directly.
    pub(in crate::transport) fn is_reached(&self) -> bool {
        let exposed = lock(&self.exposed);
        exposed
            .as_ref()
            .is_some_and(|exposed| !exposed.reached.is_empty())
    }

    /// How bytes of device memory travel over the link.
    pub(crate) fn path(&self) -> NetworkPath {
        match (&self.staged, &self.peers_memory) {
            (Some(_), None) => NetworkPath::Staged,
            _ => NetworkPath::Direct,
        }
    }

    /// Keeps the link's staged end alive while the peer may write; returns the service for it.
    pub(in crate::transport) fn keep_end(&self, staged_end: &Arc<StagedEnd>) -> &Arc<Service> {
        // Cannot be set already: a link has at most one, created with the connection.
        let _ = self.staged_end.set(staged_end.clone());
        // Kept alive with the exposed memory, since it must receive messages until the peer's end is gone.
        if let Some(exposed) = &mut *lock(&self.exposed) {
            exposed.held.push(Box::new(staged_end.clone()));
        }
        &self.networks.service
    }

    /// Raises `fault` if the connection breaks while in use. Other ranks, even the peer, may not notice.
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

    /// Calls `handler` with the error if the connection breaks while in use.
    fn when_broken(&self, handler: impl FnOnce(&Error) + Send + 'static) -> Result<()> {
        // Weak references: the handler must not keep the link alive.
        let (used, networks) = (Arc::downgrade(&self.used), Arc::downgrade(&self.networks));
        let leaving = move || {
            let networks = networks.upgrade();
            networks.is_none_or(|networks| networks.is_leaving())
        };
        self.connection.when_failed(Box::new(move |error| {
            // After the link was dropped, or while peers leave, a broken connection is expected.
            if used.strong_count() > 0 && !leaving() {
                handler(error);
            }
        }))
    }

    /// Exposes one more region as `number`; returns the data the peer needs to open it.
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
            // Length, then the key if the peer may bypass the rings.
            let mut terms = (region.bytes() as u64).to_le_bytes().to_vec();
            terms.extend_from_slice(reached.as_ref().map_or(&[], NetworkRegion::key));
            exposed.reached.extend(reached);
            exposed.held.push(Box::new(region.clone()));
            return Ok(terms);
        }
        exposed.add(region)?;
        let [_, _, key] = exposed.keys();
        Ok(key.to_vec())
    }

    /// Opens one more region of the peer as `number`; returns its length.
    pub(crate) fn open(&self, key: &[u8], number: u32) -> Result<u64> {
        if self.is_staged() {
            let Some((bytes, key)) = key.split_first_chunk() else {
                let text = format!(
                    "the peer's region message has {} bytes; expected at least 8",
                    key.len()
                );
                return Err(Error::protocol(text).with_peer(self.peer));
            };
            let bytes = u64::from_le_bytes(*bytes);
            // Regions bypass the rings only if the first one does.
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
    /// Notifies the peer that nothing follows, and keeps exposed memory alive until the peer has stopped
    /// writing.
    fn drop(&mut self) {
        let done = Arc::new(AtomicBool::new(false));
        let (telling, connection) = (done.clone(), &self.connection);
        let notified = match self.staged_end.get() {
            // It notifies the peer once both ends are idle.
            Some(staged_end) => {
                // The service performs the close.
                staged_end.close(&telling);
                self.networks.service.wake();
                Ok(())
            }
            // Ordered after all puts on the connection.
            None => connection.signal(&self.words, GONE, 1).and_then(|()| {
                connection.when_done(Box::new(move |_| telling.store(true, Ordering::Release)))
            }),
        };
        if let Err(error) = notified {
            tracing::debug!(%error, "the end of a connection was not sent to the peer");
        }
        if let Some(exposed) = lock(&self.exposed).take() {
            let notice = GoneNotice {
                done,
                _connection: connection.clone(),
                _words: self.words.clone(),
            };
            self.networks.retire(exposed, Some(notice));
        }
    }
}

/// Opens the peer's region of `bytes` for direct access, if it offered a key. Otherwise data for it is
/// staged, which the peer accepts too.
fn open_reached(
    connection: &dyn NetworkConnection,
    key: &[u8],
    bytes: u64,
) -> Option<Arc<RemoteMemory>> {
    if key.is_empty() {
        return None;
    }
    // Validate the peer's claim about the region's length.
    let opened = connection.open(key).and_then(|opened| {
        if opened.bytes() as u64 == bytes {
            return Ok(opened);
        }
        let text = format!("the key is of {} bytes; expected {bytes}", opened.bytes());
        Err(Error::protocol(text))
    });
    opened
        .inspect_err(|error| tracing::debug!(%error, "data for the peer's region is staged"))
        .map(Arc::new)
        .ok()
}

/// Fails if the offered memory does not have the stated or required size.
fn check_words(
    words: &RemoteMemory,
    region: &RemoteMemory,
    staging: Option<RingShape>,
) -> Result<()> {
    if let Some(shape) = staging {
        return shape.check(words.bytes(), region.bytes());
    }
    if words.bytes() >= WORDS_BYTES {
        return Ok(());
    }
    Err(Error::protocol(format!(
        "the peer offers words of {} bytes; expected {WORDS_BYTES}",
        words.bytes()
    ))
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

//! The networks that a rank has opened, and what peers may write to over them.
//!
//! Nothing keeps a peer from writing to memory that it has a key of, so the memory, and the words of the
//! connection's slot, are held until the peer has said that it writes no more: by a word beside the inbound
//! one, the last thing that its end sends. A connection is ended when both have said so: ending it breaks the
//! peer's end of it.
//!
//! Where the network does not reach the device's memory as it reaches the host's, peers write to staging memory instead
//! (`staging`), and the staged ends do the rest. Where its library puts to the device's memory and gets from it by
//! itself all the same, at both ends, data goes past the staging memory.

use crate::deadline::Deadline;
use crate::device::network::{
    self, Network, NetworkConnection, NetworkOptions, NetworkRegion, RemoteMemory,
};
use crate::device::{Device, DeviceSlice, Fault, Word};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::Region;
use crate::sync::lock;
use crate::transport::staging::{self, Incoming, Service, Shape, StagedEnd, StagingConfig};
use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// Where the words of an end lie from the start of those that the peer writes to.
const INBOUND: usize = 0;
const GONE: usize = staging::GONE;

/// Bytes of the words that a peer writes to.
const WORDS_BYTES: usize = 16;

/// How a connection over the network moves bytes of the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkPath {
    /// The network's library reads and writes the memory itself.
    Direct,
    /// Through staging memory of the host.
    Staged,
}

/// The networks of a rank, by the devices that they use, opened when they are first needed.
pub(crate) struct Networks {
    device: Arc<dyn Device>,
    options: NetworkOptions,
    staging: StagingConfig,
    service: Arc<Service>,
    opened: Mutex<HashMap<Option<String>, Arc<dyn Network>>>,
    /// Ends that are gone here, whose peers may write yet.
    parting: Mutex<Vec<Parting>>,
    /// Whether peers may leave, so that it is no failure when a connection breaks.
    leaving: AtomicBool,
}

/// An end that is gone here: what it had exposed, and its connection.
struct Parting {
    exposed: ExposedMemory,
    told: Option<Told>,
}

/// A connection over which the peer is told that this end is gone.
struct Told {
    /// Whether it was.
    done: Arc<AtomicBool>,
    _connection: Arc<dyn NetworkConnection>,
    _words: Arc<RemoteMemory>,
}

/// What a peer may write to: the words of a slot, and regions. Dropping it holds them until the peer writes no
/// more; what no peer writes to is [discarded](Self::discard).
pub(crate) struct Exposed {
    networks: Weak<Networks>,
    /// There until it is dropped.
    memory: Option<ExposedMemory>,
}

struct ExposedMemory {
    network: Arc<dyn Network>,
    words: NetworkRegion,
    regions: Vec<NetworkRegion>,
    /// Regions of the device's memory that the network's library reaches by itself.
    reached: Vec<NetworkRegion>,
    /// What the network does not reach, and peers reach through this.
    staged: Option<Arc<Incoming>>,
    /// Held as long as the peer may write: regions, and the staged end.
    held: Vec<Box<dyn Any + Send + Sync>>,
    /// Set by the peer when it writes no more.
    gone: Word,
    /// Called when it is set.
    recycle: Option<Box<dyn FnOnce() + Send>>,
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

impl Networks {
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        options: NetworkOptions,
        staging: StagingConfig,
    ) -> Arc<Self> {
        Arc::new(Self {
            device: device.clone(),
            options,
            staging,
            service: Arc::default(),
            opened: Mutex::default(),
            parting: Mutex::default(),
            leaving: AtomicBool::new(false),
        })
    }

    /// The network over `devices`, or over those that are configured.
    fn get(&self, devices: Option<&str>) -> Result<Arc<dyn Network>> {
        let devices = devices.or(self.options.devices.as_deref());
        let devices = devices.map(str::to_owned);
        let mut opened = lock(&self.opened);
        if let Some(network) = opened.get(&devices) {
            return Ok(network.clone());
        }
        let options = NetworkOptions {
            devices: devices.clone(),
            ..self.options.clone()
        };
        let network = network::open(&options)?;
        Ok(opened.entry(devices).or_insert(network).clone())
    }

    /// Lets a peer write to `slot`, the words of a slot, and to `region`, over `devices`. `recycle` is called when
    /// it writes no more, unless what is given back is dropped before the peer has it.
    pub(crate) fn expose(
        self: &Arc<Self>,
        devices: Option<&str>,
        slot: &Region,
        region: &Region,
        recycle: impl FnOnce() + Send + 'static,
    ) -> Result<Exposed> {
        let network = self.get(devices)?;
        let staged = if self.staging.always || !network.reaches(region.memory()) {
            let shape = Shape::new(&self.staging)?;
            Some(Arc::new(Incoming::allocate(&self.device, shape)?))
        } else {
            None
        };
        let [words, written] = match &staged {
            Some(staged) => [staged.control.slice(), staged.ring.slice()],
            None => [slot.memory(), region.memory()],
        };
        let reached = staged
            .as_ref()
            .and_then(|_| reached(&*network, region.memory()));
        let memory = ExposedMemory {
            words: network.register(words)?,
            regions: vec![network.register(written)?],
            reached: Vec::from_iter(reached),
            gone: words.word(GONE)?,
            held: vec![Box::new((slot.clone(), region.clone()))],
            staged,
            network,
            recycle: Some(Box::new(recycle)),
        };
        Ok(Exposed {
            networks: Arc::downgrade(self),
            memory: Some(memory),
        })
    }

    /// Connects to `peer`, which gave its address and the keys of its words and of its region; where it stages, with the
    /// key of the memory that the network's library reaches by itself, if there is one.
    pub(crate) fn connect(
        self: &Arc<Self>,
        peer: Rank,
        mut exposed: Exposed,
        [address, words, region]: [&[u8]; 3],
        staging: Option<(Shape, &[u8])>,
    ) -> Result<NetworkLink> {
        let exposed = exposed.memory.take();
        let exposed = exposed.ok_or_else(|| Error::invalid("nothing is exposed"))?;
        let (staging, peers_key) = staging.unzip();
        let staged = exposed.staged.clone().zip(staging);
        let peers_key = peers_key.filter(|_| !exposed.reached.is_empty());
        let opened = exposed
            .network
            .connect(peer, address)
            .and_then(|connection| {
                let words = connection.open(words)?;
                let region = connection.open(region)?;
                check_words(&words, &region, staging).map_err(|error| error.with_peer(peer))?;
                let peers_memory = peers_key.and_then(|key| open_reached(&*connection, key));
                Ok((connection, words, region, peers_memory))
            });
        match opened {
            Ok((connection, words, region, peers_memory)) => Ok(NetworkLink {
                networks: self.clone(),
                peer,
                connection,
                words: Arc::new(words),
                regions: Mutex::new(BTreeMap::from([(0, Arc::new(region))])),
                exposed: Mutex::new(Some(exposed)),
                staged,
                peers_memory,
                staged_end: OnceLock::new(),
                used: Arc::default(),
            }),
            Err(error) => {
                // The peer believes in the connection.
                self.part(exposed, None);
                Err(error)
            }
        }
    }

    /// Holds what a peer may write to until it writes no more.
    fn part(&self, exposed: ExposedMemory, told: Option<Told>) {
        lock(&self.parting).push(Parting { exposed, told });
    }

    /// From now on connections may break, since peers leave.
    pub(crate) fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    /// Lets go of what peers write to no more.
    pub(crate) fn collect(&self) {
        let is_gone = |parting: &mut Parting| {
            let exposed = &parting.exposed;
            let is_gone = match &exposed.staged {
                Some(staged) => staged.control.load(GONE) == 1,
                None => {
                    let mut word = [0; 8];
                    let read = self.device.download(exposed.gone.as_slice(), &mut word);
                    read.is_ok() && u64::from_ne_bytes(word) == 1
                }
            };
            let told = parting.told.as_ref();
            let told = told.is_none_or(|told| told.done.load(Ordering::Acquire));
            told && is_gone
        };
        let gone: Vec<_> = lock(&self.parting).extract_if(.., is_gone).collect();
        for mut parting in gone {
            let recycle = parting.exposed.recycle.take();
            // Before the words are used again.
            drop(parting);
            if let Some(recycle) = recycle {
                recycle();
            }
        }
    }

    /// Ends all networks, when no peer writes any more.
    pub(crate) fn close(&self, deadline: Deadline) -> Result<()> {
        self.service.stop();
        let opened: Vec<_> = lock(&self.opened).drain().collect();
        let closed: Vec<_> = opened
            .iter()
            .map(|(_, network)| network.close(deadline))
            .collect();
        lock(&self.parting).clear();
        closed.into_iter().collect()
    }
}

impl Exposed {
    /// What the peer needs to connect: the address, and the keys of the words and of the region.
    pub(crate) fn keys(&self) -> [&[u8]; 3] {
        self.memory.as_ref().map_or([&[]; 3], ExposedMemory::keys)
    }

    /// The rings that the peer is to send through, where the network does not reach the region.
    pub(crate) fn staging(&self) -> Option<Shape> {
        let staged = self.memory.as_ref()?.staged.as_ref();
        staged.map(|staged| staged.shape)
    }

    /// The key of the region, where the peer need not go through the rings.
    pub(crate) fn reached_key(&self) -> &[u8] {
        let memory = self.memory.as_ref();
        memory.map_or(&[], ExposedMemory::reached_key)
    }

    /// Lets go of what no peer has seen, or will write to.
    pub(crate) fn discard(mut self) {
        self.memory = None;
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        if let (Some(memory), Some(networks)) = (self.memory.take(), self.networks.upgrade()) {
            networks.part(memory, None);
        }
    }
}

impl ExposedMemory {
    /// What the peer needs to connect: the address, and the keys of the words and of the last region.
    fn keys(&self) -> [&[u8]; 3] {
        let region = self.regions.last().map_or(&[][..], NetworkRegion::key);
        [self.network.address(), self.words.key(), region]
    }

    /// The key of the last region that the network's library reaches by itself.
    fn reached_key(&self) -> &[u8] {
        self.reached.last().map_or(&[], NetworkRegion::key)
    }

    /// Lets the peer write to one more region.
    fn add(&mut self, region: &Region) -> Result<()> {
        self.regions.push(self.network.register(region.memory())?);
        self.held.push(Box::new(region.clone()));
        Ok(())
    }
}

impl NetworkLink {
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
    pub(super) fn incoming(&self) -> Option<&Arc<Incoming>> {
        self.staged.as_ref().map(|(incoming, _)| incoming)
    }

    /// The rings of the peer, if what goes over the link is staged.
    pub(super) fn peer_shape(&self) -> Option<Shape> {
        self.staged.as_ref().map(|(_, shape)| *shape)
    }

    /// Whether what goes over the link is staged.
    pub(crate) fn is_staged(&self) -> bool {
        self.staged.is_some()
    }

    /// The peer's first region, where what goes over the link goes past the staging memory.
    pub(super) fn peers_memory(&self) -> Option<&Arc<RemoteMemory>> {
        self.peers_memory.as_ref()
    }

    /// Whether the network's library reaches this rank's first region by itself.
    pub(super) fn is_reached(&self) -> bool {
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
    pub(super) fn keep_end(&self, staged_end: &Arc<StagedEnd>) -> &Arc<Service> {
        // There is one at most, made with the connection.
        let _ = self.staged_end.set(staged_end.clone());
        if let Some(exposed) = &mut *lock(&self.exposed) {
            exposed.held.push(Box::new(staged_end.clone()));
        }
        &self.networks.service
    }

    /// Fails `fault` when the connection breaks while it is used. The peer may not know of it, nor do others.
    pub(super) fn fail_when_broken(&self, fault: &Arc<Fault>) -> Result<()> {
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
            networks.is_none_or(|networks| networks.leaving.load(Ordering::Acquire))
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
            let ends = self.staged_end.get().zip(self.peers_memory.as_ref());
            let opened = ends.and_then(|(staged_end, _)| {
                open_reached(&*self.connection, key).map(|opened| (staged_end, opened))
            });
            if let Some((staged_end, opened)) = opened {
                staged_end.set_peers_region(number, opened);
            }
            return Ok(u64::from_le_bytes(*bytes));
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
            let told = Told {
                done,
                _connection: connection.clone(),
                _words: self.words.clone(),
            };
            self.networks.part(exposed, Some(told));
        }
    }
}

/// Has the network's library reach memory that only the device reaches by itself, where it can and may.
fn reached(network: &dyn Network, memory: &DeviceSlice) -> Option<NetworkRegion> {
    network
        .register_device_memory(memory)
        .inspect_err(|error| tracing::debug!(%error, ?memory, "a region is staged"))
        .ok()
}

/// Opens memory of the peer's that its library reaches by itself, if it gave a key of it. Without it, what goes there is
/// staged, which the peer takes as well.
fn open_reached(connection: &dyn NetworkConnection, key: &[u8]) -> Option<Arc<RemoteMemory>> {
    if key.is_empty() {
        return None;
    }
    let opened = connection.open(key);
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

impl fmt::Debug for Networks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Networks")
            .field("opened", &lock(&self.opened).len())
            .field("parting", &lock(&self.parting).len())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Exposed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exposed({})", self.memory.is_some())
    }
}

impl fmt::Debug for NetworkLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NetworkLink")
            .field(&self.connection)
            .field(&self.path())
            .finish()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
#[path = "networks_tests.rs"]
mod tests;

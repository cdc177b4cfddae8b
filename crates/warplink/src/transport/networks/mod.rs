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

mod exposed;
mod link;

pub(crate) use exposed::Exposed;
pub use link::NetworkPath;
pub(crate) use link::{NetworkLink, Offered, OfferedRings};

use crate::deadline::Deadline;
use crate::device::Device;
use crate::device::network::{self, Network, NetworkConnection, NetworkOptions, RemoteMemory};
use crate::error::{Error, Rank, Result};
use crate::memory::Region;
use crate::sync::lock;
use crate::transport::staging::{self, Incoming, Service, Shape, StagingConfig};
use exposed::ExposedMemory;
use link::PeerEnd;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Where the words of an end lie from the start of those that the peer writes to.
const INBOUND: usize = 0;
const GONE: usize = staging::GONE;

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

impl Told {
    fn new(
        done: Arc<AtomicBool>,
        connection: &Arc<dyn NetworkConnection>,
        words: &Arc<RemoteMemory>,
    ) -> Self {
        Self {
            done,
            _connection: connection.clone(),
            _words: words.clone(),
        }
    }
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
        let memory = ExposedMemory::new(network, staged, (slot, region), recycle)?;
        Ok(Exposed::new(self, memory))
    }

    /// Connects to `peer`, which offered so.
    pub(crate) fn connect(
        self: &Arc<Self>,
        peer: Rank,
        mut exposed: Exposed,
        offered: &Offered<'_>,
    ) -> Result<NetworkLink> {
        let exposed = exposed.take();
        let exposed = exposed.ok_or_else(|| Error::invalid("nothing is exposed"))?;
        match PeerEnd::open(peer, &exposed, offered) {
            Ok(end) => Ok(NetworkLink::new(self, end, exposed)),
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

    fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// From now on connections may break, since peers leave.
    pub(crate) fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    /// Lets go of what peers write to no more.
    pub(crate) fn collect(&self) {
        let is_gone = |parting: &mut Parting| {
            let told = parting.told.as_ref();
            let told = told.is_none_or(|told| told.done.load(Ordering::Acquire));
            told && parting.exposed.is_left(&*self.device)
        };
        let gone: Vec<_> = lock(&self.parting).extract_if(.., is_gone).collect();
        for mut parting in gone {
            let recycle = parting.exposed.take_recycle();
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

impl fmt::Debug for Networks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Networks")
            .field("opened", &lock(&self.opened).len())
            .field("parting", &lock(&self.parting).len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

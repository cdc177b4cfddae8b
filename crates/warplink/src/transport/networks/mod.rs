//! Networks opened by a rank, and the memory exposed over them.
//!
//! A peer that has a key can write to the memory at any time, so memory and slot words are kept alive until
//! the peer has announced its last write, by a word next to the inbound one. A connection is closed when both
//! ends have announced that: closing breaks the peer's end.
//!
//! If the network cannot access device memory, peers write to staging memory instead (`staging`). If the
//! network library can access it by itself at both ends, data bypasses the staging memory.

mod exposed;
mod link;

pub(crate) use exposed::Exposed;
pub use link::NetworkPath;
pub(crate) use link::{NetworkLink, NetworkOffer, StagingOffer};

use crate::deadline::Deadline;
use crate::debug::debug_fields;
use crate::device::Device;
use crate::device::network::{self, Network, NetworkConnection, NetworkOptions, RemoteMemory};
use crate::error::{Error, Rank, Result};
use crate::memory::Region;
use crate::sync::lock;
use crate::transport::staging::{self, Incoming, RingShape, Service, StagingConfig};
use exposed::ExposedMemory;
use link::PeerEnd;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Offsets of an end's words within those that the peer writes to.
const INBOUND: usize = 0;
const GONE: usize = staging::GONE;

/// Networks of a rank by device selection, opened on first use.
pub(crate) struct Networks {
    device: Arc<dyn Device>,
    options: NetworkOptions,
    staging: StagingConfig,
    service: Arc<Service>,
    opened: Mutex<HashMap<Option<String>, Arc<dyn Network>>>,
    /// Dropped ends whose peers may still write.
    retired: Mutex<Vec<Retired>>,
    /// Whether peers may leave, so that broken connections are not failures.
    leaving: AtomicBool,
}

/// A dropped end: its exposed memory and connection.
struct Retired {
    exposed: ExposedMemory,
    notice: Option<GoneNotice>,
}

/// A connection over which the peer is notified that this end is gone.
struct GoneNotice {
    /// Whether the notification was delivered.
    done: Arc<AtomicBool>,
    _connection: Arc<dyn NetworkConnection>,
    _words: Arc<RemoteMemory>,
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
            retired: Mutex::default(),
            leaving: AtomicBool::new(false),
        })
    }

    /// The devices of a connection that asks for `devices`, or for the configured ones.
    pub(crate) fn devices<'a>(&'a self, devices: Option<&'a str>) -> Option<&'a str> {
        devices.or(self.options.devices.as_deref())
    }

    /// The network over `devices`, or over the configured ones.
    fn get(&self, devices: Option<&str>) -> Result<Arc<dyn Network>> {
        let devices = self.devices(devices).map(str::to_owned);
        // Held while opening, so that each network is opened once.
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

    /// Exposes `slot` and `region` to a peer, over `devices`. `recycle` is called when the peer has stopped
    /// writing, or if the result is dropped before the peer received it.
    pub(crate) fn expose(
        self: &Arc<Self>,
        devices: Option<&str>,
        slot: &Region,
        region: &Region,
        recycle: impl FnOnce() + Send + 'static,
    ) -> Result<Exposed> {
        let network = self.get(devices)?;
        let staged = if self.staging.always || !network.reaches(region.memory()) {
            // Explicitly staged, or the network cannot access the memory.
            let shape = RingShape::new(&self.staging)?;
            Some(Arc::new(Incoming::allocate(&self.device, shape)?))
        } else {
            None
        };
        let memory = ExposedMemory::new(network, staged, (slot, region), recycle)?;
        Ok(Exposed::new(self, memory))
    }

    /// Connects to `peer` with its offer.
    pub(crate) fn connect(
        self: &Arc<Self>,
        peer: Rank,
        mut exposed: Exposed,
        offered: &NetworkOffer,
    ) -> Result<NetworkLink> {
        let exposed = exposed.take();
        let exposed = exposed.ok_or_else(|| Error::invalid("nothing is exposed"))?;
        match PeerEnd::open(peer, &exposed, offered) {
            Ok(end) => Ok(NetworkLink::new(self, end, exposed)),
            Err(error) => {
                // The peer considers the connection established.
                self.retire(exposed, None);
                Err(error)
            }
        }
    }

    /// Keeps memory alive until its peer has stopped writing.
    fn retire(&self, exposed: ExposedMemory, notice: Option<GoneNotice>) {
        lock(&self.retired).push(Retired { exposed, notice });
    }

    fn is_leaving(&self) -> bool {
        // Acquire: pairs with the release store in `leave`.
        self.leaving.load(Ordering::Acquire)
    }

    /// Connections may break from now on, since peers leave.
    pub(crate) fn leave(&self) {
        // Release: pairs with the acquire load in the failure handler of a connection.
        self.leaving.store(true, Ordering::Release);
    }

    /// Releases memory that peers have stopped writing to.
    pub(crate) fn collect(&self) {
        // Both directions must be finished: the peer knows that this end stopped, and has stopped itself.
        let is_gone = |retired: &mut Retired| {
            let notice = retired.notice.as_ref();
            let is_notified = notice.is_none_or(|notice| notice.done.load(Ordering::Acquire));
            is_notified && retired.exposed.is_left(&*self.device)
        };
        let gone: Vec<_> = lock(&self.retired).extract_if(.., is_gone).collect();
        for mut retired in gone {
            let recycle = retired.exposed.take_recycle();
            // Close the connections before the words are reused.
            drop(retired);
            if let Some(recycle) = recycle {
                recycle();
            }
        }
    }

    /// Closes all networks once no peer writes any more.
    pub(crate) fn close(&self, deadline: Deadline) -> Result<()> {
        // Before the networks: the service still uses their connections.
        self.service.stop();
        let opened: Vec<_> = lock(&self.opened).drain().collect();
        let closed: Vec<_> = opened
            .iter()
            // Collected before the first error is returned, so that one network that fails leaves no other open.
            .map(|(_, network)| network.close(deadline))
            .collect();
        // Only after the networks are closed: until then a peer's put may still arrive in this memory.
        lock(&self.retired).clear();
        closed.into_iter().collect()
    }
}

debug_fields!(Networks, |it| opened: lock(&it.opened).len(), retired: lock(&it.retired).len());

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

//! What a peer may write to over a network.

use super::{GONE, Networks};
use crate::device::network::{Network, NetworkRegion};
use crate::device::{Device, DeviceSlice, Word};
use crate::error::Result;
use crate::memory::Region;
use crate::transport::staging::{Incoming, Shape};
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Weak};

/// What a peer may write to: the words of a slot, and regions. Dropping it holds them until the peer writes no
/// more; what no peer writes to is [discarded](Self::discard).
pub(crate) struct Exposed {
    networks: Weak<Networks>,
    /// There until it is dropped.
    memory: Option<ExposedMemory>,
}

pub(super) struct ExposedMemory {
    pub(super) network: Arc<dyn Network>,
    pub(super) words: NetworkRegion,
    pub(super) regions: Vec<NetworkRegion>,
    /// Regions of the device's memory that the network's library reaches by itself.
    pub(super) reached: Vec<NetworkRegion>,
    /// What the network does not reach, and peers reach through this.
    pub(super) staged: Option<Arc<Incoming>>,
    /// Held as long as the peer may write: regions, and the staged end.
    pub(super) held: Vec<Box<dyn Any + Send + Sync>>,
    /// Set by the peer when it writes no more.
    pub(super) gone: Word,
    /// Called when it is set.
    pub(super) recycle: Option<Box<dyn FnOnce() + Send>>,
}

impl Exposed {
    pub(super) fn new(networks: &Arc<Networks>, memory: ExposedMemory) -> Self {
        Self {
            networks: Arc::downgrade(networks),
            memory: Some(memory),
        }
    }

    /// The memory, which whoever takes it holds from now on.
    pub(super) fn take(&mut self) -> Option<ExposedMemory> {
        self.memory.take()
    }

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
    /// Lets a peer write to a slot and a region, or to `staged` in their place, where there is one.
    pub(super) fn new(
        network: Arc<dyn Network>,
        staged: Option<Arc<Incoming>>,
        (slot, region): (&Region, &Region),
        recycle: impl FnOnce() + Send + 'static,
    ) -> Result<Self> {
        let [words, written] = match &staged {
            Some(staged) => [staged.control.slice(), staged.ring.slice()],
            None => [slot.memory(), region.memory()],
        };
        let reached = staged
            .as_ref()
            .and_then(|_| reached(&*network, region.memory()));
        Ok(Self {
            words: network.register(words)?,
            regions: vec![network.register(written)?],
            reached: Vec::from_iter(reached),
            gone: words.word(GONE)?,
            held: vec![Box::new((slot.clone(), region.clone()))],
            staged,
            network,
            recycle: Some(Box::new(recycle)),
        })
    }

    /// Whether the peer has said that it writes no more.
    pub(super) fn is_left(&self, device: &dyn Device) -> bool {
        match &self.staged {
            Some(staged) => staged.control.load(GONE) == 1,
            None => {
                let mut word = [0; 8];
                let read = device.download(self.gone.as_slice(), &mut word);
                read.is_ok() && u64::from_ne_bytes(word) == 1
            }
        }
    }

    /// What is to be called when the peer writes no more.
    pub(super) fn take_recycle(&mut self) -> Option<Box<dyn FnOnce() + Send>> {
        self.recycle.take()
    }

    /// What the peer needs to connect: the address, and the keys of the words and of the last region.
    pub(super) fn keys(&self) -> [&[u8]; 3] {
        let region = self.regions.last().map_or(&[][..], NetworkRegion::key);
        [self.network.address(), self.words.key(), region]
    }

    /// The key of the last region that the network's library reaches by itself.
    fn reached_key(&self) -> &[u8] {
        self.reached.last().map_or(&[], NetworkRegion::key)
    }

    /// Lets the peer write to one more region.
    pub(super) fn add(&mut self, region: &Region) -> Result<()> {
        self.regions.push(self.network.register(region.memory())?);
        self.held.push(Box::new(region.clone()));
        Ok(())
    }
}

/// Has the network's library reach memory that only the device reaches by itself, where it can and may.
pub(super) fn reached(network: &dyn Network, memory: &DeviceSlice) -> Option<NetworkRegion> {
    network
        .register_device_memory(memory)
        .inspect_err(|error| tracing::debug!(%error, ?memory, "a region is staged"))
        .ok()
}

impl fmt::Debug for Exposed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exposed({})", self.memory.is_some())
    }
}

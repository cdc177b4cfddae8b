//! Memory that a peer may write to over a network.

use super::{GONE, NetworkOffer, Networks, StagingOffer};
use crate::debug::debug_text;
use crate::device::network::{Network, NetworkRegion};
use crate::device::{Device, DeviceSlice, Word};
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::transport::staging::Incoming;
use std::any::Any;
use std::sync::{Arc, Weak};

/// Words of a slot and regions that a peer may write to. Dropping it keeps them alive until the peer has
/// stopped writing; memory that no peer will write to is [discarded](Self::discard) at once.
pub(crate) struct Exposed {
    networks: Weak<Networks>,
    /// `None` only while being dropped.
    memory: Option<ExposedMemory>,
}

pub(super) struct ExposedMemory {
    pub(super) network: Arc<dyn Network>,
    pub(super) words: NetworkRegion,
    pub(super) regions: Vec<NetworkRegion>,
    /// Regions of device memory that the network library accesses directly.
    pub(super) reached: Vec<NetworkRegion>,
    /// Staging for memory that the network cannot access.
    pub(super) staged: Option<Arc<Incoming>>,
    /// Kept while the peer may write: regions, and the staged end.
    pub(super) held: Vec<Box<dyn Any + Send + Sync>>,
    /// Set by the peer when it has stopped writing.
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

    /// Moves the memory to the caller, who must keep it alive.
    pub(super) fn take(&mut self) -> Option<ExposedMemory> {
        self.memory.take()
    }

    /// Data that a peer needs to connect. The region has `region_bytes`.
    pub(crate) fn offer(&self, region_bytes: u64) -> Result<NetworkOffer> {
        let memory = self.memory.as_ref();
        let memory = memory.ok_or_else(|| Error::invalid("nothing is exposed"))?;
        let [address, words, region] = memory.keys().map(<[u8]>::to_vec);
        let reached = memory.reached.last().map_or(&[][..], NetworkRegion::key);
        let staging = memory.staged.as_ref().map(|staged| StagingOffer {
            shape: staged.shape,
            region_bytes,
            region: reached.to_vec(),
        });
        Ok(NetworkOffer {
            address,
            words,
            region,
            staging,
        })
    }

    /// Whether the peer must use rings, since the region is staged.
    pub(crate) fn is_staged(&self) -> bool {
        let memory = self.memory.as_ref();
        memory.is_some_and(|memory| memory.staged.is_some())
    }

    /// Releases memory that no peer has seen or will write to.
    pub(crate) fn discard(mut self) {
        self.memory = None;
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        if let (Some(memory), Some(networks)) = (self.memory.take(), self.networks.upgrade()) {
            // The peer received the keys and may be writing by now, although this end never connected.
            networks.retire(memory, None);
        }
    }
}

impl ExposedMemory {
    /// Exposes a slot and a region to a peer, or `staged` in their place.
    pub(super) fn new(
        network: Arc<dyn Network>,
        staged: Option<Arc<Incoming>>,
        (slot, region): (&Region, &Region),
        recycle: impl FnOnce() + Send + 'static,
    ) -> Result<Self> {
        // With staging, the peer writes to the rings instead of the slot and region.
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

    /// Whether the peer has stopped writing.
    pub(super) fn is_left(&self, device: &dyn Device) -> bool {
        match &self.staged {
            Some(staged) => staged.control.load(GONE) == 1,
            None => {
                // The word is in device memory, so read it by a copy.
                let mut word = [0; 8];
                let read = device.download(self.gone.as_slice(), &mut word);
                read.is_ok() && u64::from_ne_bytes(word) == 1
            }
        }
    }

    /// The callback for when the peer has stopped writing.
    pub(super) fn take_recycle(&mut self) -> Option<Box<dyn FnOnce() + Send>> {
        self.recycle.take()
    }

    /// Data a peer needs to connect: the address, and the keys of the words and of the last region.
    pub(super) fn keys(&self) -> [&[u8]; 3] {
        let region = self.regions.last().map_or(&[][..], NetworkRegion::key);
        [self.network.address(), self.words.key(), region]
    }

    /// Exposes one more region.
    pub(super) fn add(&mut self, region: &Region) -> Result<()> {
        self.regions.push(self.network.register(region.memory())?);
        self.held.push(Box::new(region.clone()));
        Ok(())
    }
}

/// Registers device memory with the network library for direct access, if possible and allowed.
pub(super) fn reached(network: &dyn Network, memory: &DeviceSlice) -> Option<NetworkRegion> {
    network
        .register_device_memory(memory)
        .inspect_err(|error| tracing::debug!(%error, ?memory, "a region is staged"))
        .ok()
}

debug_text!(Exposed, |it| "Exposed({})", it.memory.is_some());

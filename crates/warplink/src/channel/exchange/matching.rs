//! Builds a connection from both matched ends.

use super::{ConnectionExchange, EndOffer, OfferedMemory, RequestedConnection};
use crate::channel::answers::Answers;
use crate::channel::connection::{Connection, ConnectionEnd, HeldEnd, PeerReach};
use crate::channel::proxy::{ProxyKey, Route};
use crate::channel::request::Transport;
use crate::device::ChannelMemory;
use crate::device::channel::{ChannelParts, RegionPlace, Windows};
use crate::error::{Error, Rank, Result};
use crate::memory::{PeerHandle, RemoteRegion};
use crate::signal::Slot;
use crate::transport::{Carrier, CopyEngine, Exposed, NetworkCarrier, NetworkOffer, StagedCarrier};
use std::sync::{Arc, Mutex};

/// The peer's region, if it is mapped, and its location for kernels.
type PeersRegion = (Option<RemoteRegion>, RegionPlace);

impl ConnectionExchange {
    /// Builds the connection of this rank's `end` and the peer's.
    pub(super) fn make(
        &self,
        end: RequestedConnection,
        job_peer: Rank,
        terms: EndOffer,
    ) -> Result<Connection> {
        let pairs = &self.pairs;
        let (transport, number) = (end.transport, end.number);
        // Handles are wrapped before any check can fail: one that is dropped is returned to the peer, a plain message is
        // not.
        let handle = |wire| pairs.memory.peer_handle(job_peer, wire);
        let (handles, network) = match terms.memory {
            OfferedMemory::Handles(wires) => (Some(wires.map(handle)), None),
            OfferedMemory::Network(offer) => (None, Some(offer)),
        };
        let both = end.exposed.as_ref().zip(network.as_ref());
        // Both ends must put to the same kind of memory: rings and regions are different protocols.
        let other_staging =
            both.is_some_and(|(exposed, offer)| exposed.is_staged() != offer.staging.is_some());
        let differs = if terms.transport != transport {
            let what = format!(
                "this rank uses the {transport} transport, the peer the {}",
                terms.transport
            );
            Some((what, "choose the same transport on both ranks"))
        } else if other_staging {
            let what = "one rank stages what goes over the network, the other does not";
            let help = "configure the same staging on every rank";
            Some((what.to_owned(), help))
        } else {
            None
        };
        if let Some((what, help)) = differs {
            // The peer detects the same mismatch and drops its end, so nobody writes to the slot.
            if let Some(exposed) = end.exposed {
                exposed.discard();
            }
            pairs.slots.recycle(end.slot.number);
            return Err(Error::mismatch(what).with_help(help));
        }
        let request = end.request;
        let words = end.slot.channel_words()?;
        let (reach, (region, place)) = match (end.exposed, network, handles) {
            (Some(exposed), Some(offer), _) => {
                self.link(request.peer, request.tag, exposed, &offer)?
            }
            (None, _, Some(handles)) => self.map(end.slot, (job_peer, terms.slot), handles)?,
            _ => {
                return Err(Error::protocol(
                    "the peer offers other memory than its transport needs",
                )
                .with_help("run the same version of Warplink on every rank"));
            }
        };
        let own = request.region;
        let held = Arc::new(HeldEnd {
            regions: Mutex::new(vec![(own.clone(), region)]),
            reach,
            table: self.tables.allocate()?,
            answers: Answers::new(&pairs.slots, &pairs.memory),
        });
        let windows = Windows::new(
            &pairs.device,
            held.table.memory().clone(),
            own.memory().clone(),
            place,
        )?;
        let windows = Arc::new(windows);
        let carrier: Option<Box<dyn Carrier>> = match &held.reach {
            PeerReach::Network(link) if link.is_staged() => Some(Box::new(StagedCarrier::new(
                &pairs.device,
                (request.peer, link),
                (own.memory(), &windows),
                [&words.inbound, &words.completed],
                &pairs.fault,
            )?)),
            PeerReach::Network(link) => Some(Box::new(NetworkCarrier::new(
                &pairs.device,
                link,
                &windows,
                &words.completed,
                &pairs.fault,
            )?)),
            PeerReach::Mapped(slots) if transport == Transport::Proxied => {
                let (outbound, completed) = (slots.remote.word(false), &words.completed);
                let engine = CopyEngine::new(&pairs.device, &windows, outbound, completed)?;
                Some(Box::new(engine))
            }
            PeerReach::Mapped(_) => None,
        };
        let proxy = match carrier {
            None => None,
            Some(carrier) => {
                let key = match &held.reach {
                    PeerReach::Mapped(_) => ProxyKey::Copies,
                    PeerReach::Network(_) => {
                        let devices = request.network_devices.as_deref();
                        ProxyKey::Network(self.networks.devices(devices).map(str::to_owned))
                    }
                };
                let proxy = (self.proxies.0)(key)?;
                let route = Route::new(request.peer, &pairs.fault, &windows, carrier);
                let registered = proxy.register(route)?;
                Some((proxy, registered))
            }
        };
        let (proxy, proxy_end) = proxy.unzip();
        let peer = u32::try_from(request.peer).map_err(|_| Error::invalid("too many ranks"))?;
        let outbound = match &held.reach {
            PeerReach::Mapped(slots) => Some(slots.remote.word(false).clone()),
            PeerReach::Network(_) => None,
        };
        let memory = ChannelMemory::new(ChannelParts {
            peer,
            tag: request.tag,
            windows,
            inbound: words.inbound,
            awaited: words.awaited,
            completed: words.completed,
            abort: words.abort,
            outbound,
            proxy: proxy_end,
        });
        let made = ConnectionEnd {
            peer: request.peer,
            job_peer,
            tag: request.tag,
            number,
            transport,
            memory: Arc::new(memory),
            held,
            proxy,
        };
        Ok(Connection::new(&pairs.device, made, &pairs.in_flight))
    }

    /// Maps the peer's slot and its region.
    fn map(
        &self,
        slot: Slot,
        (job_peer, peers): (Rank, u64),
        [inbound, region]: [PeerHandle; 2],
    ) -> Result<(PeerReach, PeersRegion)> {
        let slots = self.pairs.pair_slots(slot, job_peer, peers, inbound)?;
        let region = region.open()?;
        let place = RegionPlace::Mapped(region.memory().clone());
        Ok((PeerReach::Mapped(Box::new(slots)), (Some(region), place)))
    }

    /// Connects to the peer over the network. From then on, dropping the link notifies the peer; so does a failure.
    fn link(
        &self,
        peer: Rank,
        tag: u64,
        exposed: Exposed,
        offered: &NetworkOffer,
    ) -> Result<(PeerReach, PeersRegion)> {
        let link = self.networks.connect(peer, exposed, offered)?;
        let path = link.path();
        tracing::debug!(peer, tag, ?path, "connected over the network");
        let bytes = match &offered.staging {
            Some(staging) => staging.region_bytes,
            None => link.region(0)?.bytes() as u64,
        };
        let region = (None, RegionPlace::Elsewhere(bytes));
        Ok((PeerReach::Network(Arc::new(link)), region))
    }
}

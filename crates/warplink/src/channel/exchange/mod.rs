//! Connecting: matching the two ends of connections, in batches, pairwise, without a barrier.
//!
//! Every end is published in the store under a key of its own, which its peer takes: the two ranks, the
//! tag, and how many with these were connected before. All ends of a batch are published before any is
//! waited for, so the order of the requests does not matter. How offers are published, taken and withdrawn is
//! `signal/publisher.rs`; `matching` makes a connection of the two offers, and `regions` adds regions to it.

mod matching;
mod offer;
mod regions;

use super::connection::Connections;
use super::proxy::Proxy;
use super::request::{ConnectionRequest, Transport};
use super::tables::TablePool;
use crate::bootstrap::{Bootstrap, Group};
use crate::deadline::Deadline;
use crate::device::channel::trigger::MAX_OFFSET;
use crate::device::{Device, Fault, InFlight};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::MemoryRegistry;
use crate::signal::{
    EndNumbers, Missing, Offer, Publisher, Slot, SlotDirectory, SlotPool, SlotReleases,
};
use crate::transport::{Exposed, Networks};
use offer::{EndOffer, StagingOffer};
use std::collections::HashSet;
use std::sync::Arc;

/// Connects one rank with others of one communicator, whose ranks its requests name.
#[derive(Debug)]
pub struct ConnectionExchange {
    publisher: Publisher,
    group: Arc<Group>,
    memory: Arc<MemoryRegistry>,
    device: Arc<dyn Device>,
    in_flight: Arc<InFlight>,
    fault: Arc<Fault>,
    slots: Arc<SlotPool>,
    releases: Arc<SlotReleases>,
    tables: Arc<TablePool>,
    proxies: ProxySource,
    networks: Arc<Networks>,
    /// How many connections were made with each peer and tag.
    numbers: EndNumbers<(Rank, u64)>,
}

/// What the exchanges of all communicators of a rank share.
pub(crate) struct ConnectionServices {
    pub(crate) bootstrap: Arc<Bootstrap>,
    pub(crate) memory: Arc<MemoryRegistry>,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) slots: Arc<SlotDirectory>,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) proxies: ProxySource,
    pub(crate) networks: Arc<Networks>,
}

/// Gives the rank's proxy, which it starts where there is none.
#[derive(Clone)]
pub(crate) struct ProxySource(pub(crate) Arc<dyn Fn() -> Result<Arc<Proxy>> + Send + Sync>);

impl std::fmt::Debug for ProxySource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ProxySource")
    }
}

/// An end of this rank.
struct End<'a> {
    request: &'a ConnectionRequest,
    transport: Transport,
    slot: Slot,
    number: u64,
    /// What the peer may write to, over the network.
    exposed: Option<Exposed>,
}

impl ConnectionExchange {
    /// The exchange of `group`, whose waits end when `fault` is raised.
    pub(crate) fn new(
        group: &Arc<Group>,
        fault: &Arc<Fault>,
        services: ConnectionServices,
    ) -> Self {
        let ConnectionServices {
            bootstrap,
            memory,
            device,
            slots: directory,
            in_flight,
            proxies,
            networks,
        } = services;
        let (slots, releases) = SlotReleases::start(&directory, &device, fault, &memory);
        Self {
            publisher: Publisher::new(&bootstrap, group, &memory, fault, "connect"),
            group: group.clone(),
            tables: TablePool::new(&device),
            memory,
            device,
            in_flight,
            fault: fault.clone(),
            slots,
            releases,
            proxies,
            networks,
            numbers: EndNumbers::default(),
        }
    }

    /// Connects every request's end with its peer's, and gives the connections in the same order. Both ends
    /// of a connection are requested, with the same tag, in any order and in batches cut in any way. Blocks
    /// the caller until all peers have requested theirs; then kernels of both may use the channels.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a peer that is this rank or
    /// none, and for two requests with the same peer and tag;
    /// [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch), on both ranks, where transports differ;
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) or
    /// [`ErrorKind::PeerLost`](crate::ErrorKind::PeerLost), with the peer and what was waited for. A batch
    /// that fails for want of a peer is withdrawn, and may be connected again; where the store does not
    /// answer that either, the communicator ends.
    pub fn connect(
        &self,
        requests: &[ConnectionRequest],
        deadline: Deadline,
    ) -> Result<Connections> {
        self.match_all(requests, deadline)
            .map_err(|error| self.group.with_job_ranks(error))
    }

    fn match_all(&self, requests: &[ConnectionRequest], deadline: Deadline) -> Result<Connections> {
        self.fault.check()?;
        self.check(requests)?;
        let published = self.publish(requests, deadline)?;
        let taken = self.publisher.take(&published, deadline, missing_end);
        let messages = match taken {
            Ok(messages) => messages,
            Err(error) => {
                let complete =
                    |offer: Offer<End<'_>>, message: &[u8]| drop(self.match_end(offer, message));
                self.publisher
                    .withdraw(published, |end| self.forget(end), complete);
                return Err(error);
            }
        };
        // Every end is matched before the first failure is reported, so that none is left behind.
        let matched: Vec<_> = published
            .into_iter()
            .zip(messages)
            .map(|(offer, message)| self.match_end(offer, &message))
            .collect();
        let all = matched.into_iter().collect::<Result<_>>()?;
        Ok(Connections::new(&self.device, all))
    }

    /// Forgets an end that no peer has seen.
    fn forget(&self, end: End<'_>) {
        let key = (end.request.peer, end.request.tag);
        self.numbers.reuse(key, end.number);
        self.give_back(end);
    }

    /// Gives back what no peer will write to.
    fn give_back(&self, end: End<'_>) {
        if let Some(exposed) = end.exposed {
            exposed.discard();
        }
        self.slots.recycle(end.slot.number);
    }

    fn roll_back(&self, offers: Vec<Offer<End<'_>>>) {
        for offer in offers {
            self.forget(self.publisher.cancel(offer));
        }
    }

    fn check(&self, requests: &[ConnectionRequest]) -> Result<()> {
        let (rank, world) = (self.group.rank(), self.group.world());
        let mut seen = HashSet::new();
        for request in requests {
            let invalid = |what: String, help: &'static str| {
                Err(Error::invalid(what)
                    .with_operation("connect")
                    .with_rank(rank)
                    .with_peer(request.peer)
                    .with_help(help))
            };
            if request.peer == rank {
                return invalid(
                    "the peer of a connection is this rank itself; expected another rank"
                        .to_owned(),
                    "copy within a rank in the kernel itself",
                );
            }
            if request.peer >= world {
                return invalid(
                    format!(
                        "unknown peer {}; expected less than {world}, as there are {world} ranks",
                        request.peer
                    ),
                    "name a rank of this communicator",
                );
            }
            let proxied = self.transport(request)? != Transport::Direct;
            if proxied && request.region.bytes() as u64 > MAX_OFFSET {
                return invalid(
                    format!(
                        "a region of {} bytes; expected at most {MAX_OFFSET} for a proxied connection",
                        request.region.bytes()
                    ),
                    "connect with a part of the region, or directly",
                );
            }
            if !seen.insert((request.peer, request.tag)) {
                return invalid(
                    format!("two connections with tag {}; expected one", request.tag),
                    "give each connection to the same peer a tag of its own",
                );
            }
        }
        Ok(())
    }

    /// Publishes every end at once.
    fn publish<'a>(
        &self,
        requests: &'a [ConnectionRequest],
        deadline: Deadline,
    ) -> Result<Vec<Offer<End<'a>>>> {
        let mut offers = Vec::with_capacity(requests.len());
        let prepared = requests.iter().try_for_each(|request| {
            offers.push(self.prepare(request)?);
            Ok(())
        });
        match prepared.and_then(|()| self.publisher.publish(&offers, deadline)) {
            Ok(()) => Ok(offers),
            Err(error) => {
                // They may be published yet, so that peers may write: what is exposed stays so.
                let late = error.kind() == ErrorKind::Timeout;
                offers.retain(|offer| !late || offer.item.exposed.is_none());
                self.roll_back(offers);
                Err(error)
            }
        }
    }

    /// An end, and what is to be published for it.
    fn prepare<'a>(&self, request: &'a ConnectionRequest) -> Result<Offer<End<'a>>> {
        let transport = self.transport(request)?;
        self.networks.collect();
        let slot = self.slots.allocate(&self.memory)?;
        let number = self.numbers.next((request.peer, request.tag));
        let (rank, peer) = (self.group.rank(), request.peer);
        let end = End {
            request,
            transport,
            slot,
            number,
            exposed: None,
        };
        let keys = [(rank, peer), (peer, rank)]
            .map(|(from, to)| self.store_key(from, to, request.tag, number));
        // The peer was checked to be a rank.
        let mut offer = self.publisher.offer(peer, keys, end)?;
        match self.describe(&mut offer).and_then(|end| end.encode()) {
            Ok(message) => Ok(offer.with_message(message)),
            Err(error) => {
                self.roll_back(vec![offer]);
                Err(error)
            }
        }
    }

    /// What the peer is told of an end.
    fn describe(&self, offer: &mut Offer<End<'_>>) -> Result<EndOffer> {
        let (request, transport) = (offer.item.request, offer.item.transport);
        let (inbound, slot) = (offer.item.slot.inbound().clone(), offer.item.slot.number);
        if transport != Transport::Network {
            return Ok(EndOffer {
                transport,
                region: self.publisher.export(offer, &request.region)?,
                inbound: self.publisher.export(offer, &inbound)?,
                slot,
                address: Vec::new(),
                staging: None,
            });
        }
        let (slots, devices) = (self.slots.clone(), request.network_devices.as_deref());
        let recycle = move || slots.recycle(slot);
        let exposed = self
            .networks
            .expose(devices, &inbound, &request.region, recycle);
        let exposed = exposed.map_err(|error| error.with_peer(request.peer))?;
        let [address, inbound, region] = exposed.keys().map(<[u8]>::to_vec);
        let staging = exposed.staging().map(|shape| StagingOffer {
            shape,
            region_bytes: request.region.bytes() as u64,
            region: exposed.reached_key().to_vec(),
        });
        offer.item.exposed = Some(exposed);
        Ok(EndOffer {
            transport,
            region,
            inbound,
            slot,
            address,
            staging,
        })
    }

    /// How the bytes of a connection move. A direct one counts a word of the peer's up by several blocks at a time, so
    /// that it needs atomic operations on the peer's memory.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where a direct one is wanted to a peer
    /// whose memory cannot be mapped, or has no atomic operations from here.
    fn transport(&self, request: &ConnectionRequest) -> Result<Transport> {
        let job_peer = self.group.job_rank(request.peer)?;
        let near = self.memory.is_near(job_peer)?;
        let access = self.memory.access(job_peer)?;
        let refuse = |what: &'static str, help: &'static str| {
            Err(Error::new(ErrorKind::Unsupported, what)
                .with_operation("connect")
                .with_rank(self.group.rank())
                .with_peer(request.peer)
                .with_help(help))
        };
        match request.transport {
            Some(Transport::Network) => Ok(Transport::Network),
            Some(Transport::Direct) if !near => refuse(
                "the peer is on another machine, so that its memory cannot be mapped",
                "leave the transport open, or choose the network",
            ),
            Some(Transport::Direct) if !access.mapped => refuse(
                "the devices of the two ranks cannot map each other's memory",
                "leave the transport open, or choose the proxy",
            ),
            Some(Transport::Direct) if !access.atomics => refuse(
                "the devices of the two ranks have no atomic operations on each other's memory",
                "leave the transport open, or choose the proxy",
            ),
            _ if !near => Ok(Transport::Network),
            None if !access.atomics => Ok(Transport::Proxied),
            chosen => Ok(chosen.unwrap_or_default()),
        }
    }

    /// Where the end of `from` of connection `number` to `to` with `tag` is published.
    fn store_key(&self, from: Rank, to: Rank, tag: u64, number: u64) -> String {
        self.group
            .key(&format!("channel/{from}>{to}/tag {tag}/{number}"))
    }
}

/// Whose end did not come, and with which tag.
fn missing_end(offer: &Offer<End<'_>>) -> Missing {
    let ConnectionRequest { peer, tag, .. } = offer.item.request;
    Missing {
        what: format!("rank {peer} to connect with tag {tag}"),
        help: "check that the peer requests this connection too",
    }
}

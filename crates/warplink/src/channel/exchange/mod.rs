//! Connection [`exchange`](crate::exchange): the ends, and the offer that each end publishes for the other.

mod matching;
mod offer;
mod regions;

use super::connection::{Connection, Connections};
use super::proxy::{Proxy, ProxyKey};
use super::request::{ConnectionRequest, Transport};
use super::tables::TablePool;
use crate::bootstrap::Group;
use crate::deadline::Deadline;
use crate::debug::debug_fields;
use crate::device::Fault;
use crate::device::channel::trigger::MAX_OFFSET;
use crate::error::{ErrorKind, Rank, Result};
use crate::exchange::{ExchangeServices, Matching, Missing, Offer, PairExchange};
use crate::signal::Slot;
use crate::transport::{Exposed, Networks};
use offer::{EndOffer, OfferedMemory};
use std::collections::HashSet;
use std::sync::Arc;

/// Connects one rank with others of one communicator. Requests name ranks of that communicator.
#[derive(Debug)]
pub struct ConnectionExchange {
    /// Ends with the same peer and tag match in the order of their numbers.
    pairs: PairExchange<(Rank, u64)>,
    tables: Arc<TablePool>,
    proxies: ProxySource,
    networks: Arc<Networks>,
}

/// Returns the rank's proxy for a kind of connection, and starts one if none is running.
#[derive(Clone)]
pub(crate) struct ProxySource(pub(crate) Arc<StartProxy>);

type StartProxy = dyn Fn(ProxyKey) -> Result<Arc<Proxy>> + Send + Sync;

debug_fields!(ProxySource);

/// An end of this rank.
pub(crate) struct RequestedConnection {
    request: ConnectionRequest,
    transport: Transport,
    slot: Slot,
    number: u64,
    /// Memory exposed to the peer's writes over the network.
    exposed: Option<Exposed>,
}

impl ConnectionExchange {
    /// Creates the exchange of `group`, whose waits end when `fault` is raised.
    pub(crate) fn new(
        group: &Arc<Group>,
        fault: &Arc<Fault>,
        services: ExchangeServices,
        proxies: ProxySource,
        networks: &Arc<Networks>,
    ) -> Self {
        Self {
            tables: TablePool::new(&services.device),
            pairs: PairExchange::new(group, fault, services, "connect"),
            proxies,
            networks: networks.clone(),
        }
    }

    /// Connects every request's end with the peer's, and returns the connections in the same order. Both ranks
    /// request their end with the same tag, in any order and in batches of any size. Blocks until all peers have
    /// requested theirs; then kernels of both ranks may use the channels.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if a peer is this rank or not in the
    /// communicator, and for two requests with the same peer and tag;
    /// [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch), on both ranks, where transports differ;
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) or [`ErrorKind::PeerLost`](crate::ErrorKind::PeerLost), with
    /// the peer and the missing end. A batch that fails because a peer is missing is withdrawn, and may be retried;
    /// if the store does not answer the withdrawal either, the communicator fails.
    pub fn connect(
        &self,
        requests: &[ConnectionRequest],
        deadline: Deadline,
    ) -> Result<Connections> {
        let checked = self.pairs.fault.check().and_then(|()| self.check(requests));
        let ends = requests.iter().map(|request| self.end(request));
        let connected = checked.and_then(|()| self.exchange(ends, deadline));
        match connected {
            Ok(all) => Ok(Connections::new(&self.pairs.device, all)),
            Err(error) => Err(self.pairs.group.with_job_ranks(error)),
        }
    }

    fn check(&self, requests: &[ConnectionRequest]) -> Result<()> {
        let mut seen = HashSet::new();
        for request in requests {
            let invalid = |what: String, help: &'static str| {
                let kind = ErrorKind::InvalidArgument;
                Err(self.pairs.refused(request.peer, kind, what, help))
            };
            if request.peer == self.pairs.group.rank() {
                return invalid(
                    "the peer of a connection is this rank itself; expected another rank"
                        .to_owned(),
                    "copy within a rank in the kernel itself",
                );
            }
            self.pairs.check_peer(request.peer)?;
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

    fn end(&self, request: &ConnectionRequest) -> Result<Offer<RequestedConnection>> {
        let transport = self.transport(request)?;
        // Before memory is allocated for this end, since ends dropped earlier may be released by now.
        self.networks.collect();
        let (peer, tag) = (request.peer, request.tag);
        let (slot, number) = self.pairs.reserve((peer, tag))?;
        let end = RequestedConnection {
            request: request.clone(),
            transport,
            slot,
            number,
            exposed: None,
        };
        self.pairs
            .offer(peer, self.store_keys(peer, tag, number), end)
    }

    /// Selects the transport of a connection. In a direct connection several blocks increment a word of the peer
    /// concurrently, which requires atomic operations on the peer's memory.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if a direct connection is requested to a peer whose
    /// memory cannot be mapped, or does not support atomic operations from here.
    fn transport(&self, request: &ConnectionRequest) -> Result<Transport> {
        let job_peer = self.pairs.group.job_rank(request.peer)?;
        let near = self.pairs.memory.is_near(job_peer)?;
        let access = self.pairs.memory.access(job_peer)?;
        let refuse = |what: &'static str, help: &'static str| {
            let kind = ErrorKind::Unsupported;
            Err(self.pairs.refused(request.peer, kind, what, help))
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
            // Also for a requested proxy, whose copy engine needs mapped memory.
            _ if !near => Ok(Transport::Network),
            None if !access.atomics => Ok(Transport::Proxied),
            chosen => Ok(chosen.unwrap_or_default()),
        }
    }

    /// Store keys of the ends of connection `number` to `peer` with `tag`, this rank's first.
    fn store_keys(&self, peer: Rank, tag: u64, number: u64) -> [String; 2] {
        let rank = self.pairs.group.rank();
        [(rank, peer), (peer, rank)]
            .map(|(from, to)| format!("channel/{from}>{to}/tag {tag}/{number}"))
    }
}

impl Matching for ConnectionExchange {
    type Key = (Rank, u64);
    type End = RequestedConnection;
    type Terms = EndOffer;
    type Made = Connection;

    fn pairs(&self) -> &PairExchange<(Rank, u64)> {
        &self.pairs
    }

    fn describe(&self, offer: &mut Offer<RequestedConnection>) -> Result<EndOffer> {
        let (transport, region) = (offer.end.transport, offer.end.request.region.clone());
        let (inbound, slot) = (offer.end.slot.inbound().clone(), offer.end.slot.number);
        if transport != Transport::Network {
            let region = self.pairs.export(offer, &region)?;
            let inbound = self.pairs.export(offer, &inbound)?;
            return Ok(EndOffer {
                transport,
                slot,
                memory: OfferedMemory::Handles([inbound, region]),
            });
        }
        let slots = self.pairs.slots.clone();
        let devices = offer.end.request.network_devices.as_deref();
        // Over the network the peer announces its last write by a word, so `Networks::collect` recycles the slot.
        let recycle = move || slots.recycle(slot);
        let exposed = self.networks.expose(devices, &inbound, &region, recycle);
        let exposed = exposed.map_err(|error| error.with_peer(offer.peer))?;
        let memory = exposed.offer(region.bytes() as u64);
        // Kept with the end, which connects with it or discards it: a plain drop would wait for the peer's last
        // write.
        offer.end.exposed = Some(exposed);
        Ok(EndOffer {
            transport,
            slot,
            memory: OfferedMemory::Network(memory?),
        })
    }

    fn missing(&self, offer: &Offer<RequestedConnection>) -> Missing {
        let ConnectionRequest { peer, tag, .. } = offer.end.request;
        Missing {
            what: format!("rank {peer} to connect with tag {tag}"),
            help: "check that the peer requests this connection too",
        }
    }

    fn forget(&self, end: RequestedConnection) {
        if let Some(exposed) = end.exposed {
            exposed.discard();
        }
        let key = (end.request.peer, end.request.tag);
        self.pairs.give_back(key, &end.slot, end.number);
    }

    fn meet(
        &self,
        end: RequestedConnection,
        job_peer: Rank,
        terms: EndOffer,
    ) -> Result<Connection> {
        self.make(end, job_peer, terms)
    }
}

//! Connecting: matching the two ends of connections, in batches, pairwise, without a barrier.
//!
//! Every end is published in the store under a key of its own, which its peer takes: the two ranks, the
//! tag, and how many with these were connected before. All ends of a batch are published before any is
//! waited for, so the order of the requests does not matter.
//!
//! ```text
//!   publish      each request's offer, or nothing at all       (this file)
//!   matching     with the peer's offer: a connection, or why not
//!   withdrawal   of what no peer took, where connecting fails
//!   regions      that are added to a connection later
//! ```

mod matching;
mod offer;
mod regions;
mod withdrawal;

use super::connection::Connections;
use super::proxy::Proxy;
use super::request::{ConnectionRequest, Transport};
use super::tables::TablePool;
use crate::bootstrap::{Bootstrap, Group, Wait};
use crate::deadline::Deadline;
use crate::device::channel::trigger::MAX_OFFSET;
use crate::device::{Device, Fault, InFlight};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::{MemoryRegistry, Region};
use crate::signal::{EndNumbers, Slot, SlotDirectory, SlotPool, SlotReleases};
use offer::EndOffer;
use std::collections::HashSet;
use std::sync::Arc;

/// Connects one rank with others of one communicator, whose ranks its requests name.
#[derive(Debug)]
pub struct ConnectionExchange {
    bootstrap: Arc<Bootstrap>,
    group: Arc<Group>,
    memory: Arc<MemoryRegistry>,
    device: Arc<dyn Device>,
    in_flight: Arc<InFlight>,
    fault: Arc<Fault>,
    slots: Arc<SlotPool>,
    releases: Arc<SlotReleases>,
    tables: Arc<TablePool>,
    proxies: ProxySource,
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
}

/// Gives the rank's proxy, which it starts where there is none.
#[derive(Clone)]
pub(crate) struct ProxySource(pub(crate) Arc<dyn Fn() -> Result<Arc<Proxy>> + Send + Sync>);

impl std::fmt::Debug for ProxySource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ProxySource")
    }
}

/// An end of this rank that was published.
struct PublishedEnd<'a> {
    request: &'a ConnectionRequest,
    slot: Slot,
    number: u64,
    own_key: String,
    peer_key: String,
    /// Whose handles the peer is to get.
    exported: Vec<Region>,
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
        } = services;
        let (slots, releases) = SlotReleases::start(&directory, &device, fault, &memory);
        Self {
            bootstrap,
            group: group.clone(),
            tables: TablePool::new(&device),
            memory,
            device,
            in_flight,
            fault: fault.clone(),
            slots,
            releases,
            proxies,
            numbers: EndNumbers::default(),
        }
    }

    /// Connects every request's end with its peer's, and gives the connections in the same order. Both ends
    /// of a connection are requested, with the same tag, in any order and in batches cut in any way. Blocks
    /// the caller until all peers have requested theirs; then kernels of both may use the channels.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a peer that is this rank or none, and for two requests with the
    /// same peer and tag; [`ErrorKind::Mismatch`], on both ranks, where transports differ;
    /// [`ErrorKind::Timeout`] or [`ErrorKind::PeerLost`], with the peer and what was waited for. A batch
    /// that fails for want of a peer is withdrawn, and may be connected again.
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
        let published = self.publish(requests)?;
        let keys: Vec<String> = published.iter().map(|end| end.peer_key.clone()).collect();
        let wait = self.wait_for(requests.iter().map(|request| request.peer), deadline)?;
        let messages = match self.bootstrap.store().multi_take(&keys, &wait) {
            Ok(messages) => messages,
            Err(error) => {
                let error = self.group.in_own_ranks(error);
                let error = name_missing_end(error, &published, deadline);
                self.withdraw(published);
                return Err(error.with_operation("connect").with_rank(self.group.rank()));
            }
        };
        // Every end is matched before the first failure is reported, so that none is left behind.
        let matched: Vec<_> = published
            .into_iter()
            .zip(messages)
            .map(|(end, message)| self.match_end(end, &message))
            .collect();
        let all = matched.into_iter().collect::<Result<_>>()?;
        Ok(Connections::new(&self.device, all))
    }

    /// A wait that ends when one of `peers` is lost.
    fn wait_for(&self, peers: impl Iterator<Item = Rank>, deadline: Deadline) -> Result<Wait> {
        let peers = peers.map(|peer| self.group.job_rank(peer));
        let mut peers: Vec<Rank> = peers.collect::<Result<_>>()?;
        peers.sort_unstable();
        peers.dedup();
        Ok(Wait::on(peers, deadline))
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
            if request.transport == Transport::Proxied && request.region.bytes() as u64 > MAX_OFFSET
            {
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
    fn publish<'a>(&self, requests: &'a [ConnectionRequest]) -> Result<Vec<PublishedEnd<'a>>> {
        let mut published = Vec::with_capacity(requests.len());
        let mut pairs = Vec::with_capacity(requests.len());
        for request in requests {
            match self.prepare(request) {
                Ok((end, message)) => {
                    pairs.push((end.own_key.clone(), message));
                    published.push(end);
                }
                Err(error) => {
                    // Nothing was published yet.
                    self.roll_back(published);
                    return Err(error);
                }
            }
        }
        if let Err(error) = self.bootstrap.store().multi_set(&pairs) {
            self.roll_back(published);
            return Err(self
                .group
                .in_own_ranks(error)
                .with_operation("publish connections"));
        }
        Ok(published)
    }

    /// An end, and what is to be published for it.
    fn prepare<'a>(&self, request: &'a ConnectionRequest) -> Result<(PublishedEnd<'a>, Vec<u8>)> {
        let slot = self.slots.allocate(&self.memory)?;
        let number = self.numbers.next((request.peer, request.tag));
        let (rank, peer) = (self.group.rank(), request.peer);
        let mut end = PublishedEnd {
            request,
            slot,
            number,
            own_key: self.store_key(rank, peer, request.tag, number),
            peer_key: self.store_key(peer, rank, request.tag, number),
            exported: Vec::new(),
        };
        match self.offer(&mut end).and_then(|offer| offer.encode()) {
            Ok(message) => Ok((end, message)),
            Err(error) => {
                self.roll_back(vec![end]);
                Err(error)
            }
        }
    }

    /// What `end` tells its peer; the handles in it are noted, to be cancelled if it never arrives.
    fn offer(&self, end: &mut PublishedEnd<'_>) -> Result<EndOffer> {
        let request = end.request;
        let peer = self.group.job_rank(request.peer)?;
        let mut export = |region: &Region| {
            let handle = self.memory.export_handle(region, peer);
            let handle = handle.map_err(|error| self.group.in_own_ranks(error))?;
            end.exported.push(region.clone());
            Ok::<_, Error>(handle.to_vec())
        };
        Ok(EndOffer {
            transport: request.transport,
            region: export(&request.region)?,
            inbound: export(end.slot.inbound())?,
            slot: end.slot.number,
        })
    }

    /// Where the end of `from` of connection `number` to `to` with `tag` is published.
    fn store_key(&self, from: Rank, to: Rank, tag: u64, number: u64) -> String {
        self.group
            .key(&format!("channel/{from}>{to}/tag {tag}/{number}"))
    }
}

/// A timeout in the terms of the caller: whose end did not come, and with which tag.
fn name_missing_end(error: Error, published: &[PublishedEnd<'_>], deadline: Deadline) -> Error {
    let missing = published
        .iter()
        .find(|end| error.key() == Some(end.peer_key.as_str()));
    match missing {
        Some(PublishedEnd { request, .. }) if error.kind() == ErrorKind::Timeout => deadline
            .expired(&format!(
                "rank {} to connect with tag {}",
                request.peer, request.tag
            ))
            .with_peer(request.peer)
            .with_help("check that the peer requests this connection too"),
        _ => error,
    }
}

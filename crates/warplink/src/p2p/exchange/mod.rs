//! Matching the two ends of transfers, in batches, pairwise, without a barrier.
//!
//! Every end is published in the store under a key of its own, which its peer takes: the two
//! ranks, the tag, the direction, and how many with these were exchanged before. So batches need
//! not be cut alike on the two ranks. All ends of a batch are published before any is waited for.
//!
//! Both ranks always publish, whether or not their mappings are cached, and a handle names the
//! generation of its registration: a rank whose cache is filled while its peer's is not neither
//! waits for what does not come nor uses a mapping of what was replaced.
//!
//! ```text
//!   publish      each request's offer, or nothing at all       (this file)
//!   matching     with the peer's offer: a transfer, or why not
//!   withdrawal   of what no peer took, where the exchange fails
//! ```

mod matching;
mod offer;
mod withdrawal;

use super::progress::ProgressList;
use super::protocol::{Protocol, Role};
use super::request::{Direction, MatchKey, TransferRequest};
use super::transfer::Transfer;
use crate::bootstrap::{Bootstrap, Group, Wait};
use crate::deadline::Deadline;
use crate::device::{Device, Fault, InFlight};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::{MemoryRegistry, Region};
use crate::signal::{EndNumbers, Slot, SlotDirectory, SlotPool, SlotReleases};
use offer::EndOffer;
use std::sync::Arc;

/// Exchanges the transfers of one rank in one communicator, whose ranks its requests name.
#[derive(Debug)]
pub struct TransferExchange {
    bootstrap: Arc<Bootstrap>,
    group: Arc<Group>,
    memory: Arc<MemoryRegistry>,
    device: Arc<dyn Device>,
    in_flight: Arc<InFlight>,
    fault: Arc<Fault>,
    slots: Arc<SlotPool>,
    releases: Arc<SlotReleases>,
    default_protocol: Protocol,
    numbers: EndNumbers<MatchKey>,
    progress: ProgressList,
}

/// What the exchanges of all communicators of a rank share.
pub(crate) struct ExchangeServices {
    pub(crate) bootstrap: Arc<Bootstrap>,
    pub(crate) memory: Arc<MemoryRegistry>,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) slots: Arc<SlotDirectory>,
    pub(crate) in_flight: Arc<InFlight>,
    /// Of transfers that do not choose one.
    pub(crate) protocol: Protocol,
}

/// This rank's ends of a batch, which were published.
pub(crate) struct PublishedEnds<'a>(Vec<PublishedEnd<'a>>);

/// An end of this rank that was published.
struct PublishedEnd<'a> {
    request: &'a TransferRequest,
    protocol: Protocol,
    slot: Slot,
    number: u64,
    own_key: String,
    peer_key: String,
    // Whose handles the peer is to get.
    exported: Vec<Region>,
}

impl TransferExchange {
    /// The exchange of `group`, whose waits end when `fault` is raised.
    pub(crate) fn new(group: &Arc<Group>, fault: &Arc<Fault>, services: ExchangeServices) -> Self {
        let ExchangeServices {
            bootstrap,
            memory,
            device,
            slots: directory,
            in_flight,
            protocol,
        } = services;
        let (slots, releases) = SlotReleases::start(&directory, &device, fault, &memory);
        Self {
            bootstrap,
            group: group.clone(),
            memory,
            device,
            in_flight,
            fault: fault.clone(),
            releases,
            slots,
            default_protocol: protocol,
            numbers: EndNumbers::default(),
            progress: ProgressList::default(),
        }
    }

    /// Matches every request with its peer's, and gives the transfers in the same order. Blocks the
    /// caller until all peers have exchanged the other ends, in batches cut in any way; two ranks
    /// that each wait in one batch for what the other has in a later one wait until `deadline`. A
    /// peer may be this rank: then both ends are in its batches, and the transfer is a copy.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a peer that is no rank;
    /// [`ErrorKind::Mismatch`], on both ranks, where lengths or
    /// protocols differ;
    /// [`ErrorKind::Timeout`] or
    /// [`ErrorKind::PeerLost`], with the peer and what was waited for. A batch that fails for want of
    /// a peer is withdrawn, and may be exchanged again.
    pub fn exchange(
        &self,
        requests: &[TransferRequest],
        deadline: Deadline,
    ) -> Result<Vec<Transfer>> {
        self.match_all(requests, deadline)
            .map_err(|error| self.group.with_job_ranks(error))
    }

    fn match_all(&self, requests: &[TransferRequest], deadline: Deadline) -> Result<Vec<Transfer>> {
        let published = self.publish(requests, deadline)?;
        self.complete(published, deadline)
    }

    /// Takes what the peers publish for the ends that this rank has, and makes the transfers. Blocks
    /// until all are there. What cannot be completed is withdrawn.
    pub(crate) fn complete(
        &self,
        PublishedEnds(published): PublishedEnds<'_>,
        deadline: Deadline,
    ) -> Result<Vec<Transfer>> {
        let keys: Vec<String> = published.iter().map(|end| end.peer_key.clone()).collect();
        let peers = published
            .iter()
            .map(|end| self.group.job_rank(end.request.peer));
        let mut peers: Vec<Rank> = peers.collect::<Result<_>>()?;
        peers.sort_unstable();
        peers.dedup();
        let taken = self
            .bootstrap
            .store()
            .multi_take(&keys, &Wait::on(peers, deadline));
        let messages = match taken {
            Ok(messages) => messages,
            Err(error) => {
                let error = self.group.in_own_ranks(error);
                let error = name_missing_end(error, &published, deadline);
                self.withdraw(PublishedEnds(published));
                return Err(error
                    .with_operation("exchange transfers")
                    .with_rank(self.group.rank()));
            }
        };
        // Every end is matched before the first failure is reported, so that none is left behind.
        let matched: Vec<_> = published
            .into_iter()
            .zip(messages)
            .map(|(end, message)| self.match_end(end, &message))
            .collect();
        matched.into_iter().collect()
    }

    /// The error of a stream that was waited for in vain, in the terms of the caller: which transfers
    /// in streams of this rank wait for their peers, and since when. Blocks while it reads their
    /// signals.
    pub(crate) fn explain_timeout(&self, error: Error) -> Error {
        let waiting = self.progress.waiting(&*self.device);
        let Some(first) = waiting.first() else {
            return error;
        };
        let more = match waiting.len() - 1 {
            0 => String::new(),
            more => format!(", and {more} other transfers"),
        };
        Error::new(
            error.kind(),
            format!(
                "{}: rank {} has not posted its {} with tag {} for {:.1?}{more}",
                error.message(),
                first.peer,
                first.direction.reversed(),
                first.tag,
                first.since,
            ),
        )
        .with_operation("synchronize")
        .with_peer(first.peer)
        .with_help("check that both ranks post every transfer")
    }

    fn check(&self, request: &TransferRequest) -> Result<()> {
        let (rank, world) = (self.group.rank(), self.group.world());
        let invalid = |what: String, help: &'static str| {
            Err(Error::invalid(what)
                .with_operation("exchange transfers")
                .with_rank(rank)
                .with_peer(request.peer)
                .with_help(help))
        };
        if request.peer >= world {
            return invalid(
                format!(
                    "unknown peer {}; expected less than {world}, as there are {world} ranks",
                    request.peer
                ),
                "name a rank of this communicator",
            );
        }
        if request.buffer.region().is_none() && request.protocol != Some(Protocol::Put) {
            return invalid(
                "a send without a buffer of its own uses get; expected put".to_owned(),
                "use put for what is stored into the receiver's memory",
            );
        }
        Ok(())
    }

    /// Publishes this rank's end of every request at once, for [`complete`](Self::complete) or
    /// [`withdraw`](Self::withdraw). Does not wait for a peer, only for the store. Should that not answer
    /// until `deadline`, the ends may be published yet, so the communicator ends.
    pub(crate) fn publish<'a>(
        &self,
        requests: &'a [TransferRequest],
        deadline: Deadline,
    ) -> Result<PublishedEnds<'a>> {
        self.fault.check()?;
        requests
            .iter()
            .try_for_each(|request| self.check(request))?;
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
        if let Err(error) = self.bootstrap.store().multi_set_until(&pairs, deadline) {
            let error = self.group.in_own_ranks(error);
            let error = error.with_operation("publish transfers");
            if error.kind() == ErrorKind::Timeout {
                self.fault.raise(withdrawal::not_withdrawn(&error));
            }
            self.roll_back(published);
            return Err(error);
        }
        Ok(PublishedEnds(published))
    }

    /// An end, and what is to be published for it.
    fn prepare<'a>(&self, request: &'a TransferRequest) -> Result<(PublishedEnd<'a>, Vec<u8>)> {
        let slot = self.slots.allocate(&self.memory)?;
        let key = request.match_key();
        let number = self.numbers.next(key);
        let mut end = PublishedEnd {
            request,
            protocol: request.protocol.unwrap_or(self.default_protocol),
            slot,
            number,
            own_key: self.store_key(key, number, request.direction),
            peer_key: self.store_key(key, number, request.direction.reversed()),
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
        let buffer = match request.direction.role(end.protocol) {
            Role::Target => request.buffer.region().map(&mut export).transpose()?,
            Role::Initiator => None,
        };
        let inbound = export(end.slot.inbound())?;
        Ok(EndOffer {
            bytes: request.buffer.bytes() as u64,
            protocol: end.protocol,
            buffer,
            inbound,
            slot: end.slot.number,
        })
    }

    /// Where the end of `direction` of transfer `number` under `key` is published.
    fn store_key(&self, key: MatchKey, number: u64, direction: Direction) -> String {
        let rank = self.group.rank();
        let (from, to) = match key.direction {
            Direction::Send => (rank, key.peer),
            Direction::Receive => (key.peer, rank),
        };
        self.group.key(&format!(
            "p2p/{from}>{to}/tag {}/{number}/{direction}",
            key.tag
        ))
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
                "rank {} to exchange its {} with tag {}",
                request.peer,
                request.direction.reversed(),
                request.tag
            ))
            .with_peer(request.peer)
            .with_help("check that the peer exchanges this transfer too"),
        _ => error,
    }
}

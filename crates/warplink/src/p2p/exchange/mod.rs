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
//! How offers are published, taken and withdrawn is `signal/publisher.rs`; `matching` makes a transfer of
//! the two offers, or says why not.

mod flow;
mod matching;
mod offer;

use super::path::{Flow, Path};
use super::progress::ProgressList;
use super::protocol::{Protocol, Role};
use super::request::{Direction, MatchKey, TransferRequest};
use super::transfer::Transfer;
use crate::bootstrap::{Bootstrap, Group};
use crate::deadline::Deadline;
use crate::device::{Device, Fault, InFlight};
use crate::error::{Error, Result};
use crate::memory::{MemoryRegistry, Region};
use crate::signal::{
    EndNumbers, Missing, Offer, Publisher, Slot, SlotDirectory, SlotPool, SlotReleases,
};
pub(crate) use flow::PathModel;
use offer::EndOffer;
use std::sync::Arc;

/// Exchanges the transfers of one rank in one communicator, whose ranks its requests name.
#[derive(Debug)]
pub struct TransferExchange {
    publisher: Publisher,
    group: Arc<Group>,
    memory: Arc<MemoryRegistry>,
    device: Arc<dyn Device>,
    in_flight: Arc<InFlight>,
    fault: Arc<Fault>,
    slots: Arc<SlotPool>,
    releases: Arc<SlotReleases>,
    default_protocol: Protocol,
    default_path: Path,
    paths: PathModel,
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
    /// Likewise.
    pub(crate) path: Path,
    pub(crate) paths: PathModel,
}

/// This rank's ends of a batch, which were published.
pub(crate) struct PublishedEnds<'a>(Vec<Offer<End<'a>>>);

/// An end of this rank.
struct End<'a> {
    request: &'a TransferRequest,
    protocol: Protocol,
    path: Path,
    flow: Flow,
    slot: Slot,
    scratch: Option<Region>,
    number: u64,
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
            path,
            paths,
        } = services;
        let (slots, releases) = SlotReleases::start(&directory, &device, fault, &memory);
        Self {
            publisher: Publisher::new(&bootstrap, group, &memory, fault, "exchange transfers"),
            group: group.clone(),
            memory,
            device,
            in_flight,
            fault: fault.clone(),
            releases,
            slots,
            default_protocol: protocol,
            default_path: path,
            paths,
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
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a peer that is no rank;
    /// [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch), on both ranks, where lengths,
    /// protocols or paths differ;
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) or
    /// [`ErrorKind::PeerLost`](crate::ErrorKind::PeerLost), with the peer and what was waited for. A
    /// batch that fails for want of a peer is withdrawn, and may be exchanged again.
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
        let taken = self.publisher.take(&published, deadline, missing_end);
        let messages = match taken {
            Ok(messages) => messages,
            Err(error) => {
                self.withdraw(PublishedEnds(published));
                return Err(error);
            }
        };
        // Every end is matched before the first failure is reported, so that none is left behind.
        let matched: Vec<_> = published
            .into_iter()
            .zip(messages)
            .map(|(offer, message)| self.match_end(offer, &message))
            .collect();
        matched.into_iter().collect()
    }

    /// Takes back what peers have not taken; what they took is completed and dropped, which tells the peer to
    /// forget it.
    pub(crate) fn withdraw(&self, PublishedEnds(published): PublishedEnds<'_>) {
        let complete = |offer: Offer<End<'_>>, message: &[u8]| drop(self.match_end(offer, message));
        self.publisher
            .withdraw(published, |end| self.forget(end), complete);
    }

    /// Forgets an end that no peer has seen.
    fn forget(&self, end: End<'_>) {
        self.numbers.reuse(end.request.match_key(), end.number);
        self.slots.recycle(end.slot.number);
    }

    fn roll_back(&self, offers: Vec<Offer<End<'_>>>) {
        for offer in offers {
            self.forget(self.publisher.cancel(offer));
        }
    }

    /// The error of a stream that was waited for in vain, in the terms of the caller: which transfers
    /// in streams of this rank wait for their peers, and since when. Blocks while it reads their
    /// signals.
    pub(crate) fn explain_timeout(&self, error: &Error) -> Option<Error> {
        let waiting = self.progress.waiting(&*self.device);
        let first = waiting.first()?;
        let more = match waiting.len() - 1 {
            0 => String::new(),
            more => format!(", and {more} other transfers"),
        };
        let explained = Error::new(
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
        .with_help("check that both ranks post every transfer");
        Some(explained)
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
        let mut offers = Vec::with_capacity(requests.len());
        let prepared = requests.iter().try_for_each(|request| {
            offers.push(self.prepare(request)?);
            Ok(())
        });
        match prepared.and_then(|()| self.publisher.publish(&offers, deadline)) {
            Ok(()) => Ok(PublishedEnds(offers)),
            Err(error) => {
                self.roll_back(offers);
                Err(error)
            }
        }
    }

    /// An end, and what is to be published for it.
    fn prepare<'a>(&self, request: &'a TransferRequest) -> Result<Offer<End<'a>>> {
        let slot = self.slots.allocate(&self.memory)?;
        let key = request.match_key();
        let number = self.numbers.next(key);
        let end = End {
            request,
            protocol: request.protocol.unwrap_or(self.default_protocol),
            path: request.path.unwrap_or(self.default_path),
            flow: Flow::Streams,
            slot,
            scratch: None,
            number,
        };
        let keys = [request.direction, request.direction.reversed()]
            .map(|direction| self.store_key(key, number, direction));
        // The peer was checked to be a rank.
        let mut offer = self.publisher.offer(request.peer, keys, end)?;
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
        let End {
            request,
            protocol,
            path,
            ..
        } = offer.item;
        let flow = self.flow(request, protocol, path)?;
        offer.item.flow = flow;
        offer.item.scratch = self.scratch(request, flow, &offer.item.slot)?;
        let buffer = match request.direction.role(protocol) {
            Role::Target => request.buffer.region(),
            Role::Initiator => None,
        };
        let buffer = buffer.map(|region| self.publisher.export(offer, region));
        let buffer = buffer.transpose()?;
        let scratch = offer.item.scratch.clone();
        let scratch = scratch.map(|region| self.publisher.export(offer, &region));
        let scratch = scratch.transpose()?;
        let inbound = offer.item.slot.inbound().clone();
        Ok(EndOffer {
            bytes: request.buffer.bytes() as u64,
            protocol,
            path,
            flow,
            stored: request.buffer.region().is_none(),
            scratch,
            buffer,
            inbound: self.publisher.export(offer, &inbound)?,
            slot: offer.item.slot.number,
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

/// Whose end did not come, and with which tag.
fn missing_end(offer: &Offer<End<'_>>) -> Missing {
    let request = offer.item.request;
    Missing {
        what: format!(
            "rank {} to exchange its {} with tag {}",
            request.peer,
            request.direction.reversed(),
            request.tag
        ),
        help: "check that the peer exchanges this transfer too",
    }
}

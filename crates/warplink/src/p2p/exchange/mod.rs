//! Transfer [`exchange`](crate::exchange): the ends, and the offer that each end publishes for the other.

mod flow;
mod matching;
mod offer;

use super::path::{Flow, Path, TransferKernels};
use super::progress::ProgressList;
use super::protocol::{Protocol, Role};
use super::request::{Direction, MatchKey, TransferRequest};
use super::transfer::Transfer;
use crate::bootstrap::Group;
use crate::deadline::Deadline;
use crate::device::Fault;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::exchange::{ExchangeServices, Matching, Missing, Offer, PairExchange, PublishedEnds};
use crate::memory::Region;
use crate::signal::Slot;
use offer::EndOffer;
use std::sync::Arc;

/// Exchanges transfers of one rank in one communicator. Requests name ranks of that communicator.
#[derive(Debug)]
pub struct TransferExchange {
    pairs: PairExchange<MatchKey>,
    default_protocol: Protocol,
    default_path: Path,
    /// Performance of transfers by kernels, equal on all ranks of the job, or why it is unknown.
    kernels: Result<TransferKernels>,
    progress: ProgressList,
}

/// An end of this rank.
pub(crate) struct RequestedTransfer {
    request: TransferRequest,
    protocol: Protocol,
    path: Path,
    flow: Flow,
    slot: Slot,
    scratch: Option<Region>,
    number: u64,
}

impl TransferExchange {
    /// Creates the exchange of `group`, whose waits end when `fault` is raised. Transfers without an explicit
    /// protocol or path use `defaults`; `kernels` is the same on all ranks.
    pub(crate) fn new(
        group: &Arc<Group>,
        fault: &Arc<Fault>,
        services: ExchangeServices,
        defaults: (Protocol, Path),
        kernels: Result<TransferKernels>,
    ) -> Self {
        Self {
            pairs: PairExchange::new(group, fault, services, "exchange transfers"),
            default_protocol: defaults.0,
            default_path: defaults.1,
            kernels,
            progress: ProgressList::default(),
        }
    }

    /// Matches every request with the peer's and returns the transfers in the same order. Blocks until all peers have
    /// exchanged the other ends. Batches may be split differently on each rank, but two ranks that each wait in one
    /// batch for an end that the other exchanges in a later batch wait until `deadline`. The peer may be this rank:
    /// then its batches contain both ends, and the transfer is a local copy.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if a peer is not a rank of the communicator;
    /// [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch), on both ranks, where lengths, protocols or paths differ;
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) or [`ErrorKind::PeerLost`](crate::ErrorKind::PeerLost), with
    /// the peer and the missing end. A batch that fails because a peer is missing is withdrawn, and may be retried.
    pub fn exchange(
        &self,
        requests: &[TransferRequest],
        deadline: Deadline,
    ) -> Result<Vec<Transfer>> {
        let transfers = self
            .publish_all(requests, deadline)
            .and_then(|published| self.complete(published, deadline));
        transfers.map_err(|error| self.pairs.group.with_job_ranks(error))
    }

    /// Publishes this rank's end of every request; see [`Matching::publish`].
    pub(crate) fn publish_all(
        &self,
        requests: &[TransferRequest],
        deadline: Deadline,
    ) -> Result<PublishedEnds<RequestedTransfer>> {
        requests
            .iter()
            // All before the first reservation, so that an invalid request leaves no numbers to return.
            .try_for_each(|request| self.check(request))?;
        self.publish(requests.iter().map(|request| self.end(request)), deadline)
    }

    /// Translates a timeout of a stream into the caller's terms: which transfers in this rank's streams wait for
    /// their peers, and since when. Blocks while it reads their signals.
    pub(crate) fn explain_timeout(&self, error: &Error) -> Option<Error> {
        let waiting = self.progress.waiting(&*self.pairs.device);
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
        self.pairs.check_peer(request.peer)?;
        if request.buffer.region().is_none() && request.protocol != Some(Protocol::Put) {
            return Err(self.pairs.refused(
                request.peer,
                ErrorKind::InvalidArgument,
                "a send without a buffer of its own uses get; expected put",
                "use put for sends that store into the receiver's memory",
            ));
        }
        Ok(())
    }

    fn end(&self, request: &TransferRequest) -> Result<Offer<RequestedTransfer>> {
        let key = request.match_key();
        let (slot, number) = self.pairs.reserve(key)?;
        let end = RequestedTransfer {
            request: request.clone(),
            protocol: request.protocol.unwrap_or(self.default_protocol),
            path: request.path.unwrap_or(self.default_path),
            flow: Flow::Streams,
            slot,
            scratch: None,
            number,
        };
        let keys = [request.direction, request.direction.reversed()]
            .map(|direction| self.store_key(key, number, direction));
        self.pairs.offer(request.peer, keys, end)
    }

    /// Store key of the end of `direction` of transfer `number` under `key`.
    fn store_key(&self, key: MatchKey, number: u64, direction: Direction) -> String {
        let rank = self.pairs.group.rank();
        let (from, to) = match key.direction {
            Direction::Send => (rank, key.peer),
            Direction::Receive => (key.peer, rank),
        };
        let tag = key.tag;
        format!("p2p/{from}>{to}/tag {tag}/{number}/{direction}")
    }
}

impl Matching for TransferExchange {
    type Key = MatchKey;
    type End = RequestedTransfer;
    type Terms = EndOffer;
    type Made = Transfer;

    fn pairs(&self) -> &PairExchange<MatchKey> {
        &self.pairs
    }

    fn describe(&self, offer: &mut Offer<RequestedTransfer>) -> Result<EndOffer> {
        let end = &mut offer.end;
        // Chosen by each end for itself from the same figures, and compared when they meet: no extra round trip.
        end.flow = self.flow(&end.request, end.protocol, end.path)?;
        end.scratch = self.scratch(&end.request, end.flow, &end.slot)?;
        let buffer = match end.request.direction.role(end.protocol) {
            Role::Target => end.request.buffer.region(),
            // The target never touches the initiator's memory, so there is nothing to map.
            Role::Initiator => None,
        };
        let buffer = buffer.cloned();
        let (inbound, scratch) = (end.slot.inbound().clone(), end.scratch.clone());
        let mut export = |region: Option<Region>| {
            let handle = region.map(|region| self.pairs.export(offer, &region));
            handle.transpose()
        };
        let (buffer, scratch) = (export(buffer)?, export(scratch)?);
        let inbound = self.pairs.export(offer, &inbound)?;
        let end = &offer.end;
        Ok(EndOffer {
            bytes: end.request.buffer.bytes() as u64,
            protocol: end.protocol,
            path: end.path,
            flow: end.flow,
            stored: end.request.buffer.region().is_none(),
            scratch,
            buffer,
            inbound,
            slot: end.slot.number,
        })
    }

    fn missing(&self, offer: &Offer<RequestedTransfer>) -> Missing {
        let TransferRequest {
            peer,
            direction,
            tag,
            ..
        } = &offer.end.request;
        Missing {
            what: format!(
                "rank {peer} to exchange its {} with tag {tag}",
                direction.reversed()
            ),
            help: "check that the peer exchanges this transfer too",
        }
    }

    fn forget(&self, end: RequestedTransfer) {
        self.pairs
            .give_back(end.request.match_key(), &end.slot, end.number);
    }

    fn meet(&self, end: RequestedTransfer, job_peer: Rank, terms: EndOffer) -> Result<Transfer> {
        self.make(end, job_peer, terms)
    }
}

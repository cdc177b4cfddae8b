//! Exchanges between two ranks, in batches and without a barrier.

use super::numbers::EndNumbers;
use super::{decode, encode};
use crate::bootstrap::{Bootstrap, Group, Wait};
use crate::deadline::Deadline;
use crate::device::{Device, Fault, InFlight};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::{ExportedHandle, MemoryRegistry, PeerHandle, Region};
use crate::signal::{Slot, SlotDirectory, SlotPair, SlotPool, SlotReleases};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

/// Maximum duration of a withdrawal. Its data is already in the store; only an unresponsive store, such as a stopped
/// process, takes longer.
const MAX_WITHDRAWAL: Duration = Duration::from_secs(1);

/// Services shared by the exchanges of all communicators of a rank.
#[derive(Clone)]
pub(crate) struct ExchangeServices {
    pub(crate) bootstrap: Arc<Bootstrap>,
    pub(crate) memory: Arc<MemoryRegistry>,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) slots: Arc<SlotDirectory>,
    pub(crate) in_flight: Arc<InFlight>,
}

/// Exchanges of one kind, of one rank in one communicator. Ends with the same `K` match in the order of their
/// numbers.
#[derive(Debug)]
pub(crate) struct PairExchange<K> {
    bootstrap: Arc<Bootstrap>,
    pub(crate) group: Arc<Group>,
    pub(crate) memory: Arc<MemoryRegistry>,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) in_flight: Arc<InFlight>,
    /// Ends the communicator's waits. Raised if ends can be neither used nor withdrawn.
    pub(crate) fault: Arc<Fault>,
    pub(crate) slots: Arc<SlotPool>,
    releases: Arc<SlotReleases>,
    numbers: EndNumbers<K>,
    /// Operation named in errors.
    operation: &'static str,
}

/// An end of this rank that is not matched yet.
#[derive(Debug)]
pub(crate) struct Offer<T> {
    pub(crate) end: T,
    pub(crate) peer: Rank,
    /// The peer's rank in the job.
    pub(crate) job_peer: Rank,
    /// Store keys of this rank's and of the peer's offer.
    pub(crate) own_key: String,
    peer_key: String,
    message: Vec<u8>,
    /// Handles in the message.
    exported: Vec<ExportedHandle>,
}

/// Ends that were published, for [`complete`](Matching::complete) or [`withdraw`](Matching::withdraw).
pub(crate) struct PublishedEnds<T>(Vec<Offer<T>>);

/// Description of a missing peer's end in the caller's terms, and advice for the case that it never arrives.
pub(crate) struct Missing {
    pub(crate) what: String,
    pub(crate) help: &'static str,
}

/// A kind of exchange: its ends, their description for the peer, and the result of a match.
pub(crate) trait Matching {
    type Key: Eq + Hash;
    type End;
    /// Description of an end, sent to its peer.
    type Terms: Serialize + DeserializeOwned;
    type Made;

    fn pairs(&self) -> &PairExchange<Self::Key>;

    /// Describes an end for its peer, with handles [exported](PairExchange::export) for it.
    fn describe(&self, offer: &mut Offer<Self::End>) -> Result<Self::Terms>;

    fn missing(&self, offer: &Offer<Self::End>) -> Missing;

    /// Frees the resources of an end that no peer has seen.
    fn forget(&self, end: Self::End);

    /// Builds the result from both ends, or fails on both ranks on a mismatch. `job_peer` is the peer's rank in the
    /// job.
    fn meet(&self, end: Self::End, job_peer: Rank, terms: Self::Terms) -> Result<Self::Made>;

    /// Called instead of [`meet`](Self::meet) if the peer's description cannot be decoded. Only this rank fails then:
    /// the peer may have matched this end.
    fn unreadable(&self, _: Self::End) {}

    /// Publishes `ends`, takes and matches the peers' ends, and returns the results in the order of `ends`. Blocks
    /// until all peers have published.
    ///
    /// # Errors
    /// As [`publish`](Self::publish) and [`complete`](Self::complete).
    fn exchange(
        &self,
        ends: impl IntoIterator<Item = Result<Offer<Self::End>>>,
        deadline: Deadline,
    ) -> Result<Vec<Self::Made>> {
        let published = self.publish(ends, deadline)?;
        self.complete(published, deadline)
    }

    /// Publishes all ends at once, or none on failure. Waits for the store only.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] if the store does not answer until `deadline`. The ends may still get published, so the
    /// communicator fails, and their resources are kept.
    fn publish(
        &self,
        ends: impl IntoIterator<Item = Result<Offer<Self::End>>>,
        deadline: Deadline,
    ) -> Result<PublishedEnds<Self::End>> {
        let pairs = self.pairs();
        pairs.fault.check()?;
        let mut offers = Vec::new();
        let prepared = ends.into_iter().try_for_each(|offer| {
            let mut offer = offer?;
            let message = self.describe(&mut offer).and_then(|terms| encode(&terms));
            offers.push(offer);
            if let Some(offer) = offers.last_mut() {
                // Pushed before its error is returned, so that its resources are freed with those of the others.
                offer.message = message?;
            }
            Ok(())
        });
        let is_prepared = prepared.is_ok();
        match prepared.and_then(|()| pairs.set(&offers, deadline)) {
            Ok(()) => Ok(PublishedEnds(offers)),
            Err(error) => {
                // At a timeout the request may still reach the store: a peer may then see the offers, whose handles must
                // stay valid.
                let may_be_published = is_prepared && error.kind() == ErrorKind::Timeout;
                for offer in offers {
                    if may_be_published {
                        drop(offer.seen());
                    } else {
                        self.forget(offer.unseen());
                    }
                }
                Err(error)
            }
        }
    }

    /// Takes the peers' ends and matches them. Blocks until all have arrived; ends that cannot be completed are
    /// withdrawn.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`], with the first missing end; the error of a communicator that fails meanwhile; errors of
    /// [`meet`](Self::meet).
    fn complete(
        &self,
        published: PublishedEnds<Self::End>,
        deadline: Deadline,
    ) -> Result<Vec<Self::Made>> {
        let taken = self
            .pairs()
            .take(&published.0, deadline, |offer| self.missing(offer));
        let messages = match taken {
            Ok(messages) => messages,
            Err(error) => {
                self.withdraw(published);
                return Err(error);
            }
        };
        // Every end is matched before the first failure is reported, so that none is left behind.
        let matched: Vec<_> = published
            .0
            .into_iter()
            .zip(messages)
            .map(|(offer, message)| self.match_end(offer, &message))
            .collect();
        matched.into_iter().collect()
    }

    /// Withdraws ends that peers have not taken. An end that was taken is matched with the peer's and dropped,
    /// because the peer uses the result. If the store does not answer in time, published ends stay, so the
    /// communicator fails.
    fn withdraw(&self, PublishedEnds(offers): PublishedEnds<Self::End>) {
        let pairs = self.pairs();
        let deadline = Deadline::after(MAX_WITHDRAWAL);
        let mut is_answered = true;
        for offer in offers {
            let withdrawn = is_answered.then(|| pairs.withdraw(&offer, deadline));
            match withdrawn {
                Some(Ok(None)) => self.forget(offer.unseen()),
                Some(Ok(Some(message))) => drop(self.match_end(offer, &message)),
                Some(Err(error)) if error.kind() == ErrorKind::Timeout && deadline.passed() => {
                    pairs.fault.fail(pairs.not_withdrawn(&error));
                    // The store has not answered within the deadline, so the rest would only wait in vain.
                    is_answered = false;
                    drop(offer.seen());
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "an offer could not be withdrawn");
                    drop(offer.seen());
                }
                None => drop(offer.seen()),
            }
        }
    }

    /// Matches an end with its peer's, published as `message`.
    fn match_end(&self, offer: Offer<Self::End>, message: &[u8]) -> Result<Self::Made> {
        let (peer, job_peer, key) = (offer.peer, offer.job_peer, offer.own_key.clone());
        let end = offer.seen();
        let made = match decode(message) {
            Ok(terms) => self.meet(end, job_peer, terms),
            Err(error) => {
                self.unreadable(end);
                Err(error)
            }
        };
        made.map_err(|error| {
            let pairs = self.pairs();
            error
                .with_operation(pairs.operation)
                .with_rank(pairs.group.rank())
                .with_peer(peer)
                .with_key(key)
        })
    }
}

impl<K: Eq + Hash> PairExchange<K> {
    /// Creates the exchange in `group`, whose waits end when `fault` is raised. `operation` is for errors.
    pub(crate) fn new(
        group: &Arc<Group>,
        fault: &Arc<Fault>,
        services: ExchangeServices,
        operation: &'static str,
    ) -> Self {
        let ExchangeServices {
            bootstrap,
            memory,
            device,
            slots,
            in_flight,
        } = services;
        let (slots, releases) = SlotReleases::start(&slots, &device, fault, &memory);
        Self {
            bootstrap,
            group: group.clone(),
            memory,
            device,
            in_flight,
            fault: fault.clone(),
            slots,
            releases,
            numbers: EndNumbers::default(),
            operation,
        }
    }

    /// The error of an invalid request to `peer`.
    pub(crate) fn refused(
        &self,
        peer: Rank,
        kind: ErrorKind,
        what: impl Into<String>,
        help: &'static str,
    ) -> Error {
        Error::new(kind, what.into())
            .with_operation(self.operation)
            .with_rank(self.group.rank())
            .with_peer(peer)
            .with_help(help)
    }

    /// Fails if the peer is not a rank of the communicator.
    pub(crate) fn check_peer(&self, peer: Rank) -> Result<()> {
        let world = self.group.world();
        if peer < world {
            return Ok(());
        }
        let what =
            format!("unknown peer {peer}; expected less than {world}, as there are {world} ranks");
        let help = "name a rank of this communicator";
        Err(self.refused(peer, ErrorKind::InvalidArgument, what, help))
    }

    /// Reserves a slot, and a number under `key`, for a new end; to be [given back](Self::give_back) if no peer sees
    /// it.
    pub(crate) fn reserve(&self, key: K) -> Result<(Slot, u64)> {
        // Before the number, which an error here would otherwise leave as a gap that the peer waits for.
        let slot = self.slots.allocate(&self.memory)?;
        Ok((slot, self.numbers.next(key)))
    }

    pub(crate) fn give_back(&self, key: K, slot: &Slot, number: u64) {
        self.numbers.reuse(key, number);
        self.slots.recycle(slot.number);
    }

    /// Pairs the slot `own` with the peer's slot number `slot`, whose words are mapped by `inbound`. From then on
    /// both ranks may write to both slots: dropping the pair notifies the peer, and so does a failure.
    pub(crate) fn pair_slots(
        &self,
        own: Slot,
        job_peer: Rank,
        slot: u64,
        inbound: PeerHandle,
    ) -> Result<SlotPair> {
        self.releases.pair(own, (job_peer, slot), inbound)
    }

    /// Creates an offer of `end` to `peer` under this rank's and the peer's key; the name of the communicator is
    /// prefixed.
    pub(crate) fn offer<T>(&self, peer: Rank, keys: [String; 2], end: T) -> Result<Offer<T>> {
        let [own_key, peer_key] = keys.map(|key| self.group.key(&key));
        Ok(Offer {
            end,
            peer,
            job_peer: self.group.job_rank(peer)?,
            own_key,
            peer_key,
            message: Vec::new(),
            exported: Vec::new(),
        })
    }

    /// Exports a handle of `region` for the peer of `offer`, to be part of its message.
    pub(crate) fn export<T>(&self, offer: &mut Offer<T>, region: &Region) -> Result<Vec<u8>> {
        let handle = self.memory.export_handle(region, offer.job_peer);
        let handle = handle.map_err(|error| self.group.in_own_ranks(error))?;
        let wire = handle.wire().to_vec();
        offer.exported.push(handle);
        Ok(wire)
    }

    fn set<T>(&self, offers: &[Offer<T>], deadline: Deadline) -> Result<()> {
        let pairs: Vec<_> = offers
            .iter()
            .map(|offer| (offer.own_key.clone(), offer.message.clone()))
            .collect();
        let set = self.bootstrap.store().multi_set_until(&pairs, deadline);
        set.map_err(|error| {
            let error = self.group.in_own_ranks(error);
            if error.kind() == ErrorKind::Timeout {
                self.fault.fail(self.not_withdrawn(&error));
            }
            error.with_operation(self.operation)
        })
    }

    fn take<T>(
        &self,
        offers: &[Offer<T>],
        deadline: Deadline,
        missing: impl Fn(&Offer<T>) -> Missing,
    ) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<String> = offers.iter().map(|offer| offer.peer_key.clone()).collect();
        let mut peers: Vec<Rank> = offers.iter().map(|offer| offer.job_peer).collect();
        peers.sort_unstable();
        peers.dedup();
        // The loss of any of these peers ends the wait at once, rather than at the deadline.
        let wait = Wait::on(peers, deadline);
        let taken = self.bootstrap.store().multi_take(&keys, &wait);
        taken.map_err(|error| {
            let error = self.group.in_own_ranks(error);
            let awaited = |offer: &&Offer<T>| error.key() == Some(offer.peer_key.as_str());
            let error = match offers.iter().find(awaited) {
                Some(offer) if error.kind() == ErrorKind::Timeout => {
                    let Missing { what, help } = missing(offer);
                    let late = deadline.expired(&what);
                    late.with_peer(offer.peer).with_help(help)
                }
                _ => error,
            };
            error
                .with_operation(self.operation)
                .with_rank(self.group.rank())
        })
    }

    /// Deletes an offer from the store; if the peer has taken it, returns the peer's instead.
    fn withdraw<T>(&self, offer: &Offer<T>, deadline: Deadline) -> Result<Option<Vec<u8>>> {
        let store = self.bootstrap.store();
        if store.delete_until(&offer.own_key, deadline)? {
            return Ok(None);
        }
        // The peer publishes before it takes, so its offer exists.
        let wait = Wait::on([offer.job_peer], deadline);
        store.take(&offer.peer_key, &wait).map(Some)
    }

    /// The failure of a communicator whose exchange could not be rolled back.
    fn not_withdrawn(&self, error: &Error) -> Error {
        Error::new(
            ErrorKind::Timeout,
            format!(
                "an exchange that failed could not be withdrawn, which ends the communicator: {}",
                error.message()
            ),
        )
        .with_operation(self.operation)
        .with_help("make a communicator of these ranks anew")
    }
}

impl<T> Offer<T> {
    /// Returns the end, which the peer has seen or may still see: its handles stay counted.
    fn seen(self) -> T {
        for handle in self.exported {
            handle.sent();
        }
        self.end
    }

    /// Returns the end, which no peer has seen: its handles are cancelled.
    fn unseen(self) -> T {
        self.end
    }
}

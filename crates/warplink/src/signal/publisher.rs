//! Publishes this rank's offers in the store, takes the peers' offers, and withdraws those that no peer took.
//!
//! Used for everything that two ranks exchange: ends of transfers and connections, and regions added to
//! these. Each offer has its own key, which the peer takes. All offers of a batch are published before any
//! wait, so the two ranks need not batch alike.

use crate::bootstrap::{Bootstrap, Group, Wait};
use crate::deadline::Deadline;
use crate::device::Fault;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::{MemoryRegistry, Region};
use std::sync::Arc;
use std::time::Duration;

/// Time limit of a withdrawal. The awaited value is in the store already; only an unresponsive (stopped)
/// store takes longer.
const MAX_WITHDRAWAL: Duration = Duration::from_secs(1);

/// Publisher of one rank of one communicator.
#[derive(Debug)]
pub(crate) struct Publisher {
    bootstrap: Arc<Bootstrap>,
    group: Arc<Group>,
    memory: Arc<MemoryRegistry>,
    /// Raised if published offers can be neither used nor withdrawn.
    fault: Arc<Fault>,
    /// Operation name, for errors.
    operation: &'static str,
}

/// An offer to a peer, and this rank's state to continue with once the peer's arrives.
#[derive(Debug)]
pub(crate) struct Offer<T> {
    /// This rank's state.
    pub(crate) item: T,
    pub(crate) peer: Rank,
    /// Job rank of the peer.
    pub(crate) job_peer: Rank,
    /// Key of this rank's offer and of the peer's.
    pub(crate) own_key: String,
    peer_key: String,
    message: Vec<u8>,
    /// Regions with handles in the offer.
    exported: Vec<Region>,
}

/// Description of a missing offer, for the timeout error.
pub(crate) struct Missing {
    pub(crate) what: String,
    pub(crate) help: &'static str,
}

impl Publisher {
    pub(crate) fn new(
        bootstrap: &Arc<Bootstrap>,
        group: &Arc<Group>,
        memory: &Arc<MemoryRegistry>,
        fault: &Arc<Fault>,
        operation: &'static str,
    ) -> Self {
        Self {
            bootstrap: bootstrap.clone(),
            group: group.clone(),
            memory: memory.clone(),
            fault: fault.clone(),
            operation,
        }
    }

    /// Creates an offer to `peer` without a message, under the keys of this rank and of the peer.
    pub(crate) fn offer<T>(
        &self,
        peer: Rank,
        [own_key, peer_key]: [String; 2],
        item: T,
    ) -> Result<Offer<T>> {
        Ok(Offer {
            item,
            peer,
            job_peer: self.group.job_rank(peer)?,
            own_key,
            peer_key,
            message: Vec::new(),
            exported: Vec::new(),
        })
    }

    /// Issues a handle of `region` for the offer's message. It is cancelled if the message never reaches the
    /// peer.
    pub(crate) fn export<T>(&self, offer: &mut Offer<T>, region: &Region) -> Result<Vec<u8>> {
        let handle = self.memory.export_handle(region, offer.job_peer);
        let handle = handle.map_err(|error| self.group.in_own_ranks(error))?;
        offer.exported.push(region.clone());
        Ok(handle.to_vec())
    }

    /// Publishes all offers atomically. Waits only for the store. If that does not answer by `deadline`, the
    /// offers may or may not be published, so the communicator fails.
    pub(crate) fn publish<T>(&self, offers: &[Offer<T>], deadline: Deadline) -> Result<()> {
        let pairs: Vec<_> = offers
            .iter()
            .map(|offer| (offer.own_key.clone(), offer.message.clone()))
            .collect();
        // One request sets all keys, so the peers see all offers of a batch or none.
        let set = self.bootstrap.store().multi_set_until(&pairs, deadline);
        set.map_err(|error| {
            let error = self.group.in_own_ranks(error);
            // The store may still execute the request, and the offers would then be taken.
            if error.kind() == ErrorKind::Timeout {
                self.fault.fail(self.not_withdrawn(&error));
            }
            error.with_operation(self.operation)
        })
    }

    /// Takes the peers' offers, in the order of `offers`. Blocks until all are published.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`], described by `missing` for the first absent one; [`ErrorKind::PeerLost`].
    pub(crate) fn take<T>(
        &self,
        offers: &[Offer<T>],
        deadline: Deadline,
        missing: impl Fn(&Offer<T>) -> Missing,
    ) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<String> = offers.iter().map(|offer| offer.peer_key.clone()).collect();
        let mut peers: Vec<Rank> = offers.iter().map(|offer| offer.job_peer).collect();
        // Wait for each peer once, whatever the number of offers.
        peers.sort_unstable();
        peers.dedup();
        let wait = Wait::on(peers, deadline);
        let taken = self.bootstrap.store().multi_take(&keys, &wait);
        taken.map_err(|error| {
            let error = self.group.in_own_ranks(error);
            // The store reports the first missing key; describe it in the caller's terms.
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

    /// Withdraws offers that peers have not taken. A peer that has taken an offer relies on it, so that one
    /// is completed with the peer's message. If the store does not answer in time, the offers stay published,
    /// so the communicator fails.
    pub(crate) fn withdraw<T>(
        &self,
        offers: Vec<Offer<T>>,
        forget: impl Fn(T),
        complete: impl Fn(Offer<T>, &[u8]),
    ) {
        let store = self.bootstrap.store();
        let deadline = Deadline::after(MAX_WITHDRAWAL);
        for offer in offers {
            // Deleting succeeds only if the peer has not taken the offer, which decides the race.
            let withdrawn = match store.delete_until(&offer.own_key, deadline) {
                Ok(true) => {
                    forget(self.cancel(offer));
                    Ok(())
                }
                // The peer publishes before it takes, so its offer is present.
                Ok(false) => {
                    let wait = Wait::on([offer.job_peer], deadline);
                    let taken = store.take(&offer.peer_key, &wait);
                    taken.map(|message| complete(offer, &message))
                }
                Err(error) => Err(error),
            };
            match withdrawn {
                Ok(()) => {}
                // The state of the offer is unknown, so no later exchange could be trusted.
                Err(error) if error.kind() == ErrorKind::Timeout && deadline.passed() => {
                    return self.fault.fail(self.not_withdrawn(&error));
                }
                Err(error) => tracing::debug!(%error, "an offer could not be withdrawn"),
            }
        }
    }

    /// Cancels the handles of an offer that no peer has seen, and returns its item.
    pub(crate) fn cancel<T>(&self, offer: Offer<T>) -> T {
        for region in &offer.exported {
            self.memory.cancel_handle(region, offer.job_peer);
        }
        offer.item
    }

    /// The error for an exchange that could not be withdrawn.
    fn not_withdrawn(&self, error: &Error) -> Error {
        Error::new(
            ErrorKind::Timeout,
            format!(
                "a failed exchange could not be withdrawn, so the communicator fails: {}",
                error.message()
            ),
        )
        .with_operation(self.operation)
        .with_help("create a new communicator of these ranks")
    }
}

impl<T> Offer<T> {
    /// Sets the message for the peer.
    pub(crate) fn with_message(mut self, message: Vec<u8>) -> Self {
        self.message = message;
        self
    }
}

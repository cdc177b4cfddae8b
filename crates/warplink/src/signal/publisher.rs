//! Publishing what this rank offers its peers, taking what they offer, and taking back what no peer took.
//!
//! Whatever two ranks exchange (the ends of transfers and of connections, regions that are added to these)
//! goes this way: each offer is set in the store under a key of its own, which the peer takes. All of a
//! batch are published before any is waited for, so batches need not be cut alike on the two ranks.

use crate::bootstrap::{Bootstrap, Group, Wait};
use crate::deadline::Deadline;
use crate::device::Fault;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::{MemoryRegistry, Region};
use std::sync::Arc;
use std::time::Duration;

/// The longest that a withdrawal takes. What it waits for is in the store already; only a store that does
/// not answer, as its process is stopped, takes longer.
const MAX_WITHDRAWAL: Duration = Duration::from_secs(1);

/// Publishes for one rank of one communicator.
#[derive(Debug)]
pub(crate) struct Publisher {
    bootstrap: Arc<Bootstrap>,
    group: Arc<Group>,
    memory: Arc<MemoryRegistry>,
    /// Raised where what was published can be neither used nor taken back.
    fault: Arc<Fault>,
    /// What the ranks do by it, for errors.
    operation: &'static str,
}

/// An offer to a peer, and what this rank needs to go on with when it has the peer's.
#[derive(Debug)]
pub(crate) struct Offer<T> {
    /// What this rank needs.
    pub(crate) item: T,
    pub(crate) peer: Rank,
    /// The peer's rank in the job.
    pub(crate) job_peer: Rank,
    /// Where this rank publishes, and where the peer does.
    pub(crate) own_key: String,
    peer_key: String,
    message: Vec<u8>,
    /// Whose handles the peer is to get.
    exported: Vec<Region>,
}

/// What a wait is for, in the terms of the caller, and what to do when it does not come.
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

    /// An offer to `peer` without a message yet, under `keys` of this rank and of the peer.
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

    /// A handle of `region` for the peer of `offer`, to be part of its message. It is cancelled if it never
    /// reaches the peer.
    pub(crate) fn export<T>(&self, offer: &mut Offer<T>, region: &Region) -> Result<Vec<u8>> {
        let handle = self.memory.export_handle(region, offer.job_peer);
        let handle = handle.map_err(|error| self.group.in_own_ranks(error))?;
        offer.exported.push(region.clone());
        Ok(handle.to_vec())
    }

    /// Publishes all at once, or nothing where that fails. Waits for the store alone. Should that not answer until `deadline`, the offers may be published yet, so the
    /// communicator ends.
    pub(crate) fn publish<T>(&self, offers: &[Offer<T>], deadline: Deadline) -> Result<()> {
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

    /// What the peers offer, in the order of `offers`. Blocks until all have published.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] with what `missing` says of the first that did not come;
    /// [`ErrorKind::PeerLost`].
    pub(crate) fn take<T>(
        &self,
        offers: &[Offer<T>],
        deadline: Deadline,
        missing: impl Fn(&Offer<T>) -> Missing,
    ) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<String> = offers.iter().map(|offer| offer.peer_key.clone()).collect();
        let mut peers: Vec<Rank> = offers.iter().map(|offer| offer.job_peer).collect();
        peers.sort_unstable();
        peers.dedup();
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

    /// Takes back what peers have not taken, and has it forgotten. What was taken belongs to something that
    /// the peer believes in; it is completed with the peer's message. Where the store does not answer in
    /// time, what is published stays, so the communicator ends.
    pub(crate) fn withdraw<T>(
        &self,
        offers: Vec<Offer<T>>,
        forget: impl Fn(T),
        complete: impl Fn(Offer<T>, &[u8]),
    ) {
        let store = self.bootstrap.store();
        let deadline = Deadline::after(MAX_WITHDRAWAL);
        for offer in offers {
            let withdrawn = match store.delete_until(&offer.own_key, deadline) {
                Ok(true) => {
                    forget(self.cancel(offer));
                    Ok(())
                }
                // The peer publishes before it takes, so its offer is there.
                Ok(false) => {
                    let wait = Wait::on([offer.job_peer], deadline);
                    let taken = store.take(&offer.peer_key, &wait);
                    taken.map(|message| complete(offer, &message))
                }
                Err(error) => Err(error),
            };
            match withdrawn {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Timeout && deadline.passed() => {
                    return self.fault.fail(self.not_withdrawn(&error));
                }
                Err(error) => tracing::debug!(%error, "an offer could not be withdrawn"),
            }
        }
    }

    /// Cancels the handles of an offer that no peer has seen, and gives its item back.
    pub(crate) fn cancel<T>(&self, offer: Offer<T>) -> T {
        for region in &offer.exported {
            self.memory.cancel_handle(region, offer.job_peer);
        }
        offer.item
    }

    /// Why a communicator ends whose exchange could not be taken back.
    fn not_withdrawn(&self, error: &Error) -> Error {
        Error::new(
            ErrorKind::Timeout,
            format!(
                "an exchange that failed could not be taken back, which ends the communicator: {}",
                error.message()
            ),
        )
        .with_operation(self.operation)
        .with_help("make a communicator of these ranks anew")
    }
}

impl<T> Offer<T> {
    /// The same, with what the peer is told.
    pub(crate) fn with_message(mut self, message: Vec<u8>) -> Self {
        self.message = message;
        self
    }
}

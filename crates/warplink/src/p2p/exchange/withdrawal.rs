//! Taking back ends that no peer has taken.

use super::{PublishedEnd, PublishedEnds, TransferExchange};
use crate::bootstrap::Wait;
use crate::deadline::Deadline;
use std::time::Duration;

/// The longest wait for what must be in the store already.
const MAX_WAIT: Duration = Duration::from_secs(1);

impl TransferExchange {
    /// Takes back what peers have not taken. An end that was taken belongs to a transfer that the
    /// peer believes in; it is completed and dropped, which tells the peer to forget it.
    pub(crate) fn withdraw(&self, published: PublishedEnds<'_>) {
        let store = self.bootstrap.store();
        for end in published.0 {
            match store.delete(&end.own_key) {
                Ok(true) => self.roll_back(vec![end]),
                Ok(false) => {
                    // The peer publishes before it takes, so its end is there.
                    match store.take(&end.peer_key, &self.wait_for(&end)) {
                        Ok(message) => drop(self.match_end(end, &message)),
                        Err(error) => {
                            tracing::debug!(%error, key = end.peer_key, "an end could not be withdrawn");
                        }
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, key = end.own_key, "an end could not be withdrawn");
                }
            }
        }
    }

    /// Forgets ends that no peer has seen.
    pub(super) fn roll_back(&self, published: Vec<PublishedEnd<'_>>) {
        for end in published {
            self.reuse_number(end.request.match_key(), end.number);
            self.release(&end);
        }
    }

    /// Lets go of what an end holds that its peer has not taken.
    pub(super) fn release(&self, end: &PublishedEnd<'_>) {
        if let Ok(peer) = self.group.job_rank(end.request.peer) {
            for region in &end.exported {
                self.memory.cancel_handle(region, peer);
            }
        }
        self.slots.recycle(end.slot.number);
    }

    fn wait_for(&self, end: &PublishedEnd<'_>) -> Wait {
        let peer = self.group.job_rank(end.request.peer).into_iter();
        Wait::on(peer.collect::<Vec<_>>(), Deadline::after(MAX_WAIT))
    }
}

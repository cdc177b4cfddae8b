//! Taking back ends that no peer has taken.

use super::{EndMessage, PublishedEnd, TransferExchange};
use crate::bootstrap::Wait;
use crate::deadline::Deadline;
use crate::error::Result;
use std::time::Duration;

/// The longest wait for what must be in the store already.
const MAX_WAIT: Duration = Duration::from_secs(1);

impl TransferExchange {
    /// Takes back what peers have not taken. An end that was taken belongs to a transfer that the
    /// peer believes in; it is completed and dropped, which tells the peer to forget it.
    pub(super) fn withdraw(&self, published: Vec<PublishedEnd<'_>>) {
        let store = self.bootstrap.store();
        for end in published {
            match store.delete(&end.own_key) {
                // A refusal is used up with the end that it answers.
                Ok(true) if self.take_refusal(&end) => self.release(&end),
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

    /// Whether the peer of an end that is taken back has refused it. Takes the refusal, and nothing
    /// else: an end that the peer published waits for the next try.
    fn take_refusal(&self, end: &PublishedEnd<'_>) -> bool {
        let store = self.bootstrap.store();
        let refused = || -> Result<bool> {
            if !store.check(&[&end.peer_key])? {
                return Ok(false);
            }
            let message = store.get(&end.peer_key, &self.wait_for(end))?;
            match EndMessage::decode(&message) {
                Ok(EndMessage::Refusal { .. }) => store.delete(&end.peer_key),
                _ => Ok(false),
            }
        };
        refused().unwrap_or_else(|error| {
            tracing::debug!(%error, key = end.peer_key, "a refusal could not be looked for");
            false
        })
    }

    fn wait_for(&self, end: &PublishedEnd<'_>) -> Wait {
        let peer = self.group.job_rank(end.request.peer).into_iter();
        Wait::on(peer.collect::<Vec<_>>(), Deadline::after(MAX_WAIT))
    }
}

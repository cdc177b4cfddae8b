//! Taking back ends that no peer has taken.

use super::{PublishedEnd, PublishedEnds, TransferExchange};
use crate::bootstrap::Wait;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind};
use std::time::Duration;

/// The longest that a withdrawal takes. What it waits for is in the store already; only a store that does
/// not answer, as its process is stopped, takes longer.
const MAX_WITHDRAWAL: Duration = Duration::from_secs(1);

impl TransferExchange {
    /// Takes back what peers have not taken. An end that was taken belongs to a transfer that the
    /// peer believes in; it is completed and dropped, which tells the peer to forget it. Where the store
    /// does not answer in time, what is published stays, so the communicator ends.
    pub(crate) fn withdraw(&self, published: PublishedEnds<'_>) {
        let store = self.bootstrap.store();
        let deadline = Deadline::after(MAX_WITHDRAWAL);
        for end in published.0 {
            let withdrawn = match store.delete_until(&end.own_key, deadline) {
                Ok(true) => {
                    self.roll_back(vec![end]);
                    Ok(())
                }
                // The peer publishes before it takes, so its end is there.
                Ok(false) => store
                    .take(&end.peer_key, &self.wait_for(&end, deadline))
                    .map(|message| drop(self.match_end(end, &message))),
                Err(error) => Err(error),
            };
            match withdrawn {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Timeout && deadline.passed() => {
                    return self.fault.raise(not_withdrawn(&error));
                }
                Err(error) => tracing::debug!(%error, "an end could not be withdrawn"),
            }
        }
    }

    /// Forgets ends that no peer has seen.
    pub(super) fn roll_back(&self, published: Vec<PublishedEnd<'_>>) {
        for end in published {
            self.numbers.reuse(end.request.match_key(), end.number);
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

    fn wait_for(&self, end: &PublishedEnd<'_>, deadline: Deadline) -> Wait {
        let peer = self.group.job_rank(end.request.peer).into_iter();
        Wait::on(peer.collect::<Vec<_>>(), deadline)
    }
}

/// Why a communicator ends whose exchange could not be taken back.
pub(super) fn not_withdrawn(error: &Error) -> Error {
    Error::new(
        ErrorKind::Timeout,
        format!(
            "an exchange that failed could not be taken back, which ends the communicator: {}",
            error.message()
        ),
    )
    .with_operation("exchange transfers")
    .with_help("make a communicator of these ranks anew")
}

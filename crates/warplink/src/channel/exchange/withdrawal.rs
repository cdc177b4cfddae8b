//! Taking back ends that no peer has taken.

use super::{ConnectionExchange, PublishedEnd};
use crate::deadline::Deadline;
use crate::error::Error;
use std::time::Duration;

/// The longest wait for what must be in the store already.
const MAX_WAIT: Duration = Duration::from_secs(1);

impl ConnectionExchange {
    /// Takes back what peers have not taken. An end that was taken belongs to a connection that the peer
    /// believes in; it is completed and dropped, which tells the peer to forget it.
    pub(super) fn withdraw(&self, published: Vec<PublishedEnd<'_>>) {
        let store = self.bootstrap.store();
        for end in published {
            let failed = |error: Error, key: &str| {
                tracing::debug!(%error, key, "an end could not be withdrawn");
            };
            match store.delete(&end.own_key) {
                Ok(true) => self.roll_back(vec![end]),
                Ok(false) => {
                    // The peer publishes before it takes, so its end is there.
                    let peer = std::iter::once(end.request.peer);
                    let message = self
                        .wait_for(peer, Deadline::after(MAX_WAIT))
                        .and_then(|wait| store.take(&end.peer_key, &wait));
                    match message {
                        Ok(message) => drop(self.match_end(end, &message)),
                        Err(error) => failed(error, &end.peer_key),
                    }
                }
                Err(error) => failed(error, &end.own_key),
            }
        }
    }

    /// Forgets ends that no peer has seen.
    pub(super) fn roll_back(&self, published: Vec<PublishedEnd<'_>>) {
        for end in published {
            self.numbers
                .reuse((end.request.peer, end.request.tag), end.number);
            if let Ok(peer) = self.group.job_rank(end.request.peer) {
                for region in &end.exported {
                    self.memory.cancel_handle(region, peer);
                }
            }
            self.slots.recycle(end.slot.number);
        }
    }
}

//! Telling peers that ends will never come.
//!
//! A rank that cannot bind a program refuses the ends of it: it publishes why, so that those which
//! exchange with it need not wait for their deadlines.

use super::{EndMessage, TransferExchange};
use crate::p2p::request::MatchKey;
use crate::sync::lock;
use std::collections::HashMap;
use std::sync::Mutex;

/// The store keys of refusals, which nobody takes where the peer refused the same.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<HashMap<MatchKey, Vec<String>>>);

impl TransferExchange {
    /// Tells the peers of `ends` that this rank's next end under each key will not come, and why.
    /// Their exchanges fail with [`ErrorKind::PeerFailed`](crate::ErrorKind::PeerFailed); the end
    /// after it is matched as ever.
    pub(crate) fn refuse(&self, ends: &[MatchKey], reason: &str) {
        let refusal = EndMessage::Refusal {
            reason: reason.to_owned(),
        };
        let numbered: Vec<_> = ends
            .iter()
            .map(|&end| (end, self.next_number(end)))
            .collect();
        let keys = numbered
            .iter()
            .map(|&(end, number)| (end, self.store_key(end, number, end.direction)));
        let told = refusal.encode().and_then(|bytes| {
            let pairs: Vec<_> = keys.clone().map(|(_, key)| (key, bytes.clone())).collect();
            self.bootstrap.store().multi_set(&pairs)
        });
        match told {
            Ok(()) => {
                let mut refusals = lock(&self.refusals.0);
                for (end, key) in keys {
                    refusals.entry(end).or_default().push(key);
                }
            }
            Err(error) => {
                tracing::debug!(%error, "peers could not be told of a failure");
                for (end, number) in numbered {
                    self.reuse_number(end, number);
                }
            }
        }
    }

    /// Deletes the refusals under `end`: a later end was matched, so the peer has passed them.
    pub(super) fn clear_refusals(&self, end: MatchKey) {
        let keys = lock(&self.refusals.0).remove(&end);
        for key in keys.into_iter().flatten() {
            if let Err(error) = self.bootstrap.store().delete(&key) {
                tracing::debug!(%error, key, "a refusal could not be deleted");
            }
        }
    }
}

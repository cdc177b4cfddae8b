//! Handling of peers' requests and notices.

use super::exchanged::PeerHandle;
use super::exports::RegionNumbers;
use super::message::{Message, Request};
use super::publications::{Heard, Publications};
use super::shared::Shared;
use crate::device::Piece;
use crate::error::{Rank, Result};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

type SlotReleasedHandler = Box<dyn Fn(Rank, u64) + Send + Sync>;

/// Handles peers' requests to this rank.
pub(super) struct RequestHandler {
    shared: Arc<Shared>,
    /// Sequence number of the last handled notice of each peer.
    heard: Mutex<BTreeMap<Rank, u64>>,
    pub(super) slot_released: OnceLock<SlotReleasedHandler>,
    pub(super) publications: Publications,
}

impl RequestHandler {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: shared.clone(),
            heard: Mutex::default(),
            slot_released: OnceLock::new(),
            publications: Publications::default(),
        }
    }

    /// Handles a peer's request, unless it is a notice that was handled before and is retransmitted because
    /// its answer was lost.
    pub(super) fn answer(&self, request: Request) -> Result<Option<Piece>> {
        let Request {
            from,
            number,
            message,
        } = request;
        let shared = &self.shared;
        // Reject unknown ranks. Before the peers are gathered, only their own information can be requested.
        if let Some(peers) = shared.peers.get() {
            peers.service(from)?;
        }
        if number != 0 {
            // Deduplicate retransmissions: the answer to an earlier copy was lost.
            let mut heard = lock(&self.heard);
            let last = heard.entry(from).or_default();
            if number <= *last {
                return Ok(None);
            }
            *last = number;
        }
        match message {
            Message::Piece {
                allocation,
                generation,
                index,
            } => {
                let piece = shared.exports.piece(generation, allocation, index);
                return piece.map(Some);
            }
            Message::Unmap {
                allocation,
                generation,
            } => {
                // The generation guards against a request that arrives after the memory was mapped anew.
                shared.mappings.revoke((from, allocation), generation);
            }
            Message::Released {
                generation,
                region,
                handles,
            } => {
                let numbers = RegionNumbers { generation, region };
                shared.exports.released(numbers, from, handles);
            }
            Message::SlotReleased { slot } => {
                if let Some(handler) = self.slot_released.get() {
                    handler(from, slot);
                }
            }
            Message::Offered {
                publication,
                entry,
                handle,
            } => {
                let handle = PeerHandle::new(shared, from, handle.to_vec());
                let offer = Heard::Offer {
                    from,
                    entry,
                    handle,
                };
                self.publications.notify(publication, offer);
            }
            Message::Published {
                publication,
                entry,
                notice,
            } => {
                let heard = Heard::Notice {
                    from,
                    entry,
                    notice,
                };
                self.publications.notify(publication, heard);
            }
        }
        Ok(None)
    }
}

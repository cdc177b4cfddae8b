//! State shared by regions, mappings and threads of one rank, and the handling of peers' requests.

use super::cache::MappingCache;
use super::exchanged::PeerHandle;
use super::exports::{Exports, RegionNumbers, Unwanted};
use super::handle::{Handle, HandleKey};
use super::mapping::Mapped;
use super::message::{Message, Request, TOKEN_BYTES};
use super::notifier::Outbox;
use super::peers::Peers;
use super::publications::{Heard, Publications};
use super::service_client::{self, Asked};
use crate::device::{Device, Piece};
use crate::error::{Error, Rank, Result};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Total time that requests wait for peers that cannot answer, or for descriptors of this process. A shared
/// budget, since waits for many such peers would add up.
const PATIENCE: Duration = Duration::from_secs(1);

/// Minimum such wait of each request.
const MIN_PATIENCE: Duration = Duration::from_millis(50);

/// The budget is renewed this long after the last such wait.
const RENEWAL: Duration = Duration::from_secs(10);

/// Cache key of a mapping: owner and allocation.
pub(super) type MappingKey = (Rank, u64);

pub(super) type SlotReleasedHandler = Box<dyn Fn(Rank, u64) + Send + Sync>;

pub(super) type Reclaimer = Box<dyn Fn() + Send + Sync>;

/// State shared by regions, mappings and threads.
pub(super) struct Shared {
    pub(super) rank: Rank,
    pub(super) device: Arc<dyn Device>,
    pub(super) key: HandleKey,
    pub(super) token: [u8; TOKEN_BYTES],
    pub(super) peers: OnceLock<Peers>,
    pub(super) exports: Exports,
    pub(super) mappings: MappingCache<MappingKey, Mapped>,
    pub(super) outbox: Outbox,
    /// Sequence number of the last handled notice of each peer.
    pub(super) heard: Mutex<BTreeMap<Rank, u64>>,
    pub(super) slot_released: OnceLock<SlotReleasedHandler>,
    pub(super) publications: Publications,
    pub(super) reclaimers: Mutex<Vec<Reclaimer>>,
    /// Recently spent wait budget, and when the last wait ended.
    pub(super) waited: Mutex<Option<(Duration, Instant)>>,
}

impl Shared {
    pub(super) fn peers(&self) -> Result<&Peers> {
        self.peers
            .get()
            .ok_or_else(|| Error::internal("peers are asked before their information was gathered"))
    }

    /// Notifies the owner that a handle is not used.
    pub(super) fn release_handle(&self, handle: &Handle) {
        let notify = |region| {
            let message = Message::Released {
                generation: handle.generation,
                region,
                handles: 1,
            };
            self.outbox.notify(handle.owner, message);
        };
        notify(0);
        // 0 means that the owner does not track this region.
        if handle.region != 0 {
            notify(handle.region);
        }
    }

    pub(super) fn decode(&self, peer: Rank, wire: &[u8]) -> Result<Handle> {
        let handle = Handle::decode(wire, &self.key)
            .map_err(|error| error.with_rank(self.rank).with_peer(peer))?;
        let kind = self.device.kind();
        // A valid seal proves only that some rank of the job made it.
        if handle.owner != peer || handle.kind != kind {
            let what = format!(
                "the handle is of rank {} on device {}; expected rank {peer} on device {kind}",
                handle.owner, handle.kind
            );
            return Err(Error::invalid_handle(what)
                .with_operation("read a handle")
                .with_rank(self.rank)
                .with_peer(peer));
        }
        Ok(handle)
    }

    pub(super) fn forget_peer(&self, peer: Rank) {
        self.ask_to_unmap(self.exports.forget_peer(peer));
    }

    /// Asks peers to unmap allocations that will not be reused. Does not block.
    pub(super) fn ask_to_unmap(&self, unwanted: Vec<Unwanted>) {
        for Unwanted {
            peer,
            allocation,
            generation,
        } in unwanted
        {
            let message = Message::Unmap {
                allocation,
                generation,
            };
            self.outbox.notify(peer, message);
        }
    }

    /// Sends a request to `peer`'s service and waits for the answer, possibly a piece of memory.
    pub(super) fn ask(&self, peer: Rank, message: Message) -> Result<Option<Piece>> {
        let request = Request {
            from: self.rank,
            // Not numbered, since asking for a piece again is harmless.
            number: 0,
            message,
        };
        let name = self.peers()?.service(peer)?;
        let recent = |(_, ended): &(Duration, Instant)| ended.elapsed() < RENEWAL;
        let waited = lock(&self.waited).filter(recent);
        let waited = waited.map_or(Duration::ZERO, |(waited, _)| waited);
        // Stopped peers must not cost the full wait each: the budget is shared by all recent requests.
        let patience = PATIENCE.saturating_sub(waited).max(MIN_PATIENCE);
        let begun = Instant::now();
        let answer = service_client::ask(name, &self.token, request, patience);
        let took = begun.elapsed();
        // Short waits are normal and do not consume the budget.
        if took >= MIN_PATIENCE {
            *lock(&self.waited) = Some((waited + took, Instant::now()));
        }
        answer.map_err(|error| error.with_rank(self.rank).with_peer(peer))
    }

    /// Sends notice `number` to `peer`'s service without waiting for the answer.
    pub(super) fn begin_telling(&self, peer: Rank, number: u64, message: Message) -> Result<Asked> {
        let request = Request {
            from: self.rank,
            number,
            message,
        };
        service_client::begin(self.peers()?.service(peer)?, &self.token, request)
            .map_err(|error| error.with_rank(self.rank).with_peer(peer))
    }

    /// Handles a peer's request, unless it is a notice that was handled before and is retransmitted because
    /// its answer was lost.
    pub(super) fn answer(self: &Arc<Self>, request: Request) -> Result<Option<Piece>> {
        let Request {
            from,
            number,
            message,
        } = request;
        // Reject unknown ranks. Before the peers are gathered, only their own information can be requested.
        if let Some(peers) = self.peers.get() {
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
                let piece = self.exports.piece(generation, allocation, index);
                return piece.map(Some);
            }
            Message::Unmap {
                allocation,
                generation,
            } => {
                // The generation guards against a request that arrives after the memory was mapped anew.
                self.mappings.revoke((from, allocation), generation);
            }
            Message::Released {
                generation,
                region,
                handles,
            } => {
                let numbers = RegionNumbers { generation, region };
                self.exports.released(numbers, from, handles);
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
                let handle = PeerHandle::new(self, from, handle.to_vec());
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

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryRegistry")
            .field("rank", &self.rank)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

//! State shared by regions, mappings and threads of one rank.

use super::cache::MappingCache;
use super::exports::{Exports, Unwanted};
use super::handle::{Handle, HandleKey};
use super::mapping::Mapped;
use super::message::{Message, Request, TOKEN_BYTES};
use super::outbox::Outbox;
use super::peers::Peers;
use super::service_client::{self, Asked};
use crate::debug::debug_fields;
use crate::device::{Device, Piece};
use crate::error::{Error, Rank, Result};
use crate::sync::lock;
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
}

debug_fields!(Shared, |it| rank: it.rank, device: it.device);

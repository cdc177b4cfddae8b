//! A barrier across the ranks' streams.

use super::exchange::TransferExchange;
use super::{Path, Protocol, Transfer, TransferRequest, post_all, wait_all};
use crate::deadline::Deadline;
use crate::debug::debug_fields;
use crate::device::{AllocationKind, Stream};
use crate::error::Result;
use crate::memory::{MemoryRegistry, Region};

/// Length of the token: the smallest length of a transfer.
const BYTES: usize = 64;

/// Tag of its transfers, outside the range of tags that count up from 0.
const TAG: u64 = u64::MAX >> 1;

/// Blocks each rank's stream until the streams of all other ranks have reached the barrier.
///
/// A token travels around the ring of ranks, one hop less than there are ranks, in stream order; no host waits.
pub struct StreamBarrier {
    // To the right neighbour and from the left one; empty for one rank.
    ring: Vec<Transfer>,
    rounds: usize,
    _tokens: [Region; 2],
}

debug_fields!(StreamBarrier, |it| rounds: it.rounds);

impl StreamBarrier {
    /// Collective call: every rank creates one at the same time, whose token uses `path`. Blocks until the neighbours
    /// have done so.
    pub(crate) fn new(
        memory: &MemoryRegistry,
        transfers: &TransferExchange,
        (rank, world): (usize, usize),
        path: Path,
        deadline: Deadline,
    ) -> Result<Self> {
        let token = || memory.allocate(BYTES, AllocationKind::Plain);
        let tokens = [token()?, token()?];
        let ring = if world == 1 {
            Vec::new()
        } else {
            let (right, left) = ((rank + 1) % world, (rank + world - 1) % world);
            let requests = [
                TransferRequest::send(&tokens[0], right, TAG),
                TransferRequest::receive(&tokens[1], left, TAG),
            ]
            .map(|request| request.with_protocol(Protocol::Put).with_path(path));
            transfers.exchange(&requests, deadline)?
        };
        Ok(Self {
            ring,
            rounds: world - 1,
            _tokens: tokens,
        })
    }

    /// Enqueues the barrier on `stream`. Does not block. Every rank must enqueue it equally often.
    ///
    /// # Errors
    /// The device's fault, and that of the communicator.
    pub fn enqueue(&self, stream: &Stream) -> Result<()> {
        let ring: Vec<&Transfer> = self.ring.iter().collect();
        // After hop n, a rank has heard from its n left neighbours; all of them after world - 1 hops.
        for _ in 0..self.rounds {
            post_all(&ring, stream)?;
            wait_all(&ring, stream)?;
        }
        Ok(())
    }
}

//! A barrier of the ranks' streams.

use super::exchange::TransferExchange;
use super::{Path, Protocol, Transfer, TransferRequest, post_all, wait_all};
use crate::deadline::Deadline;
use crate::device::{AllocationKind, Stream};
use crate::error::Result;
use crate::memory::{MemoryRegistry, Region};
use std::fmt;

/// Bytes that travel; the least that a transfer has.
const BYTES: usize = 64;

/// The tag of its transfers, out of the way of those that count up from 0.
const TAG: u64 = u64::MAX >> 1;

/// Holds a stream of every rank until all the others have got there.
///
/// It is a token that goes around the ring of ranks once less than there are ranks, in stream order; no
/// host waits.
pub struct StreamBarrier {
    // To the right neighbour and from the left one; none where there is one rank.
    ring: Vec<Transfer>,
    rounds: usize,
    _tokens: [Region; 2],
}

impl fmt::Debug for StreamBarrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamBarrier")
            .field("rounds", &self.rounds)
            .finish_non_exhaustive()
    }
}

impl StreamBarrier {
    /// Every rank makes one at the same time, whose token goes by `path`. Blocks until the neighbours have.
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

    /// Enqueues the barrier on `stream`. Does not block. Every rank enqueues it equally often.
    ///
    /// # Errors
    /// The device's fault, and that of the communicator.
    pub fn enqueue(&self, stream: &Stream) -> Result<()> {
        let ring: Vec<&Transfer> = self.ring.iter().collect();
        for _ in 0..self.rounds {
            post_all(&ring, stream)?;
            wait_all(&ring, stream)?;
        }
        Ok(())
    }
}

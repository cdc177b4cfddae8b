//! Buffers and signal words of both neighbours for `bench p2p`, and the check of received bytes.

use super::Method;
use crate::commands::bench::clock::{BenchClock, Submission};
use crate::commands::bench::peers::{SecondStream, SharedMemory, neighbours};
use crate::names::name_of;
use anyhow::{Context, Result, bail};
use std::cell::Cell;
use std::sync::Arc;
use warplink::Communicator;
use warplink::device::{CollectiveEngine, MemoryOp, Priority, Stream, Word};
use warplink::memory::Region;

/// The same for every size.
pub(super) struct P2pRunner<'a> {
    pub(super) clock: BenchClock<'a>,
    pub(super) second: SecondStream,
    pub(super) ring: bool,
    pub(super) engine: Option<Arc<dyn CollectiveEngine>>,
    // The ranks that this one sends to and receives from.
    pub(super) right: usize,
    pub(super) left: usize,
    pub(super) memory: SharedMemory,
    /// Words of the right neighbour, by which raw copies signal.
    remote_words: [Word; 2],
    // Signals that the raw sequence sent and received outside of graphs.
    sent: Cell<u64>,
    received: Cell<u64>,
}

impl<'a> P2pRunner<'a> {
    pub(super) fn new(
        comm: &'a Communicator,
        largest: usize,
        ring: bool,
        nccl: bool,
    ) -> Result<Self> {
        let clock = BenchClock::new(comm, Priority::High)?;
        let memory = SharedMemory::new(comm, largest)?;
        let sent: Vec<u8> = (0..largest).map(|at| pattern(comm.rank(), at)).collect();
        memory.own.upload(&sent)?;
        let (right, left) = Self::peers(comm, ring);
        let engine = nccl.then(|| comm.collective_engine()).transpose();
        let engine =
            engine.context("load the vendor's library; help: use --no-nccl to leave it out")?;
        Ok(Self {
            second: SecondStream::new(comm)?,
            clock,
            ring,
            engine,
            right,
            left,
            remote_words: memory.remote_words(right)?,
            memory,
            sent: Cell::new(0),
            received: Cell::new(0),
        })
    }

    /// The neighbours in the ring, or the other of the pair; further ranks only keep the barriers.
    fn peers(comm: &Communicator, ring: bool) -> (usize, usize) {
        let (rank, world) = (comm.rank(), comm.world());
        match (ring, rank) {
            (false, 0) => (1, 1),
            (false, 1) => (0, 0),
            _ => {
                let [left, right] = neighbours(rank, world);
                (right, left)
            }
        }
    }

    /// The first bytes of the buffers to send and receive.
    pub(super) fn buffers(&self, bytes: usize) -> Result<(Region, Region)> {
        let Self { memory, .. } = self;
        Ok((memory.own.slice(0..bytes)?, memory.into.slice(0..bytes)?))
    }

    pub(super) fn takes_part(&self) -> bool {
        self.ring || self.clock.comm.rank() < 2
    }

    /// Sets the word of the right neighbour: outside of a graph to the number of signals so far, in a
    /// graph to 1, which the receiver resets.
    pub(super) fn signal(&self, stream: &Stream, submission: Submission) -> Result<()> {
        let [counted, toggled] = &self.remote_words;
        let operation = match submission {
            Submission::Eager => MemoryOp::write(counted, next(&self.sent)),
            Submission::Captured => MemoryOp::write(toggled, 1),
        };
        Ok(stream.memory_ops(&[operation])?)
    }

    pub(super) fn await_signal(&self, stream: &Stream, submission: Submission) -> Result<()> {
        let [counted, toggled] = &self.memory.words;
        match submission {
            Submission::Eager => {
                stream.memory_ops(&[MemoryOp::wait(counted, next(&self.received))])?
            }
            Submission::Captured => stream.memory_ops(&[
                MemoryOp::wait(toggled, 1),
                MemoryOp::Reset { word: toggled },
            ])?,
        }
        Ok(())
    }

    /// Fails unless the received bytes are those that the rank to the left sent, at both ends of the
    /// buffer; then overwrites them for the next method.
    pub(super) fn check(&self, bytes: usize, method: Method) -> Result<()> {
        let rank = self.clock.comm.rank();
        if self.ring || rank == 1 {
            // Not the whole: comparing large buffers on the host would take longer than the measurement.
            let part = bytes.min(64 << 10);
            for start in [0, bytes - part] {
                let got = self.memory.into.slice(start..start + part)?.download()?;
                let wrong = got
                    .iter()
                    .zip(start..)
                    .position(|(byte, at)| *byte != pattern(self.left, at));
                if let Some(at) = wrong {
                    bail!(
                        "rank {rank}: byte {} of {bytes} received by {} is wrong; expected what the peer sent",
                        start + at,
                        name_of(&method)
                    );
                }
            }
        }
        // A peer's last copy may still be in flight until it has passed the barrier.
        self.clock.comm.barrier()?;
        self.clock.stream.fill(&self.memory.into, 0xff)?;
        self.clock.comm.synchronize(&self.clock.stream)?;
        // No peer may send for the next method before this buffer is overwritten, or its data would be lost.
        Ok(self.clock.comm.barrier()?)
    }
}

fn next(count: &Cell<u64>) -> u64 {
    count.set(count.get() + 1);
    count.get()
}

/// Byte `at` of the buffer that `rank` sends; it differs from rank to rank and from byte to byte.
fn pattern(rank: usize, at: usize) -> u8 {
    (at * 31 + rank * 7 + (at >> 9)) as u8
}

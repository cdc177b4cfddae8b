//! Work of all ranks in a cell; every phase moves data that is checked.

use super::cell::Phase;
use crate::commands::bench::peers::neighbours;
use crate::gemm::inputs::Random;
use warplink::device::{Priority, Stream};
use warplink::memory::Region;
use warplink::p2p::{Transfer, TransferRequest, post_all, wait_all};
use warplink::program::{PrepareOptions, Program};
use warplink::{Communicator, ErrorKind, Result};

/// Bytes of a transfer.
const BYTES: usize = 256 << 10;

/// Rounds of a phase that moves data; the fault is in the middle one.
const ROUNDS: usize = 6;
const FAULTY: usize = 3;

/// Launches of a graph in one round, so that several are queued.
const LAUNCHES: usize = 8;

/// Each rank sends to the next.
const RING: &str = "program ring(n) {
    input A: u8[n]
    output B: u8[n]
    share {
        give = send A to (rank + 1) % world via put
        take = receive B from (rank - 1) % world via put
    }
    post give, take
    wait give, take
}";

/// Runs one rank in one phase.
pub(super) struct Player<'a> {
    pub(super) comm: Communicator,
    /// Inflicts the fault on the victim; does nothing on other ranks.
    pub(super) fail: &'a mut dyn FnMut(&Communicator) -> Result<()>,
    /// Findings of wrong data.
    pub(super) wrong: &'a mut Vec<String>,
}

/// Memory and transfers of a ring, in which each rank sends to the next.
struct Ring {
    send: Region,
    receive: Region,
    stream: Stream,
    transfers: Vec<Transfer>,
}

impl Ring {
    fn new(comm: &Communicator) -> Result<Self> {
        Ok(Self {
            send: comm.alloc(BYTES)?,
            receive: comm.alloc(BYTES)?,
            stream: comm.create_stream(Priority::Normal)?,
            transfers: Vec::new(),
        })
    }

    fn with_transfers(comm: &Communicator) -> Result<Self> {
        let mut ring = Self::new(comm)?;
        ring.exchange(comm)?;
        Ok(ring)
    }

    fn exchange(&mut self, comm: &Communicator) -> Result<()> {
        let [left, right] = neighbours(comm.rank(), comm.world());
        self.transfers = comm.exchange(&[
            TransferRequest::send(&self.send, right, 0),
            TransferRequest::receive(&self.receive, left, 0),
        ])?;
        Ok(())
    }

    fn enqueue(&self) -> Result<()> {
        let group: Vec<&Transfer> = self.transfers.iter().collect();
        post_all(&group, &self.stream)?;
        wait_all(&group, &self.stream)
    }

    /// Sends the data of `round` by what `work` enqueues, and compares the received data.
    fn round(
        &self,
        comm: &Communicator,
        round: usize,
        wrong: &mut Vec<String>,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let [left, _] = neighbours(comm.rank(), comm.world());
        // By ranks of the job: those of the survivors' communicator are renumbered.
        let [own, left] = [comm.rank(), left].map(|rank| job_rank(comm, rank));
        // Other data in each round, so that a late or repeated transfer is noticed.
        self.send.upload(&values(own, round))?;
        work()?;
        comm.synchronize(&self.stream)?;
        if self.receive.download()? != values(left, round) {
            wrong.push(format!("wrong data from rank {left} in round {round}"));
        }
        Ok(())
    }
}

impl Player<'_> {
    /// Runs `phase` until the first error. The phase of closing closes the communicator.
    pub(super) fn play(&mut self, phase: Phase) -> Result<()> {
        match phase {
            // Only ranks that have joined get here.
            Phase::Join => self.transfer(),
            Phase::Exchange => self.exchange(),
            Phase::Transfer => self.transfer(),
            Phase::Graph => self.graph(),
            Phase::Collective => self.collective(),
            Phase::Bind => self.bind(),
            Phase::Split => self.split(),
            Phase::Close => {
                self.fail()?;
                self.comm.clone().close()
            }
        }
    }

    /// Inflicts the fault, just before an operation that needs all ranks.
    fn fail(&mut self) -> Result<()> {
        (self.fail)(&self.comm)
    }

    fn exchange(&mut self) -> Result<()> {
        let mut ring = Ring::new(&self.comm)?;
        // All ranks are past the preparation: the fault falls into the exchange and not before it.
        self.comm.barrier()?;
        self.fail()?;
        ring.exchange(&self.comm)?;
        ring.round(&self.comm, 0, self.wrong, || ring.enqueue())
    }

    fn transfer(&mut self) -> Result<()> {
        let ring = Ring::with_transfers(&self.comm)?;
        for round in 0..ROUNDS {
            ring.round(&self.comm, round, self.wrong, || {
                if round == FAULTY {
                    // Every rank now posts that its buffer may be overwritten.
                    (self.fail)(&self.comm)?;
                }
                ring.enqueue()
            })?;
        }
        Ok(())
    }

    fn graph(&mut self) -> Result<()> {
        let ring = Ring::with_transfers(&self.comm)?;
        ring.stream.begin_capture()?;
        ring.enqueue()?;
        let graph = ring.stream.end_capture()?;
        for round in 0..ROUNDS {
            ring.round(&self.comm, round, self.wrong, || {
                // Several launches in flight, so that the fault falls between graphs that wait for one another.
                for launch in 0..LAUNCHES {
                    if (round, launch) == (FAULTY, LAUNCHES / 2) {
                        (self.fail)(&self.comm)?;
                    }
                    graph.launch(&ring.stream)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// All-gathers: each waits for every rank.
    fn collective(&mut self) -> Result<()> {
        let (rank, world) = (self.comm.rank(), self.comm.world());
        let collectives = self.comm.collectives()?;
        let stream = self.comm.create_stream(Priority::Normal)?;
        let (own, all) = (self.comm.alloc(BYTES)?, self.comm.alloc(world * BYTES)?);
        for round in 0..ROUNDS {
            own.upload(&values(job_rank(&self.comm, rank), round))?;
            if round == FAULTY {
                self.fail()?;
            }
            collectives.all_gather(all.memory(), own.memory(), &stream)?;
            self.comm.synchronize(&stream)?;
            let gathered = all.download()?;
            for (from, part) in gathered.chunks_exact(BYTES).enumerate() {
                let from = job_rank(&self.comm, from);
                if part != values(from, round) {
                    self.wrong
                        .push(format!("wrong data of rank {from} in round {round}"));
                }
            }
        }
        Ok(())
    }

    fn bind(&mut self) -> Result<()> {
        let ring = Ring::new(&self.comm)?;
        let program = Program::parse(RING)?;
        let parameters = [("n", BYTES as i64)].into();
        let executor = self.comm.executor();
        let prepared = executor.prepare(&program, &parameters, PrepareOptions::default())?;
        let bindings = [("A", &ring.send), ("B", &ring.receive)]
            .map(|(name, region)| (name.to_owned(), region.memory().clone()));
        self.comm.barrier()?;
        self.fail()?;
        let plan = prepared.bind(&bindings.into())?;
        ring.round(&self.comm, 0, self.wrong, || plan.run(&ring.stream))
    }

    fn split(&mut self) -> Result<()> {
        let ring = Ring::with_transfers(&self.comm)?;
        self.comm.barrier()?;
        self.fail()?;
        let whole = self.comm.split(0, 0)?;
        whole.barrier()?;
        ring.round(&self.comm, 0, self.wrong, || ring.enqueue())
    }
}

/// Moves data around `comm`, which does not contain the victim.
pub(super) fn go_on(comm: &Communicator, wrong: &mut Vec<String>) -> Result<()> {
    let nothing = &mut |_: &Communicator| Ok(());
    Player {
        comm: comm.clone(),
        fail: nothing,
        wrong,
    }
    .transfer()
}

fn job_rank(comm: &Communicator, rank: usize) -> usize {
    comm.job_ranks().get(rank).copied().unwrap_or(rank)
}

/// Pseudo-random bytes that depend on both.
fn values(rank: usize, round: usize) -> Vec<u8> {
    let mut random = Random((rank as u64 + 1) << 32 | (round as u64 + 1));
    (0..BYTES).map(|_| random.below(256) as u8).collect()
}

/// Whether an error reports the loss of a rank, after which the survivors can continue.
pub(super) fn is_loss(error: &warplink::Error) -> bool {
    error.kind() == ErrorKind::PeerLost
}

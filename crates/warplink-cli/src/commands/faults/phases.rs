//! Work of all ranks in a cell; every phase moves data that is checked.

use super::cell::Phase;
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

/// Launches of a graph in one round, so that waits lie behind waits.
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

/// One rank in one phase.
pub(super) struct Player<'a> {
    pub(super) comm: Communicator,
    /// Fails here, on the victim; nothing elsewhere.
    pub(super) fail: &'a mut dyn FnMut(&Communicator) -> Result<()>,
    /// Data that was not sent.
    pub(super) wrong: &'a mut Vec<String>,
}

/// The memory of a ring, in which each rank sends to the next.
struct Ring {
    send: Region,
    receive: Region,
    stream: Stream,
}

impl Ring {
    fn new(comm: &Communicator) -> Result<Self> {
        Ok(Self {
            send: comm.alloc(BYTES)?,
            receive: comm.alloc(BYTES)?,
            stream: comm.create_stream(Priority::Normal)?,
        })
    }

    fn exchange(&self, comm: &Communicator) -> Result<Vec<Transfer>> {
        let (rank, world) = (comm.rank(), comm.world());
        comm.exchange(&[
            TransferRequest::send(&self.send, (rank + 1) % world, 0),
            TransferRequest::receive(&self.receive, (rank + world - 1) % world, 0),
        ])
    }

    /// Moves data once.
    fn round(
        &self,
        comm: &Communicator,
        transfers: &[Transfer],
        wrong: &mut Vec<String>,
    ) -> Result<()> {
        let group: Vec<&Transfer> = transfers.iter().collect();
        self.fill(comm, 0)?;
        post_all(&group, &self.stream)?;
        wait_all(&group, &self.stream)?;
        comm.synchronize(&self.stream)?;
        self.check(comm, 0, wrong)
    }

    fn fill(&self, comm: &Communicator, round: usize) -> Result<()> {
        self.send
            .upload(&values(job_rank(comm, comm.rank()), round))
    }

    /// Compares what arrived with what was sent.
    fn check(&self, comm: &Communicator, round: usize, wrong: &mut Vec<String>) -> Result<()> {
        let left = (comm.rank() + comm.world() - 1) % comm.world();
        let left = job_rank(comm, left);
        if self.receive.download()? != values(left, round) {
            wrong.push(format!("wrong data from rank {left} in round {round}"));
        }
        Ok(())
    }
}

impl Player<'_> {
    /// Plays `phase` to its end, or to the first error. Closes the communicator where that is the phase.
    pub(super) fn play(&mut self, phase: Phase) -> Result<()> {
        match phase {
            // Where nothing failed, the ranks have joined.
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

    /// Fails, on the victim, where all ranks are about to enter what one will not leave.
    fn fail(&mut self) -> Result<()> {
        (self.fail)(&self.comm)
    }

    fn exchange(&mut self) -> Result<()> {
        let ring = Ring::new(&self.comm)?;
        self.comm.barrier()?;
        self.fail()?;
        let transfers = ring.exchange(&self.comm)?;
        ring.round(&self.comm, &transfers, self.wrong)
    }

    fn transfer(&mut self) -> Result<()> {
        let ring = Ring::new(&self.comm)?;
        let transfers = ring.exchange(&self.comm)?;
        let group: Vec<&Transfer> = transfers.iter().collect();
        for round in 0..ROUNDS {
            ring.fill(&self.comm, round)?;
            if round == FAULTY {
                // After this, every rank has posted that its buffer may be used.
                self.fail()?;
            }
            post_all(&group, &ring.stream)?;
            wait_all(&group, &ring.stream)?;
            self.comm.synchronize(&ring.stream)?;
            ring.check(&self.comm, round, self.wrong)?;
        }
        Ok(())
    }

    fn graph(&mut self) -> Result<()> {
        let ring = Ring::new(&self.comm)?;
        let transfers = ring.exchange(&self.comm)?;
        let group: Vec<&Transfer> = transfers.iter().collect();
        ring.stream.begin_capture()?;
        post_all(&group, &ring.stream)?;
        wait_all(&group, &ring.stream)?;
        let graph = ring.stream.end_capture()?;
        for round in 0..ROUNDS {
            ring.fill(&self.comm, round)?;
            for launch in 0..LAUNCHES {
                if (round, launch) == (FAULTY, LAUNCHES / 2) {
                    self.fail()?;
                }
                graph.launch(&ring.stream)?;
            }
            self.comm.synchronize(&ring.stream)?;
            ring.check(&self.comm, round, self.wrong)?;
        }
        Ok(())
    }

    /// Gathers, of which each waits for all ranks.
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
        ring.fill(&self.comm, 0)?;
        plan.run(&ring.stream)?;
        self.comm.synchronize(&ring.stream)?;
        ring.check(&self.comm, 0, self.wrong)
    }

    fn split(&mut self) -> Result<()> {
        let ring = Ring::new(&self.comm)?;
        let transfers = ring.exchange(&self.comm)?;
        self.comm.barrier()?;
        self.fail()?;
        let whole = self.comm.split(0, 0)?;
        whole.barrier()?;
        ring.round(&self.comm, &transfers, self.wrong)
    }
}

/// Moves data around `comm`, which has no victim.
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
    let mut state = (rank as u64 + 1) << 32 | (round as u64 + 1);
    let next = || {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)).to_le_bytes()
    };
    std::iter::repeat_with(next).flatten().take(BYTES).collect()
}

/// Whether an error says that a rank is gone, so that its communicator can be left behind.
pub(super) fn is_loss(error: &warplink::Error) -> bool {
    error.kind() == ErrorKind::PeerLost
}

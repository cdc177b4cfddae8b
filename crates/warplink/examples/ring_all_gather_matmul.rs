//! All-gather + matmul as a ring: the tutorial for Warplink's transfers.
//!
//! ```sh
//! # Ranks as threads of one process, one for each GPU (or 4 on a machine without):
//! cargo run --release -p warplink --example ring_all_gather_matmul
//! # Ranks as processes, one for each GPU:
//! cargo build --release -p warplink --example ring_all_gather_matmul
//! cargo run --release -- launch -n 4 -- target/release/examples/ring_all_gather_matmul
//! ```
//!
//! # The problem
//!
//! A is a tall matrix whose rows are spread over the ranks: each holds one *chunk* of them. Every
//! rank has a matrix B of its own, and wants the product C of *all* of A with it. This is how a layer
//! of a model begins whose weights B are split over GPUs by columns. The plain way is to gather A
//! first and to multiply then. But chunk C[i] needs chunk A[i] alone, so a rank can begin with the
//! chunk that it has, and multiply each other one when it arrives. Then most of the communication
//! hides behind the matmuls.
//!
//! # The ring
//!
//! Every rank sends to its right neighbour and receives from its left. In step 0 it passes on its
//! own chunk, in every later step the one that it received just before. After `world - 1` steps
//! every chunk has been everywhere. With 4 ranks, rank 0
//!
//! ```text
//!   step    sends to 1    receives from 3    and multiplies meanwhile
//!   0       A[0]          A[3]               A[0], its own
//!   1       A[3]          A[2]               A[3]
//!   2       A[2]          A[1]               A[2]
//!                                            A[1], when the ring has ended
//! ```
//!
//! On GPUs, copy engines move the bytes while the multiprocessors multiply. On the host device both
//! take the same processors, so there the example shows how it is done, and not that it is faster.
//!
//! [`Ring::new`] exchanges the transfers, once. [`Ring::step`] is one step of the ring.
//! [`overlapped`] and [`sequential`] are the two ways. [`rank`] checks both and measures them.

mod ranks;

use half::bf16;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;
use warplink::device::{
    AllocationKind, Compute, DeviceBuffer, Event, MatmulSpec, Priority, Stream,
};
use warplink::memory::Region;
use warplink::p2p::{Transfer, TransferRequest, post_all};
use warplink::{Communicator, DType, DeviceKind, Error, Result};
use zerocopy::IntoBytes;

/// How often each way is measured.
const SAMPLES: usize = 7;

fn main() -> ExitCode {
    ranks::run(4, rank)
}

/// The sizes of the problem, and a rank's matrices.
struct Problem {
    /// Rows of one chunk of A and of C.
    rows: usize,
    /// Columns of A and rows of B.
    k: usize,
    /// Columns of B and of C.
    n: usize,
    /// All of A, one chunk after the other, of which this rank fills its own. It is a *region*:
    /// memory that the neighbours may reach.
    a: Region,
    /// This rank's B and C. No peer needs them, so they are plain device memory.
    b: DeviceBuffer<bf16>,
    c: DeviceBuffer<bf16>,
    compute: Arc<dyn Compute>,
}

impl Problem {
    fn new(comm: &Communicator) -> Result<Self> {
        // As much work as the device does in a moment.
        let (rows, k, n) = match comm.device().kind() {
            DeviceKind::Host => (128, 512, 512),
            DeviceKind::Cuda => (2048, 4096, 4096),
        };
        let (world, device) = (comm.world(), comm.device());
        // Chooses algorithms and loads kernels now. To load a kernel while a stream waits for a peer
        // could end in a deadlock.
        let compute = comm.compute()?;
        for chunks in [1, world] {
            compute.prepare_matmul(&MatmulSpec::new(chunks * rows, n, k, DType::BF16))?;
        }
        Ok(Self {
            rows,
            k,
            n,
            a: comm.alloc(world * rows * k * size_of::<bf16>())?,
            b: DeviceBuffer::new(device, k * n, AllocationKind::Plain)?,
            c: DeviceBuffer::new(device, world * rows * n, AllocationKind::Plain)?,
            compute,
        })
    }

    /// Chunk `index` of A, as a region of its own. It can be sent like any other.
    fn chunk(&self, index: usize) -> Result<Region> {
        let bytes = self.rows * self.k * size_of::<bf16>();
        self.a.slice(index * bytes..(index + 1) * bytes)
    }

    /// Enqueues the product of `count` chunks of A, from `first` on, with B.
    fn multiply(&self, stream: &Stream, first: usize, count: usize) -> Result<()> {
        let spec = MatmulSpec::new(count * self.rows, self.n, self.k, DType::BF16);
        let (a, c) = (self.rows * self.k * size_of::<bf16>(), self.rows * self.n);
        let a = self.a.slice(first * a..(first + count) * a)?;
        let c = self.c.slice(first * c..(first + count) * c)?;
        let b = self.b.memory();
        (self.compute).matmul(stream, &spec, a.memory(), b, c.memory(), None)
    }
}

/// The ring's transfers, and the two streams that the work goes to.
struct Ring {
    steps: Vec<Step>,
    /// Reached when the matmuls of the last run are done.
    computed: Event,
    /// For communication, with priority on the device, since other ranks wait for it.
    communication: Stream,
    /// For matmuls.
    computation: Stream,
}

/// One step: the send to the right and the receive from the left.
struct Step {
    send: Transfer,
    receive: Transfer,
    /// Which chunk arrives.
    chunk: usize,
    /// Reached when it is there.
    arrived: Event,
}

impl Ring {
    /// Exchanges the transfers with the neighbours.
    ///
    /// This is the only part in which hosts wait for one another. It tells each rank where its
    /// neighbours' memory is, and maps it. From then on, a transfer is a copy and two signals in
    /// streams, and it can be repeated any number of times.
    fn new(comm: &Communicator, problem: &Problem) -> Result<Self> {
        let (rank, world) = (comm.rank(), comm.world());
        let (right, left) = ((rank + 1) % world, (rank + world - 1) % world);
        let chunk = |from: usize, step: usize| (from + world - step) % world;

        let mut requests = Vec::new();
        for step in 0..world - 1 {
            let (leaves, arrives) = (chunk(rank, step), chunk(left, step));
            // The two ends of a transfer name the same tag. The left neighbour sends in its step
            // what this rank receives in its own, so the step is a fitting one.
            let tag = step as u64;
            requests.push(TransferRequest::send(&problem.chunk(leaves)?, right, tag));
            // It is received where it belongs in A: nothing is staged or copied again.
            requests.push(TransferRequest::receive(
                &problem.chunk(arrives)?,
                left,
                tag,
            ));
        }
        // One call for all of them: it publishes every end before it waits for the neighbours'. The
        // transfers come in the order of the requests.
        let mut transfers = comm.exchange(&requests)?.into_iter();
        let mut steps = Vec::new();
        while let (Some(send), Some(receive)) = (transfers.next(), transfers.next()) {
            steps.push(Step {
                send,
                receive,
                chunk: chunk(left, steps.len()),
                arrived: comm.device().create_event(false)?,
            });
        }
        Ok(Self {
            steps,
            computed: comm.device().create_event(false)?,
            communication: comm.create_stream(Priority::High)?,
            computation: comm.create_stream(Priority::Normal)?,
        })
    }

    /// Enqueues one step of the ring. Nothing here blocks this thread, and nothing has moved when
    /// it returns.
    fn step(&self, step: &Step) -> Result<()> {
        let stream = &self.communication;
        // Both are posted as one group. Posting tells a neighbour that this rank is ready, and may
        // have to wait for the neighbour to be ready too. In a ring everybody would wait for
        // everybody if the send were posted first and the receive after it; a group has no order,
        // so it always completes.
        post_all(&[&step.send, &step.receive], stream)?;
        // From here on in this stream, the chunk is there. The next step sends it on.
        step.receive.wait(stream)?;
        // The other stream learns by an event.
        stream.record(&step.arrived)
    }

    /// Enqueues what is between two runs, at the end of each.
    fn end(&self) -> Result<()> {
        // A chunk that a neighbour has not read yet must not be overwritten. With the put protocol
        // that is so when the send is through, and there is nothing to wait for; with get, the
        // neighbour says when it has read.
        for step in &self.steps {
            step.send.wait(&self.communication)?;
        }
        // Nor one that this run's matmuls have not read.
        self.computation.record(&self.computed)?;
        self.communication.wait_event(&self.computed)
    }
}

/// Enqueues a run in which each chunk is multiplied while the next one arrives.
fn overlapped(comm: &Communicator, problem: &Problem, ring: &Ring) -> Result<()> {
    // This rank's own chunk is there from the beginning.
    problem.multiply(&ring.computation, comm.rank(), 1)?;
    for step in &ring.steps {
        // The communication stream does not wait for matmuls: it runs ahead as far as it can.
        ring.step(step)?;
        // The computation stream waits for the chunk that it needs next, and for no more.
        ring.computation.wait_event(&step.arrived)?;
        problem.multiply(&ring.computation, step.chunk, 1)?;
    }
    ring.end()
}

/// Enqueues a run that gathers all of A first and then multiplies it as a whole.
fn sequential(comm: &Communicator, problem: &Problem, ring: &Ring) -> Result<()> {
    for step in &ring.steps {
        ring.step(step)?;
        ring.computation.wait_event(&step.arrived)?;
    }
    problem.multiply(&ring.computation, 0, comm.world())?;
    ring.end()
}

/// Body of every rank.
fn rank(comm: &Communicator) -> Result<()> {
    let (rank, world) = (comm.rank(), comm.world());
    let problem = Problem::new(comm)?;
    let ring = Ring::new(comm, &problem)?;
    // Blocks until both streams are done. If a peer is lost meanwhile, this is an error that names it.
    let finish = || {
        comm.synchronize(&ring.communication)?;
        comm.synchronize(&ring.computation)
    };
    let mut times = Vec::new();
    let ways = [
        ("one after the other", sequential as fn(&_, &_, &_) -> _),
        ("overlapped", overlapped),
    ];
    for (round, (name, run)) in ways.into_iter().enumerate() {
        // Each chunk of A has a value of its own, another one in each round, and B averages over a
        // row: so the chunks of C have the values of those of A, exactly.
        let value = |chunk: usize| bf16::from_f32((round * world + chunk + 1) as f32);
        let chunk = vec![value(rank); problem.rows * problem.k];
        problem.chunk(rank)?.upload(chunk.as_bytes())?;
        let average = bf16::from_f32(1.0 / problem.k as f32);
        problem.b.upload(&vec![average; problem.b.len()])?;
        // An upload is not in a stream. This barrier keeps a neighbour from receiving anything
        // before it was made, and the streams were idle before it.
        comm.barrier()?;
        run(comm, &problem, &ring)?;
        finish()?;
        let c = problem.c.download()?;
        for (index, chunk) in c.chunks(problem.rows * problem.n).enumerate() {
            if chunk.iter().any(|c| *c != value(index)) {
                let message = format!("chunk {index} of C is wrong");
                return Err(Error::internal(message).with_rank(rank));
            }
        }

        let mut samples = Vec::new();
        for _ in 0..SAMPLES {
            comm.barrier()?;
            let start = Instant::now();
            run(comm, &problem, &ring)?;
            finish()?;
            // The slowest rank counts.
            comm.barrier()?;
            samples.push(start.elapsed().as_secs_f64() * 1e3);
        }
        samples.sort_by(f64::total_cmp);
        times.push(samples[SAMPLES / 2]);
        if rank == 0 {
            println!("{name:>20}: {:9.3} ms", times[round]);
        }
    }
    if rank == 0 {
        println!("{:>20}: {:9.3}", "ratio", times[0] / times[1]);
    }
    Ok(())
}

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
//! rank has a matrix B of its own, and wants the product of *all* of A with it:
//!
//! ```text
//!            k                 n                  n
//!        ┌───────┐         ┌───────┐          ┌───────┐
//!  rank 0│ A[0]  │         │       │          │ C[0]  │
//!        ├───────┤         │   B   │          ├───────┤
//!  rank 1│ A[1]  │    ·    │       │    =     │ C[1]  │    on every rank, each with its own B
//!        ├───────┤       k │       │          ├───────┤
//!  rank 2│ A[2]  │         │       │          │ C[2]  │
//!        └───────┘         └───────┘          └───────┘
//! ```
//!
//! This is how a layer of a model begins whose weights B are split over GPUs by columns. The plain
//! way is to gather A first and to multiply then. But chunk C[i] needs chunk A[i] alone, so a rank
//! can begin with the chunk that it has, and multiply each other one when it arrives. Then most of
//! the communication hides behind the products.
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
//! # Read on in this order
//!
//! [`Ring::new`] exchanges the transfers, once. [`Ring::step`] is one step of the ring.
//! [`overlapped`] and [`one_after_the_other`] are the two ways. [`rank`] puts it together, checks
//! both against a reference in double precision, and measures.

mod ranks;

use half::bf16;
use std::process::ExitCode;
use std::time::Instant;
use warplink::device::{
    AllocationKind, Compute, DeviceBuffer, Event, MatmulSpec, Priority, Stream,
};
use warplink::dtype::Element;
use warplink::memory::Region;
use warplink::p2p::{Transfer, TransferRequest};
use warplink::{Communicator, DType, DeviceKind, Error, ErrorKind, Result};

/// How often each way is measured.
const SAMPLES: usize = 7;

/// How many rows of each chunk of C are checked. All columns of them are.
const ROWS_CHECKED: usize = 4;

fn main() -> ExitCode {
    ranks::run(4, rank)
}

/// The sizes of the problem, and what a rank needs of it.
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
    /// This rank's B. No peer needs it, so it is plain device memory.
    b: DeviceBuffer<bf16>,
    /// This rank's C.
    c: DeviceBuffer<bf16>,
}

impl Problem {
    fn new(comm: &Communicator) -> Result<Self> {
        // As much work as the device does in a moment.
        let (rows, k, n) = match comm.device().kind() {
            DeviceKind::Host => (128, 512, 512),
            DeviceKind::Cuda => (2048, 4096, 4096),
        };
        let (world, device) = (comm.world(), comm.device());
        Ok(Self {
            rows,
            k,
            n,
            a: comm.alloc(world * rows * k * size_of::<bf16>())?,
            b: DeviceBuffer::new(device, k * n, AllocationKind::Plain)?,
            c: DeviceBuffer::new(device, world * rows * n, AllocationKind::Plain)?,
        })
    }

    /// The memory of chunk `index` of A, as a region of its own. It can be sent like any other.
    fn chunk_of_a(&self, index: usize) -> Result<Region> {
        let bytes = self.rows * self.k * size_of::<bf16>();
        self.a.slice(index * bytes..(index + 1) * bytes)
    }

    /// The memory of chunk `index` of C.
    fn chunk_of_c(&self, index: usize) -> Result<DeviceBuffer<bf16>> {
        let elements = self.rows * self.n;
        self.c.slice(index * elements..(index + 1) * elements)
    }

    /// The product of `chunks` chunks of A with B.
    fn product(&self, chunks: usize) -> MatmulSpec {
        MatmulSpec::new(chunks * self.rows, self.n, self.k, DType::BF16)
    }
}

/// The ring's transfers, and the two streams that the work goes to.
struct Ring {
    /// By step: the send to the right and the receive from the left.
    steps: Vec<(Transfer, Transfer)>,
    /// By step: which chunk arrives.
    arriving: Vec<usize>,
    /// By step: reached when the chunk is there.
    arrived: Vec<Event>,
    /// Reached when the products of the last run are done.
    computed: Event,
    /// What communicates. It comes first where the device has to choose, since others wait for it.
    communication: Stream,
    /// What multiplies.
    computation: Stream,
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

        let (mut requests, mut arriving, mut arrived) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..world - 1 {
            let leaves = (rank + world - step) % world;
            let arrives = (left + world - step) % world;
            // The two ends of a transfer name the same tag. The left neighbour sends in its step
            // what this rank receives in its own, so the step is a fitting one.
            let tag = step as u64;
            requests.push(TransferRequest::send(
                &problem.chunk_of_a(leaves)?,
                right,
                tag,
            ));
            // It is received where it belongs in A: nothing is staged or copied again.
            requests.push(TransferRequest::receive(
                &problem.chunk_of_a(arrives)?,
                left,
                tag,
            ));
            arriving.push(arrives);
            arrived.push(comm.device().create_event(false)?);
        }
        // One call for all of them: it publishes every end before it waits for the neighbours'.
        let mut transfers = comm.exchange(&requests)?.into_iter();
        // They come in the order of the requests.
        let mut steps = Vec::new();
        while let (Some(send), Some(receive)) = (transfers.next(), transfers.next()) {
            steps.push((send, receive));
        }
        Ok(Self {
            steps,
            arriving,
            arrived,
            computed: comm.device().create_event(false)?,
            communication: comm.create_stream(Priority::High)?,
            computation: comm.create_stream(Priority::Normal)?,
        })
    }

    /// Enqueues the beginning of a run.
    fn begin(&self) -> Result<()> {
        // The chunks of the last run are overwritten now, so its products must be done with them.
        // (The first time, nothing was recorded in the event, and nothing is waited for.)
        self.communication.wait_event(&self.computed)
    }

    /// Enqueues one step of the ring. Nothing here blocks this thread, and nothing has moved when
    /// it returns.
    fn step(&self, step: usize) -> Result<()> {
        let (send, receive) = &self.steps[step];
        let stream = &self.communication;
        // Both are posted as one group. Posting tells a neighbour that this rank is ready, and may
        // have to wait for the neighbour to be ready too. In a ring everybody would wait for
        // everybody if the send were posted first and the receive after it; a group has no order,
        // so it always completes.
        warplink::p2p::post_all(&[send, receive], stream)?;
        // From here on in this stream, the chunk is there. The next step sends it on.
        receive.wait(stream)?;
        // The other stream learns by an event.
        stream.record(&self.arrived[step])
    }

    /// Enqueues the end of a run.
    fn end(&self) -> Result<()> {
        // A chunk that a neighbour has not read yet must not be overwritten. With the put protocol
        // that is so when the send is through, and there is nothing to wait for; with get, the
        // neighbour says when it has read.
        for (send, _) in &self.steps {
            send.wait(&self.communication)?;
        }
        // And this run's products come before the next run.
        self.computation.record(&self.computed)
    }
}

/// Enqueues a run in which each chunk is multiplied while the next one arrives.
fn overlapped(comm: &Communicator, problem: &Problem, ring: &Ring, on: &dyn Compute) -> Result<()> {
    let multiply = |chunk: usize| {
        on.matmul(
            &ring.computation,
            &problem.product(1),
            problem.chunk_of_a(chunk)?.memory(),
            problem.b.memory(),
            problem.chunk_of_c(chunk)?.memory(),
            None,
        )
    };
    ring.begin()?;
    // This rank's own chunk is there from the beginning.
    multiply(comm.rank())?;
    for step in 0..ring.steps.len() {
        // The communication stream does not wait for products: it runs ahead as far as it can.
        ring.step(step)?;
        // The computation stream waits for the chunk that it needs next, and for no more.
        ring.computation.wait_event(&ring.arrived[step])?;
        multiply(ring.arriving[step])?;
    }
    ring.end()
}

/// Enqueues a run that gathers all of A first and then multiplies it as a whole.
fn one_after_the_other(problem: &Problem, ring: &Ring, on: &dyn Compute) -> Result<()> {
    ring.begin()?;
    for step in 0..ring.steps.len() {
        ring.step(step)?;
    }
    if let Some(last) = ring.arrived.last() {
        ring.computation.wait_event(last)?;
    }
    on.matmul(
        &ring.computation,
        &problem.product(ring.steps.len() + 1),
        problem.a.memory(),
        problem.b.memory(),
        problem.c.memory(),
        None,
    )?;
    ring.end()
}

/// What every rank does.
fn rank(comm: &Communicator) -> Result<()> {
    if comm.world() < 2 {
        return Err(Error::invalid("a ring takes at least two ranks"));
    }
    let problem = Problem::new(comm)?;
    let ring = Ring::new(comm, &problem)?;

    // Chooses algorithms and loads kernels now. To load a kernel while a stream waits for a peer
    // could end in a deadlock.
    let compute = comm.compute()?;
    compute.prepare_matmul(&problem.product(1))?;
    compute.prepare_matmul(&problem.product(comm.world()))?;

    let overlapped = || overlapped(comm, &problem, &ring, &*compute);
    let apart = || one_after_the_other(&problem, &ring, &*compute);

    let errors = [
        check(comm, &problem, &ring, &apart)?,
        check(comm, &problem, &ring, &overlapped)?,
    ];
    let times = [
        measure(comm, &ring, &apart)?,
        measure(comm, &ring, &overlapped)?,
    ];

    if comm.rank() == 0 {
        let (m, k, n) = (comm.world() * problem.rows, problem.k, problem.n);
        println!(
            "{m} x {k} times {k} x {n} in bf16 on each of {} ranks, {}",
            comm.world(),
            comm.device().describe()
        );
        for (name, time, error) in [
            ("one after the other", times[0], errors[0]),
            ("overlapped", times[1], errors[1]),
        ] {
            println!("{name:>20}: {:9.3} ms, error {error:.1e}", time * 1e3);
        }
        println!("{:>20}: {:9.3}", "ratio", times[0] / times[1]);
    }
    Ok(())
}

/// Runs `run` once on fresh random matrices, and fails where C is wrong on any rank. Returns the
/// largest relative error.
fn check(
    comm: &Communicator,
    problem: &Problem,
    ring: &Ring,
    run: &dyn Fn() -> Result<()>,
) -> Result<f64> {
    let (rank, world) = (comm.rank(), comm.world());
    let (rows, k, n) = (problem.rows, problem.k, problem.n);

    // Each rank draws a seed and tells it to all. So a rank can make the others' chunks itself, for
    // the reference, and what arrived over the ring is compared with what should have arrived. The
    // matrices are new every time, so that nothing that an earlier run left behind looks right.
    let mut seed = [0; 8];
    getrandom::fill(&mut seed).map_err(|error| Error::new(ErrorKind::Io, error.to_string()))?;
    let mut seeds = Vec::new();
    for bytes in comm.all_gather_bytes(&seed)? {
        let bytes = bytes
            .try_into()
            .map_err(|_| Error::new(ErrorKind::Protocol, "a seed has 8 bytes"))?;
        seeds.push(u64::from_le_bytes(bytes));
    }
    let chunks: Vec<Vec<bf16>> = (seeds.iter()).map(|seed| random(*seed, rows * k)).collect();
    let b = random(!seeds[rank], k * n);

    let own = problem.chunk_of_a(rank)?;
    let bytes: Vec<u8> = (chunks[rank].iter())
        .flat_map(|value| value.to_le_bytes())
        .collect();
    own.upload(&bytes)?;
    problem.b.upload(&b)?;

    // An upload is not in a stream. This barrier keeps a neighbour from receiving anything before
    // it was made, and the streams were idle before it.
    comm.barrier()?;
    run()?;
    finish(comm, ring)?;

    let c = problem.c.download()?;
    let b: Vec<f64> = b.into_iter().map(Element::to_f64).collect();
    let (mut difference, mut norm) = (0.0, 0.0);
    for (index, chunk) in chunks.iter().enumerate() {
        for picked in 0..ROWS_CHECKED.min(rows) {
            // The first row, the last, and some between them.
            let row = picked * (rows - 1) / (ROWS_CHECKED - 1);
            let mut reference = vec![0.0; n];
            for (a, row_of_b) in chunk[row * k..][..k].iter().zip(b.chunks_exact(n)) {
                let a = Element::to_f64(*a);
                for (sum, b) in reference.iter_mut().zip(row_of_b) {
                    *sum += a * b;
                }
            }
            let row_of_c = &c[(index * rows + row) * n..][..n];
            for (value, exact) in row_of_c.iter().zip(&reference) {
                difference += (Element::to_f64(*value) - exact).powi(2);
                norm += exact * exact;
            }
        }
    }
    let error = (difference / norm).sqrt();
    let errors = comm.all_gather_bytes(&error.to_le_bytes())?;

    // Products in bf16 are a little wrong; these may be no more so than any other.
    let tolerance = DType::BF16.matmul_tolerance().unwrap_or(0.0);
    let mut largest = 0.0_f64;
    for (peer, bytes) in errors.iter().enumerate().take(world) {
        let error = f64::from_le_bytes(bytes.as_slice().try_into().unwrap_or([0xff; 8]));
        if error.is_nan() || error > tolerance {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("the product of rank {peer} is wrong: its relative error is {error:.1e}"),
            ));
        }
        largest = largest.max(error);
    }
    Ok(largest)
}

/// The median time of `run`, in seconds, in which the slowest rank counts.
fn measure(comm: &Communicator, ring: &Ring, run: &dyn Fn() -> Result<()>) -> Result<f64> {
    let mut times = Vec::new();
    for sample in 0..SAMPLES + 1 {
        comm.barrier()?;
        let start = Instant::now();
        run()?;
        finish(comm, ring)?;
        let own = start.elapsed().as_secs_f64();
        let mut slowest = own;
        for bytes in comm.all_gather_bytes(&own.to_le_bytes())? {
            slowest = slowest.max(f64::from_le_bytes(bytes.try_into().unwrap_or([0; 8])));
        }
        // The first is for warming up.
        if sample > 0 {
            times.push(slowest);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Blocks until both streams are done. If a peer is lost meanwhile, this is an error that names it.
fn finish(comm: &Communicator, ring: &Ring) -> Result<()> {
    comm.synchronize(&ring.communication)?;
    comm.synchronize(&ring.computation)
}

/// `count` values between -1 and 1 that depend on `seed` alone.
fn random(seed: u64, count: usize) -> Vec<bf16> {
    let mut state = seed | 1;
    (0..count)
        .map(|_| {
            // xorshift64*: good enough for matrices, and short.
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            let bits = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
            Element::from_f64(bits as f64 / f64::from(1 << 23) - 1.0)
        })
        .collect()
}

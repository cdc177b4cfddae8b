//! Shared state of measurements: memory of all ranks, streams, and clocks.

use crate::commands::bench::clock::{BenchClock, Submission, WorkRef, median};
use crate::commands::bench::peers::{SecondStream, SharedMemory, gather, neighbours};
use crate::memory;
use anyhow::Result;
use std::sync::Arc;
use std::time::{Duration, Instant};
use warplink::device::{
    DeviceSlice, Elementwise, ElementwiseOp, KernelCopy, PreparedLaunch, Priority, Stream,
    StreamOp, Word,
};
use warplink::program::cost::curve::Curve;
use warplink::{Communicator, DType};

/// Target duration in seconds of one sample's repetitions.
const SAMPLE: f64 = 1e-3;

/// Warm-up time before timing a single rank.
const WARM_UP: Duration = Duration::from_millis(20);

/// Scope of the measurements.
pub(super) struct Selection {
    pub(super) samples: usize,
    /// Largest transfer in bytes.
    pub(super) largest: usize,
    /// Largest matrix extent.
    pub(super) largest_shape: usize,
    /// Element types of matrices.
    pub(super) dtypes: Vec<DType>,
    /// Whether to measure algorithms of collectives.
    pub(super) algorithms: bool,
    /// Whether to measure the vendor's collectives.
    pub(super) nccl: bool,
}

pub(super) struct TunedMachine<'a> {
    pub(super) comm: &'a Communicator,
    pub(super) clock: BenchClock<'a>,
    pub(super) second: SecondStream,
    /// The neighbours in the ring.
    pub(super) left: usize,
    pub(super) right: usize,
    pub(super) selection: Selection,
    /// Memory that peers read and write.
    pub(super) memory: SharedMemory,
    /// For copies by kernels.
    counter: Word,
}

impl<'a> TunedMachine<'a> {
    /// Collective.
    pub(super) fn new(comm: &'a Communicator, selection: Selection) -> Result<Self> {
        let largest = selection.largest;
        memory::check(comm.device().kind(), comm.world(), 0, 2 * largest as u128)?;
        let [left, right] = neighbours(comm.rank(), comm.world());
        let machine = Self {
            clock: BenchClock::new(comm, Priority::Normal)?,
            second: SecondStream::new(comm)?,
            left,
            right,
            selection,
            memory: SharedMemory::new(comm, largest)?,
            counter: comm.device().allocate_signals(64)?.word(0)?,
            comm,
        };
        let stream = &machine.clock.stream;
        // A normal number in every float type, where leftovers could be NaN; memory of zeros draws less power.
        stream.fill(&machine.memory.own, 0x3c)?;
        stream.fill(&machine.memory.into, 0)?;
        comm.synchronize(stream)?;
        Ok(machine)
    }

    /// Sizes from 1 KiB to the largest transfer, in factors of four.
    pub(super) fn sizes(&self) -> Vec<usize> {
        std::iter::successors(Some(1024_usize), |size| size.checked_mul(4))
            .take_while(|size| *size <= self.selection.largest)
            .collect()
    }

    /// The sum of two parts of `bytes` bytes.
    pub(super) fn sum(&self, bytes: usize) -> Result<Arc<dyn PreparedLaunch>> {
        let own = self.memory.own.memory();
        let sources = [own.slice(0..bytes)?, own.slice(bytes..2 * bytes)?];
        let target = self.memory.into.memory().slice(0..bytes)?;
        let sum = Elementwise::new(ElementwiseOp::Sum, DType::F32, &target, &sources);
        Ok(self.comm.compute()?.prepare_elementwise(&sum)?)
    }

    /// Seconds of one of many consecutive repetitions of `work`: median over samples of the slowest rank.
    /// Collective.
    pub(super) fn each(
        &self,
        repeat: usize,
        submission: Submission,
        work: WorkRef<'_>,
    ) -> Result<f64> {
        let clock = &self.clock;
        let times = clock.measure(self.selection.samples, submission, repeat, work)?;
        Ok(times.median)
    }

    /// A curve of the seconds for each size.
    pub(super) fn curve(
        &self,
        sizes: impl IntoIterator<Item = usize>,
        seconds: impl Fn(usize) -> Result<f64>,
    ) -> Result<Curve> {
        let points = sizes
            .into_iter()
            .map(|bytes| Ok((bytes as u64, seconds(bytes)?)));
        Ok(monotonic(points.collect::<Result<_>>()?))
    }

    /// Enqueues a copy by a kernel of `blocks` blocks.
    pub(super) fn kernel_copy(
        &self,
        stream: &Stream,
        (target, source): (&DeviceSlice, &DeviceSlice),
        blocks: u32,
    ) -> Result<()> {
        let copy = KernelCopy {
            target,
            source,
            blocks,
            arrivals: [None; 2],
            counter: &self.counter,
        };
        Ok(stream.sequence(&[StreamOp::KernelCopy(copy)])?)
    }

    /// As [`each`](Self::each) for this rank alone.
    pub(super) fn alone(&self, work: WorkRef<'_>) -> Result<f64> {
        let clock = &self.clock;
        // The first run loads kernels.
        let mut once = 0.0;
        for _ in 0..2 {
            once = clock.alone(1, work)?;
        }
        let repeat = (SAMPLE / once.max(1e-6)).clamp(1.0, 32.0) as usize;
        // A GPU that was idle runs faster than one at its power limit, which long programs reach.
        let start = Instant::now();
        while start.elapsed() < WARM_UP {
            clock.alone(repeat, work)?;
        }
        let mut times = Vec::new();
        // Few, since a grid has hundreds of shapes.
        for _ in 0..self.selection.samples.min(3) {
            times.push(clock.alone(repeat, work)? / repeat as f64);
        }
        Ok(median(&mut times))
    }

    /// Host seconds of one of many calls of `work`.
    pub(super) fn host(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        const ROUNDS: usize = 16;
        const IN_A_ROW: usize = 8;
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            // The queue is empty at the start of each round: a full one would block the host, and count as its time.
            self.comm.synchronize(&self.clock.stream)?;
            let start = Instant::now();
            for _ in 0..IN_A_ROW {
                work()?;
            }
            times.push(start.elapsed().as_secs_f64() / IN_A_ROW as f64);
        }
        self.comm.synchronize(&self.clock.stream)?;
        Ok(median(&mut times))
    }

    /// Median over the ranks of a locally measured figure.
    pub(super) fn median(&self, own: f64) -> Result<f64> {
        Ok(median(&mut gather(self.comm, &[own])?.concat()))
    }
}

/// Makes a curve monotonic: if more bytes seem faster, the smaller sample was disturbed.
fn monotonic(mut points: Vec<(u64, f64)>) -> Curve {
    let mut least = f64::INFINITY;
    for (_, seconds) in points.iter_mut().rev() {
        least = least.min(*seconds);
        *seconds = least;
    }
    Curve(points)
}

/// The first choice that takes at most `factor` times as long as the fastest. Every rank knows the slowest rank's
/// times, so all choose alike.
pub(super) fn first_within<T: Copy>(factor: f64, tried: &[(T, f64)]) -> Option<T> {
    let least = tried.iter().map(|(_, seconds)| *seconds).reduce(f64::min)?;
    let good = tried.iter().find(|(_, seconds)| *seconds <= factor * least);
    good.map(|(choice, _)| *choice)
}

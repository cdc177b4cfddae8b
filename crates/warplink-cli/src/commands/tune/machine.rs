//! Shared state of measurements: memory of all ranks, streams, and clocks.

use crate::commands::bench::clock::{Clock, Submission, median};
use crate::commands::bench::peers::{SecondStream, gather, neighbours};
use crate::memory;
use anyhow::{Context, Result};
use std::time::{Duration, Instant};
use warplink::device::{AllocationKind, DeviceSlice, Event, Priority, Stream, Word};
use warplink::memory::{Region, RemoteRegion};
use warplink::program::cost::curve::Curve;
use warplink::{Communicator, DType};

/// Target duration in seconds of one sample's repetitions.
const SAMPLE: f64 = 1e-3;

/// Warm-up time before timing a single rank.
const WARM_UP: Duration = Duration::from_millis(20);

/// Scope of the measurements.
pub(super) struct Selection {
    pub(super) samples: usize,
    pub(super) largest_transfer: usize,
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
    pub(super) clock: Clock<'a>,
    pub(super) second: SecondStream,
    pub(super) selection: Selection,
    pub(super) samples: usize,
    /// Largest transfer.
    pub(super) largest: usize,
    /// Memory that peers read and write.
    pub(super) own: Region,
    pub(super) into: Region,
    /// The peers' memory; none for this rank.
    pub(super) remote_own: Vec<Option<RemoteRegion>>,
    pub(super) remote_into: Vec<Option<RemoteRegion>>,
    /// Words that the left neighbour writes, and the right neighbour's.
    pub(super) words: [Word; 2],
    pub(super) remote_words: Option<[Word; 2]>,
    _words: Region,
    _remote_words: Vec<Option<RemoteRegion>>,
    begin: Event,
    end: Event,
}

impl<'a> TunedMachine<'a> {
    /// Collective.
    pub(super) fn new(comm: &'a Communicator, selection: Selection) -> Result<Self> {
        let largest = selection.largest_transfer;
        let bytes = largest as u128;
        memory::check(comm.device().kind(), comm.world(), 0, 2 * bytes)?;
        let (own, into) = (comm.alloc(largest)?, comm.alloc(largest)?);
        let words = comm.register(&comm.device().allocate_signals(4096)?)?;
        let remote_words = comm.share(&words)?;
        let pair =
            |slice: &DeviceSlice| -> Result<[Word; 2]> { Ok([slice.word(0)?, slice.word(64)?]) };
        let right = (comm.rank() + 1) % comm.world();
        let machine = Self {
            clock: Clock::new(comm, Priority::Normal)?,
            second: SecondStream::new(comm)?,
            samples: selection.samples,
            largest,
            selection,
            remote_own: comm.share(&own)?,
            remote_into: comm.share(&into)?,
            own,
            into,
            words: pair(words.memory())?,
            remote_words: remote_words[right]
                .as_ref()
                .map(|remote| pair(remote.memory()))
                .transpose()?,
            _words: words,
            _remote_words: remote_words,
            begin: comm.device().create_event(true)?,
            end: comm.device().create_event(true)?,
            comm,
        };
        machine.clock.stream.fill(&machine.own, 0x3c)?;
        machine.clock.stream.fill(&machine.into, 0)?;
        comm.synchronize(&machine.clock.stream)?;
        Ok(machine)
    }

    pub(super) fn right(&self) -> usize {
        let [_, right] = neighbours(self.comm.rank(), self.comm.world());
        right
    }

    pub(super) fn left(&self) -> usize {
        let [left, _] = neighbours(self.comm.rank(), self.comm.world());
        left
    }

    /// Sizes from 1 KiB to the largest transfer, in factors of four.
    pub(super) fn sizes(&self) -> Vec<usize> {
        std::iter::successors(Some(1024_usize), |size| size.checked_mul(4))
            .take_while(|size| *size <= self.largest)
            .collect()
    }

    pub(super) fn allocate(&self, bytes: usize) -> Result<DeviceSlice> {
        Ok(self.comm.device().allocate(bytes, AllocationKind::Plain)?)
    }

    /// Seconds of one of many consecutive repetitions of `work`: median over samples of the slowest rank.
    /// Collective.
    pub(super) fn each(
        &self,
        repeat: usize,
        submission: Submission,
        work: &dyn Fn(&Stream) -> Result<()>,
    ) -> Result<f64> {
        let samples = self.samples;
        let times = self
            .clock
            .measure_in_turn(samples, submission, repeat, &[work])?;
        Ok(times.first().context("nothing was timed")?.stream.median)
    }

    /// As [`each`](Self::each) for this rank alone.
    pub(super) fn alone(&self, work: &dyn Fn(&Stream) -> Result<()>) -> Result<f64> {
        let stream = &self.clock.stream;
        // The first run loads kernels.
        let mut once = 0.0;
        for _ in 0..2 {
            once = self.timed(stream, &|| work(stream))?;
        }
        let repeat = (SAMPLE / once.max(1e-6)).clamp(1.0, 32.0) as usize;
        // A GPU that was idle runs faster than one at its power limit, which long programs reach.
        let start = Instant::now();
        while start.elapsed() < WARM_UP {
            self.timed(stream, &|| (0..repeat).try_for_each(|_| work(stream)))?;
        }
        let mut times = Vec::new();
        for _ in 0..self.samples.min(3) {
            let all = self.timed(stream, &|| (0..repeat).try_for_each(|_| work(stream)))?;
            times.push(all / repeat as f64);
        }
        Ok(median(&mut times))
    }

    /// Seconds that `stream` takes for the work that `work` enqueues.
    pub(super) fn timed(&self, stream: &Stream, work: &dyn Fn() -> Result<()>) -> Result<f64> {
        stream.record(&self.begin)?;
        work()?;
        stream.record(&self.end)?;
        self.comm.synchronize(stream)?;
        Ok(f64::from(self.end.elapsed_since(&self.begin)?) / 1e3)
    }

    /// Host seconds of one of many calls of `work`.
    pub(super) fn host(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        const ROUNDS: usize = 16;
        const IN_A_ROW: usize = 8;
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
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

/// A curve of measured points, made monotonic: if more bytes seem faster, the smaller sample was disturbed.
pub(super) fn curve(mut points: Vec<(u64, f64)>) -> Curve {
    let mut least = f64::INFINITY;
    for (_, seconds) in points.iter_mut().rev() {
        least = least.min(*seconds);
        *seconds = least;
    }
    Curve(points)
}

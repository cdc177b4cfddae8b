//! Timing of stream work over all ranks.
//!
//! Every sample starts with a barrier of the hosts and then one of the streams, and its time is that of
//! the slowest rank: the time of one rank alone would include waiting for a late peer.

use super::peers::gather;
use anyhow::{Context, Result};
use clap::ValueEnum;
use std::time::{Duration, Instant};
use warplink::device::{Event, Graph, Priority, Stream};
use warplink::p2p::{Path, StreamBarrier};
use warplink::{Communicator, Deadline};

/// How stream work is submitted to the device.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum, serde::Deserialize, serde::Serialize,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Submission {
    /// Operation by operation
    Eager,
    /// As a graph, captured once
    Captured,
}

/// Median and spread of the samples, in seconds.
#[derive(Clone, Copy, Debug, Default, serde::Deserialize, serde::Serialize)]
pub(crate) struct Times {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Times {
    /// The time of each of `parts` equal parts.
    pub(crate) fn divided(self, parts: f64) -> Self {
        Self {
            median: self.median / parts,
            least: self.least / parts,
            most: self.most / parts,
        }
    }
}

/// Measured times of work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// From its beginning to its end in the stream.
    pub(crate) stream: Times,
    /// Time of the host to enqueue it.
    pub(crate) host: Times,
}

/// Stream work that enqueues the same operations on every call.
pub(crate) type Work<'a> = Box<dyn Fn(&Stream) -> Result<()> + 'a>;

/// A borrowed [`Work`].
pub(crate) type WorkRef<'a> = &'a dyn Fn(&Stream) -> Result<()>;

/// Measures on one stream of every rank.
pub(crate) struct BenchClock<'a> {
    pub(crate) comm: &'a Communicator,
    pub(crate) stream: Stream,
    /// For all samples of a measurement, if they have a limit of their own.
    pub(crate) limit: Option<Duration>,
    begin: Event,
    end: Event,
    barrier: StreamBarrier,
}

impl<'a> BenchClock<'a> {
    /// Every rank makes one at the same time.
    pub(crate) fn new(comm: &'a Communicator, priority: Priority) -> Result<Self> {
        let stream = comm.create_stream(priority)?;
        // One pair for all samples, since each is complete before the next one begins.
        let (begin, end) = (
            comm.device().create_event(true)?,
            comm.device().create_event(true)?,
        );
        Ok(Self {
            comm,
            stream,
            limit: None,
            begin,
            end,
            // Not the communicator's default path, so that samples start alike whichever path the work takes.
            barrier: comm.stream_barrier_by(Path::OneBlock)?,
        })
    }

    /// Repeats `work`, which waits for no other rank, for `time`: a device that was idle while inputs were
    /// drawn is slow at first.
    pub(crate) fn warm_up(&self, time: Duration, work: WorkRef<'_>) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < time {
            work(&self.stream)?;
            self.comm.synchronize(&self.stream)?;
        }
        Ok(())
    }

    /// A graph of `work`.
    pub(crate) fn capture(&self, work: WorkRef<'_>) -> Result<Graph> {
        self.stream.begin_capture()?;
        let captured = work(&self.stream).context("while a graph was captured");
        // Also after a failure: a bench may go on with other cases, on the same stream.
        let graph = self.stream.end_capture();
        captured?;
        Ok(graph?)
    }

    /// Runs `work` once to its end.
    pub(crate) fn run(&self, submission: Submission, work: WorkRef<'_>) -> Result<()> {
        match submission {
            Submission::Eager => work(&self.stream)?,
            Submission::Captured => self.capture(work)?.launch(&self.stream)?,
        }
        Ok(self.comm.synchronize(&self.stream)?)
    }

    /// Times `work`, `samples` times after warming up. A sample is `repeat` runs in a row, and its time that of one.
    pub(crate) fn measure(
        &self,
        samples: usize,
        submission: Submission,
        repeat: usize,
        work: WorkRef<'_>,
    ) -> Result<Times> {
        let times = self.measure_in_turn(samples, submission, repeat, &[Box::new(work)])?;
        Ok(times.first().context("nothing was timed")?.stream)
    }

    /// As [`measure`](Self::measure) for several works whose samples alternate, so that they see the same clock rates
    /// and temperatures.
    pub(crate) fn measure_in_turn(
        &self,
        samples: usize,
        submission: Submission,
        repeat: usize,
        works: &[Work<'_>],
    ) -> Result<Vec<Taken>> {
        let limit = self.limit.map(Deadline::after);
        let stream = &self.stream;
        let mut turns = Vec::with_capacity(works.len());
        let repeated =
            |work: &Work<'_>, stream: &Stream| (0..repeat).try_for_each(|_| work(stream));
        // Before the first sample: capturing and instantiating a graph between two would leave the device idle.
        for work in works {
            let graph = match submission {
                Submission::Eager => None,
                Submission::Captured => Some(self.capture(&|stream| repeated(work, stream))?),
            };
            turns.push((work, graph));
        }
        let mut times = vec![[Vec::new(), Vec::new()]; works.len()];
        // The first runs load kernels, upload graphs and map memory.
        const WARM_UP: usize = 2;
        for sample in 0..samples + WARM_UP {
            for ((work, graph), times) in turns.iter().zip(&mut times) {
                self.comm.barrier()?;
                self.barrier.enqueue(stream)?;
                let took = self.timed(limit, &|stream| match graph {
                    Some(graph) => Ok(graph.launch(stream)?),
                    None => repeated(work, stream),
                })?;
                if sample >= WARM_UP {
                    for (times, took) in times.iter_mut().zip(took) {
                        times.push(took);
                    }
                }
            }
        }
        let taken = |[stream, host]: [Vec<f64>; 2]| -> Result<Taken> {
            Ok(Taken {
                stream: self.slowest(stream)?.divided(repeat as f64),
                host: self.slowest(host)?.divided(repeat as f64),
            })
        };
        times.into_iter().map(taken).collect()
    }

    /// Seconds of `count` runs of `work` in a row, on this rank alone.
    pub(crate) fn alone(&self, count: usize, work: WorkRef<'_>) -> Result<f64> {
        let all = |stream: &Stream| (0..count).try_for_each(|_| work(stream));
        let [on_stream, _] = self.timed(None, &all)?;
        Ok(on_stream)
    }

    /// Seconds that the stream takes for `work`, and that the host takes to enqueue it.
    fn timed(&self, limit: Option<Deadline>, work: WorkRef<'_>) -> Result<[f64; 2]> {
        let stream = &self.stream;
        stream.record(&self.begin)?;
        let enqueuing = Instant::now();
        work(stream)?;
        // Before the event, whose recording is not part of the work.
        let host = enqueuing.elapsed();
        stream.record(&self.end)?;
        match limit {
            Some(limit) => stream.synchronize(limit)?,
            None => self.comm.synchronize(stream)?,
        }
        // Events return milliseconds.
        let on_stream = f64::from(self.end.elapsed_since(&self.begin)?) / 1e3;
        Ok([on_stream, host.as_secs_f64()])
    }

    /// Statistics over samples, each the maximum over the ranks.
    pub(crate) fn slowest(&self, own: Vec<f64>) -> Result<Times> {
        let mut samples = vec![0f64; own.len()];
        // Sample by sample, since the slowest rank differs between samples; the medians of ranks would hide that.
        for rank in gather(self.comm, &own)? {
            for (slowest, time) in samples.iter_mut().zip(rank) {
                *slowest = slowest.max(time);
            }
        }
        Ok(Times {
            median: median(&mut samples),
            // `median` has sorted them.
            least: samples.first().copied().unwrap_or(f64::NAN),
            most: samples.last().copied().unwrap_or(f64::NAN),
        })
    }
}

/// The median of `figures`, which it sorts; NaN if there are none.
pub(crate) fn median(figures: &mut [f64]) -> f64 {
    // A total order: a NaN is sorted to an end, where comparing partially would panic or leave the order undefined.
    figures.sort_by(f64::total_cmp);
    // The upper one of the two in the middle of an even number: a time that was measured.
    let middle = figures.get(figures.len() / 2);
    middle.copied().unwrap_or(f64::NAN)
}

//! Benchmarks plans against each other.

use super::plan::{CapturedPlan, Plan};
use super::{Executor, RankContext};
use crate::device::{Event, Priority, Stream};
use crate::error::{Error, Result};
use crate::p2p::StreamBarrier;
use crate::program::times::Times;

/// Warm-up runs of each plan.
const WARM_UP: usize = 2;

impl Executor {
    /// Times `plans` in turn, so that all see the same clock rates, `samples` times each for every submission mode.
    /// All ranks start a run together, and the slowest rank counts. Collective: every rank calls it at the same time
    /// with plans of the same programs, and all get the same times. Blocks until all runs complete.
    pub(crate) fn time_in_turn(&self, plans: Vec<Plan>, samples: usize) -> Result<Vec<Times>> {
        self.context.attempt("time plans", |context| {
            Clock::new(&context)?.time_in_turn(plans, samples)
        })
    }
}

struct Clock<'a> {
    context: &'a RankContext,
    stream: Stream,
    begin: Event,
    end: Event,
    barrier: StreamBarrier,
}

impl<'a> Clock<'a> {
    fn new(context: &'a RankContext) -> Result<Self> {
        let device = &context.device;
        Ok(Self {
            stream: device.create_stream(Priority::Normal)?,
            begin: device.create_event(true)?,
            end: device.create_event(true)?,
            barrier: context.stream_barrier()?,
            context,
        })
    }

    /// Eager and captured times of `plans`.
    fn time_in_turn(&self, plans: Vec<Plan>, samples: usize) -> Result<Vec<Times>> {
        let eager: Vec<_> = plans
            .iter()
            .map(|plan| |stream: &Stream| plan.run(stream))
            .collect();
        let eager = self.medians(&eager, samples)?;
        let captured: Vec<Option<CapturedPlan>> = plans
            .into_iter()
            // Infinite time keeps such a plan out of the choice of graphs.
            .map(|plan| match plan.eager_only() {
                Some(_) => Ok(None),
                None => plan.capture().map(Some),
            })
            .collect::<Result<_>>()?;
        let launches: Vec<_> = captured
            .iter()
            .flatten()
            .map(|plan| |stream: &Stream| plan.launch(stream))
            .collect();
        let mut launched = self.medians(&launches, samples)?.into_iter();
        let captured = captured.iter().map(|plan| match plan {
            Some(_) => launched.next().unwrap_or(f64::INFINITY),
            None => f64::INFINITY,
        });
        Ok(eager
            .into_iter()
            .zip(captured)
            .map(|(eager, captured)| Times { eager, captured })
            .collect())
    }

    /// Median time of each of `works`.
    fn medians(
        &self,
        works: &[impl Fn(&Stream) -> Result<()>],
        samples: usize,
    ) -> Result<Vec<f64>> {
        let mut own = Vec::with_capacity(samples * works.len());
        for sample in 0..samples + WARM_UP {
            for work in works {
                self.context.barrier()?;
                // Hosts leave their barrier at different times, and this one lets all devices start together.
                self.barrier.enqueue(&self.stream)?;
                self.stream.record(&self.begin)?;
                work(&self.stream)?;
                self.stream.record(&self.end)?;
                self.stream.synchronize(self.context.deadline())?;
                if sample >= WARM_UP {
                    own.push(f64::from(self.end.elapsed_since(&self.begin)?) / 1e3);
                }
            }
        }
        let slowest = self.slowest(&own)?;
        Ok((0..works.len())
            .map(|work| {
                let mut times: Vec<f64> = slowest
                    .iter()
                    .copied()
                    .skip(work)
                    .step_by(works.len())
                    .collect();
                times.sort_by(f64::total_cmp);
                times.get(times.len() / 2).copied().unwrap_or(f64::INFINITY)
            })
            .collect())
    }

    /// Maximum over all ranks for each of `own`.
    fn slowest(&self, own: &[f64]) -> Result<Vec<f64>> {
        let mut slowest = own.to_vec();
        for rank in self.context.gather(&slowest)? {
            if rank.len() != own.len() {
                return Err(Error::mismatch(format!(
                    "a rank timed {} runs; expected {}",
                    rank.len(),
                    own.len()
                ))
                .with_operation("time plans")
                .with_help("call this with the same programs on every rank"));
            }
            for (slowest, time) in slowest.iter_mut().zip(rank) {
                *slowest = slowest.max(time);
            }
        }
        Ok(slowest)
    }
}

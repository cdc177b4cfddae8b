//! Matmul + reduce-scatter.

use super::runs::{Bound, CapturedOverlap, Runs, available, check, several};
use super::{Choice, MatmulReduceScatter, Options, machine_of};
use crate::device::{DeviceSlice, Stream};
use crate::error::Result;
use crate::program::lower::{choose_matmul_reduce_scatter, lower_matmul_reduce_scatter};
use crate::program::{Executor, Plan};
use std::fmt;

/// The memory of a matmul + reduce-scatter. With [`Options::outer`] above 1, `a` and `c` hold so
/// many of these one after the other.
#[derive(Clone, Debug)]
pub struct MatmulReduceScatterBuffers {
    /// This rank's part of A's columns, `[m, k / world]`.
    pub a: DeviceSlice,
    /// This rank's part of B's rows, `[k / world, n]`.
    pub b: DeviceSlice,
    /// A vector of `n`, the same on every rank, exactly where the problem has a bias. It counts
    /// once.
    pub bias: Option<DeviceSlice>,
    /// This rank's part of C's rows, `[m / world, n]`.
    pub c: DeviceSlice,
}

/// A matmul + reduce-scatter that is ready to run on given memory, any number of times.
///
/// Every rank makes the same plans in the same order. Drop a plan when the streams that it ran on
/// are done; the memory is kept until then.
pub struct MatmulReduceScatterPlan {
    runs: Runs,
}

impl fmt::Debug for MatmulReduceScatterPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.runs.debug("MatmulReduceScatterPlan", f)
    }
}

impl MatmulReduceScatterPlan {
    /// Makes a plan: chooses the variant, lowers and verifies it, exchanges handles and tunes the
    /// products. Every rank calls this at the same time with the same problem and options. Blocks
    /// until the peers have exchanged theirs.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where `m` or `k` does not
    /// divide by the world size, a size is zero, the element type has no products, or a slice is
    /// not as long as the problem says;
    /// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) where the collective variant
    /// is forced and there is no library for it.
    pub fn new(
        executor: &Executor,
        problem: &MatmulReduceScatter,
        options: &Options,
        buffers: &MatmulReduceScatterBuffers,
    ) -> Result<Self> {
        Self::make(executor, problem, options, buffers)
            .map_err(|error| error.on_rank(executor.rank()))
    }

    fn make(
        executor: &Executor,
        problem: &MatmulReduceScatter,
        options: &Options,
        buffers: &MatmulReduceScatterBuffers,
    ) -> Result<Self> {
        check(options)?;
        let world = executor.world();
        let machine = match &options.machine {
            Some(machine) => machine.clone(),
            None => machine_of(executor.device_kind()),
        };
        let choice = choose_matmul_reduce_scatter(problem, world, &machine, options.variant)?;
        let mut tensors = vec![
            Bound::parted("A", &buffers.a),
            Bound::shared("B", &buffers.b),
            Bound::parted("C", &buffers.c),
        ];
        let bias: Vec<DeviceSlice> = buffers.bias.iter().cloned().collect();
        tensors.extend(several("bias", &bias, problem.bias.into(), Bound::shared)?);
        let mut choice = available(executor, choice)?;
        choice.streams = options.streams.unwrap_or(choice.variant.scatter_streams());
        let lowered = lower_matmul_reduce_scatter(problem, world, choice.variant, choice.streams)?;
        let runs = Runs::new(executor, choice, lowered, options, &tensors)?;
        Ok(Self { runs })
    }

    /// Enqueues one run, starting from and joining back into `stream`. Does not block. The next may
    /// be enqueued before it is done.
    pub fn run(&self, stream: &Stream) -> Result<()> {
        self.runs.run(stream)
    }

    /// Turns the plan into one graph. Blocks while the graph is prepared.
    pub fn capture(self) -> Result<CapturedOverlap> {
        self.runs.capture()
    }

    /// The variant, and why.
    pub fn choice(&self) -> &Choice {
        &self.runs.choice
    }

    /// The text of the host program that runs.
    pub fn program(&self) -> &str {
        &self.runs.lowered.text
    }

    /// The bound programs, one for each outer index.
    pub fn plans(&self) -> &[Plan] {
        &self.runs.plans
    }
}

/// Enqueues a matmul + reduce-scatter once: makes a plan, runs it, and lets go of it when the run is
/// done. Every rank calls this at the same time. Blocks until the peers have exchanged handles, not
/// until the result is there. For what repeats, make a [`MatmulReduceScatterPlan`] instead. Gives
/// the variant that runs, and why.
///
/// # Errors
/// As [`MatmulReduceScatterPlan::new`];
/// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) in a capture.
pub fn matmul_reduce_scatter(
    executor: &Executor,
    stream: &Stream,
    problem: &MatmulReduceScatter,
    options: &Options,
    buffers: &MatmulReduceScatterBuffers,
) -> Result<Choice> {
    MatmulReduceScatterPlan::new(executor, problem, options, buffers)?
        .runs
        .once(stream)
}

//! All-gather + matmul.

use super::runs::{Bound, CapturedOverlap, Runs, available, check, several};
use super::{AllGatherMatmul, Choice, Options, machine_of};
use crate::device::{DeviceSlice, Stream};
use crate::error::{Error, Result};
use crate::program::lower::{choose_all_gather_matmul, lower_all_gather_matmul};
use crate::program::{Executor, Plan};
use std::fmt;

/// The memory of an all-gather + matmul. With [`Options::outer`] above 1, `a`, the results and
/// `gathered` hold so many of these one after the other.
#[derive(Clone, Debug)]
pub struct AllGatherMatmulBuffers {
    /// This rank's part of A, `[m / world, k]`.
    pub a: DeviceSlice,
    /// The right operands, each `[k, n]`; not shared, whole on every rank.
    pub b: Vec<DeviceSlice>,
    /// For each right operand a vector of `n`, where the problem has a bias; else none.
    pub bias: Vec<DeviceSlice>,
    /// The results, each `[m, n]`: the parts in rank order.
    pub c: Vec<DeviceSlice>,
    /// All of A, `[m, k]`, where the problem keeps it; else `None`, and the plan has memory of its
    /// own for it.
    pub gathered: Option<DeviceSlice>,
}

/// An all-gather + matmul that is ready to run on given memory, any number of times.
///
/// Every rank makes the same plans in the same order. Drop a plan when the streams that it ran on
/// are done; the memory is kept until then.
pub struct AllGatherMatmulPlan {
    runs: Runs,
}

impl fmt::Debug for AllGatherMatmulPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.runs.debug("AllGatherMatmulPlan", f)
    }
}

impl AllGatherMatmulPlan {
    /// Makes a plan: chooses the variant, lowers and verifies it, exchanges handles and tunes the
    /// products. Every rank calls this at the same time with the same problem and options. Blocks
    /// until the peers have exchanged theirs.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where `m` does not divide
    /// by the world size, a size is zero, the element type has no products, or a slice is not as
    /// long as the problem says;
    /// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) where the collective variant
    /// is forced and there is no library for it.
    pub fn new(
        executor: &Executor,
        problem: &AllGatherMatmul,
        options: &Options,
        buffers: &AllGatherMatmulBuffers,
    ) -> Result<Self> {
        Self::make(executor, problem, options, buffers)
            .map_err(|error| error.on_rank(executor.rank()))
    }

    fn make(
        executor: &Executor,
        problem: &AllGatherMatmul,
        options: &Options,
        buffers: &AllGatherMatmulBuffers,
    ) -> Result<Self> {
        check(options)?;
        let world = executor.world();
        let machine = match &options.machine {
            Some(machine) => machine.clone(),
            None => machine_of(executor.device_kind()),
        };
        let choice = choose_all_gather_matmul(problem, world, &machine, options.variant)?;
        let mut tensors = vec![Bound::parted("A", &buffers.a)];
        tensors.extend(several("B", &buffers.b, problem.n.len(), Bound::shared)?);
        tensors.extend(several("C", &buffers.c, problem.n.len(), Bound::parted)?);
        let biases = if problem.bias { problem.n.len() } else { 0 };
        tensors.extend(several("bias", &buffers.bias, biases, Bound::shared)?);
        match (&buffers.gathered, problem.keep) {
            (Some(gathered), true) => tensors.push(Bound::parted("G", gathered)),
            (None, false) => {}
            _ => {
                return Err(Error::invalid(
                    "memory for the gathered A is given exactly when the problem keeps it",
                ));
            }
        }
        let mut choice = available(executor, choice)?;
        choice.streams = options.streams.unwrap_or(choice.variant.gather_streams());
        let lowered = lower_all_gather_matmul(problem, world, choice.variant, choice.streams)?;
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

/// Enqueues an all-gather + matmul once: makes a plan, runs it, and lets go of it when the run is
/// done. Every rank calls this at the same time. Blocks until the peers have exchanged handles, not
/// until the result is there. For what repeats, make an [`AllGatherMatmulPlan`] instead. Gives the
/// variant that runs, and why.
///
/// # Errors
/// As [`AllGatherMatmulPlan::new`];
/// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) in a capture.
pub fn all_gather_matmul(
    executor: &Executor,
    stream: &Stream,
    problem: &AllGatherMatmul,
    options: &Options,
    buffers: &AllGatherMatmulBuffers,
) -> Result<Choice> {
    AllGatherMatmulPlan::new(executor, problem, options, buffers)?
        .runs
        .once(stream)
}

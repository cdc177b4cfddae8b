//! All-gather + matmul.

use super::operands::{BoundOperands, family};
use super::plan::OverlapPlan;
use super::{AllGatherMatmul, Choice, Options};
use crate::device::{DeviceSlice, Stream};
use crate::error::{Error, Result};
use crate::program::Executor;

/// Memory of an all-gather + matmul. With [`Options::outer`] above 1, `a`, the results and `gathered` hold
/// one of these for each outer index, consecutively.
#[derive(Clone, Debug)]
pub struct AllGatherMatmulBuffers {
    /// This rank's part of A, `[m / world, k]`.
    pub a: DeviceSlice,
    /// Right operands, each `[k, n]` (`[n, k]` if transposed); complete on every rank.
    pub b: Vec<DeviceSlice>,
    /// For each right operand a vector of `n` if the problem has a bias; else empty.
    pub bias: Vec<DeviceSlice>,
    /// Results, each `[m, n]`: parts in rank order.
    pub c: Vec<DeviceSlice>,
    /// All of A, `[m, k]`, if the problem keeps it; else `None`, and the plan uses internal memory.
    pub gathered: Option<DeviceSlice>,
}

impl AllGatherMatmul {
    /// Creates a plan: selects and verifies the lowering, exchanges handles and tunes the matmuls. If the
    /// cost model finds several lowerings close to the fastest, they are timed on the machine, with the
    /// inputs and temporary outputs (see [`Options::trials`]). Collective, with the same problem and options;
    /// blocks until all ranks have exchanged theirs.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if `m` is not divisible by the world
    /// size, a size is zero, the element type has no matmul, or a slice has the wrong length;
    /// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) if only the collective is allowed and
    /// its library is missing.
    pub fn plan(
        &self,
        executor: &Executor,
        options: &Options,
        buffers: &AllGatherMatmulBuffers,
    ) -> Result<OverlapPlan> {
        OverlapPlan::new(executor, self, options, self.tensors(buffers))
    }

    /// Memory of the program's tensors.
    fn tensors(&self, buffers: &AllGatherMatmulBuffers) -> Result<Vec<BoundOperands>> {
        let count = self.n.len();
        let biases = if self.bias { count } else { 0 };
        let mut tensors = vec![BoundOperands::parted("A", &buffers.a)];
        tensors.extend(family("B", &buffers.b, count, BoundOperands::shared)?);
        tensors.extend(family("C", &buffers.c, count, BoundOperands::written)?);
        tensors.extend(family(
            "bias",
            &buffers.bias,
            biases,
            BoundOperands::shared,
        )?);
        match (&buffers.gathered, self.keep) {
            (Some(gathered), true) => tensors.push(BoundOperands::written("G", gathered)),
            (None, false) => {}
            (given, _) => {
                return Err(Error::invalid(if given.is_some() {
                    "unexpected memory for the gathered A; the problem does not keep it"
                } else {
                    "missing memory for the gathered A; the problem keeps it"
                }));
            }
        }
        Ok(tensors)
    }
}

/// Enqueues an all-gather + matmul once: creates a plan, runs it, and releases it when the run is complete.
/// Collective. Blocks until the peers have exchanged handles, not until the result is ready. For repeated
/// use, create a [plan](AllGatherMatmul::plan) instead. Returns the lowering and the reason for it.
///
/// # Errors
/// As [`AllGatherMatmul::plan`]; [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) during a capture.
pub fn all_gather_matmul(
    executor: &Executor,
    stream: &Stream,
    problem: &AllGatherMatmul,
    options: &Options,
    buffers: &AllGatherMatmulBuffers,
) -> Result<Choice> {
    let plan = problem.plan(executor, &options.for_one_run(), buffers)?;
    plan.once(stream)
}

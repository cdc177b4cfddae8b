//! Matmul + reduce-scatter.

use super::operands::BoundOperands;
use super::plan::OverlapPlan;
use super::{Choice, MatmulReduceScatter, Options};
use crate::device::{DeviceSlice, Stream};
use crate::error::{Error, Result};
use crate::program::Executor;

/// Memory of a matmul + reduce-scatter. With [`Options::outer`] above 1, `a` and `c` hold that many,
/// consecutively.
#[derive(Clone, Debug)]
pub struct MatmulReduceScatterBuffers {
    /// This rank's part of A's columns, `[m, k / world]`.
    pub a: DeviceSlice,
    /// This rank's part of B's rows, `[k / world, n]`; `[n, k / world]` if transposed.
    pub b: DeviceSlice,
    /// A vector of `n`, equal on every rank, if and only if the problem has a bias. Added once.
    pub bias: Option<DeviceSlice>,
    /// This rank's part of C's rows, `[m / world, n]`.
    pub c: DeviceSlice,
}

impl MatmulReduceScatter {
    /// Creates a plan: selects and verifies the lowering, exchanges handles and tunes the matmuls. If the
    /// cost model finds several lowerings close to the fastest, they are timed on the machine, with the
    /// inputs and temporary outputs (see [`Options::trials`]). Collective, with the same problem and options;
    /// blocks until all ranks have exchanged theirs.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if `m` or `k` is not divisible by
    /// the world size, a size is zero, the element type has no matmul, or a slice has the wrong length;
    /// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) if only the collective is allowed and
    /// its library is missing.
    pub fn plan(
        &self,
        executor: &Executor,
        options: &Options,
        buffers: &MatmulReduceScatterBuffers,
    ) -> Result<OverlapPlan> {
        OverlapPlan::new(executor, self, options, self.tensors(buffers))
    }

    /// Memory of the program's tensors.
    fn tensors(&self, buffers: &MatmulReduceScatterBuffers) -> Result<Vec<BoundOperands>> {
        let mut tensors = vec![
            BoundOperands::parted("A", &buffers.a),
            BoundOperands::shared("B", &buffers.b),
            BoundOperands::written("C", &buffers.c),
        ];
        match (&buffers.bias, self.bias) {
            (Some(bias), true) => tensors.push(BoundOperands::shared("bias", bias)),
            (None, false) => {}
            (given, _) => {
                return Err(Error::invalid(if given.is_some() {
                    "unexpected bias memory; the problem has no bias"
                } else {
                    "missing bias memory; the problem has a bias"
                }));
            }
        }
        Ok(tensors)
    }
}

/// Enqueues a matmul + reduce-scatter once: creates a plan, runs it, and releases it when the run is
/// complete. Collective. Blocks until the peers have exchanged handles, not until the result is ready. For
/// repeated use, create a [plan](MatmulReduceScatter::plan) instead. Returns the lowering and the reason for
/// it.
///
/// # Errors
/// As [`MatmulReduceScatter::plan`]; [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) during a
/// capture.
pub fn matmul_reduce_scatter(
    executor: &Executor,
    stream: &Stream,
    problem: &MatmulReduceScatter,
    options: &Options,
    buffers: &MatmulReduceScatterBuffers,
) -> Result<Choice> {
    let plan = problem.plan(executor, &options.for_one_run(), buffers)?;
    plan.once(stream)
}

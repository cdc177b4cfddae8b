//! Matmul + reduce-scatter.

use super::operands::Bound;
use super::plan::OverlapPlan;
use super::{Choice, MatmulReduceScatter, Options};
use crate::device::{DeviceSlice, Stream};
use crate::error::{Error, Result};
use crate::program::Executor;

/// The memory of a matmul + reduce-scatter. With [`Options::outer`] above 1, `a` and `c` hold so
/// many of these one after the other.
#[derive(Clone, Debug)]
pub struct MatmulReduceScatterBuffers {
    /// This rank's part of A's columns, `[m, k / world]`.
    pub a: DeviceSlice,
    /// This rank's part of B's rows, `[k / world, n]`; `[n, k / world]` where it is transposed.
    pub b: DeviceSlice,
    /// A vector of `n`, the same on every rank, exactly where the problem has a bias. It counts
    /// once.
    pub bias: Option<DeviceSlice>,
    /// This rank's part of C's rows, `[m / world, n]`.
    pub c: DeviceSlice,
}

impl MatmulReduceScatter {
    /// Makes a plan: chooses the lowering and verifies it, exchanges handles and tunes the matmuls.
    /// Where the cost model finds several lowerings close to the fastest, they are tried on the machine,
    /// with the inputs and with other memory than the outputs (see [`Options::trials`]). Every rank calls this at the same time with the same problem and options. Blocks until the
    /// peers have exchanged theirs.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where `m` or `k` does not
    /// divide by the world size, a size is zero, the element type has no matmul, or a slice is not
    /// as long as the problem says; [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing)
    /// where only the collective is allowed and there is no library for it.
    pub fn plan(
        &self,
        executor: &Executor,
        options: &Options,
        buffers: &MatmulReduceScatterBuffers,
    ) -> Result<OverlapPlan> {
        OverlapPlan::new(executor, self, options, self.tensors(buffers))
    }

    /// The memory of the program's tensors.
    fn tensors(&self, buffers: &MatmulReduceScatterBuffers) -> Result<Vec<Bound>> {
        let mut tensors = vec![
            Bound::parted("A", &buffers.a),
            Bound::shared("B", &buffers.b),
            Bound::written("C", &buffers.c),
        ];
        match (&buffers.bias, self.bias) {
            (Some(bias), true) => tensors.push(Bound::shared("bias", bias)),
            (None, false) => {}
            (given, _) => {
                return Err(Error::invalid(if given.is_some() {
                    "there is memory of a bias; expected none, since the problem has none"
                } else {
                    "there is no memory of the bias; expected some, since the problem has one"
                }));
            }
        }
        Ok(tensors)
    }
}

/// Enqueues a matmul + reduce-scatter once: makes a plan, runs it, and lets go of it when the run is
/// done. Every rank calls this at the same time. Blocks until the peers have exchanged handles, not
/// until the result is there. For what repeats, make a [plan](MatmulReduceScatter::plan) instead.
/// Gives the lowering that runs, and why.
///
/// # Errors
/// As [`MatmulReduceScatter::plan`]; [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) in a
/// capture.
pub fn matmul_reduce_scatter(
    executor: &Executor,
    stream: &Stream,
    problem: &MatmulReduceScatter,
    options: &Options,
    buffers: &MatmulReduceScatterBuffers,
) -> Result<Choice> {
    // A trial takes longer than one run is worth.
    let options = Options {
        trials: false,
        ..options.clone()
    };
    problem.plan(executor, &options, buffers)?.once(stream)
}

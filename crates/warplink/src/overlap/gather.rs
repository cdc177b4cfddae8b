//! All-gather + matmul.

use super::operands::{Bound, family};
use super::plan::OverlapPlan;
use super::{AllGatherMatmul, Choice, Options};
use crate::device::{DeviceSlice, Stream};
use crate::error::{Error, Result};
use crate::program::Executor;

/// The memory of an all-gather + matmul. With [`Options::outer`] above 1, `a`, the results and
/// `gathered` hold one of these for each rank, one after the other.
#[derive(Clone, Debug)]
pub struct AllGatherMatmulBuffers {
    /// This rank's part of A, `[m / world, k]`.
    pub a: DeviceSlice,
    /// The right operands, each `[k, n]` (`[n, k]` where it is transposed); not shared, whole on every rank.
    pub b: Vec<DeviceSlice>,
    /// For each right operand a vector of `n`, where the problem has a bias; else none.
    pub bias: Vec<DeviceSlice>,
    /// The results, each `[m, n]`: the parts in rank order.
    pub c: Vec<DeviceSlice>,
    /// All of A, `[m, k]`, where the problem keeps it; else `None`, and the plan has memory of its
    /// own for it.
    pub gathered: Option<DeviceSlice>,
}

impl AllGatherMatmul {
    /// Makes a plan: chooses the lowering and verifies it, exchanges handles and tunes the matmuls.
    /// Where the cost model finds several lowerings close to the fastest, they are tried on the machine,
    /// with the inputs and with other memory than the outputs (see [`Options::trials`]). Every rank calls this at the same time with the same problem and options. Blocks until the
    /// peers have exchanged theirs.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where `m` does not divide
    /// by the world size, a size is zero, the element type has no matmul, or a slice is not as long as
    /// the problem says; [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) where only
    /// the collective is allowed and there is no library for it.
    pub fn plan(
        &self,
        executor: &Executor,
        options: &Options,
        buffers: &AllGatherMatmulBuffers,
    ) -> Result<OverlapPlan> {
        OverlapPlan::new(executor, self, options, self.tensors(buffers))
    }

    /// The memory of the program's tensors.
    fn tensors(&self, buffers: &AllGatherMatmulBuffers) -> Result<Vec<Bound>> {
        let count = self.n.len();
        let biases = if self.bias { count } else { 0 };
        let mut tensors = vec![Bound::parted("A", &buffers.a)];
        tensors.extend(family("B", &buffers.b, count, Bound::shared)?);
        tensors.extend(family("C", &buffers.c, count, Bound::written)?);
        tensors.extend(family("bias", &buffers.bias, biases, Bound::shared)?);
        match (&buffers.gathered, self.keep) {
            (Some(gathered), true) => tensors.push(Bound::written("G", gathered)),
            (None, false) => {}
            (given, _) => {
                return Err(Error::invalid(if given.is_some() {
                    "there is memory for the gathered A; expected none, since it is not kept"
                } else {
                    "there is no memory for the gathered A; expected some, since it is kept"
                }));
            }
        }
        Ok(tensors)
    }
}

/// Enqueues an all-gather + matmul once: makes a plan, runs it, and lets go of it when the run is
/// done. Every rank calls this at the same time. Blocks until the peers have exchanged handles, not
/// until the result is there. For what repeats, make a [plan](AllGatherMatmul::plan) instead. Gives
/// the lowering that runs, and why.
///
/// # Errors
/// As [`AllGatherMatmul::plan`]; [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) in a
/// capture.
pub fn all_gather_matmul(
    executor: &Executor,
    stream: &Stream,
    problem: &AllGatherMatmul,
    options: &Options,
    buffers: &AllGatherMatmulBuffers,
) -> Result<Choice> {
    // A trial takes longer than one run is worth.
    let options = Options {
        trials: false,
        ..options.clone()
    };
    problem.plan(executor, &options, buffers)?.once(stream)
}

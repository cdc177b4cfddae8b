//! Matmuls overlapped with the communication that feeds or follows them.
//!
//! | call | what it computes |
//! | call | result |
//! | [`all_gather_matmul`], [`AllGatherMatmul::plan`] | `C = A · B`, where every rank has some of A's rows and needs all of C |
//! | [`matmul_reduce_scatter`], [`MatmulReduceScatter::plan`] | `C = A · B`, where every rank has a part of the contraction and needs some of C's rows |
//!
//! A plan is created once, collectively, for slices of device memory; then every [`run`](OverlapPlan::run)
//! only enqueues. The functions are for single use. Both are lowered to a host program (see
//! [`lower`](crate::program::lower)). The lowering is selected by a cost model, by trials of close
//! candidates, or by [`Options::lowering`]; a plan's `choice()` explains it.
//!
//! Elements are bf16, f16 or f32, accumulated in f32. Everything is row-major and contiguous, but B may be
//! transposed in memory (`transposed_b`), like the weights of a linear layer.
//!
//! # Leading dimensions
//! A may have more than two dimensions, `[.., m, k]`, and be gathered along any but the last; C likewise is
//! scattered along any but the last. [`Leading`] maps such a shape to rows: if all dimensions before the
//! shared one are 1 (the common case), those after it are flattened into rows and there is one program.
//! Otherwise a rank's part is not contiguous; then there is one program for each index of the preceding
//! dimensions, run consecutively.

mod gather;
mod operands;
mod plan;
mod scatter;
mod trial;

pub use crate::program::lower::{
    AllGatherMatmul, AllGatherMatmulLowering, Choice, Decision, Lowering, MatmulReduceScatter,
    MatmulReduceScatterLowering,
};
pub use gather::{AllGatherMatmulBuffers, all_gather_matmul};
pub use plan::{CapturedOverlap, OverlapPlan};
pub use scatter::{MatmulReduceScatterBuffers, matmul_reduce_scatter};

use crate::error::{Error, Result};
use crate::program::cost::HardwareModel;
use std::sync::Arc;

/// Default of [`Options::streams`]: with two, one matmul fills the device while the last tiles of the other
/// run.
pub const DEFAULT_STREAMS: usize = 2;

/// Options of a plan; equal on every rank.
#[derive(Clone, Debug)]
pub struct Options {
    /// Restricts the choice to one lowering. By default the cost model chooses among the library's and
    /// `added`.
    pub lowering: Option<Lowering>,
    /// Additional lowerings to choose from.
    pub added: Vec<Lowering>,
    /// Number of streams that the matmuls alternate between.
    pub streams: usize,
    /// Number of repetitions, for the dimensions before the shared one; see [`Leading::outer`].
    pub outer: usize,
    /// Hardware model for the cost model; by default the device's.
    pub model: Option<Arc<HardwareModel>>,
    /// Whether to time candidates on the machine when the model finds several within its
    /// [uncertainty](HardwareModel::uncertainty). Creating the plan then takes up to some tenths of a second
    /// longer, and memory for another result. The single-use functions never do.
    pub trials: bool,
    /// Whether to verify the lowered program before it runs.
    pub verify: bool,
    /// Whether the vendor's library executes collectives; see [`PrepareOptions::library`](crate::program::PrepareOptions).
    pub library: bool,
    /// Most multiprocessors that kernels which wait for other ranks may occupy at a time, equal on all ranks; without a
    /// limit by default. The matmuls have no limit, nor has the vendor's library, which then executes collectives; see
    /// [`PrepareOptions::multiprocessors`](crate::program::PrepareOptions::multiprocessors).
    pub multiprocessors: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            lowering: None,
            added: Vec::new(),
            streams: DEFAULT_STREAMS,
            outer: 1,
            model: None,
            trials: true,
            verify: true,
            library: false,
            multiprocessors: None,
        }
    }
}

impl Options {
    /// As these, for a plan that is run once: trials would take longer than that can save.
    fn for_one_run(&self) -> Self {
        Self {
            trials: false,
            ..self.clone()
        }
    }

    /// Defaults with only `lowering` allowed.
    pub fn only(lowering: Lowering) -> Self {
        Self {
            lowering: Some(lowering),
            ..Self::default()
        }
    }
}

/// A shape `[.., m, k]` viewed as rows of `k`, of which those along one dimension are distributed over the
/// ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leading {
    /// Number of separate matmuls: product of the dimensions before the shared one.
    pub outer: usize,
    /// Rows of each: product of the shared dimension and those after it, except the last. This is the `m` of
    /// [`AllGatherMatmul`] and [`MatmulReduceScatter`].
    pub rows: usize,
    /// The last dimension.
    pub columns: usize,
}

impl Leading {
    /// Interprets the whole tensor's `shape`, distributed along `dimension`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if `dimension` is the last or does
    /// not exist, an extent is 0, or the number of rows overflows.
    pub fn of(shape: &[usize], dimension: usize) -> Result<Self> {
        let invalid = |what: &str| {
            Error::invalid(format!(
                "{shape:?} shared along dimension {dimension}: {what}"
            ))
        };
        let Some((&columns, leading)) = shape.split_last() else {
            return Err(invalid("there is no dimension"));
        };
        if dimension >= leading.len() {
            return Err(invalid("it can be any but the last"));
        }
        if shape.contains(&0) {
            return Err(invalid("an extent is 0"));
        }
        let product = |part: &[usize]| {
            part.iter()
                .try_fold(1_usize, |all, extent| all.checked_mul(*extent))
                .ok_or_else(|| invalid("it has too many rows"))
        };
        let (before, shared) = leading.split_at(dimension);
        Ok(Self {
            outer: product(before)?,
            rows: product(shared)?,
            columns,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_after_the_shared_one_are_rows() {
        let leading = |shape: &[usize], dimension| {
            let leading = Leading::of(shape, dimension).unwrap();
            (leading.outer, leading.rows, leading.columns)
        };
        assert_eq!(leading(&[6, 5], 0), (1, 6, 5));
        assert_eq!(leading(&[2, 3, 4, 5], 0), (1, 24, 5));
        assert_eq!(leading(&[2, 3, 4, 5], 1), (2, 12, 5));
        assert_eq!(leading(&[2, 3, 4, 5], 2), (6, 4, 5));
        for (shape, dimension) in [
            (&[][..], 0),
            (&[5], 0),
            (&[4, 5], 1),
            (&[4, 0, 5], 0),
            (&[usize::MAX, 2, 5], 0),
        ] {
            assert!(Leading::of(shape, dimension).is_err(), "{shape:?}");
        }
    }
}

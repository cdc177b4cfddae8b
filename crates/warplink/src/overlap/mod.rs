//! Matmuls overlapped with the communication that feeds or follows them.
//!
//! | call | what it computes |
//! |---|---|
//! | [`all_gather_matmul`], [`AllGatherMatmul::plan`] | `C = A · B`, where every rank has a part of A's rows and wants all of C |
//! | [`matmul_reduce_scatter`], [`MatmulReduceScatter::plan`] | `C = A · B`, where every rank has a part of the contraction and wants a part of C's rows |
//!
//! A plan is made once, by all ranks at the same time, for slices of device memory; then every
//! [`run`](OverlapPlan::run) only enqueues. The functions are for one use. Both are lowered
//! to a host program (see [`lower`](crate::program::lower)). Which lowering runs is chosen by a cost
//! model, by trials of those that it finds close, or by [`Options::lowering`]; a plan's `choice()`
//! explains it.
//!
//! Elements are bf16, f16 or f32, accumulated in f32. Everything is row-major and contiguous, but B may
//! be transposed in memory (`transposed_b`), as the weights of a linear layer are.
//!
//! # Leading dimensions
//! A may have more than two dimensions, `[.., m, k]`, and be gathered along any but the last; C
//! likewise is scattered along any but the last. [`Leading`] says how such a shape is one of rows:
//! where all dimensions before the one that is shared are 1 (the common case), those after it are
//! flattened into rows and there is one program. Otherwise a rank's part is not one contiguous range
//! of the whole; then there is one program for each index of the dimensions before, one after the
//! other.

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

/// How many streams the matmuls of a plan take turns on unless [`Options::streams`] says otherwise:
/// with two, one fills the device while the last tiles of the other run.
pub const DEFAULT_STREAMS: usize = 2;

/// How a plan is made; the same on every rank.
#[derive(Clone, Debug)]
pub struct Options {
    /// The only lowering that is allowed. Where there is none, the cost model chooses among the
    /// library's and `added`.
    pub lowering: Option<Lowering>,
    /// Lowerings of the caller's, to be chosen among as well.
    pub added: Vec<Lowering>,
    /// How many streams the matmuls take turns on.
    pub streams: usize,
    /// How often the whole is done, for the leading dimensions before the one that is shared; see
    /// [`Leading::outer`].
    pub outer: usize,
    /// What the cost model takes the machine for; the model that is found for the device where none
    /// is given.
    pub model: Option<Arc<HardwareModel>>,
    /// Whether a plan is decided by times on the machine where the model finds several lowerings within
    /// its [uncertainty](HardwareModel::uncertainty). Making the plan then takes up to some tenths of a
    /// second longer, and memory for another result. The functions of one use never try.
    pub trials: bool,
    /// Whether the lowered program is verified before it runs.
    pub verify: bool,
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
        }
    }
}

impl Options {
    /// The defaults with `lowering` alone allowed.
    pub fn only(lowering: Lowering) -> Self {
        Self {
            lowering: Some(lowering),
            ..Self::default()
        }
    }
}

/// A shape `[.., m, k]` seen as rows of `k`, of which those along one dimension are shared by the
/// ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leading {
    /// How many separate matmuls there are: the product of the dimensions before the shared one.
    pub outer: usize,
    /// Rows of each: the product of the shared dimension and those after it, but the last. This is
    /// the `m` of [`AllGatherMatmul`] and [`MatmulReduceScatter`].
    pub rows: usize,
    /// The last dimension.
    pub columns: usize,
}

impl Leading {
    /// Reads the whole tensor's `shape`, shared along `dimension`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where `dimension` is the
    /// last or not there, an extent is 0, or the number of rows overflows.
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

//! A rank's instances of tensors, and contiguous parts of them.

use super::ir::{Role, Sharding};
use super::site::Site;
use crate::dtype::DType;
use std::sync::Arc;

/// Index of a tensor in [`RankProgram::tensors`](super::rank_program::RankProgram::tensors).
pub type TensorId = usize;

/// A rank's instance of a tensor.
#[derive(Clone, Debug)]
pub struct TensorInstance {
    /// Its name in the program.
    pub name: Arc<str>,
    /// Its element type.
    pub dtype: DType,
    /// Its extents, outermost first.
    pub shape: Vec<usize>,
    /// Whether its memory holds the transpose of its last two axes.
    pub column_major: bool,
    /// How it relates to the tensor as a whole.
    pub sharding: Sharding,
    /// Its length; never zero.
    pub bytes: usize,
    /// What it is to the caller.
    pub role: Role,
    /// Its declaration.
    pub site: Site,
}

/// A contiguous part of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Range {
    /// The tensor.
    pub tensor: TensorId,
    /// Where the part starts.
    pub offset_bytes: usize,
    /// How long it is; never zero.
    pub bytes: usize,
}

impl Range {
    /// One after the last byte.
    pub const fn end(&self) -> usize {
        self.offset_bytes + self.bytes
    }
}

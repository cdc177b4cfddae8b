//! A rank's instances of tensors, and contiguous parts of them.

use super::ir::{Role, Sharding};
use super::section::TensorId;
use super::site::Site;
use crate::dtype::DType;
use std::sync::Arc;

/// A rank's instance of a tensor.
#[derive(Clone, Debug)]
pub struct TensorInstance {
    /// Its name in the program.
    pub name: Arc<str>,
    /// Its element type.
    pub dtype: DType,
    /// Its extents, outermost first.
    pub shape: Vec<usize>,
    /// Whether memory stores the transpose of the last two axes.
    pub column_major: bool,
    /// How it relates to the tensor as a whole.
    pub sharding: Sharding,
    /// Length in bytes; never zero.
    pub bytes: usize,
    /// Role for the caller.
    pub role: Role,
    /// Greatest value, from 0 on, of elements that kernels read as integers; some elements may be bounded by others.
    pub value_bound: Option<i64>,
    /// Its declaration.
    pub site: Site,
}

/// A contiguous part of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Range {
    /// The tensor.
    pub tensor: TensorId,
    /// Offset of the part, in bytes.
    pub offset_bytes: usize,
    /// Length in bytes; never zero.
    pub bytes: usize,
}

impl Range {
    /// Bytes of a tensor.
    pub const fn of(tensor: TensorId, bytes: std::ops::Range<usize>) -> Self {
        Self {
            tensor,
            offset_bytes: bytes.start,
            bytes: bytes.end - bytes.start,
        }
    }

    /// End offset, exclusive.
    pub const fn end(&self) -> usize {
        self.offset_bytes + self.bytes
    }
}

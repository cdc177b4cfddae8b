//! Element-wise operations.

use super::slice::DeviceSlice;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::named::{alternatives, named};

/// Maximum number of sources that every device supports.
pub const MAX_ELEMENTWISE_SOURCES: usize = 16;

/// Maximum number of axes that every device supports.
pub const MAX_ELEMENTWISE_AXES: usize = 4;

named! {
    /// Element-wise function.
    pub enum ElementwiseOp: "operation" {
        /// Sum of all sources.
        Sum = "sum",
        /// Product of all sources.
        Product = "product",
        /// Maximum of all sources.
        Max = "max",
        /// Minimum of all sources.
        Min = "min",
        /// The single source converted to the target type.
        Cast = "cast",
        /// The single source, bit for bit.
        Copy = "copy",
    }
}

impl ElementwiseOp {
    /// Whether it takes exactly one source.
    pub const fn is_unary(self) -> bool {
        matches!(self, Self::Cast | Self::Copy)
    }
}

/// Elements of a slice.
#[derive(Clone, Debug)]
pub struct Operand {
    /// Covers the first to the last element.
    pub slice: DeviceSlice,
    /// Stride of each axis in elements.
    pub strides: Vec<usize>,
}

impl Operand {
    /// All elements of a slice, along one axis.
    pub fn contiguous(slice: DeviceSlice) -> Self {
        Self {
            slice,
            strides: vec![1],
        }
    }
}

/// An element-wise operation: each target element is computed from the source elements at the same indices,
/// in order of the sources.
///
/// 16-bit floats are accumulated in `f32` and rounded once, to nearest; `f32`, `f64` and `i32` in their own
/// type, where `i32` wraps. Maximum and minimum ignore NaN unless all sources are NaN. Casts to 16-bit floats
/// go through `f32`; casts to integers truncate and saturate, and map NaN to 0.
#[derive(Clone, Debug)]
pub struct Elementwise {
    /// Function.
    pub op: ElementwiseOp,
    /// Element type of the target.
    pub dtype: DType,
    /// Element type of the sources; differs from the target's only for a cast.
    pub source_dtype: DType,
    /// Extents of target and sources, outermost axis first; at most [`MAX_ELEMENTWISE_AXES`].
    pub shape: Vec<usize>,
    /// Output. Its elements must not alias one another. It may be identical to a source of the same type.
    pub target: Operand,
    /// Inputs, at most [`MAX_ELEMENTWISE_SOURCES`].
    pub sources: Vec<Operand>,
}

impl Elementwise {
    /// An operation on contiguous slices of one type and length.
    pub fn new(
        op: ElementwiseOp,
        dtype: DType,
        target: &DeviceSlice,
        sources: &[DeviceSlice],
    ) -> Self {
        Self {
            op,
            dtype,
            source_dtype: dtype,
            shape: vec![target.bytes() / dtype.size()],
            target: Operand::contiguous(target.clone()),
            sources: sources.iter().cloned().map(Operand::contiguous).collect(),
        }
    }

    /// A cast of a contiguous slice.
    pub fn cast(
        (dtype, target): (DType, &DeviceSlice),
        (source_dtype, source): (DType, &DeviceSlice),
    ) -> Self {
        Self {
            source_dtype,
            sources: vec![Operand::contiguous(source.clone())],
            ..Self::new(ElementwiseOp::Cast, dtype, target, &[])
        }
    }

    /// Number of elements of the target.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether all operands are contiguous.
    pub fn is_contiguous(&self) -> bool {
        let mut all = std::iter::once(&self.target).chain(&self.sources);
        self.shape.len() == 1 && all.all(|operand| operand.strides == [1])
    }

    /// Validates the operation for every device.
    pub(crate) fn check(&self) -> Result<()> {
        let (op, dtype) = (self.op, self.dtype);
        let wrong = |text: String| Err(Error::invalid(text).with_operation(op.name()));
        let most = if op.is_unary() {
            1
        } else {
            MAX_ELEMENTWISE_SOURCES
        };
        if self.sources.is_empty() || self.sources.len() > most {
            return wrong(format!(
                "{} sources of a {op}; expected 1 to {most}",
                self.sources.len()
            ));
        }
        if self.shape.is_empty() || self.shape.len() > MAX_ELEMENTWISE_AXES {
            return wrong(format!(
                "{} axes; expected 1 to {MAX_ELEMENTWISE_AXES}",
                self.shape.len()
            ));
        }
        if op != ElementwiseOp::Cast && dtype != self.source_dtype {
            return wrong(format!(
                "a {op} of {} into {dtype}; expected one type, or a cast",
                self.source_dtype
            ));
        }
        let refused = match op {
            ElementwiseOp::Copy => None,
            ElementwiseOp::Cast => [dtype, self.source_dtype]
                .into_iter()
                .find(|dtype| !DType::ELEMENTWISE.contains(dtype)),
            _ => Some(dtype).filter(|dtype| !DType::computed_elementwise().contains(dtype)),
        };
        if let Some(dtype) = refused {
            let types = alternatives(&DType::computed_elementwise());
            let message = format!("unsupported element type {dtype}; expected {types}");
            return Err(Error::unsupported(message)
                .with_operation(op.name())
                .with_help("use one of these types"));
        }
        let sources = self
            .sources
            .iter()
            .map(|source| (source, self.source_dtype));
        for (operand, dtype) in std::iter::once((&self.target, dtype)).chain(sources) {
            let expected = self.spanned(&operand.strides, dtype);
            if Some(operand.slice.bytes()) != expected {
                return wrong(format!(
                    "a slice of {} bytes for {:?} elements of {dtype} at steps of {:?}; expected one that \
                     goes from the first to the last",
                    operand.slice.bytes(),
                    self.shape,
                    operand.strides
                ));
            }
        }
        // With strides, interleaved elements overlap as ranges of bytes without sharing any; callers answer for
        // these.
        if !self.is_contiguous() {
            return Ok(());
        }
        let target = &self.target.slice;
        let partly = |source: &&Operand| {
            let source = &source.slice;
            let same = source.address() == target.address() && source.bytes() == target.bytes();
            source.overlaps(target) && !same
        };
        match self.sources.iter().find(partly) {
            None => Ok(()),
            Some(source) => wrong(format!(
                "source {:?} overlaps a part of the target {target:?}; expected the same slice or none of it",
                source.slice
            )),
        }
    }

    /// Bytes from the first to the last element; `None` on overflow, or if the strides do not match the
    /// shape.
    fn spanned(&self, strides: &[usize], dtype: DType) -> Option<usize> {
        if strides.len() != self.shape.len() {
            return None;
        }
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut last: usize = 0;
        for (extent, stride) in self.shape.iter().zip(strides) {
            // The last element rather than the product of the extents: strides may leave gaps.
            last = last.checked_add((extent - 1).checked_mul(*stride)?)?;
        }
        last.checked_add(1)?.checked_mul(dtype.size())
    }
}

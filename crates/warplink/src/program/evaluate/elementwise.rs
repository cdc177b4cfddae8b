//! Results of element-wise operations.

use super::value::BoundedValue;
use crate::dtype::DType;
use crate::program::ir::ElementwiseOp;
use std::borrow::Cow;

/// Results of an operation with a target of `dtype`, as they are stored.
pub(super) fn combined(
    op: ElementwiseOp,
    dtype: DType,
    sources: &[Cow<'_, [BoundedValue]>],
) -> Vec<BoundedValue> {
    let Some((first, rest)) = sources.split_first() else {
        return Vec::new();
    };
    if op == ElementwiseOp::Cast {
        return first.iter().map(|value| value.cast(dtype)).collect();
    }
    let mut all = first.to_vec();
    for source in rest {
        for (value, other) in all.iter_mut().zip(source.iter()) {
            *value = match op {
                // With many sources, a device may store the intermediate result.
                ElementwiseOp::Sum => value.plus(*other).stored(dtype),
                // A product of two i32 may exceed the 53 bits of f64, so that wrapping it afterwards would be too
                // late.
                ElementwiseOp::Product if dtype == DType::I32 => value.times_wrapping(*other),
                ElementwiseOp::Product => value.times(*other).stored(dtype),
                ElementwiseOp::Max => value.larger(*other),
                ElementwiseOp::Min => value.smaller(*other),
                ElementwiseOp::Cast | ElementwiseOp::Copy => *value,
            };
        }
    }
    all
}

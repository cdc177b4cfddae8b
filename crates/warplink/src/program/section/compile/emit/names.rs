//! Names of the kernels' headers.

use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::program::section::RowReduction;

/// Name of the element type in `warplink/elements.cuh`: its own name, except that an 8-bit float is named by its
/// format alone.
pub(super) fn element_name(dtype: DType) -> String {
    let name = dtype.name();
    let (first, rest) = name.strip_prefix("f8").unwrap_or(name).split_at(1);
    first.to_ascii_uppercase() + rest
}

/// Name of the operator in the headers.
pub(super) fn operator_name(operator: ReduceOp) -> &'static str {
    match operator {
        ReduceOp::Sum => "Add",
        ReduceOp::Max => "Maximum",
        ReduceOp::Min => "Minimum",
        ReduceOp::Product => "Multiply",
        ReduceOp::Average => "Average",
        ReduceOp::ScaledSum(_) => "ScaledSum",
    }
}

/// The element type by which targets are stored.
pub(super) fn stored_name(dtype: DType) -> String {
    match dtype {
        DType::U8 => "RowByte".to_owned(),
        _ => element_name(dtype),
    }
}

/// Name of the operator of a reduction along rows.
pub(super) fn row_operator(reduction: RowReduction) -> &'static str {
    match reduction {
        RowReduction::Sum => "RowSum",
        RowReduction::Max => "RowMax",
    }
}

//! NCCL's element types and operators.

use super::{Nccl, NcclHandle};
use crate::device::{Factor, ReduceOp};
use crate::dtype::DType;
use std::ffi::c_int;

/// `ncclUint8`, for operations that only move data.
pub(in crate::device::cuda) const BYTES: c_int = 1;

/// `ncclScalarHostImmediate`: the factor is read before the call returns.
const ON_HOST: c_int = 1;

/// Element types in the order of `ncclDataType_t`.
pub const NCCL_TYPES: [DType; 12] = [
    DType::I8,
    DType::U8,
    DType::I32,
    DType::U32,
    DType::I64,
    DType::U64,
    DType::F16,
    DType::F32,
    DType::F64,
    DType::BF16,
    DType::F8E4M3,
    DType::F8E5M2,
];

/// Operators without a factor in the order of `ncclRedOp_t`.
pub const NCCL_OPERATORS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Product,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Average,
];

/// NCCL's code of an element type.
pub(in crate::device::cuda) fn data_type(dtype: DType) -> c_int {
    let known = NCCL_TYPES.iter().position(|known| *known == dtype);
    known.map_or(-1, |number| number as c_int)
}

/// Calls `with` with NCCL's operator for an element type. A temporary operator is destroyed afterwards.
///
/// # Safety
/// `comm` must be a communicator that may be called now.
pub(in crate::device::cuda) unsafe fn with_operator(
    nccl: &Nccl,
    comm: NcclHandle,
    (op, dtype): (ReduceOp, DType),
    with: impl FnOnce(c_int) -> c_int,
) -> c_int {
    let Some(factor) = op.factor() else {
        return with(operator(op));
    };
    let mut scalar = scalar(factor, dtype);
    let (mut made, data_type) = (0, data_type(dtype));
    let at = scalar.as_mut_ptr().cast();
    // SAFETY: `made` is an output parameter for one number; the scalar is one of the type, in the host's memory, which
    // is read before the function returns. The caller vouches for the communicator.
    let code = unsafe { (nccl.ncclRedOpCreatePreMulSum)(&mut made, at, data_type, ON_HOST, comm) };
    if code != 0 {
        return code;
    }
    let called = with(made);
    // SAFETY: made above for this communicator. NCCL allows it when the call that was given it has returned.
    let destroyed = unsafe { (nccl.ncclRedOpDestroy)(made, comm) };
    if called != 0 { called } else { destroyed }
}

/// A factor encoded as an element, padded with zeros.
fn scalar(factor: Factor, dtype: DType) -> [u8; 8] {
    let element = dtype.encode([factor.rounded(dtype).value()]);
    let mut bytes = [0; 8];
    bytes[..element.len()].copy_from_slice(&element);
    bytes
}

/// NCCL's code of an operator, ignoring its factor.
fn operator(op: ReduceOp) -> c_int {
    let known = NCCL_OPERATORS.iter().position(|known| *known == op);
    known.map_or(0, |number| number as c_int)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_is_an_element_of_the_type() {
        let half = |dtype| scalar(Factor::new(0.5), dtype);
        assert_eq!(half(DType::F64), 0.5_f64.to_ne_bytes());
        assert_eq!(half(DType::F32)[..4], 0.5_f32.to_ne_bytes());
        assert_eq!(half(DType::F16)[..2], 0x3800_u16.to_ne_bytes());
        assert_eq!(half(DType::BF16)[..2], 0x3f00_u16.to_ne_bytes());
        assert_eq!(half(DType::F8E4M3)[0], 0x30);
        assert_eq!(half(DType::F8E5M2)[0], 0x38);
        assert_eq!(half(DType::F8E5M2)[1..], [0; 7]);
    }
}

//! Conversion of rows of memory to single-precision values, and back; of words to integers.

use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::program::section::{RowArgument, RowBinary, RowValue};

/// Arguments of a row function: sources of these types, combined in order.
pub(super) fn row_arguments(
    arguments: &[RowArgument],
    types: &[DType],
    sources: &[Vec<u8>],
) -> Result<Vec<Vec<f32>>> {
    let mut next = types.iter().zip(sources);
    let one = |argument: &RowArgument| {
        let (count, operator) = match argument {
            RowArgument::Number(number) => return Ok(vec![number.value()]),
            RowArgument::Sources(count, operator) => (*count, *operator),
        };
        let mut these = next.by_ref().take(count);
        let first = these.next().map(|(dtype, bytes)| dtype.decode_f32(bytes));
        let missing = || Error::internal("a row has no source");
        let mut all = first.ok_or_else(missing)?;
        let factor = operator.factor().map(|factor| factor.value() as f32);
        // Each source before it is added, as NCCL's scaled sum and the kernels do.
        let begin = |value: f32| factor.map_or(value, |factor| value * factor);
        all.iter_mut().for_each(|value| *value = begin(*value));
        for (dtype, bytes) in these {
            for (value, other) in all.iter_mut().zip(dtype.decode_f32(bytes)) {
                *value = combined(operator, *value, begin(other));
            }
        }
        if operator == ReduceOp::Average {
            all.iter_mut().for_each(|value| *value /= count as f32);
        }
        Ok(all)
    };
    arguments.iter().map(one).collect()
}

fn combined(operator: ReduceOp, a: f32, b: f32) -> f32 {
    let function = match operator {
        ReduceOp::Sum | ReduceOp::Average | ReduceOp::ScaledSum(_) => RowBinary::Add,
        ReduceOp::Product => RowBinary::Multiply,
        ReduceOp::Max => RowBinary::Max,
        ReduceOp::Min => RowBinary::Min,
    };
    a.binary(function, b)
}

/// Bytes of a row of `elements`, each rounded to `dtype`; a single value is broadcast.
pub(super) fn row_bytes(dtype: DType, values: &[f32], elements: usize) -> Vec<u8> {
    let at = |element: usize| values[if values.len() == 1 { 0 } else { element }];
    dtype.encode((0..elements).map(|element| at(element).into()))
}

/// An integer of a type that lanes read; -1, which is out of any range, for any other.
pub(super) fn integer(dtype: DType, bytes: &[u8]) -> i64 {
    let word = |bytes: &[u8]| {
        Some([
            *bytes.first()?,
            *bytes.get(1)?,
            *bytes.get(2)?,
            *bytes.get(3)?,
        ])
    };
    let low = word(bytes).map(u32::from_le_bytes);
    let high = bytes.get(4..).and_then(word).map(u32::from_le_bytes);
    match (dtype, low, high) {
        (DType::I32, Some(low), _) => (low as i32).into(),
        (DType::U32, Some(low), _) => low.into(),
        (DType::I64, Some(low), Some(high)) => (u64::from(high) << 32 | u64::from(low)) as i64,
        _ => -1,
    }
}

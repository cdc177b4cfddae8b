//! Rows of memory as values in single precision, and back.

use crate::device::ReduceOp;
use crate::dtype::{DType, Element, F8E4M3, F8E5M2};
use crate::error::{Error, ErrorKind, Result};
use crate::program::section::{RowArgument, RowBinary, RowValue};
use half::{bf16, f16};

/// The arguments of a function: sources, of these types, combined in their order.
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
        let first = these.next().map(|(dtype, bytes)| decode(*dtype, bytes));
        let missing = || Error::new(ErrorKind::Internal, "a row has no source");
        let mut all = first.ok_or_else(missing)?;
        let factor = operator.factor().map(|factor| factor.value() as f32);
        let begin = |value: f32| factor.map_or(value, |factor| value * factor);
        all.iter_mut().for_each(|value| *value = begin(*value));
        for (dtype, bytes) in these {
            let others = decode(*dtype, bytes);
            for (value, other) in all.iter_mut().zip(others) {
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

/// The values of `bytes`.
fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    fn all<T: Element>(bytes: &[u8], value: fn(T) -> f32) -> Vec<f32> {
        let chunks = bytes.chunks_exact(size_of::<T>());
        let elements = chunks.filter_map(|chunk| T::read_from_bytes(chunk).ok());
        elements.map(value).collect()
    }
    match dtype {
        DType::F16 => all(bytes, f16::to_f32),
        DType::BF16 => all(bytes, bf16::to_f32),
        DType::F8E4M3 => all(bytes, F8E4M3::to_f32),
        DType::F8E5M2 => all(bytes, F8E5M2::to_f32),
        _ => all(bytes, |value: f32| value),
    }
}

/// The bytes of a row of `elements`, each rounded to `dtype`; one value is that of all.
pub(super) fn row_bytes(dtype: DType, values: &[f32], elements: usize) -> Vec<u8> {
    fn all<T: Element>(values: impl Iterator<Item = f32>, element: fn(f32) -> T) -> Vec<u8> {
        let elements = values.map(element);
        elements.flat_map(|it| it.as_bytes().to_vec()).collect()
    }
    let at = |element: usize| values[if values.len() == 1 { 0 } else { element }];
    let values = (0..elements).map(at);
    match dtype {
        DType::F16 => all(values, f16::from_f32),
        DType::BF16 => all(values, bf16::from_f32),
        DType::F8E4M3 => all(values, F8E4M3::from_f32),
        DType::F8E5M2 => all(values, F8E5M2::from_f32),
        _ => all(values, |value| value),
    }
}

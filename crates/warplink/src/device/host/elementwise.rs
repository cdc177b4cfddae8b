//! Element-wise operations on the host.

use super::extremes::Extremes;
use super::lane::{Values, combine};
use super::memory;
use crate::device::{DeviceSlice, Elementwise, ElementwiseOp, Operand, ReduceOp};
use crate::dtype::{DType, Element};
use crate::error::Result;
use half::{bf16, f16};
use zerocopy::IntoBytes;

/// An arithmetic type and its accumulator.
trait Number: Element {
    type Sum: Copy;
    fn widen(self) -> Self::Sum;
    fn narrow(value: Self::Sum) -> Self;
    fn combine(op: ElementwiseOp, a: Self::Sum, b: Self::Sum) -> Self::Sum;
}

macro_rules! float {
    ($type:ty, $sum:ty, $widen:expr, $narrow:expr) => {
        impl Number for $type {
            type Sum = $sum;
            fn widen(self) -> $sum {
                $widen(self)
            }
            fn narrow(value: $sum) -> Self {
                $narrow(value)
            }
            fn combine(op: ElementwiseOp, a: $sum, b: $sum) -> $sum {
                match op {
                    ElementwiseOp::Product => a * b,
                    ElementwiseOp::Max => a.larger(b),
                    ElementwiseOp::Min => a.smaller(b),
                    _ => a + b,
                }
            }
        }
    };
}

macro_rules! integer {
    ($type:ty) => {
        impl Number for $type {
            type Sum = Self;
            fn widen(self) -> Self {
                self
            }
            fn narrow(value: Self) -> Self {
                value
            }
            // Wraps on overflow, as on a GPU.
            fn combine(op: ElementwiseOp, a: Self, b: Self) -> Self {
                match op {
                    ElementwiseOp::Product => a.wrapping_mul(b),
                    ElementwiseOp::Max => a.larger(b),
                    ElementwiseOp::Min => a.smaller(b),
                    _ => a.wrapping_add(b),
                }
            }
        }
    };
}

float!(f16, f32, f16::to_f32, f16::from_f32);
float!(bf16, f32, bf16::to_f32, bf16::from_f32);
float!(f32, f32, std::convert::identity, std::convert::identity);
float!(f64, f64, std::convert::identity, std::convert::identity);
integer!(i32);
integer!(u8);

/// Executes a validated operation.
pub(super) fn run(request: &Elementwise) -> Result<()> {
    let size = request.source_dtype.size();
    let shape = &request.shape;
    let read = |source: &Operand| {
        let mut bytes = vec![0; request.elements() * size];
        each_run(shape, source, size, |slice, at| {
            memory::read_bytes(slice, &mut bytes[at..at + slice.bytes()])
        })?;
        Ok(bytes)
    };
    let sources = request.sources.iter().map(read);
    let sources = sources.collect::<Result<Vec<Vec<u8>>>>()?;
    let result = match request.op {
        ElementwiseOp::Copy => sources.concat(),
        ElementwiseOp::Cast => cast(request.dtype, request.source_dtype, &sources.concat()),
        op => combined(op, request.dtype, &sources),
    };
    each_run(shape, &request.target, request.dtype.size(), |slice, at| {
        memory::write_bytes(slice, &result[at..at + slice.bytes()])
    })
}

/// Combines `sources` into `target`, in order, for any number of sources and any type.
pub(super) fn reduce(
    op: ReduceOp,
    dtype: DType,
    target: &DeviceSlice,
    sources: &[DeviceSlice],
) -> Result<()> {
    let sources = sources.iter().map(|source| source as &dyn Values);
    let sources: Vec<&dyn Values> = sources.collect();
    combine(op, dtype, &sources, &mut |from, bytes| {
        memory::write_to(target, from, bytes)
    })
}

/// Calls `with` for each contiguous run of an operand and its byte offset, in index order. Gaps are not
/// touched: another stream may be writing there.
fn each_run(
    shape: &[usize],
    operand: &Operand,
    size: usize,
    mut with: impl FnMut(&DeviceSlice, usize) -> Result<()>,
) -> Result<()> {
    if shape.contains(&0) {
        return Ok(());
    }
    let inner = match (shape.last(), operand.strides.last()) {
        (Some(&extent), Some(1)) => extent,
        _ => 1,
    };
    let mut index = vec![0; shape.len()];
    let runs = shape.iter().product::<usize>() / inner;
    for run in 0..runs {
        let steps = index.iter().zip(&operand.strides);
        let from = steps.map(|(index, stride)| index * stride).sum::<usize>() * size;
        with(
            &operand.slice.slice(from..from + inner * size)?,
            run * inner * size,
        )?;
        for (axis, extent) in shape.iter().enumerate().rev() {
            index[axis] += if axis + 1 == shape.len() { inner } else { 1 };
            if index[axis] < *extent {
                break;
            }
            index[axis] = 0;
        }
    }
    Ok(())
}

fn combined(op: ElementwiseOp, dtype: DType, sources: &[Vec<u8>]) -> Vec<u8> {
    match dtype {
        DType::F16 => combined_as::<f16>(op, sources),
        DType::BF16 => combined_as::<bf16>(op, sources),
        DType::F32 => combined_as::<f32>(op, sources),
        DType::F64 => combined_as::<f64>(op, sources),
        DType::I32 => combined_as::<i32>(op, sources),
        DType::U8 => combined_as::<u8>(op, sources),
        // Other types are only copied.
        _ => sources.first().cloned().unwrap_or_default(),
    }
}

fn combined_as<T: Number>(op: ElementwiseOp, sources: &[Vec<u8>]) -> Vec<u8> {
    let mut sources = sources.iter().map(|bytes| elements::<T>(bytes));
    let first = sources.next().into_iter().flatten();
    let mut all: Vec<T::Sum> = first.map(T::widen).collect();
    for source in sources {
        for (value, other) in all.iter_mut().zip(source) {
            *value = T::combine(op, *value, other.widen());
        }
    }
    let rounded: Vec<T> = all.into_iter().map(T::narrow).collect();
    rounded.as_bytes().to_vec()
}

/// Converts through `f64`, which represents all values of every type.
fn cast(to: DType, from: DType, bytes: &[u8]) -> Vec<u8> {
    let values: Vec<f64> = match from {
        DType::F16 => elements::<f16>(bytes).map(Element::to_f64).collect(),
        DType::BF16 => elements::<bf16>(bytes).map(Element::to_f64).collect(),
        DType::F32 => elements::<f32>(bytes).map(Element::to_f64).collect(),
        DType::F64 => elements::<f64>(bytes).collect(),
        DType::I32 => elements::<i32>(bytes).map(Element::to_f64).collect(),
        DType::U8 => bytes.iter().map(|value| f64::from(*value)).collect(),
        _ => Vec::new(),
    };
    fn stored<T: Element>(values: &[f64], narrow: impl Fn(f64) -> T) -> Vec<u8> {
        let values: Vec<T> = values.iter().copied().map(narrow).collect();
        values.as_bytes().to_vec()
    }
    match to {
        DType::F16 => stored(&values, |value| f16::from_f32(value as f32)),
        DType::BF16 => stored(&values, |value| bf16::from_f32(value as f32)),
        DType::F32 => stored(&values, |value| value as f32),
        DType::F64 => stored(&values, |value| value),
        DType::I32 => stored(&values, |value| value as i32),
        DType::U8 => stored(&values, |value| value as u8),
        _ => Vec::new(),
    }
}

fn elements<T: Element>(bytes: &[u8]) -> impl Iterator<Item = T> + '_ {
    let chunks = bytes.chunks_exact(size_of::<T>());
    chunks.filter_map(|chunk| T::read_from_bytes(chunk).ok())
}

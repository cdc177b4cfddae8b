//! Element-wise operations on the host.

use super::extremes::Extremes;
use super::lane::{Summand, Values, combine};
use super::memory;
use crate::device::{DeviceSlice, Elementwise, ElementwiseOp, Operand, ReduceOp};
use crate::dtype::{DType, Element, with_element};
use crate::error::Result;
use zerocopy::IntoBytes;

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
    with_element!(dtype, T => combined_as::<T>(op, sources))
}

fn combined_as<T: Element<Wide: Summand>>(op: ElementwiseOp, sources: &[Vec<u8>]) -> Vec<u8> {
    let combine = match op {
        ElementwiseOp::Product => Summand::times,
        ElementwiseOp::Max => Extremes::larger,
        ElementwiseOp::Min => Extremes::smaller,
        _ => T::Wide::plus,
    };
    let mut sources = sources.iter().map(|bytes| elements::<T>(bytes));
    let first = sources.next().into_iter().flatten();
    let mut all: Vec<T::Wide> = first.map(T::widen).collect();
    for source in sources {
        for (value, other) in all.iter_mut().zip(source) {
            *value = combine(*value, other.widen());
        }
    }
    let rounded: Vec<T> = all.into_iter().map(T::narrow).collect();
    rounded.as_bytes().to_vec()
}

/// Converts through `f64`, which represents all values of every type, and to 16-bit floats through `f32`, as kernels do.
fn cast(to: DType, from: DType, bytes: &[u8]) -> Vec<u8> {
    let is_half = to.is_float() && to.size() == 2;
    let narrowed = |value: f64| {
        if is_half {
            // By way of f32, as the kernels convert: two roundings may differ from one.
            (value as f32).into()
        } else {
            value
        }
    };
    to.encode(from.decode(bytes).map(narrowed))
}

fn elements<T: Element>(bytes: &[u8]) -> Vec<T> {
    let mut values = vec![T::new_zeroed(); bytes.len() / size_of::<T>()];
    let (whole, _) = bytes.split_at(size_of_val(&values[..]));
    values.as_mut_bytes().copy_from_slice(whole);
    values
}

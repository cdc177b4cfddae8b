//! Arithmetic of reductions: integers, which wrap, and how far floats may be off.

use warplink::DType;
use warplink::device::ReduceOp;
use warplink::dtype::Numbers;

/// How far the reduction of numbers of a magnitude of 2 may be off.
pub(crate) fn off(op: ReduceOp, dtype: DType, world: usize, value: f64) -> f64 {
    if matches!(op, ReduceOp::Max | ReduceOp::Min) {
        return 0.0;
    }
    let [accumulated, rounded, least] = precision(dtype);
    // Products by a factor are rounded, too.
    let roundings = world + usize::from(op.factor().is_some());
    let inner = accumulated * roundings as f64 * largest(op, world);
    inner + (value.abs() + inner) * rounded + least
}

/// By how much of a number roundings may change what is accumulated, and the result; and by how much that of the least
/// numbers.
pub(crate) fn precision(dtype: DType) -> [f64; 3] {
    let power = |power: i32| 2f64.powi(power);
    match dtype {
        DType::F16 => [power(-24), power(-11), power(-25)],
        DType::BF16 => [power(-24), power(-8), 0.0],
        DType::F8E4M3 => [power(-24), power(-4), power(-10)],
        DType::F8E5M2 => [power(-24), power(-3), power(-17)],
        DType::F32 => [power(-24), power(-24), 0.0],
        _ => [power(-52), power(-52), 0.0],
    }
}

/// The largest magnitude that a reduction of numbers of a magnitude of 2 may have.
pub(crate) fn largest(op: ReduceOp, world: usize) -> f64 {
    match op {
        ReduceOp::Product => 2f64.powi(world as i32),
        ReduceOp::ScaledSum(factor) => 2.0 * world as f64 * factor.value().abs(),
        _ => 2.0 * world as f64,
    }
}

/// The value of an integer.
pub(crate) fn integer(dtype: DType, bytes: &[u8]) -> i128 {
    let mut all = [0; 16];
    all[..bytes.len()].copy_from_slice(bytes);
    let bits = 8 * bytes.len() as u32;
    wrapped(is_signed(dtype), bits, i128::from_le_bytes(all))
}

fn is_signed(dtype: DType) -> bool {
    dtype.numbers() == Numbers::Signed
}

/// A value wrapped to `bits` bits.
fn wrapped(signed: bool, bits: u32, value: i128) -> i128 {
    let all = 1_i128 << bits;
    let value = value.rem_euclid(all);
    if signed && value >= all / 2 {
        value - all
    } else {
        value
    }
}

/// The reduction of integers, which wrap; narrow ones are added in 32 bits.
pub(crate) fn reduced_integers(op: ReduceOp, dtype: DType, values: &[i128]) -> i128 {
    let bits = 8 * dtype.size().max(4) as u32;
    let wrap = |value| wrapped(is_signed(dtype), bits, value);
    let all = values.iter().copied();
    let reduced = match op {
        ReduceOp::Max => all.max(),
        ReduceOp::Min => all.min(),
        ReduceOp::Product => all.reduce(|a, b| wrap(wrap(a).wrapping_mul(wrap(b)))),
        _ => all.reduce(|a, b| wrap(a + b)),
    };
    let reduced = reduced.unwrap();
    if op == ReduceOp::Average {
        reduced / values.len() as i128
    } else {
        reduced
    }
}

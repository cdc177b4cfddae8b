//! Conversion of single-precision values to rows of memory, and of words to integers.

use crate::dtype::DType;

/// Bytes of a row of `elements`, each rounded to `dtype`; a single value is broadcast.
pub(super) fn row_bytes(dtype: DType, values: &[f32], elements: usize) -> Vec<u8> {
    match values {
        [value] => dtype.encode_f32(&vec![*value; elements]),
        _ => dtype.encode_f32(values),
    }
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

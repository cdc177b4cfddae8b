//! Conversion of single-precision values to rows of memory, and of words to integers.

use crate::dtype::DType;

/// Bytes of a row of `elements`, each rounded to `dtype`; a single value is broadcast.
pub(super) fn row_bytes(dtype: DType, values: &[f32], elements: usize) -> Vec<u8> {
    debug_assert!(values.len() == 1 || values.len() == elements);
    match values {
        [value] => dtype.encode_f32(&vec![*value; elements]),
        _ => dtype.encode_f32(values),
    }
}

/// Integers of a type that lanes read; -1, which is out of any range, for any other.
pub(super) fn integers(dtype: DType, bytes: &[u8]) -> Vec<i64> {
    match dtype {
        DType::I32 => words(bytes, |word| i32::from_le_bytes(word).into()),
        DType::U32 => words(bytes, |word| u32::from_le_bytes(word).into()),
        DType::I64 => words(bytes, i64::from_le_bytes),
        _ => vec![-1; bytes.len() / dtype.size()],
    }
}

/// The first of them; -1 if there is none.
pub(super) fn integer(dtype: DType, bytes: &[u8]) -> i64 {
    integers(dtype, bytes).first().copied().unwrap_or(-1)
}

fn words<const SIZE: usize>(bytes: &[u8], of: impl Fn([u8; SIZE]) -> i64) -> Vec<i64> {
    bytes.as_chunks().0.iter().map(|word| of(*word)).collect()
}

//! Reproducible random matrices, so that every rank can compute the reference without communication.

use std::ops::Range;
use warplink::DType;

/// A matrix of pseudo-random elements between -1 and 1, exact in its element type, so that the reference
/// multiplies the same values.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    seed: u64,
    pub(crate) columns: usize,
    dtype: DType,
}

/// Elements drawn from one random word, and their significant bits.
fn elements_per_word(dtype: DType) -> (usize, u32) {
    match dtype {
        DType::BF16 => (8, 8),
        DType::F16 => (4, 11),
        _ => (2, 24),
    }
}

/// Bijective mixing function (SplitMix64 finalizer).
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Reproducible generator (SplitMix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0) >> 11
    }

    /// Uniform in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        self.bits() as f64 / (1_u64 << 53) as f64
    }

    /// Uniform in 0..`end`; `end` must not be 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        // The remainder's bias is negligible, since `end` is far below 2^53.
        (self.bits() % end as u64) as usize
    }
}

impl Matrix {
    /// Matrix number `which` of `seed`.
    pub(crate) fn new(seed: u64, which: u64, rows: usize, columns: usize, dtype: DType) -> Self {
        debug_assert!(rows > 0 && columns > 0);
        Self {
            seed: mix(seed ^ mix(which.wrapping_mul(STEP))),
            columns,
            dtype,
        }
    }

    /// Generates elements `columns` of a row.
    pub(crate) fn row(&self, row: usize, columns: Range<usize>, out: &mut [f32]) {
        // As many bits as the type's significand: values are exact in it, and the reference has no input error.
        let (per_word, bits) = elements_per_word(self.dtype);
        let width = 64 / per_word as u32;
        let start = mix(self.seed.wrapping_add((row as u64 + 1).wrapping_mul(STEP)));
        let scale = 1.0 / (1_u32 << (bits - 1)) as f32;
        let mut at = columns.start;
        let mut out = out.iter_mut();
        while at < columns.end {
            // A function of the position: any part of a row can be drawn alone, the same on every rank.
            let drawn = mix(start.wrapping_add(((at / per_word) as u64 + 1).wrapping_mul(STEP)));
            let first = at % per_word;
            let last = per_word.min(first + columns.end - at);
            for (index, value) in (first..last).zip(&mut out) {
                // The element's top bits, sign-extended.
                let top = (drawn << (64 - width * (index as u32 + 1))) as i64 >> (64 - bits);
                *value = top as f32 * scale;
            }
            at += last - first;
        }
    }

    /// Encodes a block row by row. `ranks` of this machine share its cores.
    pub(crate) fn bytes(&self, rows: Range<usize>, columns: Range<usize>, ranks: usize) -> Vec<u8> {
        let row_bytes = columns.len() * self.dtype.size();
        let mut bytes = vec![0; rows.len() * row_bytes];
        let each = rows.len().div_ceil(threads(ranks)).max(1);
        std::thread::scope(|scope| {
            // At least 1: `chunks_mut` panics for 0, the length of rows without columns.
            for (part, chunk) in bytes.chunks_mut((each * row_bytes).max(1)).enumerate() {
                let (first, columns) = (rows.start + part * each, columns.clone());
                scope.spawn(move || {
                    let mut values = vec![0.0; columns.len()];
                    for (row, out) in chunk.chunks_exact_mut(row_bytes).enumerate() {
                        self.row(first + row, columns.clone(), &mut values);
                        encode(self.dtype, &values, out);
                    }
                });
            }
        });
        bytes
    }
}

/// Transposes a matrix with `columns` columns.
pub(crate) fn transposed(bytes: &[u8], columns: usize, dtype: DType) -> Vec<u8> {
    let size = dtype.size();
    let rows = bytes.len() / size / columns;
    let mut out = vec![0; bytes.len()];
    for (row, values) in bytes.chunks_exact(columns * size).enumerate() {
        for (column, value) in values.chunks_exact(size).enumerate() {
            let at = (column * rows + row) * size;
            out[at..at + size].copy_from_slice(value);
        }
    }
    out
}

/// Number of threads for each of `ranks`.
pub(crate) fn threads(ranks: usize) -> usize {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    // All ranks generate at the same time, so that they share the processors.
    (all / ranks.max(1)).clamp(1, 16)
}

fn encode(dtype: DType, values: &[f32], out: &mut [u8]) {
    let pairs = values.iter().zip(out.chunks_exact_mut(dtype.size()));
    match dtype {
        // Values are exact, so truncation does not round.
        DType::BF16 => pairs.for_each(|(value, out)| {
            out.copy_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
        }),
        DType::F16 => pairs.for_each(|(value, out)| {
            out.copy_from_slice(&half::f16::from_f32(*value).to_le_bytes());
        }),
        _ => pairs.for_each(|(value, out)| out.copy_from_slice(&value.to_le_bytes())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_a_part_of_the_whole() {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let matrix = Matrix::new(7, 1, 9, 37, dtype);
            let whole = matrix.bytes(0..9, 0..37, 1);
            let all: Vec<f64> = dtype.decode(&whole).collect();
            assert!(all.iter().all(|value| (-1.0..1.0).contains(value)));
            let mean = all.iter().sum::<f64>() / all.len() as f64;
            assert!(mean.abs() < 0.15, "{dtype}: {mean}");
            let block = matrix.bytes(2..7, 5..30, 1);
            for (at, value) in dtype.decode(&block).enumerate() {
                assert_eq!(value, all[(2 + at / 25) * 37 + 5 + at % 25], "{dtype}");
            }
            let mut row = vec![0.0; 37];
            matrix.row(3, 0..37, &mut row);
            assert!(
                row.iter()
                    .zip(&all[3 * 37..])
                    .all(|(a, b)| f64::from(*a) == *b)
            );
        }
    }

    #[test]
    fn a_transpose_has_rows_for_columns() {
        let bytes = Matrix::new(7, 1, 3, 5, DType::F32).bytes(0..3, 0..5, 1);
        let turned = transposed(&bytes, 5, DType::F32);
        let [there, back] = [&bytes, &turned].map(|m| DType::F32.decode(m).collect::<Vec<_>>());
        for (row, column) in [(0, 1), (2, 4), (1, 0)] {
            assert_eq!(there[row * 5 + column], back[column * 3 + row]);
        }
        assert_eq!(transposed(&turned, 3, DType::F32), bytes);
    }

    #[test]
    fn seeds_and_matrices_differ() {
        let bytes = |seed, which| Matrix::new(seed, which, 4, 8, DType::F32).bytes(0..4, 0..8, 1);
        assert_ne!(bytes(1, 1), bytes(2, 1));
        assert_ne!(bytes(1, 1), bytes(1, 2));
    }
}

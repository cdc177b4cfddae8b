//! GEMM rows in double precision.

use super::inputs::{Matrix, threads};
use std::ops::Range;

/// GEMMs of at most this many multiplications are checked completely.
const MAX_FULL: u128 = 1 << 28;

/// Number of rows checked of a larger GEMM.
const SAMPLED: usize = 16;

/// Some rows of A · B.
#[derive(Debug)]
pub(crate) struct Reference {
    // Relative to the first row of the requested part.
    rows: Vec<usize>,
    columns: usize,
    values: Vec<f64>,
}

impl Reference {
    /// Rows of `part` of the GEMM: all if it is small, else some selected by `seed`, spread over the part.
    /// `ranks` of this machine share its cores.
    pub(crate) fn new(a: &Matrix, b: &Matrix, part: Range<usize>, ranks: usize, seed: u64) -> Self {
        let size = part.len() as u128 * a.columns as u128 * b.columns as u128;
        let count = if size <= MAX_FULL {
            part.len()
        } else {
            SAMPLED.min(part.len())
        };
        let rows: Vec<usize> = (0..count)
            .map(|index| {
                let (from, to) = (index * part.len() / count, (index + 1) * part.len() / count);
                // One row of each stratum, so that the rows of every tile and rank are covered.
                from + (seed.rotate_left(index as u32) % (to - from) as u64) as usize
            })
            .collect();
        let mut left = vec![0.0_f32; count * a.columns];
        for (row, out) in rows.iter().zip(left.chunks_exact_mut(a.columns)) {
            a.row(part.start + row, 0..a.columns, out);
        }
        let mut values = vec![0.0; count * b.columns];
        // Each thread computes all rows of some columns, so that each element of B is generated once.
        let each = b.columns.div_ceil(threads(ranks));
        let parts: Vec<(Range<usize>, Vec<f64>)> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..b.columns)
                .step_by(each)
                .map(|from| {
                    let (left, columns) = (&left, from..b.columns.min(from + each));
                    scope.spawn(move || (columns.clone(), block(left, a.columns, b, columns)))
                })
                .collect();
            workers
                .into_iter()
                // The columns of a thread that panicked stay 0, so that the comparison fails.
                .filter_map(|worker| worker.join().ok())
                .collect()
        });
        for (columns, part) in parts {
            let rows = values.chunks_exact_mut(b.columns);
            for (row, part) in rows.zip(part.chunks_exact(columns.len())) {
                row[columns.clone()].copy_from_slice(part);
            }
        }
        Self {
            rows,
            columns: b.columns,
            values,
        }
    }

    /// The rows with their index in the part.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (usize, &[f64])> {
        self.rows
            .iter()
            .copied()
            .zip(self.values.chunks_exact(self.columns))
    }
}

/// Some columns of the GEMM of `left`, with rows of length `depth`, and `b`.
fn block(left: &[f32], depth: usize, b: &Matrix, columns: Range<usize>) -> Vec<f64> {
    let width = columns.len();
    let mut sums = vec![0.0; left.len() / depth * width];
    let mut drawn = vec![0.0; width];
    let mut right = vec![0.0_f64; width];
    // One row of B at a time, which is never held as a whole.
    for p in 0..depth {
        b.row(p, columns.clone(), &mut drawn);
        for (wide, narrow) in right.iter_mut().zip(&drawn) {
            *wide = f64::from(*narrow);
        }
        let rows = left.iter().skip(p).step_by(depth);
        for (factor, sums) in rows.zip(sums.chunks_exact_mut(width)) {
            let factor = f64::from(*factor);
            for (sum, value) in sums.iter_mut().zip(&right) {
                *sum += factor * value;
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use warplink::DType;

    #[test]
    fn rows_are_those_of_the_gemm() {
        let (a, b) = (
            Matrix::new(1, 1, 12, 20, DType::F32),
            Matrix::new(1, 2, 20, 7, DType::F32),
        );
        let reference = Reference::new(&a, &b, 4..10, 1, 99);
        assert_eq!(reference.rows().count(), 6);
        let (mut left, mut right) = (vec![0.0; 20], vec![0.0; 7]);
        for (row, values) in reference.rows() {
            a.row(4 + row, 0..20, &mut left);
            let mut expected = [0.0_f64; 7];
            for (p, factor) in left.iter().enumerate() {
                b.row(p, 0..7, &mut right);
                for (sum, value) in expected.iter_mut().zip(&right) {
                    *sum += f64::from(*factor) * f64::from(*value);
                }
            }
            assert_eq!(values, expected);
        }
    }

    #[test]
    fn a_large_gemm_is_sampled() {
        let (a, b) = (
            Matrix::new(1, 1, 1 << 20, 64, DType::BF16),
            Matrix::new(1, 2, 64, 16, DType::BF16),
        );
        let reference = Reference::new(&a, &b, 0..1 << 20, 1, 0x1234_5678_9abc_def0);
        let rows: Vec<usize> = reference.rows().map(|(row, _)| row).collect();
        assert_eq!(rows.len(), SAMPLED);
        assert!(rows.windows(2).all(|pair| pair[0] < pair[1]));
    }
}

//! Seconds of a matrix multiplication by shape: measured grids, with interpolation and extrapolation.

use super::fields::{MAX_SECONDS, MIN_SECONDS};
use crate::dtype::DType;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Rows of a multiple of these bytes count as aligned.
const ALIGNMENT: usize = 16;

/// Times of matrix multiplications on one device, and the share of the device that they occupy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Gemm {
    /// Rows and columns of the result tile of a multiprocessor, for large results.
    pub tile: (usize, usize),
    /// Tile for results with fewer tiles than multiprocessors.
    pub smallest_tile: (usize, usize),
    /// Share of the multiprocessors idle in the last wave that a concurrent multiplication can use.
    pub tail_filled: f64,
    /// Multiprocessors that share a tile by splitting the contraction, if there are more of them than tiles.
    pub tile_sharers: f64,
    /// Measured times.
    pub grids: Vec<Grid>,
}

/// Times of `m × k` by `k × n` for every combination of the listed sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Grid {
    /// Element type.
    pub dtype: DType,
    /// Whether the operands' rows (of `k` and of `n` elements) are multiples of 16 bytes; libraries have slower
    /// kernels for unaligned ones.
    pub aligned: bool,
    /// Rows of the left operand, ascending.
    pub m: Vec<usize>,
    /// Columns of the left operand, ascending.
    pub k: Vec<usize>,
    /// Columns of the right operand, ascending.
    pub n: Vec<usize>,
    /// Seconds of one of many multiplications in a row on one stream, by m, then k, then n.
    pub seconds: Vec<f64>,
}

impl Gemm {
    /// Seconds of `m × k` by `k × n` alone.
    ///
    /// Interpolation is linear in the logarithms of time and each size. Beyond the largest size, time is proportional
    /// to it; below the smallest, it is constant.
    pub fn seconds(&self, dtype: DType, m: usize, k: usize, n: usize) -> f64 {
        let aligned = [k, n]
            .iter()
            .all(|size| (size * dtype.size()).is_multiple_of(ALIGNMENT));
        // If there is no matching grid, use the most similar one.
        let likeness = |grid: &&Grid| {
            let same_size = grid.dtype.size() == dtype.size();
            (grid.dtype == dtype, same_size, grid.aligned == aligned)
        };
        let grid = self.grids.iter().max_by_key(likeness);
        grid.map_or(0.0, |grid| grid.seconds(m, k, n))
    }

    /// Average share of `multiprocessors` that an `m × n` result occupies, above 0 and up to 1, as far as a
    /// concurrent multiplication benefits from the idle ones.
    ///
    /// A concurrent multiplication uses only a share of the idle multiprocessors of a last wave, because its own
    /// first wave then ends late. For results with few tiles, libraries split the contraction of a tile among
    /// multiprocessors.
    pub fn occupancy(&self, m: usize, n: usize, multiprocessors: usize) -> f64 {
        let all = multiprocessors.max(1);
        let tiles =
            |(rows, columns): (usize, usize)| m.div_ceil(rows.max(1)) * n.div_ceil(columns.max(1));
        let large = tiles(self.tile);
        if large >= all {
            let full = large as f64 / (large.div_ceil(all) * all) as f64;
            1.0 - self.tail_filled * (1.0 - full)
        } else {
            let tiles = tiles(self.smallest_tile).max(1) as f64 * self.tile_sharers;
            (tiles / all as f64).min(1.0)
        }
    }
}

impl Grid {
    fn seconds(&self, m: usize, k: usize, n: usize) -> f64 {
        let axes = [
            AxisPosition::on(&self.m, m),
            AxisPosition::on(&self.k, k),
            AxisPosition::on(&self.n, n),
        ];
        let mut logarithm = 0.0;
        // Trilinear interpolation over the corners of the cell, in logarithms: times span six orders of magnitude.
        for corner in 0..8_usize {
            let (mut index, mut weight) = (0, 1.0);
            for (axis, place) in axes.iter().enumerate() {
                let upper = corner >> axis & 1;
                let length = [self.m.len(), self.k.len(), self.n.len()][axis];
                // At the upper end both corners coincide; the share is 0 there.
                index = index * length + (place.low + upper).min(length - 1);
                weight *= if upper == 1 {
                    place.share
                } else {
                    1.0 - place.share
                };
            }
            if weight > 0.0 {
                logarithm += weight * self.seconds[index].ln();
            }
        }
        axes.iter()
            .fold(logarithm.exp(), |seconds, place| seconds * place.beyond)
    }

    pub(super) fn check(&self) -> Result<()> {
        let rising = |sizes: &[usize]| {
            sizes.first().is_some_and(|first| *first > 0)
                && sizes.windows(2).all(|pair| pair[0] < pair[1])
        };
        let whole = self.seconds.len() == self.m.len() * self.k.len() * self.n.len();
        let positive = self
            .seconds
            .iter()
            .all(|seconds| (MIN_SECONDS..=MAX_SECONDS).contains(seconds));
        if rising(&self.m) && rising(&self.k) && rising(&self.n) && whole && positive {
            return Ok(());
        }
        Err(Error::parse(format!(
            "the grid of {} is incomplete; expected rising sizes, and {MIN_SECONDS:e} to {MAX_SECONDS:e} \
                 seconds for each combination",
            self.dtype
        )))
    }
}

/// Position of a size on an axis.
struct AxisPosition {
    /// Index of the next smaller size.
    low: usize,
    /// Logarithmic position towards the next size.
    share: f64,
    /// Ratio to the largest size if it is beyond that; otherwise 1.
    beyond: f64,
}

impl AxisPosition {
    fn on(sizes: &[usize], size: usize) -> Self {
        let above = sizes.partition_point(|known| *known <= size);
        let low = above.saturating_sub(1);
        let (share, beyond) = match (sizes.get(low), sizes.get(above)) {
            (Some(below), Some(next)) if above > 0 => {
                let ln = |large: usize| (large as f64 / *below as f64).ln();
                (ln(size) / ln(*next), 1.0)
            }
            (Some(largest), None) => (0.0, size as f64 / *largest as f64),
            _ => (0.0, 1.0),
        };
        Self { low, share, beyond }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A monotonic reference time: a floor, and a rate of operations.
    fn known(m: usize, k: usize, n: usize) -> f64 {
        5e-6 + 2.0 * (m * k * n) as f64 / 1e14
    }

    fn gemm() -> Gemm {
        let sizes = vec![1, 16, 256, 4096];
        let mut seconds = Vec::new();
        for &m in &sizes {
            for &k in &sizes {
                seconds.extend(sizes.iter().map(|&n| known(m, k, n)));
            }
        }
        let grid = Grid {
            dtype: DType::F16,
            aligned: true,
            m: sizes.clone(),
            k: sizes.clone(),
            n: sizes,
            seconds,
        };
        Gemm {
            tile: (128, 256),
            smallest_tile: (64, 64),
            tail_filled: 0.5,
            tile_sharers: 4.0,
            grids: vec![grid],
        }
    }

    #[test]
    fn measured_shapes_are_met() {
        for (m, k, n) in [
            (1, 1, 1),
            (16, 256, 4096),
            (4096, 4096, 4096),
            (4096, 1, 16),
        ] {
            let seconds = gemm().seconds(DType::F16, m, k, n);
            assert!(
                (seconds / known(m, k, n) - 1.0).abs() < 1e-12,
                "{m} {k} {n}"
            );
        }
        // Beyond the grid, time is proportional to operations.
        let far = gemm().seconds(DType::F16, 8192, 4096, 4096);
        assert!((far / (2.0 * known(4096, 4096, 4096)) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn the_most_similar_grid_stands_for_one_that_is_missing() {
        let mut gemm = gemm();
        let mut other = gemm.grids[0].clone();
        other.dtype = DType::F32;
        other.seconds.iter_mut().for_each(|seconds| *seconds *= 8.0);
        gemm.grids.push(other);
        let seconds = |dtype, n| gemm.seconds(dtype, 16, 16, n);
        assert_eq!(seconds(DType::BF16, 16), seconds(DType::F16, 16));
        assert!(seconds(DType::F32, 16) > 7.0 * seconds(DType::F16, 16));
        // Unaligned, but of the same type: the type takes precedence.
        assert!(seconds(DType::F32, 17) > 7.0 * seconds(DType::F16, 17));
    }

    #[test]
    fn waves_that_are_not_full_leave_room() {
        let gemm = gemm();
        let occupancy = |m, n| gemm.occupancy(m, n, 132);
        // 128 tiles are fewer than the multiprocessors, but there are smaller tiles.
        assert_eq!(occupancy(2048, 2048), 1.0);
        // 198 tiles in two waves.
        // A wave and a half: of the quarter that is idle, half is filled.
        assert!((occupancy(128 * 198, 256) - 0.875).abs() < 1e-12);
        assert!((occupancy(64, 64) - 4.0 / 132.0).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn a_larger_size_never_takes_less_time(
            m in 1..20_000_usize, k in 1..20_000_usize, n in 1..20_000_usize, more in 0..5_000_usize,
        ) {
            let gemm = Gemm { grids: vec![gemm().grids[0].clone()], ..gemm() };
            let seconds = |m, k, n| gemm.seconds(DType::F16, m, k, n);
            let base = seconds(m, k, n) * (1.0 - 1e-12);
            prop_assert!(base <= seconds(m + more, k, n));
            prop_assert!(base <= seconds(m, k + more, n));
            prop_assert!(base <= seconds(m, k, n + more));
        }

        #[test]
        fn a_shape_lies_between_the_corners_around_it(
            m in 16..256_usize, k in 16..256_usize, n in 256..4096_usize,
        ) {
            let seconds = gemm().seconds(DType::F16, m, k, n);
            prop_assert!(seconds >= known(16, 16, 256) * (1.0 - 1e-12));
            prop_assert!(seconds <= known(256, 256, 4096) * (1.0 + 1e-12));
        }
    }
}

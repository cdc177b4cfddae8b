//! Tokens, their experts and the expected result, the same for the same seed.

use super::Routing;
use crate::commands::bench::cases::collective::data::different;
use crate::gemm::inputs::Random;
use warplink::collective::{ExpertOptions, RowLayout};

/// How far results may be from what they are without quantisation: relatively, e4m3 with its 3 bits of mantissa and bf16
/// together; and of a weight, half of e4m3's smallest number with a scale of 2 · 2 / 448, whose next power of two may be taken.
const ROUNDED: f64 = 1.0 / 16.0 + 1.0 / 128.0;
const LEAST: f64 = 4.0 / 448.0 / 1024.0;

/// The tokens of one rank.
pub(super) struct Tokens {
    /// Elements, `[tokens, elements]`, in the format of the device's memory.
    pub(super) rows: Vec<u8>,
    /// `[tokens, top_k]`.
    pub(super) experts: Vec<i32>,
    pub(super) weights: Vec<f32>,
}

impl Tokens {
    pub(super) fn new(
        layer: &ExpertOptions,
        routing: Routing,
        (rank, world): (usize, usize),
        count: usize,
    ) -> Self {
        let mut random = Random(rank as u64);
        let elements = count * layer.elements;
        let values = (0..elements).map(|_| random.below(1024) as f64 / 256.0 - 2.0);
        let rows = layer.dtype.encode(values);
        let reached = match routing {
            Routing::Random => layer.experts,
            Routing::OneRank => layer.experts / world,
        };
        let mut experts = Vec::with_capacity(count * layer.top_k);
        for _ in 0..count {
            // Drawn without replacement: the experts of a token are distinct.
            let mut left: Vec<i32> = (0..reached as i32).collect();
            for _ in 0..layer.top_k {
                experts.push(left.swap_remove(random.below(left.len())));
            }
        }
        // Never 0, so that a missing row shows in the sum.
        let weights = (0..experts.len()).map(|_| (1 + random.below(255)) as f32 / 256.0);
        Self {
            rows,
            weights: weights.collect(),
            experts,
        }
    }

    /// The number of rows for each rank.
    pub(super) fn counts(&self, layer: &ExpertOptions, world: usize) -> Vec<usize> {
        let mut counts = vec![0; world];
        for experts in self.experts.chunks_exact(layer.top_k) {
            let ranks = experts
                .iter()
                .map(|expert| *expert as usize / (layer.experts / world));
            let mut ranks: Vec<usize> = ranks.collect();
            if layer.layout == RowLayout::OncePerRank {
                ranks.sort_unstable();
                ranks.dedup();
            }
            for rank in ranks {
                counts[rank] += 1;
            }
        }
        counts
    }

    /// The weights of the rows that a token gets back, for experts that return their rows unchanged: those of its slots, or
    /// for each rank the sum of those of the rank's experts.
    pub(super) fn returned_weights(&self, layer: &ExpertOptions, world: usize) -> Vec<f32> {
        if layer.layout != RowLayout::OncePerRank {
            return self.weights.clone();
        }
        let mut sums = vec![0.0; self.weights.len() / layer.top_k * world];
        for (slot, (expert, weight)) in self.experts.iter().zip(&self.weights).enumerate() {
            let rank = *expert as usize / (layer.experts / world);
            sums[slot / layer.top_k * world + rank] += weight;
        }
        sums
    }

    /// The number of elements of `got` that are wrong, for experts that return their rows unchanged.
    pub(super) fn different(&self, layer: &ExpertOptions, world: usize, got: &[u8]) -> u64 {
        let row = layer.elements * layer.dtype.size();
        let tokens = self.rows.chunks_exact(row).zip(got.chunks_exact(row));
        let weights = self.returned_weights(layer, world);
        let weights = weights.chunks_exact(layer.rows_per_token(world));
        let wrong = tokens.zip(weights).map(|((values, got), weights)| {
            let sums = layer.dtype.decode(values).map(|value| {
                // Exact in f32, in any order: products are multiples of 2^-16, and the sum of up to 128 is below 2^8.
                let terms = weights.iter().map(|weight| weight * value as f32);
                terms.fold(0_f32, |sum, term| sum + term).into()
            });
            if layer.quantization.is_none() {
                return different(layer.dtype, &layer.dtype.encode(sums), got) as u64;
            }
            // Rows are rounded twice, and are of values up to 2 in magnitude.
            let weight: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
            let pairs = sums.zip(layer.dtype.decode(got));
            let far = pairs.filter(|(sum, got): &(f64, f64)| {
                (sum - got).abs() > ROUNDED * sum.abs() + LEAST * weight
            });
            far.count() as u64
        });
        wrong.sum()
    }
}

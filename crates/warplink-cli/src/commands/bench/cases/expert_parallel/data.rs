//! Tokens, their experts and the expected result, the same for the same seed.

use super::Routing;
use warplink::DType;
use warplink::collective::ExpertOptions;

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
        let mut random = Random((rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let elements = count * layer.elements;
        let rows = (0..elements).flat_map(|_| {
            let value = random.below(1024) as f32 / 256.0 - 2.0;
            encode(layer.dtype, value)
        });
        let rows = rows.collect();
        let reached = match routing {
            Routing::Random => layer.experts,
            Routing::OneRank => layer.experts / world,
        };
        let mut experts = Vec::with_capacity(count * layer.top_k);
        for _ in 0..count {
            let mut left: Vec<i32> = (0..reached as i32).collect();
            for _ in 0..layer.top_k {
                experts.push(left.swap_remove(random.below(left.len())));
            }
        }
        let weights = (0..experts.len()).map(|_| (1 + random.below(255)) as f32 / 256.0);
        Self {
            rows,
            weights: weights.collect(),
            experts,
        }
    }

    /// How many rows go to each rank.
    pub(super) fn counts(&self, layer: &ExpertOptions, world: usize) -> Vec<usize> {
        let mut counts = vec![0; world];
        for expert in &self.experts {
            counts[*expert as usize / (layer.experts / world)] += 1;
        }
        counts
    }

    /// The number of elements of `got` that are wrong, for experts that return their rows unchanged.
    pub(super) fn different(&self, layer: &ExpertOptions, got: &[u8]) -> u64 {
        let size = layer.dtype.size();
        let row = layer.elements * size;
        let mut wrong = 0;
        for (token, values) in self.rows.chunks_exact(row).enumerate() {
            let weights = &self.weights[token * layer.top_k..(token + 1) * layer.top_k];
            let got = &got[token * row..(token + 1) * row];
            for (value, got) in values.chunks_exact(size).zip(got.chunks_exact(size)) {
                let value = decode(layer.dtype, value);
                let sum = weights
                    .iter()
                    .fold(0_f32, |sum, weight| sum + weight * value);
                wrong += u64::from(encode(layer.dtype, sum) != *got);
            }
        }
        wrong
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) % end as u64) as usize
    }
}

fn encode(dtype: DType, value: f32) -> Vec<u8> {
    match dtype {
        DType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    }
}

fn decode(dtype: DType, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (DType::F16, [a, b]) => half::f16::from_le_bytes([*a, *b]).to_f32(),
        (_, [a, b]) => half::bf16::from_le_bytes([*a, *b]).to_f32(),
        (_, [a, b, c, d]) => f32::from_le_bytes([*a, *b, *c, *d]),
        _ => f32::NAN,
    }
}

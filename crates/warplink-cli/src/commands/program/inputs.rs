//! The inputs that a program is run with.

use crate::gemm::inputs::Matrix;
use warplink::DType;
use warplink::program::{TensorId, TensorInstance};

/// The inputs of all ranks.
#[derive(Clone, Copy)]
pub(super) struct Inputs {
    seed: u64,
}

impl Inputs {
    /// Those of a seed.
    pub(super) fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Those of a run that follows.
    pub(super) fn of_run(self, run: u64) -> Self {
        Self {
            seed: self.seed.wrapping_add(run),
        }
    }

    /// The bytes of an input of a rank.
    pub(super) fn of(self, rank: usize, index: TensorId, tensor: &TensorInstance) -> Vec<u8> {
        // They differ from rank to rank, so that what comes from a wrong one shows.
        let rank = rank as u64 + 1;
        random(tensor, self.seed, (index as u64) << 32 | rank)
    }
}

/// Random elements for `tensor`.
fn random(tensor: &TensorInstance, seed: u64, which: u64) -> Vec<u8> {
    let elements = tensor.bytes / tensor.dtype.size();
    let values = |dtype| Matrix::new(seed, which, 1, elements, dtype).bytes(0..1, 0..elements, 1);
    match tensor.dtype {
        DType::BF16 | DType::F16 | DType::F32 => values(tensor.dtype),
        dtype => values(DType::F32)
            .chunks_exact(4)
            .filter_map(|bytes| bytes.try_into().ok().map(f32::from_le_bytes))
            .flat_map(|value| element(dtype, value))
            .collect(),
    }
}

/// An element from a number between -1 and 1.
fn element(dtype: DType, value: f32) -> Vec<u8> {
    let hundredths = value * 100.0;
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => value.to_le_bytes().to_vec(),
        DType::F64 => f64::from(value).to_le_bytes().to_vec(),
        DType::I32 => (hundredths as i32).to_le_bytes().to_vec(),
        DType::I64 => (hundredths as i64).to_le_bytes().to_vec(),
        DType::I8 => (hundredths as i8).to_le_bytes().to_vec(),
        DType::U32 => (hundredths.abs() as u32).to_le_bytes().to_vec(),
        DType::U64 => (hundredths.abs() as u64).to_le_bytes().to_vec(),
        // Of both types, these are numbers from -2 to 2.
        DType::F8E4M3 | DType::F8E5M2 => {
            let sign = u8::from(value < 0.0) << 7;
            vec![sign | ((value.abs() * 64.0) as u8).min(0x3f)]
        }
        _ => vec![hundredths.abs() as u8; dtype.size()],
    }
}

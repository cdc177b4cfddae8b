//! The inputs that a program is run with.

use crate::gemm::inputs::Matrix;
use warplink::DType;
use warplink::dtype::Numbers;
use warplink::program::{TensorId, TensorInstance};

/// The inputs of all ranks.
#[derive(Clone, Copy)]
pub(super) struct Inputs {
    seed: u64,
}

impl Inputs {
    /// The inputs of a seed.
    pub(super) fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The inputs of a later run.
    pub(super) fn of_run(self, run: u64) -> Self {
        Self {
            seed: self.seed.wrapping_add(run),
        }
    }

    /// The bytes of an input of a rank.
    pub(super) fn of(self, rank: usize, index: TensorId, tensor: &TensorInstance) -> Vec<u8> {
        // Different for every rank, so that data from a wrong rank is detected.
        let rank = rank as u64 + 1;
        random(tensor, self.seed, (index as u64) << 32 | rank)
    }
}

/// Random elements for `tensor`.
fn random(tensor: &TensorInstance, seed: u64, which: u64) -> Vec<u8> {
    let elements = tensor.bytes / tensor.dtype.size();
    let values = |dtype| Matrix::new(seed, which, 1, elements, dtype).bytes(0..1, 0..elements, 1);
    let scaled = |scale: f64| {
        let values = values(DType::F32);
        let values = DType::F32.decode(&values).map(|value| value * scale);
        let unsigned = tensor.dtype.numbers() == Numbers::Unsigned;
        let values = values.map(|value| if unsigned { value.abs() } else { value });
        tensor.dtype.encode(values)
    };
    if let Some(most) = tensor.value_bound {
        let random = values(DType::F32);
        let values = DType::F32.decode(&random);
        // Up to a bound of 4095 about equally likely; larger integers do not occur.
        let in_range = values.map(|value| (value.abs() * 4096.0).floor() % (most as f64 + 1.0));
        return tensor.dtype.encode(in_range);
    }
    match tensor.dtype {
        // Exact in the type, so that a copy can be compared exactly.
        dtype if DType::MATMUL.contains(&dtype) => values(dtype),
        DType::F64 => scaled(1.0),
        dtype if dtype.is_float() => scaled(2.0),
        // Integers from -100 to 100.
        _ => scaled(100.0),
    }
}

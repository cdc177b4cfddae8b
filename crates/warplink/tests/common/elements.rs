//! Elements of every type as bytes.

use half::{bf16, f16};
use warplink::DType;
use warplink::dtype::{F8E4M3, F8E5M2};

/// Values as elements of a type, the nearest ones.
pub fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    fn all<const BYTES: usize>(values: &[f64], each: impl Fn(f64) -> [u8; BYTES]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(BYTES * values.len());
        for value in values {
            bytes.extend_from_slice(&each(*value));
        }
        bytes
    }
    // From f64, `half` drops the lower 32 bits, and takes what is next to a tie for the tie.
    let single = |value: f64| Some(value as f32).filter(|single| f64::from(*single) == value);
    match dtype {
        DType::F16 => all(values, |value| {
            let near = single(value).map_or_else(|| f16::from_f64(value), f16::from_f32);
            near.to_le_bytes()
        }),
        DType::BF16 => all(values, |value| {
            let near = single(value).map_or_else(|| bf16::from_f64(value), bf16::from_f32);
            near.to_le_bytes()
        }),
        DType::F32 => all(values, |value| (value as f32).to_le_bytes()),
        DType::F64 => all(values, f64::to_le_bytes),
        DType::I32 => all(values, |value| (value as i32).to_le_bytes()),
        DType::U32 => all(values, |value| (value as u32).to_le_bytes()),
        DType::I64 => all(values, |value| (value as i64).to_le_bytes()),
        DType::U64 => all(values, |value| (value as u64).to_le_bytes()),
        DType::I8 => all(values, |value| (value as i8).to_le_bytes()),
        DType::F8E4M3 => all(values, |value| [F8E4M3::from_f64(value).0]),
        DType::F8E5M2 => all(values, |value| [F8E5M2::from_f64(value).0]),
        _ => all(values, |value| [value as u8]),
    }
}

/// The values of elements.
pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let each = |chunk: &[u8]| -> f64 {
        match dtype {
            DType::F16 => f16::from_le_bytes(chunk.try_into().unwrap()).to_f64(),
            DType::BF16 => bf16::from_le_bytes(chunk.try_into().unwrap()).to_f64(),
            DType::F32 => f32::from_le_bytes(chunk.try_into().unwrap()).into(),
            DType::F64 => f64::from_le_bytes(chunk.try_into().unwrap()),
            DType::I32 => i32::from_le_bytes(chunk.try_into().unwrap()).into(),
            DType::U32 => u32::from_le_bytes(chunk.try_into().unwrap()).into(),
            DType::I64 => i64::from_le_bytes(chunk.try_into().unwrap()) as f64,
            DType::U64 => u64::from_le_bytes(chunk.try_into().unwrap()) as f64,
            DType::I8 => f64::from(chunk[0] as i8),
            DType::F8E4M3 => F8E4M3(chunk[0]).to_f32().into(),
            DType::F8E5M2 => F8E5M2(chunk[0]).to_f32().into(),
            _ => chunk[0].into(),
        }
    };
    bytes.chunks_exact(dtype.size()).map(each).collect()
}

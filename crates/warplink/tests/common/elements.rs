//! Elements of every type as bytes.

use warplink::DType;
use warplink::dtype::{F8E4M3, F8E5M2};

/// Values as elements of a type, the nearest ones.
pub fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let each = |value: &f64| -> Vec<u8> {
        match dtype {
            DType::F16 => half::f16::from_f64(*value).to_le_bytes().to_vec(),
            DType::BF16 => half::bf16::from_f64(*value).to_le_bytes().to_vec(),
            DType::F32 => (*value as f32).to_le_bytes().to_vec(),
            DType::F64 => value.to_le_bytes().to_vec(),
            DType::I32 => (*value as i32).to_le_bytes().to_vec(),
            DType::U32 => (*value as u32).to_le_bytes().to_vec(),
            DType::I64 => (*value as i64).to_le_bytes().to_vec(),
            DType::U64 => (*value as u64).to_le_bytes().to_vec(),
            DType::I8 => (*value as i8).to_le_bytes().to_vec(),
            DType::F8E4M3 => vec![F8E4M3::from_f64(*value).0],
            DType::F8E5M2 => vec![F8E5M2::from_f64(*value).0],
            _ => vec![*value as u8],
        }
    };
    values.iter().flat_map(each).collect()
}

/// The values of elements.
pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let each = |chunk: &[u8]| -> f64 {
        match dtype {
            DType::F16 => half::f16::from_le_bytes(chunk.try_into().unwrap()).to_f64(),
            DType::BF16 => half::bf16::from_le_bytes(chunk.try_into().unwrap()).to_f64(),
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

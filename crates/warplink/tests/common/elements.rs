//! Elements of every type as bytes.

use warplink::DType;

/// Values as elements of a type, the nearest ones.
pub fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let each = |value: &f64| -> Vec<u8> {
        match dtype {
            DType::F16 => half::f16::from_f64(*value).to_le_bytes().to_vec(),
            DType::BF16 => half::bf16::from_f64(*value).to_le_bytes().to_vec(),
            DType::F32 => (*value as f32).to_le_bytes().to_vec(),
            DType::F64 => value.to_le_bytes().to_vec(),
            DType::I32 => (*value as i32).to_le_bytes().to_vec(),
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
            _ => chunk[0].into(),
        }
    };
    bytes.chunks_exact(dtype.size()).map(each).collect()
}

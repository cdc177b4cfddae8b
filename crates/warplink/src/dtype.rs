//! Element types of tensors and buffers.

mod f8;

pub use f8::{F8E4M3, F8E5M2};

use crate::error::{Error, ErrorKind, Result};
use std::fmt;
use std::str::FromStr;
use zerocopy::IntoBytes as _;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 half precision.
    F16,
    /// bfloat16: the upper half of an `f32`.
    BF16,
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 double precision.
    F64,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned byte.
    U8,
    /// Signed byte.
    I8,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 64-bit integer.
    U64,
    /// Float of 8 bits with 4 bits of exponent, without infinities.
    F8E4M3,
    /// Float of 8 bits with 5 bits of exponent.
    F8E5M2,
}

impl DType {
    /// Every type.
    pub const ALL: [Self; 12] = [
        Self::F16,
        Self::BF16,
        Self::F32,
        Self::F64,
        Self::I32,
        Self::U8,
        Self::I8,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F8E4M3,
        Self::F8E5M2,
    ];

    /// Types that element-wise operations can cast; all except `u8` also support element-wise arithmetic.
    /// Collectives and kernels reduce every type.
    pub const ELEMENTWISE: [Self; 6] = [
        Self::F16,
        Self::BF16,
        Self::F32,
        Self::F64,
        Self::I32,
        Self::U8,
    ];

    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// Name in program text and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::I32 => "i32",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U64 => "u64",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
        }
    }

    /// Whether element-wise arithmetic supports it.
    pub(crate) const fn is_computed_elementwise(self) -> bool {
        matches!(
            self,
            Self::F16 | Self::BF16 | Self::F32 | Self::F64 | Self::I32
        )
    }

    /// Whether element-wise casts support it.
    pub(crate) const fn is_cast_elementwise(self) -> bool {
        self.is_computed_elementwise() || matches!(self, Self::U8)
    }

    /// Whether it is a float.
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            Self::F16 | Self::BF16 | Self::F32 | Self::F64 | Self::F8E4M3 | Self::F8E5M2
        )
    }

    /// Maximum accepted relative error ‖out − ref‖ / ‖ref‖ of a matmul that accumulates in `f32` and rounds
    /// operands and result to this type; `None` if there is no matmul for it.
    pub const fn matmul_tolerance(self) -> Option<f64> {
        match self {
            Self::BF16 => Some(1e-2),
            Self::F16 => Some(2e-3),
            Self::F32 => Some(1e-5),
            _ => None,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == text)
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Parse,
                    format!(
                        "unknown element type '{text}'; expected f16, bf16, f32, f64, i8, u8, i32, u32, i64, \
                         u64, f8e4m3 or f8e5m2"
                    ),
                )
            })
    }
}

/// Evaluates `body` with `element` as the Rust type of a [`DType`]'s elements.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        with_element!(@ $dtype, $element => $body;
            F16 = half::f16, BF16 = half::bf16, F32 = f32, F64 = f64, I32 = i32, U8 = u8, I8 = i8,
            U32 = u32, I64 = i64, U64 = u64, F8E4M3 = F8E4M3, F8E5M2 = F8E5M2)
    };
    (@ $dtype:expr, $element:ident => $body:expr; $($name:ident = $rust:ty),+) => {
        match $dtype {
            $(DType::$name => {
                type $element = $rust;
                $body
            })+
        }
    };
}

impl DType {
    /// Element values in `bytes`, converted by [`Element::to_f64`]. A trailing partial element is ignored.
    pub fn decode(self, bytes: &[u8]) -> Box<dyn Iterator<Item = f64> + '_> {
        fn all<T: Element>(bytes: &[u8]) -> impl Iterator<Item = f64> + '_ {
            let chunks = bytes.chunks_exact(size_of::<T>());
            chunks.filter_map(|chunk| T::read_from_bytes(chunk).ok().map(Element::to_f64))
        }
        with_element!(self, T => Box::new(all::<T>(bytes)))
    }

    /// Encodes `values` as elements, converted by [`Element::from_f64`].
    pub fn encode(self, values: impl IntoIterator<Item = f64>) -> Vec<u8> {
        fn all<T: Element>(values: impl Iterator<Item = f64>) -> Vec<u8> {
            let values: Vec<T> = values.map(T::from_f64).collect();
            values.as_bytes().to_vec()
        }
        let values = values.into_iter();
        with_element!(self, T => all::<T>(values))
    }
}

/// A Rust type that is the element of a [`DType`].
pub trait Element:
    Copy + Send + Sync + zerocopy::IntoBytes + zerocopy::FromBytes + zerocopy::Immutable + 'static
{
    /// The element type it is.
    const DTYPE: DType;
    /// Converts to `f64`: exact, except that 64-bit integers above 2^53 are rounded.
    fn to_f64(self) -> f64;
    /// Converts from `f64`, to the nearest value.
    fn from_f64(value: f64) -> Self;
}

macro_rules! element {
    ($rust:ty, $dtype:ident, $to:expr, $from:expr) => {
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
            fn to_f64(self) -> f64 {
                #[allow(clippy::redundant_closure_call)]
                ($to)(self)
            }
            fn from_f64(value: f64) -> Self {
                #[allow(clippy::redundant_closure_call)]
                ($from)(value)
            }
        }
    };
}

element!(
    half::f16,
    F16,
    |v: half::f16| v.to_f64(),
    half::f16::from_f64
);
element!(
    half::bf16,
    BF16,
    |v: half::bf16| v.to_f64(),
    half::bf16::from_f64
);
element!(f32, F32, f64::from, |v| v as f32);
element!(f64, F64, |v| v, |v| v);
element!(i32, I32, f64::from, |v| v as i32);
element!(u8, U8, f64::from, |v| v as u8);
element!(i8, I8, f64::from, |v| v as i8);
element!(i64, I64, |v| v as f64, |v| v as i64);
element!(u64, U64, |v| v as f64, |v| v as u64);
element!(u32, U32, f64::from, |v| v as u32);
element!(
    F8E4M3,
    F8E4M3,
    |v: F8E4M3| v.to_f32().into(),
    F8E4M3::from_f64
);
element!(
    F8E5M2,
    F8E5M2,
    |v: F8E5M2| v.to_f32().into(),
    F8E5M2::from_f64
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_encoded_and_decoded() {
        for dtype in DType::ALL {
            let values = [0.0, 1.0, 2.0, 7.0];
            let mut bytes = dtype.encode(values);
            assert_eq!(bytes.len(), values.len() * dtype.size(), "{dtype}");
            bytes.extend(vec![1; dtype.size() - 1]);
            assert_eq!(dtype.decode(&bytes).collect::<Vec<_>>(), values, "{dtype}");
        }
        assert_eq!(DType::BF16.encode([1.0]), [0x80, 0x3f]);
    }
}

//! Element types of tensors and buffers.

use crate::error::{Error, ErrorKind, Result};
use std::fmt;
use std::str::FromStr;

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
}

impl DType {
    /// Every type.
    pub const ALL: [Self; 6] = [
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
            Self::U8 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 => 8,
        }
    }

    /// The name in program text and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::I32 => "i32",
            Self::U8 => "u8",
        }
    }

    /// Largest relative error, ‖out − ref‖ / ‖ref‖, accepted of a matmul that accumulates
    /// in `f32` and rounds its operands and result to this type; `None` where matmuls are not
    /// offered.
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
                Error::new(ErrorKind::Parse, format!("'{text}' is no element type"))
                    .with_help("use f16, bf16, f32, f64, i32 or u8")
            })
    }
}

/// A Rust type that is the element of a [`DType`].
pub trait Element:
    Copy + Send + Sync + zerocopy::IntoBytes + zerocopy::FromBytes + zerocopy::Immutable + 'static
{
    /// The element type it is.
    const DTYPE: DType;
    /// The value as `f64`, exactly.
    fn to_f64(self) -> f64;
    /// The nearest value to `value`.
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

//! Element types of tensors and buffers.

mod f8;

pub use f8::{F8E4M3, F8E5M2};

use crate::named::named;
use zerocopy::IntoBytes as _;

named! {
    /// The type of a tensor's elements.
    #[non_exhaustive]
    pub enum DType: "element type" {
        /// IEEE 754 single precision.
        F32 = "f32",
        /// IEEE 754 double precision.
        F64 = "f64",
        /// IEEE 754 half precision.
        F16 = "f16",
        /// bfloat16: the upper half of a 32-bit float.
        BF16 = "bf16",
        /// Float of 8 bits with 4 bits of exponent, without infinities.
        F8E4M3 = "f8e4m3",
        /// Float of 8 bits with 5 bits of exponent.
        F8E5M2 = "f8e5m2",
        /// Signed byte.
        I8 = "i8",
        /// Unsigned byte.
        U8 = "u8",
        /// Signed 32-bit integer.
        I32 = "i32",
        /// Unsigned 32-bit integer.
        U32 = "u32",
        /// Signed 64-bit integer.
        I64 = "i64",
        /// Unsigned 64-bit integer.
        U64 = "u64",
    }
}

/// Which numbers a type has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Numbers {
    /// Floats of `digits` binary digits. A device may flush values smaller than `smallest` to zero, or rounds them to a
    /// multiple of it.
    Float {
        /// Binary digits of a number, the first one included.
        digits: u8,
        /// The smallest normal number, or the distance of those below.
        smallest: f64,
        /// The largest number.
        largest: f64,
    },
    /// Integers of two's complement.
    Signed,
    /// Integers from 0 on.
    Unsigned,
}

/// A Rust type that is the element of a [`DType`].
pub trait Element:
    Copy + Send + Sync + zerocopy::IntoBytes + zerocopy::FromBytes + zerocopy::Immutable + 'static
{
    /// The element type it is.
    const DTYPE: DType;
    /// The type in which values are combined, as kernels do it.
    type Wide;
    /// The value as it is combined.
    fn widen(self) -> Self::Wide;
    /// Rounds a combined value; integers wrap.
    fn narrow(wide: Self::Wide) -> Self;
    /// Converts to `f64`: exact, except that 64-bit integers above 2^53 are rounded.
    fn to_f64(self) -> f64;
    /// Converts from `f64`, to the nearest value.
    fn from_f64(value: f64) -> Self;
}

/// `value` in single precision, rounded to odd: rounding it again to a narrower type equals rounding `value`
/// directly. Conversions of `half` from `f64` drop the lower 32 bits, and so cannot distinguish a value above a tie
/// from the tie.
#[inline]
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    let difference = f64::from(near).abs() - value.abs();
    // Exact values need no sticky bit, and infinity plus one bit would be NaN.
    if difference == 0.0 || !near.is_finite() {
        return near;
    }
    // Towards zero and then odd: the second rounding, to 16 bits, sees that the value is not a tie.
    let truncated = near.to_bits() - u32::from(difference > 0.0);
    f32::from_bits(truncated | 1)
}

/// Declares the elements of each type: in Rust, as they are combined, their numbers, and conversions.
macro_rules! elements {
    (($d:tt) $($dtype:ident = $rust:ty, as $wide:ty: $widen:expr, $narrow:expr; $from:expr; $numbers:expr;)+) => {
        $(impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
            type Wide = $wide;
            // Inlined, since loops over elements are in other codegen units.
            #[inline]
            fn widen(self) -> $wide {
                let widen: fn($rust) -> $wide = $widen;
                widen(self)
            }
            #[inline]
            fn narrow(wide: $wide) -> Self {
                let narrow: fn($wide) -> $rust = $narrow;
                narrow(wide)
            }
            #[inline]
            fn to_f64(self) -> f64 {
                self.widen() as f64
            }
            #[inline]
            fn from_f64(value: f64) -> Self {
                let from: fn(f64) -> $rust = $from;
                from(value)
            }
        })+

        impl DType {
            /// Bytes per element.
            pub const fn size(self) -> usize {
                match self {
                    $(Self::$dtype => size_of::<$rust>(),)+
                }
            }

            /// The type in which values are combined.
            pub(crate) const fn wide(self) -> Self {
                match self {
                    $(Self::$dtype => <$wide as Element>::DTYPE,)+
                }
            }

            /// Which numbers it has.
            pub const fn numbers(self) -> Numbers {
                match self {
                    $(Self::$dtype => $numbers,)+
                }
            }
        }

        /// Evaluates `body` with `element` as the Rust type of a [`DType`]'s elements.
        macro_rules! with_element {
            ($d dtype:expr, $d element:ident => $d body:expr) => {
                match $d dtype {
                    $($crate::dtype::DType::$dtype => {
                        type $d element = $rust;
                        $d body
                    })+
                }
            };
        }
    };
}

const fn float(digits: u8, smallest: f64, largest: f64) -> Numbers {
    Numbers::Float {
        digits,
        smallest,
        largest,
    }
}

// Integers of 8 bits are combined in 32, as kernels do, which the average shows.
elements! {
    ($)
    F32 = f32, as f32: |v| v, |v| v; |v| v as f32; float(24, f32::MIN_POSITIVE as f64, f32::MAX as f64);
    F64 = f64, as f64: |v| v, |v| v; |v| v; float(53, f64::MIN_POSITIVE, f64::MAX);
    F16 = half::f16, as f32: half::f16::to_f32, half::f16::from_f32; |v| half::f16::from_f32(to_odd(v));
        float(11, half::f16::MIN_POSITIVE.to_f64_const(), half::f16::MAX.to_f64_const());
    BF16 = half::bf16, as f32: half::bf16::to_f32, half::bf16::from_f32; |v| half::bf16::from_f32(to_odd(v));
        float(8, half::bf16::MIN_POSITIVE.to_f64_const(), half::bf16::MAX.to_f64_const());
    F8E4M3 = crate::dtype::F8E4M3, as f32: F8E4M3::to_f32, F8E4M3::from_f32; F8E4M3::from_f64;
        float(4, 1.0 / 512.0, 448.0);
    F8E5M2 = crate::dtype::F8E5M2, as f32: F8E5M2::to_f32, F8E5M2::from_f32; F8E5M2::from_f64;
        float(3, 1.0 / 65536.0, 57344.0);
    I8 = i8, as i32: i32::from, |v| v as i8; |v| v as i8; Numbers::Signed;
    U8 = u8, as u32: u32::from, |v| v as u8; |v| v as u8; Numbers::Unsigned;
    I32 = i32, as i32: |v| v, |v| v; |v| v as i32; Numbers::Signed;
    U32 = u32, as u32: |v| v, |v| v; |v| v as u32; Numbers::Unsigned;
    I64 = i64, as i64: |v| v, |v| v; |v| v as i64; Numbers::Signed;
    U64 = u64, as u64: |v| v, |v| v; |v| v as u64; Numbers::Unsigned;
}

pub(crate) use with_element;

impl DType {
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

    /// Element types of matmuls, and of other operations on floats that GPUs multiply.
    pub const MATMUL: [Self; 3] = [Self::F16, Self::BF16, Self::F32];

    /// The types that functions of rows compute with, in `f32`.
    pub(crate) const ROWS: [Self; 5] =
        [Self::F32, Self::F16, Self::BF16, Self::F8E4M3, Self::F8E5M2];

    /// The types that functions of rows store: also bytes, as integers.
    pub(crate) const ROW_TARGETS: [Self; 6] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::U8,
    ];

    /// The types that element-wise operations compute with.
    pub(crate) fn computed_elementwise() -> Vec<Self> {
        let all = Self::ELEMENTWISE.into_iter();
        all.filter(|dtype| *dtype != Self::U8).collect()
    }

    /// Whether it is a float.
    pub const fn is_float(self) -> bool {
        matches!(self.numbers(), Numbers::Float { .. })
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

    /// A value of `f32` as this type rounds it.
    pub(crate) fn rounded(self, value: f32) -> f32 {
        // The trait's conversion, not that of `half`, which is not exact.
        with_element!(self, T => <T as Element>::from_f64(value.into()).to_f64() as f32)
    }
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

    /// As [`decode`](Self::decode), rounded to single precision; without a call for each element.
    pub(crate) fn decode_f32(self, bytes: &[u8]) -> Vec<f32> {
        fn all<T: Element>(bytes: &[u8]) -> Vec<f32> {
            // Copied, since `bytes` need not be aligned for T.
            let mut elements = vec![T::new_zeroed(); bytes.len() / size_of::<T>()];
            let whole = size_of_val(&elements[..]);
            elements.as_mut_bytes().copy_from_slice(&bytes[..whole]);
            let values = elements.into_iter();
            values.map(|element| element.to_f64() as f32).collect()
        }
        with_element!(self, T => all::<T>(bytes))
    }

    /// As [`encode`](Self::encode), of values in single precision; without a call for each element.
    pub(crate) fn encode_f32(self, values: &[f32]) -> Vec<u8> {
        fn all<T: Element<Wide = f32>>(values: &[f32]) -> Vec<u8> {
            let values: Vec<T> = values.iter().copied().map(T::narrow).collect();
            values.as_bytes().to_vec()
        }
        match self {
            Self::F32 => all::<f32>(values),
            Self::F16 => all::<half::f16>(values),
            Self::BF16 => all::<half::bf16>(values),
            _ => self.encode(values.iter().copied().map(f64::from)),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_rounded_once() {
        // Ties of bf16 and of f16 at 1, and their neighbours closer than single precision.
        for (dtype, step) in [(DType::BF16, 2f64.powi(-7)), (DType::F16, 2f64.powi(-10))] {
            let little = 2f64.powi(-40);
            for (value, rounded) in [
                (1.0 + step / 2.0, 1.0),
                (1.0 + step / 2.0 + little, 1.0 + step),
                (1.0 + step * 1.5 - little, 1.0 + step),
                (1.0 + step * 1.5, 1.0 + step * 2.0),
                (1.0 + step / 2.0 + 2f64.powi(-23), 1.0 + step),
            ] {
                for sign in [1.0, -1.0] {
                    let found: Vec<f64> = dtype.decode(&dtype.encode([sign * value])).collect();
                    assert_eq!(found, [sign * rounded], "{dtype} {value}");
                }
            }
            let above = 1.0 + step / 2.0 + 2f64.powi(-23);
            assert_eq!(f64::from(dtype.rounded(above as f32)), 1.0 + step);
            for value in [0.0, -0.0, f64::INFINITY, 1e300, 1e-300] {
                let found: Vec<f64> = dtype.decode(&dtype.encode([value])).collect();
                let expected = if value > 1e200 { f64::INFINITY } else { 0.0 };
                assert_eq!(found, [expected], "{dtype} {value}");
            }
        }
    }

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

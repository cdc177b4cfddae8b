//! Maximum and minimum with GPU semantics.

/// An ordered number type.
pub(super) trait Extremes: Copy {
    fn larger(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
}

/// NaN loses against a number, and -0 is less than +0, so the result does not depend on argument order.
macro_rules! floats {
    ($($type:ty)*) => {$(
        impl Extremes for $type {
            #[inline]
            fn larger(self, other: Self) -> Self {
                if self == other {
                    return Self::from_bits(self.to_bits() & other.to_bits());
                }
                self.max(other)
            }

            #[inline]
            fn smaller(self, other: Self) -> Self {
                if self == other {
                    return Self::from_bits(self.to_bits() | other.to_bits());
                }
                self.min(other)
            }
        }
    )*};
}

macro_rules! integers {
    ($($type:ty)*) => {$(
        impl Extremes for $type {
            #[inline]
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }

            #[inline]
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
        }
    )*};
}

floats!(f32 f64);
integers!(u8 i32 u32 i64 u64);

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn zeros_have_an_order_and_numbers_come_before_what_is_none() {
        for (a, b) in [(-0.0_f32, 0.0), (0.0, -0.0)] {
            assert_eq!(a.larger(b).to_bits(), 0.0_f32.to_bits());
            assert_eq!(a.smaller(b).to_bits(), (-0.0_f32).to_bits());
        }
        for (a, b) in [(f64::NAN, -1.0), (-1.0, f64::NAN)] {
            assert_eq!((a.larger(b), a.smaller(b)), (-1.0, -1.0));
        }
        assert!(f32::NAN.larger(f32::NAN).is_nan());
        assert_eq!((2.0_f32.larger(2.0), 2.0_f32.smaller(2.0)), (2.0, 2.0));
        assert_eq!(((-3).larger(2), 7_u8.smaller(9)), (2, 7));
    }
}

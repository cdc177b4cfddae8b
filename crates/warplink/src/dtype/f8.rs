//! 8-bit floats.

/// Bits of the mantissa, and the exponent of the smallest normal number.
struct Format {
    mantissa: u32,
    least: i32,
    largest: u8,
}

const E4M3: Format = Format {
    mantissa: 3,
    least: -6,
    largest: 0x7e,
};

const E5M2: Format = Format {
    mantissa: 2,
    least: -14,
    largest: 0x7b,
};

/// NaN, in both formats.
const NAN: u8 = 0x7f;

macro_rules! float {
    ($(#[$doc:meta])* $name:ident, $format:ident) => {
        $(#[$doc])*
        #[derive(
            Clone,
            Copy,
            Debug,
            Default,
            PartialEq,
            Eq,
            zerocopy::IntoBytes,
            zerocopy::FromBytes,
            zerocopy::Immutable,
        )]
        #[repr(transparent)]
        pub struct $name(pub u8);

        impl $name {
            /// Exact conversion.
            pub fn to_f32(self) -> f32 {
                $format.value(self.0)
            }

            /// Rounds to nearest, ties to even; saturates.
            pub fn from_f32(value: f32) -> Self {
                Self($format.nearest(value.into()))
            }

            /// As [`from_f32`](Self::from_f32).
            pub fn from_f64(value: f64) -> Self {
                Self($format.nearest(value))
            }
        }
    };
}

float!(
    /// 4 bits of exponent and 3 of mantissa; no infinities.
    F8E4M3,
    E4M3
);

float!(
    /// 5 bits of exponent and 2 of mantissa.
    F8E5M2,
    E5M2
);

impl Format {
    /// Whether the largest exponent encodes infinities.
    const fn has_infinities(&self) -> bool {
        self.mantissa == 2
    }

    fn value(&self, bits: u8) -> f32 {
        let magnitude = u32::from(bits & 0x7f);
        let (exponent, fraction) = (
            magnitude >> self.mantissa,
            magnitude & ((1 << self.mantissa) - 1),
        );
        let size = if magnitude > u32::from(self.largest) {
            if self.has_infinities() && fraction == 0 {
                f32::INFINITY
            } else {
                f32::NAN
            }
        } else {
            // Subnormal numbers have the smallest normal exponent and no implicit leading bit.
            let leading = u32::from(exponent > 0) << self.mantissa;
            let power = self.least + exponent.max(1) as i32 - 1 - self.mantissa as i32;
            (leading + fraction) as f32 * 2f32.powi(power)
        };
        if bits & 0x80 == 0 { size } else { -size }
    }

    fn nearest(&self, value: f64) -> u8 {
        if value.is_nan() {
            return NAN;
        }
        let sign = u8::from(value.is_sign_negative()) << 7;
        let size = value.abs();
        // Larger than any finite value, so skip the exponent computation.
        // Saturates, as `cvt.rn.satfinite` does, infinity too.
        if size >= f64::from(1_u32 << 20) {
            return sign | self.largest;
        }
        let exponent = if size < 2f64.powi(self.least) {
            self.least
        } else {
            // Exponent of a normal 64-bit number.
            (size.to_bits() >> 52) as i32 - 1023
        };
        // One rounding, from f64: going through f32 would round twice.
        let steps = (size / 2f64.powi(exponent - self.mantissa as i32)).round_ties_even() as u32;
        let one = 1 << self.mantissa;
        let bits = if steps < one {
            steps
        } else {
            // A mantissa overflow carries into the exponent.
            (((exponent - self.least + 1) as u32) << self.mantissa) + steps - one
        };
        sign | bits.min(u32::from(self.largest)) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_its_own_nearest() {
        for bits in 0..=u8::MAX {
            let (small, large) = (F8E4M3(bits), F8E5M2(bits));
            if small.to_f32().is_finite() {
                assert_eq!(F8E4M3::from_f32(small.to_f32()), small, "{bits:#x}");
            }
            if large.to_f32().is_finite() {
                assert_eq!(F8E5M2::from_f32(large.to_f32()), large, "{bits:#x}");
            }
        }
    }

    #[test]
    fn values_are_those_of_the_formats() {
        assert_eq!(F8E4M3(0x7e).to_f32(), 448.0);
        assert_eq!(F8E4M3(0x01).to_f32(), 2f32.powi(-9));
        assert_eq!(F8E4M3(0x38).to_f32(), 1.0);
        assert!(F8E4M3(0x7f).to_f32().is_nan() && F8E4M3(0xff).to_f32().is_nan());
        assert_eq!(F8E5M2(0x7b).to_f32(), 57344.0);
        assert_eq!(F8E5M2(0x7c).to_f32(), f32::INFINITY);
        assert_eq!(F8E5M2(0x83).to_f32(), -3.0 * 2f32.powi(-16));
        assert_eq!(F8E5M2(0xbc).to_f32(), -1.0);
    }

    #[test]
    fn what_lies_between_goes_to_the_nearest_and_ties_to_the_even() {
        // Halfway cases: between 16 and 18, and between 18 and 20.
        assert_eq!(F8E4M3::from_f32(17.0).to_f32(), 16.0);
        assert_eq!(F8E4M3::from_f32(17.1).to_f32(), 18.0);
        assert_eq!(F8E4M3::from_f32(19.0).to_f32(), 20.0);
        assert_eq!(F8E4M3::from_f32(2f32.powi(-10)).0, 0);
        assert_eq!(F8E4M3::from_f32(3.0 * 2f32.powi(-10)).0, 2);
        // Rounding carries into the exponent, also beyond the largest.
        assert_eq!(F8E4M3::from_f32(15.6).to_f32(), 16.0);
        assert_eq!(F8E4M3::from_f32(1e9).to_f32(), 448.0);
        assert_eq!(F8E5M2::from_f32(f32::NEG_INFINITY).to_f32(), -57344.0);
        assert!(F8E5M2::from_f32(f32::NAN).to_f32().is_nan());
    }
}

//! Row functions over values with error bounds.

use super::value::BoundedValue;
use crate::dtype::DType;
use crate::program::expr::Comparison;
use crate::program::section::{RowBinary, RowOrder, RowReduction, RowUnary, RowValue};

impl RowValue for BoundedValue {
    fn number(value: f32) -> Self {
        Self::exact(value.into())
    }

    fn unary(self, function: RowUnary) -> Self {
        let single = |value: f64| f64::from((value as f32).unary(function));
        match function {
            RowUnary::Negative => Self::exact(0.0).plus(self.with_value(-self.value)),
            RowUnary::Abs => self.with_value(self.value.abs()),
            RowUnary::Sqrt => self.mapped(f64::sqrt),
            RowUnary::Rsqrt => {
                // Both the square root and the quotient are rounded.
                let root = self.mapped(f64::sqrt).stored(DType::F32);
                Self::exact(1.0).divided_by(root).stored(DType::F32)
            }
            RowUnary::PowerOfTwo | RowUnary::Exponent => self.mapped(single),
            RowUnary::E2m1 => {
                let near = self.mapped(single);
                // A code is that of a magnitude and a sign.
                let straddles = self.value.abs() <= self.bound && self.bound > 0.0;
                near.with_bound(if straddles { 15.0 } else { near.bound })
            }
            // Allows for the error of library implementations: several roundings.
            RowUnary::Exp => {
                let near = self.mapped(f64::exp).stored(DType::F32);
                near.stored(DType::F32).stored(DType::F32)
            }
        }
    }

    fn binary(self, function: RowBinary, other: Self) -> Self {
        let value = match function {
            RowBinary::Add => self.plus(other),
            RowBinary::Subtract => self.plus(other.with_value(-other.value)),
            RowBinary::Multiply => self.times(other),
            RowBinary::Divide => self.divided_by(other),
            RowBinary::Min => return self.smaller(other),
            RowBinary::Max => return self.larger(other),
        };
        value.stored(DType::F32)
    }

    fn averaged(self, count: usize) -> Self {
        self.divided(count, DType::F32)
    }

    fn select(comparison: Comparison, a: Self, b: Self, yes: Self, no: Self) -> Self {
        let holds = f32::select(comparison, a.value as f32, b.value as f32, 1.0, 0.0) != 0.0;
        // If the comparison may go the other way on a device, the bound includes the other value.
        let (taken, left) = if holds { (yes, no) } else { (no, yes) };
        // The comparison is certain if the values differ by more than their error bounds.
        if (a.value - b.value).abs() > a.bound + b.bound || a.bound + b.bound == 0.0 {
            return taken;
        }
        let reached = (taken.value - left.value).abs() + left.bound;
        taken.with_bound(taken.bound.max(reached))
    }

    fn round(self, dtype: DType) -> Self {
        self.stored(dtype)
    }

    fn pair(self, high: Self) -> Self {
        let value = (self.value as f32).pair(high.value as f32);
        self.plus(high)
            .with_value(value.into())
            .with_bound(self.bound + 16.0 * high.bound)
    }

    fn row(reduction: RowReduction, values: &[Self], _order: RowOrder) -> Self {
        let values = values.iter().copied();
        match reduction {
            RowReduction::Max => values.fold(Self::exact(f64::NEG_INFINITY), Self::larger),
            RowReduction::Sum => {
                let (mut sum, mut size, mut count) = (Self::exact(0.0), 0.0, 0);
                for value in values {
                    size += value.value.abs() + value.bound;
                    sum = sum.plus(value);
                    count += 1;
                }
                // The bound holds for any order of additions.
                let rounding = f64::from(count) * 2_f64.powi(-24) * size;
                sum.with_bound(sum.bound + rounding).stored(DType::F32)
            }
        }
    }
}

impl BoundedValue {
    /// Result of a monotonic function: its error is largest at an end of the argument's interval.
    fn mapped(self, function: impl Fn(f64) -> f64) -> Self {
        let value = function(self.value);
        let ends = [self.value - self.bound, self.value + self.bound].map(&function);
        let off = ends.map(|end| (end - value).abs());
        // The interval reaches outside the function's domain, such as below 0 for a root.
        let bound = if off.iter().any(|off| off.is_nan()) && self.bound > 0.0 {
            f64::INFINITY
        } else {
            off[0].max(off[1])
        };
        self.with_value(value)
            .with_bound(if bound.is_nan() { 0.0 } else { bound })
    }

    fn divided_by(self, other: Self) -> Self {
        let value = self.value / other.value;
        let least = other.value.abs() - other.bound;
        let bound = if self.bound == 0.0 && other.bound == 0.0 {
            0.0
        // The divisor's interval excludes 0, or else the quotient is unbounded.
        } else if least > 0.0 {
            (self.bound + value.abs() * other.bound) / least
        } else {
            f64::INFINITY
        };
        Self {
            value,
            bound,
            made: self.plus(other).made,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UNARY: [RowUnary; 7] = [
        RowUnary::Negative,
        RowUnary::Abs,
        RowUnary::Sqrt,
        RowUnary::Rsqrt,
        RowUnary::Exp,
        RowUnary::PowerOfTwo,
        RowUnary::E2m1,
    ];
    const BINARY: [RowBinary; 6] = [
        RowBinary::Add,
        RowBinary::Subtract,
        RowBinary::Multiply,
        RowBinary::Divide,
        RowBinary::Min,
        RowBinary::Max,
    ];

    proptest! {
        #[test]
        fn what_a_device_computes_is_within_the_bound(
            a in -30.0_f64..30.0, b in -30.0_f64..30.0, off in prop::array::uniform2(-1.0_f64..1.0),
            far in 0.0_f64..0.1, which in 0..13_usize,
        ) {
            let near = |value: f64, off: f64| {
                let device = (value + off * far) as f32;
                let known = BoundedValue { bound: far + value.abs() * 2_f64.powi(-23), ..BoundedValue::exact(value) };
                (device, known)
            };
            let ((x, vx), (y, vy)) = (near(a, off[0]), near(b, off[1]));
            let (device, known) = match which {
                0..7 => (x.unary(UNARY[which]), vx.unary(UNARY[which])),
                _ => (x.binary(BINARY[which - 7], y), vx.binary(BINARY[which - 7], vy)),
            };
            let off = (f64::from(device) - known.value).abs();
            prop_assert!(known.bound.is_infinite() || off <= known.bound || off.is_nan(), "{device} {known:?}");
        }
    }
}

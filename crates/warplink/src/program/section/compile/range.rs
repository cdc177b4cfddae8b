//! Value ranges of a section's integers.

use crate::program::expr::Operator;

/// Saturation bound. Far above 32 bits, which is the boundary that matters, and small enough that sums and products
/// of bounds do not overflow.
const LIMIT: i128 = 1 << 62;

/// Minimum and maximum value of an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    least: i128,
    most: i128,
}

impl Range {
    /// Any value.
    pub(super) const ANY: Self = Self {
        least: -LIMIT,
        most: LIMIT,
    };

    /// Exactly `value`.
    pub(super) fn exactly(value: i64) -> Self {
        Self::of(value.into(), value.into())
    }

    /// From `least` to `most`.
    pub(super) fn of(least: i128, most: i128) -> Self {
        Self {
            least: least.clamp(-LIMIT, LIMIT),
            most: most.clamp(-LIMIT, LIMIT),
        }
    }

    /// Range of a loop index between two bounds.
    pub(super) fn index(from: Self, to: Self) -> Self {
        // A loop that may be empty: the range must not be.
        Self::of(from.least, (to.most - 1).max(from.least))
    }

    /// From 0 to the maximum.
    pub(super) fn down_to_zero(self) -> Self {
        Self::of(0, self.most.max(0))
    }

    /// Whether all values are at least 0.
    pub(super) fn is_natural(self) -> bool {
        self.least >= 0
    }

    /// Whether all values, and small sums of them, fit in 32 bits.
    pub(super) fn is_narrow(self) -> bool {
        self.least >= -(1 << 30) && self.most <= 1 << 30
    }

    /// Whether every value is a valid shift of a 32-bit integer.
    pub(super) fn is_within_word(self) -> bool {
        self.most <= 30
    }

    pub(super) fn negated(self) -> Self {
        Self::of(-self.most, -self.least)
    }

    /// Range of the operator's result.
    pub(super) fn with(self, operator: Operator, other: Self) -> Self {
        let (a, b) = (self, other);
        let natural = a.is_natural() && b.is_natural();
        let size = |range: Self| range.most.abs().max(range.least.abs());
        match operator {
            Operator::Add => Self::of(a.least + b.least, a.most + b.most),
            Operator::Subtract => Self::of(a.least - b.most, a.most - b.least),
            Operator::Multiply => {
                let ends = [a.least, a.most]
                    .map(|x| [x.saturating_mul(b.least), x.saturating_mul(b.most)]);
                let ends = ends.as_flattened();
                let least = ends.iter().min().copied().unwrap_or(-LIMIT);
                Self::of(least, ends.iter().max().copied().unwrap_or(LIMIT))
            }
            Operator::Divide if natural => Self::of(0, a.most),
            // One further below, as quotients round down.
            Operator::Divide => Self::of(-size(a) - 1, size(a)),
            Operator::Remainder if b.least > 0 => {
                let most = if natural {
                    a.most.min(b.most - 1)
                } else {
                    b.most - 1
                };
                Self::of(0, most)
            }
            // A divisor that may be negative gives remainders of its sign.
            Operator::Remainder => Self::of(-size(b), size(b)),
            Operator::Min => Self::of(a.least.min(b.least), a.most.min(b.most)),
            Operator::Max => Self::of(a.least.max(b.least), a.most.max(b.most)),
            // Includes the intermediate sum.
            Operator::Part => Self::of(0, a.most.max(0) + 16 * b.most.max(1)),
            Operator::Xor if natural => {
                let bits = 128 - (a.most | b.most).leading_zeros();
                Self::of(0, (1_i128 << bits) - 1)
            }
            Operator::ShiftRight if natural => Self::of(0, a.most),
            Operator::ShiftLeft if natural && b.most <= 62 => {
                Self::of(0, a.most.saturating_mul(1 << b.most))
            }
            Operator::Xor | Operator::ShiftLeft | Operator::ShiftRight => Self::ANY,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_range_has_every_value_that_an_operator_gives(
            which in 0..Operator::ALL.len(),
            a in -40_i64..40, b in -40_i64..40, more in prop::array::uniform2(0_i64..20),
            at in prop::array::uniform2(0_i64..20),
        ) {
            let operator = Operator::ALL[which];
            let (x, y) = (a + at[0].min(more[0]), b + at[1].min(more[1]));
            let ranges = [(a, more[0]), (b, more[1])].map(|(least, more)| Range::of(least.into(), (least + more).into()));
            if let Ok(value) = operator.apply(x, y) {
                let range = ranges[0].with(operator, ranges[1]);
                prop_assert!(range.least <= value.into() && range.most >= value.into(), "{range:?} {value}");
            }
        }
    }
}

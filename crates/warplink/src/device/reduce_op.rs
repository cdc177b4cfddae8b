//! Reduction operators.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::named::{Named, listed};
use std::fmt;
use std::str::FromStr;

/// Name of the operator with a factor.
const SCALED: &str = ReduceOp::ScaledSum(Factor::ONE).name();

/// Reduction operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ReduceOp {
    /// Sum.
    Sum,
    /// Maximum.
    Max,
    /// Minimum.
    Min,
    /// Product.
    Product,
    /// Sum divided by the number of values; integer division truncates.
    Average,
    /// Sum of the values multiplied by a factor; floats only. The factor has the accumulator's precision, and
    /// each product is rounded to it.
    ScaledSum(Factor),
}

/// Factor of a scaled sum. Equality compares bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Factor(u64);

impl Factor {
    /// A factor of 1.
    pub const ONE: Self = Self::new(1.0);

    /// Creates a factor.
    pub const fn new(value: f64) -> Self {
        Self(value.to_bits())
    }

    /// Value of the factor.
    pub const fn value(self) -> f64 {
        f64::from_bits(self.0)
    }

    /// Rounded to the precision in which values of `dtype` are multiplied: double for 64-bit types, else
    /// single.
    pub fn rounded(self, dtype: DType) -> Self {
        match dtype {
            DType::F64 => self,
            _ => Self::new(f64::from(self.value() as f32)),
        }
    }
}

impl ReduceOp {
    /// Every operator without a factor.
    pub const ALL: [Self; 5] = [
        Self::Sum,
        Self::Max,
        Self::Min,
        Self::Product,
        Self::Average,
    ];

    /// Name in program text.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Max => "max",
            Self::Min => "min",
            Self::Product => "product",
            Self::Average => "average",
            Self::ScaledSum(_) => "scaled_sum",
        }
    }

    /// The forms of operators as a list of alternatives.
    pub fn forms() -> String {
        let scaled = format!("{SCALED}(factor)");
        listed(Self::ALL.map(Self::name).into_iter().chain([&*scaled]))
    }

    /// The alternatives for an operator in program text.
    pub(crate) fn alternatives() -> String {
        let names = <Self as Named>::ALL.iter().map(|op| op.name());
        listed(names.chain(["a parameter that is one"]))
    }

    /// Sum of values multiplied by `factor`.
    pub const fn scaled_sum(factor: f64) -> Self {
        Self::ScaledSum(Factor::new(factor))
    }

    /// The factor, if the operator has one.
    pub const fn factor(self) -> Option<Factor> {
        match self {
            Self::ScaledSum(factor) => Some(factor),
            _ => None,
        }
    }

    /// Fails if it does not apply to `dtype`, or its factor is not finite.
    pub(crate) fn check(self, dtype: DType) -> Result<()> {
        let Some(factor) = self.factor() else {
            return Ok(());
        };
        if !factor.value().is_finite() {
            return Err(Error::invalid(format!("{self}; expected a finite factor"))
                .with_help("give a factor that is neither infinite nor NaN"));
        }
        if dtype.is_float() {
            return Ok(());
        }
        Err(
            Error::unsupported(format!("{SCALED} of {dtype}; expected floats"))
                .with_help("use sum, or another type"),
        )
    }
}

/// `ScaledSum` represents all factors.
impl Named for ReduceOp {
    const TERM: &'static str = "operator";

    const ALL: &'static [Self] = &[
        Self::Sum,
        Self::Max,
        Self::Min,
        Self::Product,
        Self::Average,
        Self::ScaledSum(Factor::ONE),
    ];

    fn name(self) -> &'static str {
        Self::name(self)
    }

    fn about(self) -> &'static str {
        match self {
            Self::Sum => "Sum.",
            Self::Max => "Maximum.",
            Self::Min => "Minimum.",
            Self::Product => "Product.",
            Self::Average => "Sum divided by the number of values; integer division truncates.",
            Self::ScaledSum(_) => "Sum of the values multiplied by the factor; floats only.",
        }
    }

    /// Starts at 1; 0 means no operator.
    fn number(self) -> i32 {
        match self {
            Self::Sum => 1,
            Self::Max => 2,
            Self::Min => 3,
            Self::Product => 4,
            Self::Average => 5,
            Self::ScaledSum(_) => 6,
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ScaledSum(factor) if *factor != Factor::ONE => {
                write!(f, "{SCALED}({})", factor.value())
            }
            _ => f.write_str(self.name()),
        }
    }
}

impl FromStr for ReduceOp {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let factor = |text: &str| {
            let value = match text.strip_prefix(SCALED)? {
                "" => 1.0,
                rest => rest.strip_prefix('(')?.strip_suffix(')')?.parse().ok()?,
            };
            Some(value)
                .filter(|value: &f64| value.is_finite())
                .map(Self::scaled_sum)
        };
        let mut all = Self::ALL.into_iter();
        let plain = all.find(|operator| operator.name() == text);
        plain.or_else(|| factor(text)).ok_or_else(|| {
            Error::parse(format!(
                "unknown operator '{text}'; expected {}",
                Self::forms()
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operator_is_read_as_it_is_written() {
        let scaled = [0.5, 1.0, -3.25e-7, 1e300].map(ReduceOp::scaled_sum);
        for op in ReduceOp::ALL.into_iter().chain(scaled) {
            assert_eq!(op.to_string().parse::<ReduceOp>().unwrap(), op);
        }
        assert_eq!(ReduceOp::scaled_sum(1.0).to_string(), "scaled_sum");
        for text in [
            "scaled_sum(",
            "scaled_sum()",
            "scaled_sum(x)",
            "scaled_sums",
            "scaled_sum(nan)",
            "scaled_sum(-inf)",
            "add",
        ] {
            let error = text.parse::<ReduceOp>().unwrap_err().to_string();
            assert!(error.contains("average or scaled_sum(factor)"), "{error}");
        }
    }

    #[test]
    fn a_factor_is_rounded_as_values_are_multiplied() {
        let factor = Factor::new(0.1);
        assert_eq!(factor.rounded(DType::F64), factor);
        assert_eq!(factor.rounded(DType::BF16).value(), f64::from(0.1_f32));
    }
}

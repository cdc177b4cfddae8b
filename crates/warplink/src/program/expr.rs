//! Integer expressions and conditions.

use crate::named::named;
use std::fmt;

/// Maximum characters of a line or a statement in messages.
pub(super) const MAX_SHOWN: usize = 160;

/// Maximum nesting depth of an expression. Bounds the stack used by recursive walks.
pub const MAX_DEPTH: usize = 64;

/// Tensor parts start at multiples of this many elements. That is at least 16 bytes for every element type, which is
/// the alignment that wide accesses need.
pub const PART_UNIT: i64 = 16;

/// An integer expression, evaluated in `i64` with every overflow an error.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Expr {
    /// A number.
    Number(i64),
    /// `rank`, `world`, `streams`, a parameter, a loop index, or a name that `let` bound.
    Name(String),
    /// `-a`.
    Negative(Box<Expr>),
    /// `n[i]`, an element of a list.
    Element(String, Box<Expr>),
    /// `count(n)`, the length of a list.
    Count(String),
    /// `log2(a)`, rounded down, of an `a` above 0.
    Log2(Box<Expr>),
    /// `a + b`, `min(a, b)` and the like.
    Binary(Operator, Box<Expr>, Box<Expr>),
}

named! {
    /// An operator between integers. The name is its sign in program text; that of `min`, `max` and `part` is a function.
    pub enum Operator: "operator" {
        /// `+`.
        Add = "+",
        /// `-`.
        Subtract = "-",
        /// `*`.
        Multiply = "*",
        /// `/`, rounded towards minus infinity.
        Divide = "/",
        /// `%`, the remainder of `/`: it has the sign of the divisor, so `(rank - 1) % world` is a rank.
        Remainder = "%",
        /// `<<`: `a << b` is `a` times 2 to the `b`, for a `b` from 0 to 62.
        ShiftLeft = "<<",
        /// `>>`: `a >> b` is `a / 2^b`, rounded towards minus infinity, for a `b` from 0 to 62.
        ShiftRight = ">>",
        /// `^`, bitwise exclusive or: `rank ^ 1` is a neighbour.
        Xor = "^",
        /// `min(a, b)`.
        Min = "min",
        /// `max(a, b)`.
        Max = "max",
        /// `part(n, k)`: length of the parts into which `[i of k]` cuts a tensor of `n`.
        Part = "part",
    }
}

named! {
    /// A comparison of integers. The name is its sign in program text.
    pub enum Comparison: "comparison" {
        /// `==`.
        Equal = "==",
        /// `!=`.
        NotEqual = "!=",
        /// `<`.
        Less = "<",
        /// `<=`.
        LessOrEqual = "<=",
        /// `>`.
        Greater = ">",
        /// `>=`.
        GreaterOrEqual = ">=",
    }
}

/// A condition.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Condition {
    /// `a == b` and the like.
    Compare(Comparison, Expr, Expr),
    /// `given(bias)`: whether the caller binds an optional tensor.
    Given(String),
    /// `reachable(X)`: in a kernel, whether all ranks can access the announced tensor on each of them.
    Reachable(String),
    /// `not a`.
    Not(Box<Condition>),
    /// `a and b`; `b` is not evaluated where `a` fails.
    And(Box<Condition>, Box<Condition>),
    /// `a or b`; `b` is not evaluated where `a` holds.
    Or(Box<Condition>, Box<Condition>),
}

/// Reason why an expression has no value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EvaluationError {
    /// A name that is unbound or not an integer.
    Unknown(String),
    /// A result that an `i64` cannot hold.
    Overflow,
    /// A division by zero.
    DivisionByZero,
    /// A shift by less than 0 or more than 62.
    ShiftRange,
    /// The logarithm of a number below 1.
    Logarithm,
    /// Nested deeper than [`MAX_DEPTH`].
    TooDeep,
}

impl fmt::Display for EvaluationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(name) => write!(f, "'{name}' is not an integer that is known here"),
            Self::Overflow => f.write_str("the value overflows 64 bits"),
            Self::DivisionByZero => f.write_str("division by zero"),
            Self::ShiftRange => f.write_str("a shift by less than 0 or more than 62"),
            Self::Logarithm => f.write_str("the logarithm of a number below 1"),
            Self::TooDeep => write!(f, "the expression is nested deeper than {MAX_DEPTH}"),
        }
    }
}

impl Expr {
    /// Evaluates the expression, with `lookup` giving the values of names. Other integer-valued terms are looked up
    /// under their printed form: `n[2]`, `count(n)`, `given(bias)` (1 or 0).
    ///
    /// # Errors
    /// An unknown name, an overflow, a division by zero, a shift or logarithm out of range.
    pub fn evaluate(&self, lookup: &dyn Fn(&str) -> Option<i64>) -> Result<i64, EvaluationError> {
        self.evaluate_within(lookup, MAX_DEPTH)
    }

    fn evaluate_within(
        &self,
        lookup: &dyn Fn(&str) -> Option<i64>,
        left: usize,
    ) -> Result<i64, EvaluationError> {
        let left = left.checked_sub(1).ok_or(EvaluationError::TooDeep)?;
        match self {
            Self::Number(value) => Ok(*value),
            Self::Name(name) => lookup(name).ok_or_else(|| EvaluationError::Unknown(name.clone())),
            Self::Element(list, index) => {
                let index = index.evaluate_within(lookup, left)?;
                let name = format!("{list}[{index}]");
                // Lists are looked up by element under composed names, so that one lookup serves integers and lists
                // alike.
                lookup(&name).ok_or(EvaluationError::Unknown(name))
            }
            Self::Count(list) => {
                let name = format!("count({list})");
                lookup(&name).ok_or(EvaluationError::Unknown(name))
            }
            Self::Log2(a) => a
                .evaluate_within(lookup, left)?
                .checked_ilog2()
                .map(i64::from)
                .ok_or(EvaluationError::Logarithm),
            Self::Negative(a) => a
                .evaluate_within(lookup, left)?
                .checked_neg()
                .ok_or(EvaluationError::Overflow),
            Self::Binary(operator, a, b) => operator.apply(
                a.evaluate_within(lookup, left)?,
                b.evaluate_within(lookup, left)?,
            ),
        }
    }

    /// Calls `with` for this expression and its subexpressions, outermost first.
    pub(super) fn walk<'e>(&'e self, with: &mut dyn FnMut(&'e Self)) {
        with(self);
        self.operands().for_each(|operand| operand.walk(with));
    }

    fn operands(&self) -> impl Iterator<Item = &Self> {
        let (first, second) = match self {
            Self::Number(_) | Self::Name(_) | Self::Count(_) => (None, None),
            Self::Negative(a) | Self::Element(_, a) | Self::Log2(a) => (Some(a), None),
            Self::Binary(_, a, b) => (Some(a), Some(b)),
        };
        first.into_iter().chain(second).map(|operand| &**operand)
    }

    /// Number of numbers, names and operators.
    pub fn terms(&self) -> usize {
        let mut terms = 0;
        self.walk(&mut |_| terms += 1);
        terms
    }

    /// Nesting depth; a number or name has depth 1.
    pub fn depth(&self) -> usize {
        1 + self.operands().map(Self::depth).max().unwrap_or(0)
    }
}

impl Operator {
    /// Applies the operator to `a` and `b`.
    ///
    /// # Errors
    /// An overflow, a division by zero, a shift out of range.
    pub fn apply(self, a: i64, b: i64) -> Result<i64, EvaluationError> {
        let value = match self {
            Self::Add => a.checked_add(b),
            Self::Subtract => a.checked_sub(b),
            Self::Multiply => a.checked_mul(b),
            Self::Divide | Self::Remainder if b == 0 => {
                return Err(EvaluationError::DivisionByZero);
            }
            Self::Divide => a
                .checked_div(b)
                .map(|q| if self.floors(a, b) { q - 1 } else { q }),
            // The only division that overflows, i64::MIN / -1, has remainder 0.
            Self::Remainder => {
                Some(a.wrapping_rem(b)).map(|r| if self.floors(a, b) { r + b } else { r })
            }
            Self::ShiftLeft | Self::ShiftRight if !(0..=62).contains(&b) => {
                return Err(EvaluationError::ShiftRange);
            }
            // A shift would drop high bits silently; the product reports an overflow.
            Self::ShiftLeft => a.checked_mul(1 << b),
            Self::ShiftRight => Some(a >> b),
            Self::Xor => Some(a ^ b),
            Self::Min => Some(a.min(b)),
            Self::Max => Some(a.max(b)),
            Self::Part if b < 1 => return Err(EvaluationError::DivisionByZero),
            Self::Part => PART_UNIT
                .checked_mul(b)
                .map(|all| a.max(0) / all + i64::from(a.max(0) % all > 0))
                .and_then(|units| units.checked_mul(PART_UNIT)),
        };
        value.ok_or(EvaluationError::Overflow)
    }

    /// Whether rounding down differs from the truncation of processor division.
    fn floors(self, a: i64, b: i64) -> bool {
        a.wrapping_rem(b) != 0 && (a < 0) != (b < 0)
    }

    /// Operators that are written as signs, those that bind least first.
    pub(super) const LEVELS: [&[Self]; 4] = [
        &[Self::Xor],
        &[Self::ShiftLeft, Self::ShiftRight],
        &[Self::Add, Self::Subtract],
        &[Self::Multiply, Self::Divide, Self::Remainder],
    ];

    /// Its place in [`LEVELS`](Self::LEVELS); `None` for functions.
    pub(super) fn level(self) -> Option<usize> {
        let mut levels = Self::LEVELS.iter();
        levels.position(|level| level.contains(&self))
    }

    /// Sign in program text; for `min`, `max` and `part`, the function name.
    pub const fn sign(self) -> &'static str {
        self.name()
    }
}

impl Comparison {
    /// Whether the comparison holds for `a` and `b`.
    pub const fn holds(self, a: i64, b: i64) -> bool {
        match self {
            Self::Equal => a == b,
            Self::NotEqual => a != b,
            Self::Less => a < b,
            Self::LessOrEqual => a <= b,
            Self::Greater => a > b,
            Self::GreaterOrEqual => a >= b,
        }
    }
}

/// The name under which [`Condition::Reachable`] is looked up.
pub(crate) fn reachable(tensor: &str) -> String {
    format!("reachable({tensor})")
}

impl Condition {
    /// Whether the condition holds, with `lookup` giving the values of names.
    ///
    /// # Errors
    /// As [`Expr::evaluate`].
    pub fn evaluate(&self, lookup: &dyn Fn(&str) -> Option<i64>) -> Result<bool, EvaluationError> {
        self.evaluate_within(lookup, MAX_DEPTH)
    }

    fn evaluate_within(
        &self,
        lookup: &dyn Fn(&str) -> Option<i64>,
        left: usize,
    ) -> Result<bool, EvaluationError> {
        let left = left.checked_sub(1).ok_or(EvaluationError::TooDeep)?;
        Ok(match self {
            Self::Compare(comparison, a, b) => {
                comparison.holds(a.evaluate(lookup)?, b.evaluate(lookup)?)
            }
            Self::Given(tensor) => Expr::Name(format!("given({tensor})")).evaluate(lookup)? != 0,
            Self::Reachable(tensor) => Expr::Name(reachable(tensor)).evaluate(lookup)? != 0,
            Self::Not(a) => !a.evaluate_within(lookup, left)?,
            Self::And(a, b) => {
                a.evaluate_within(lookup, left)? && b.evaluate_within(lookup, left)?
            }
            Self::Or(a, b) => {
                a.evaluate_within(lookup, left)? || b.evaluate_within(lookup, left)?
            }
        })
    }

    fn operands(&self) -> impl Iterator<Item = &Self> {
        let (first, second) = match self {
            Self::Compare(..) | Self::Given(_) | Self::Reachable(_) => (None, None),
            Self::Not(a) => (Some(a), None),
            Self::And(a, b) | Self::Or(a, b) => (Some(a), Some(b)),
        };
        first.into_iter().chain(second).map(|operand| &**operand)
    }

    /// Calls `with` for the comparisons, `given` and `reachable` tests in the condition.
    pub(super) fn leaves<'c>(&'c self, with: &mut dyn FnMut(&'c Self)) {
        if matches!(
            self,
            Self::Compare(..) | Self::Given(_) | Self::Reachable(_)
        ) {
            with(self);
        }
        self.operands().for_each(|operand| operand.leaves(with));
    }

    /// Number of numbers, names and operators.
    pub fn terms(&self) -> usize {
        let compared = match self {
            Self::Compare(_, a, b) => a.terms() + b.terms(),
            _ => 0,
        };
        1 + compared + self.operands().map(Self::terms).sum::<usize>()
    }

    /// Nesting depth, not counting the compared expressions.
    pub fn depth(&self) -> usize {
        1 + self.operands().map(Self::depth).max().unwrap_or(0)
    }
}

/// A statement or expression for a message; long ones are truncated.
pub(super) fn shortened(text: String) -> String {
    // By characters: a byte index could be within one.
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// The value of an expression as `value`, if it is below `limit`; otherwise a message.
pub(super) fn below(
    what: &str,
    expression: &Expr,
    value: i64,
    limit: usize,
) -> Result<usize, String> {
    let number = usize::try_from(value).ok().filter(|number| *number < limit);
    number.ok_or_else(|| {
        let (name, most) = (subject(what, expression, value), limit.saturating_sub(1));
        format!("{name} is {value}; expected 0 to {most}")
    })
}

/// Subject of a message about `value`: `peer rank + 1`, or `the peer` if the expression is the value itself. In
/// `B[1]: member`, the last word is the result.
fn subject(what: &str, expression: &Expr, value: i64) -> String {
    let text = expression.to_string();
    // `index 5 is 5` would say nothing more than `the index is 5`.
    if text != value.to_string() {
        return format!("{what} {}", shortened(text));
    }
    match what.rsplit_once(": ") {
        Some((before, what)) => format!("{before}: the {what}"),
        None => format!("the {what}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn overflow_and_division_by_zero_are_errors() {
        assert_eq!(
            Operator::Add.apply(i64::MAX, 1),
            Err(EvaluationError::Overflow)
        );
        assert_eq!(
            Operator::Divide.apply(i64::MIN, -1),
            Err(EvaluationError::Overflow)
        );
        assert_eq!(Operator::Remainder.apply(i64::MIN, -1), Ok(0));
        assert_eq!(
            Operator::Divide.apply(1, 0),
            Err(EvaluationError::DivisionByZero)
        );
        assert_eq!(
            Operator::Remainder.apply(1, 0),
            Err(EvaluationError::DivisionByZero)
        );
        assert_eq!(Operator::Remainder.apply(-1, 8), Ok(7));
        assert_eq!(Operator::Divide.apply(-1, 8), Ok(-1));
    }

    #[test]
    fn parts_are_multiples_of_a_unit_and_cover_all() {
        for (n, k, length) in [
            (0, 3, 0),
            (1, 8, 16),
            (100, 2, 64),
            (4096, 8, 512),
            (17, 1, 32),
        ] {
            assert_eq!(Operator::Part.apply(n, k), Ok(length));
        }
        assert_eq!(
            Operator::Part.apply(5, 0),
            Err(EvaluationError::DivisionByZero)
        );
        assert_eq!(
            Operator::Part.apply(i64::MAX, 1),
            Err(EvaluationError::Overflow)
        );
    }

    #[test]
    fn shifts_are_products_with_powers_of_two() {
        assert_eq!(Operator::ShiftLeft.apply(3, 4), Ok(48));
        assert_eq!(Operator::ShiftLeft.apply(-1, 62), Ok(i64::MIN / 2));
        assert_eq!(
            Operator::ShiftLeft.apply(2, 62),
            Err(EvaluationError::Overflow)
        );
        for by in [-1, 63, i64::MAX] {
            assert_eq!(
                Operator::ShiftLeft.apply(1, by),
                Err(EvaluationError::ShiftRange)
            );
        }
    }

    proptest! {
        #[test]
        fn division_rounds_down(a in any::<i64>(), b in any::<i64>()) {
            prop_assume!(b != 0 && !(a == i64::MIN && b == -1));
            let (quotient, remainder) =
                (Operator::Divide.apply(a, b).unwrap(), Operator::Remainder.apply(a, b).unwrap());
            prop_assert_eq!(i128::from(quotient) * i128::from(b) + i128::from(remainder), i128::from(a));
            prop_assert!(remainder == 0 || (remainder < 0) == (b < 0));
            prop_assert!(i128::from(remainder).abs() < i128::from(b).abs());
        }
    }
}

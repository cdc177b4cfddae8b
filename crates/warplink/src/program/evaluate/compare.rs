//! Deviation of a run's values from the program's meaning.

use super::value::BoundedValue;
use std::fmt;

/// Comparison of a tensor with its expected values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Largest error of any element, correct or not.
    pub largest: f64,
    /// Error that rounding allows at that element.
    pub allowed: f64,
    /// Number of elements with a larger error than rounding allows.
    pub wrong: usize,
    /// Number of elements that may be anything, such as those that are never written. They are not compared.
    pub unknown: usize,
    /// First wrong element: its index, the value found, and the expected one.
    pub first: Option<(usize, f64, f64)>,
}

impl Comparison {
    pub(super) fn of<'v>(pairs: impl Iterator<Item = (&'v BoundedValue, f64)>) -> Self {
        let mut all = Self::default();
        for (index, (expected, found)) in pairs.enumerate() {
            let error = (found - expected.value).abs();
            // A value that may be infinite may be anything: another sum of infinities is NaN.
            let within = error <= expected.bound || expected.bound == f64::INFINITY;
            if !within {
                all.wrong += 1;
                all.first.get_or_insert((index, found, expected.value));
            }
            let counts = expected.bound.is_finite();
            all.unknown += usize::from(!counts);
            // A NaN is kept as the largest: no later error compares greater than it.
            if counts && (error > all.largest || error.is_nan()) && !all.largest.is_nan() {
                (all.largest, all.allowed) = (error, expected.bound);
            }
        }
        all
    }

    /// Whether all errors are within their bounds.
    pub const fn is_right(&self) -> bool {
        self.wrong == 0
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "largest error {:.3e} where {:.3e} is allowed",
            self.largest, self.allowed
        )?;
        match self.first {
            None => Ok(()),
            Some((index, found, expected)) => write!(
                f,
                "; {} elements are wrong, the first is {index}: {found} instead of {expected}",
                self.wrong
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_is_wrong() {
        let expected = [BoundedValue::exact(1.0), BoundedValue::exact(2.0)];
        let of = |found: [f64; 2]| Comparison::of(expected.iter().zip(found));
        assert!(of([1.0, 2.0]).is_right());
        assert_eq!(of([1.0, 2.0]).unknown, 0);
        let unknown = Comparison::of([BoundedValue::UNKNOWN].iter().zip([1.0]));
        assert_eq!((unknown.wrong, unknown.unknown), (0, 1));
        let wrong = of([1.0, f64::NAN]);
        assert_eq!((wrong.wrong, wrong.first.map(|f| f.0)), (1, Some(1)));
        assert!(wrong.largest.is_nan());
        let wrong = of([5.0, 2.5]);
        assert_eq!((wrong.wrong, wrong.largest), (2, 4.0));
        assert!(
            wrong
                .to_string()
                .contains("2 elements are wrong, the first is 0: 5")
        );
    }
}

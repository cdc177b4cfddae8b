//! Values with a bound on a device's deviation.

use crate::dtype::{DType, Numbers};

/// Factor on rounding bounds that covers terms of higher order.
const MARGIN: f64 = 1.01;

/// Integers below this bound are exact in `f64`.
const EXACT: f64 = (1_u64 << 53) as f64;

/// A value, and a bound on a device's deviation from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct BoundedValue {
    pub(super) value: f64,
    pub(super) bound: f64,
    pub(super) made: Made,
}

/// Provenance of a sum: fingerprints of its elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Made {
    /// Fingerprint of the elements, independent of their order.
    of: u64,
    /// Fingerprint of the elements in the order of addition.
    order: u64,
}

impl Made {
    /// Provenance of the single element with this number.
    pub(super) const fn element(number: u64) -> Self {
        let number = mixed(number);
        Self {
            of: number,
            order: number,
        }
    }

    const fn and(self, other: Self) -> Self {
        Self {
            of: self.of.wrapping_add(other.of),
            // Not commutative, unlike `of`: the same elements in another order differ in this number only.
            order: mixed(self.order.rotate_left(1) ^ mixed(other.order)),
        }
    }

    /// Whether the same elements were added in another order.
    pub(super) const fn is_reordered(self, other: Self) -> bool {
        self.of == other.of && self.order != other.order
    }
}

/// Mixes `number` so that every bit of the result depends on every bit of it (SplitMix64).
const fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// A sum of products.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Product {
    sum: f64,
    /// Sum of the magnitudes.
    size: f64,
    bound: f64,
}

impl BoundedValue {
    /// A value about which nothing is known.
    pub(super) const UNKNOWN: Self = Self {
        value: f64::NAN,
        bound: f64::INFINITY,
        made: Made { of: 0, order: 0 },
    };

    pub(super) const fn exact(value: f64) -> Self {
        Self {
            value,
            bound: 0.0,
            made: Made { of: 0, order: 0 },
        }
    }

    /// Another value of the same provenance and bound.
    pub(super) const fn with_value(self, value: f64) -> Self {
        Self { value, ..self }
    }

    pub(super) const fn with_bound(self, bound: f64) -> Self {
        Self { bound, ..self }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        // Sums of integers are exact as long as `f64` is. Other sums are rounded when stored, and the bound added
        // there covers this.
        Self {
            value: self.value + other.value,
            bound: self.bound + other.bound,
            made: self.made.and(other.made),
        }
    }

    pub(super) fn times(self, other: Self) -> Self {
        let own = self.value.abs() + self.bound;
        Self {
            value: self.value * other.value,
            // |ab - a'b'| is at most |a - a'| |b| + |a'| |b - b'|.
            bound: self.bound * other.value.abs() + own * other.bound,
            made: self.made.and(other.made),
        }
    }

    /// Wrapping product of two 32-bit integers.
    pub(super) fn times_wrapping(self, other: Self) -> Self {
        let product = (self.value as i32).wrapping_mul(other.value as i32);
        self.times(other).with_value(f64::from(product))
    }

    /// Product in a reduction of `dtype`.
    pub(super) fn times_in(self, other: Self, dtype: DType) -> Self {
        match dtype {
            DType::I32 => self.times_wrapping(other),
            _ => self.times(other),
        }
    }

    /// Quotient by `count`; integer division drops the remainder.
    pub(super) fn divided(self, count: usize, dtype: DType) -> Self {
        let value = self.value / count as f64;
        if dtype.is_float() {
            return self.with_value(value).with_bound(self.bound / count as f64);
        }
        // Integer division truncates towards zero, on hosts and GPUs.
        self.with_value(value.trunc())
    }

    pub(super) fn larger(self, other: Self) -> Self {
        self.chosen(other, f64::max)
    }

    pub(super) fn smaller(self, other: Self) -> Self {
        self.chosen(other, f64::min)
    }

    fn chosen(self, other: Self, choose: fn(f64, f64) -> f64) -> Self {
        Self {
            value: choose(self.value, other.value),
            bound: self.bound.max(other.bound),
            // These operations are insensitive to order.
            made: Made::default(),
        }
    }

    /// Value cast to `dtype`.
    pub(super) fn cast(self, dtype: DType) -> Self {
        let (least, most) = match dtype {
            DType::I32 => (f64::from(i32::MIN), f64::from(i32::MAX)),
            DType::U8 => (0.0, f64::from(u8::MAX)),
            // The conversion goes through `f32`, so it rounds twice.
            DType::F16 | DType::BF16 => return self.stored(DType::F32).stored(dtype),
            _ => return self.stored(dtype),
        };
        // Truncation is discontinuous: a slightly smaller value may truncate to one less.
        let fraction = if self.bound > 0.0 { 1.0 } else { 0.0 };
        self.with_value(self.value.trunc().clamp(least, most))
            .with_bound(self.bound + fraction)
    }

    /// Value as an element of `dtype`.
    pub(super) fn stored(self, dtype: DType) -> Self {
        if !dtype.is_float() {
            return match dtype {
                // Larger integers are not exact in `f64`.
                _ if self.value.abs() > EXACT => self.with_bound(f64::INFINITY),
                DType::U64 if self.value < 0.0 => self.with_bound(f64::INFINITY),
                DType::I64 | DType::U64 => self,
                // Integers wrap.
                _ => self.with_value(wrapped(self.value as i64, dtype)),
            };
        }
        let most = largest(dtype);
        let size = self.value.abs() + self.bound;
        let rounding = |size: f64| roundoff(dtype) * size + smallest(dtype);
        let rounded = |rounding: f64| self.with_bound(self.bound + MARGIN * rounding);
        match dtype {
            // Overflow saturates to the largest value.
            DType::F8E4M3 | DType::F8E5M2 if size.is_finite() => {
                rounded(rounding(size.min(most))).with_value(self.value.clamp(-most, most))
            }
            // The value may overflow to infinity.
            _ if size + rounding(size) > most => self.with_bound(f64::INFINITY),
            _ => rounded(rounding(size)),
        }
    }
}

impl Product {
    pub(super) fn add(&mut self, a: BoundedValue, b: BoundedValue) {
        self.sum += a.value * b.value;
        self.size += (a.value * b.value).abs();
        self.bound += a.bound * (b.value.abs() + b.bound) + a.value.abs() * b.bound;
    }

    /// Value of a product of `depth` terms, stored as `dtype`. The precision and order of the additions are
    /// unspecified, except that the precision is at least that of `f32`.
    pub(super) fn value(&self, depth: usize, dtype: DType) -> BoundedValue {
        let unit = match dtype {
            // Narrow types are accumulated in f32.
            DType::F64 => roundoff(DType::F64),
            _ => roundoff(DType::F32),
        };
        // The classic bound for dot products in any order of summation; 2 more for the product and the conversion.
        let rounding = (depth + 2) as f64 * unit * (self.size + self.bound);
        BoundedValue {
            value: self.sum,
            bound: self.bound + MARGIN * rounding,
            made: Made::default(),
        }
    }
}

/// An integer wrapped to elements of at most 32 bits.
fn wrapped(value: i64, dtype: DType) -> f64 {
    let bits = 8 * dtype.size() as u32;
    let low = value & ((1 << bits) - 1);
    let negative = dtype.numbers() == Numbers::Signed && low >> (bits - 1) == 1;
    (if negative { low - (1 << bits) } else { low }) as f64
}

/// Unit roundoff, half the distance from one to the next number: the largest relative rounding error.
fn roundoff(dtype: DType) -> f64 {
    match dtype.numbers() {
        Numbers::Float { digits, .. } => 2f64.powi(-i32::from(digits)),
        _ => 0.0,
    }
}

/// Smallest number that a device does not flush to zero.
fn smallest(dtype: DType) -> f64 {
    match dtype.numbers() {
        Numbers::Float { smallest, .. } => smallest,
        _ => 0.0,
    }
}

fn largest(dtype: DType) -> f64 {
    match dtype.numbers() {
        Numbers::Float { largest, .. } => largest,
        _ => f64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn integers_wrap_and_are_exact() {
        let sum = BoundedValue::exact(f64::from(i32::MAX)).plus(BoundedValue::exact(1.0));
        let sum = sum.stored(DType::I32);
        assert_eq!((sum.value, sum.bound), (f64::from(i32::MIN), 0.0));
        assert_eq!(
            BoundedValue::exact(300.0).stored(DType::U8),
            BoundedValue::exact(44.0)
        );
    }

    #[test]
    fn casts_cut_off_and_stay_in_range() {
        let cast = |value: f64, dtype: DType| BoundedValue::exact(value).cast(dtype);
        assert_eq!(cast(-2.7, DType::I32), BoundedValue::exact(-2.0));
        assert_eq!(
            cast(3e9, DType::I32),
            BoundedValue::exact(f64::from(i32::MAX))
        );
        assert_eq!(cast(-1.0, DType::U8), BoundedValue::exact(0.0));
        let uncertain = BoundedValue::exact(3.0).with_bound(1e-6);
        assert!(uncertain.cast(DType::I32).bound >= 1.0);
        let rounded = cast(3.001, DType::BF16);
        let near = f64::from(bf16::from_f32(3.001));
        assert!((near - rounded.value).abs() <= rounded.bound);
    }

    #[test]
    fn a_product_may_be_as_far_off_as_its_factors() {
        let (a, b) = (
            BoundedValue::exact(-3.0).with_bound(0.5),
            BoundedValue::exact(2.0).with_bound(0.25),
        );
        let product = a.times(b);
        for (a, b) in [(-3.5, 2.25), (-2.5, 1.75), (-3.5, 1.75)] {
            assert!((a * b - product.value).abs() <= product.bound);
        }
        assert_eq!(a.larger(b).value, 2.0);
        assert_eq!(a.smaller(b), BoundedValue::exact(-3.0).with_bound(0.5));
    }

    #[test]
    fn what_is_stored_may_be_rounded_or_infinite() {
        let stored = BoundedValue::exact(3.0).stored(DType::BF16);
        let near = f64::from(bf16::from_f64(3.0 * (1.0 + 2f64.powi(-9))));
        assert!((near - stored.value).abs() <= stored.bound);
        assert!(stored.bound < 3.0 * 2f64.powi(-7));
        assert_eq!(
            BoundedValue::exact(1e5).stored(DType::F16).bound,
            f64::INFINITY
        );
    }

    #[test]
    fn a_bound_holds_for_any_order_of_single_precision() {
        let terms: Vec<f32> = (0..1000)
            .map(|i| ((i * 7919 % 1000) as f32 - 500.0) * 1.1)
            .collect();
        let mut product = Product::default();
        for term in &terms {
            product.add(
                BoundedValue::exact(f64::from(*term)),
                BoundedValue::exact(1.0),
            );
        }
        let value = product.value(terms.len(), DType::F32);
        let forth: f32 = terms.iter().sum();
        let back: f32 = terms.iter().rev().sum();
        for sum in [forth, back] {
            assert!((f64::from(sum) - value.value).abs() <= value.bound);
        }
        assert!(value.bound < 100.0, "{value:?}");
    }
}

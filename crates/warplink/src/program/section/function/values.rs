//! Evaluation of row functions over any kind of value.

use super::{RowArgument, RowBinary, RowFunction, RowNode, RowReduction, RowStep, RowUnary};
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::program::expr::Comparison;
use std::borrow::Cow;

/// Elements of a row that a thread handles at a time. Must match the kernels, because it determines the summation
/// order.
pub(crate) const UNIT: usize = 8;

/// Threads of a warp. Must match the kernels, because it determines the summation order.
const WARP: usize = 32;

/// Order in which the elements of a row are combined. It depends only on the row's length and the lane's threads, so
/// that results are reproducible.
///
/// A row is cut into units of [`UNIT`] elements. Starting from the operator's neutral element, thread `t` of
/// `threads` combines the elements of units `t`, `t + threads`, … one by one. The 32 values of a warp are combined in
/// a butterfly: each with the value of the thread whose number differs in bit 4, then 3, 2, 1 and 0. The values of
/// the warps, padded with neutral elements to 32, or to 64 if there are more, are combined in the same way, from the highest bit on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowOrder {
    threads: usize,
}

/// Arithmetic value type of row functions.
pub(crate) trait RowValue: Copy {
    fn number(value: f32) -> Self;
    fn unary(self, function: RowUnary) -> Self;
    fn binary(self, function: RowBinary, other: Self) -> Self;
    /// The sum of so many values as their average.
    fn averaged(self, count: usize) -> Self;
    /// `yes` if the comparison of `a` and `b` holds, otherwise `no`.
    fn select(comparison: Comparison, a: Self, b: Self, yes: Self, no: Self) -> Self;
    fn round(self, dtype: DType) -> Self;
    /// Whole numbers from 0 to 15 in one byte, `self` in its low bits.
    fn pair(self, high: Self) -> Self;
    fn row(reduction: RowReduction, values: &[Self], order: RowOrder) -> Self;
}

/// Evaluates `body` with `function` as the constant that `value` is. Loops in it have no choice left to make for each
/// element, which would take most of the time.
macro_rules! chosen {
    ($value:expr, $enum:ident: $($variant:ident)+, $function:ident => $body:expr) => {
        match $value {
            $($enum::$variant => {
                const $function: $enum = $enum::$variant;
                $body
            })+
        }
    };
}

/// As [`chosen!`], for a function of two values.
macro_rules! chosen_binary {
    ($value:expr, $function:ident => $body:expr) => {
        chosen!($value, RowBinary: Add Subtract Multiply Divide Min Max, $function => $body)
    };
}

impl RowStep {
    /// Results for a row of `width` elements; `sources` are the values of the step's sources.
    pub(crate) fn apply<V: RowValue>(&self, sources: &[Vec<V>], width: usize) -> Vec<Vec<V>> {
        let mut sources = sources;
        let arguments = self.arguments.iter().map(|argument| match argument {
            RowArgument::Number(number) => vec![V::number(number.value())],
            RowArgument::Sources(count, operator) => {
                let (these, others) = sources.split_at((*count).min(sources.len()));
                sources = others;
                combined(*operator, these)
            }
        });
        let arguments: Vec<Vec<V>> = arguments.collect();
        let order = RowOrder {
            threads: self.threads,
        };
        self.function.apply(&arguments, width, order)
    }

    /// For each target of the step, in order, the result that it stores.
    pub(crate) fn by_target<'v, V>(&self, results: &'v [Vec<V>]) -> impl Iterator<Item = &'v [V]> {
        let results = results.iter().zip(&self.results);
        results.flat_map(|(result, count)| std::iter::repeat_n(&result[..], *count))
    }
}

/// Rows combined in order, element by element. Not stored in a tensor's type in between: kernels keep rows in registers
/// as f32.
fn combined<V: RowValue>(operator: ReduceOp, rows: &[Vec<V>]) -> Vec<V> {
    let function = match operator {
        ReduceOp::Sum | ReduceOp::Average | ReduceOp::ScaledSum(_) => RowBinary::Add,
        ReduceOp::Product => RowBinary::Multiply,
        ReduceOp::Max => RowBinary::Max,
        ReduceOp::Min => RowBinary::Min,
    };
    let factor = operator.factor();
    let factor = factor.map(|factor| V::number(factor.value() as f32));
    // Each source before it is added, as NCCL's scaled sum and the kernels do.
    let mut scaled = rows.iter().map(|row| match factor {
        Some(factor) => {
            let scaled = pairwise([row, &[factor]], |a: V, b| a.binary(RowBinary::Multiply, b));
            Cow::Owned(scaled)
        }
        None => Cow::Borrowed(&row[..]),
    });
    let mut all = scaled.next().map(Cow::into_owned).unwrap_or_default();
    for row in scaled {
        chosen_binary!(function, FUNCTION => for (value, other) in all.iter_mut().zip(&*row) {
            *value = value.binary(FUNCTION, *other);
        });
    }
    if operator == ReduceOp::Average {
        all.iter_mut()
            .for_each(|value| *value = value.averaged(rows.len()));
    }
    all
}

impl RowFunction {
    /// Results for a row of `width` elements. Arguments and results have one value per element or a single value;
    /// those by blocks have one value per block.
    pub(crate) fn apply<V: RowValue>(
        &self,
        arguments: &[Vec<V>],
        width: usize,
        order: RowOrder,
    ) -> Vec<Vec<V>> {
        // Also for rows of one element, where both readings give the same value.
        let uniform = self.uniform(&|argument| arguments[argument].len() == 1);
        let mut values: Vec<Cow<'_, [V]>> = Vec::with_capacity(self.nodes.len());
        for (number, node) in self.nodes.iter().enumerate() {
            let at = |operand: usize, element: usize| {
                let all = &values[operand];
                all[if all.len() == 1 { 0 } else { element }]
            };
            let count = if uniform[number] { 1 } else { width };
            let all = match *node {
                RowNode::Number(number) => vec![V::number(number.value()); count],
                RowNode::Width => vec![V::number(width as f32); count],
                // Borrowed: copying rows would dominate functions of few operations.
                RowNode::Argument(argument) => {
                    values.push(Cow::Borrowed(&arguments[argument]));
                    continue;
                }
                RowNode::OfBlock(argument, size) => {
                    each(count, |element| arguments[argument][element / size])
                }
                RowNode::Unary(function, a) => {
                    chosen!(
                        function,
                        RowUnary: Negative Abs Sqrt Rsqrt Exp PowerOfTwo Exponent E2m1,
                        FUNCTION => values[a].iter().map(|value| value.unary(FUNCTION)).collect()
                    )
                }
                RowNode::Binary(function, a, b) => {
                    let both = [&values[a][..], &values[b][..]];
                    chosen_binary!(function, FUNCTION => pairwise(both, |a: V, b| a.binary(FUNCTION, b)))
                }
                RowNode::Select(comparison, operands) => {
                    let [a, b, yes, no] = operands.map(|operand| &values[operand][..]);
                    let at = |all: &[V], element| all[if all.len() == 1 { 0 } else { element }];
                    chosen!(
                        comparison,
                        Comparison: Equal NotEqual Less LessOrEqual Greater GreaterOrEqual,
                        COMPARISON => each(count, |element| {
                            let [yes, no] = [at(yes, element), at(no, element)];
                            V::select(COMPARISON, at(a, element), at(b, element), yes, no)
                        })
                    )
                }
                RowNode::Round(dtype, a) => {
                    values[a].iter().map(|value| value.round(dtype)).collect()
                }
                RowNode::Row(reduction, a) => {
                    vec![V::row(reduction, &whole(&values[a], width), order)]
                }
                RowNode::BlockMax(size, a) => {
                    let row = whole(&values[a], width);
                    let blocks = row.chunks(size).flat_map(|block| {
                        std::iter::repeat_n(V::row(RowReduction::Max, block, order), block.len())
                    });
                    blocks.collect()
                }
                RowNode::Pairs(a) => each(count, |element| {
                    let [low, high] = [element / 2 * 2, element / 2 * 2 + 1];
                    let missing = V::number(0.0);
                    // A row of odd width leaves the upper half of its last byte zero.
                    let high = if high < width { at(a, high) } else { missing };
                    at(a, low).pair(high)
                }),
            };
            values.push(Cow::Owned(all));
        }
        let results = self.results.iter();
        let blocks = self.blocks(&uniform);
        let result = |node: &usize| {
            let all = values[*node].iter().copied();
            match blocks[*node].filter(|_| !uniform[*node]) {
                Some(size) => all.step_by(size).collect(),
                None => all.collect(),
            }
        };
        results.map(result).collect()
    }
}

/// Values of elements. Not through a reference to a function, since rows have thousands of elements.
fn each<V>(count: usize, one: impl Fn(usize) -> V) -> Vec<V> {
    (0..count).map(one).collect()
}

/// A row of `width` elements, which may be a single value for all of them.
fn whole<V: Copy>(values: &[V], width: usize) -> Cow<'_, [V]> {
    match values {
        [value] if width != 1 => Cow::Owned(vec![*value; width]),
        _ => Cow::Borrowed(values),
    }
}

/// Values of the elements of two rows, or of single values.
fn pairwise<V: Copy>([a, b]: [&[V]; 2], one: impl Fn(V, V) -> V) -> Vec<V> {
    match (a, b) {
        (&[a], b) => b.iter().map(|b| one(a, *b)).collect(),
        (a, &[b]) => a.iter().map(|a| one(*a, b)).collect(),
        (a, b) => a.iter().zip(b).map(|(a, b)| one(*a, *b)).collect(),
    }
}

impl RowValue for f32 {
    fn number(value: f32) -> Self {
        value
    }

    #[inline]
    fn unary(self, function: RowUnary) -> Self {
        match function {
            RowUnary::Negative => -self,
            RowUnary::Abs => self.abs(),
            RowUnary::Sqrt => self.sqrt(),
            RowUnary::Rsqrt => 1.0 / self.sqrt(),
            RowUnary::Exp => self.exp(),
            RowUnary::PowerOfTwo => power_of_two(self),
            // The biased exponent, as scales of type e8m0 store it.
            RowUnary::Exponent => (self.to_bits() >> 23 & 0xff) as Self,
            RowUnary::E2m1 => e2m1(self),
        }
    }

    // Inlined, so that the operator is chosen once for a row.
    #[inline]
    fn binary(self, function: RowBinary, other: Self) -> Self {
        match function {
            RowBinary::Add => self + other,
            RowBinary::Subtract => self - other,
            RowBinary::Multiply => self * other,
            RowBinary::Divide => self / other,
            // Kernels order -0 below 0.
            RowBinary::Min if self == other => f32::from_bits(self.to_bits() | other.to_bits()),
            RowBinary::Max if self == other => f32::from_bits(self.to_bits() & other.to_bits()),
            RowBinary::Min => self.min(other),
            RowBinary::Max => self.max(other),
        }
    }

    fn averaged(self, count: usize) -> Self {
        self / count as Self
    }

    #[inline]
    fn select(comparison: Comparison, a: Self, b: Self, yes: Self, no: Self) -> Self {
        let holds = match comparison {
            Comparison::Equal => a == b,
            Comparison::NotEqual => a != b,
            Comparison::Less => a < b,
            Comparison::LessOrEqual => a <= b,
            Comparison::Greater => a > b,
            Comparison::GreaterOrEqual => a >= b,
        };
        if holds { yes } else { no }
    }

    fn round(self, dtype: DType) -> Self {
        dtype.rounded(self)
    }

    fn pair(self, high: Self) -> Self {
        let [low, high] = [self, high].map(|value| (value as u8).min(15));
        (low | high << 4).into()
    }

    fn row(reduction: RowReduction, values: &[Self], order: RowOrder) -> Self {
        let (neutral, function) = match reduction {
            RowReduction::Sum => (0.0, RowBinary::Add),
            RowReduction::Max => (f32::NEG_INFINITY, RowBinary::Max),
        };
        let threads = order.threads.max(1);
        // Mirrors the kernel: threads take units of 8 elements in turn, then lanes of a warp and then warps combine
        // as trees. Another order would round sums differently.
        let mut partial = vec![neutral; threads.next_multiple_of(WARP)];
        for (number, unit) in values.chunks(UNIT).enumerate() {
            let of = &mut partial[number % threads];
            *of = unit
                .iter()
                .fold(*of, |all, value| all.binary(function, *value));
        }
        let warps = partial
            .chunks(WARP)
            .map(|warp| tree(warp, neutral, function));
        let warps: Vec<f32> = warps.collect();
        tree(&warps, neutral, function)
    }
}

/// The smallest power of two of at least the same magnitude, as kernels compute it.
fn power_of_two(value: f32) -> f32 {
    const MANTISSA: u32 = (1 << 23) - 1;
    if value.is_nan() {
        return value;
    }
    // Any set bit of the mantissa carries into the exponent: rounds up to a power of two.
    f32::from_bits((value.to_bits() + MANTISSA) & !MANTISSA)
}

/// The code of the nearest value of e2m1, as kernels compute it.
fn e2m1(value: f32) -> f32 {
    if value.is_nan() {
        // The format has no NaN; this is its largest value, as the conversion instruction gives.
        return 7.0;
    }
    let magnitude = value.abs();
    // The middles of neighbours, which go to the one with an even code.
    let beyond = [0.25, 1.25, 2.5, 5.0].map(|middle| magnitude > middle);
    let reached = [0.75, 1.75, 3.5].map(|middle| magnitude >= middle);
    let code = beyond.iter().chain(&reached).filter(|it| **it).count();
    let sign = if value.is_sign_negative() { 8.0 } else { 0.0 };
    sign + code as f32
}

/// Combines values, padded to a power of two and to 32 at least, in a butterfly over the bits of their indices, highest first.
fn tree(values: &[f32], neutral: f32, function: RowBinary) -> f32 {
    let mut all = values.to_vec();
    // Padded with the neutral value, as lanes of a warp that have no value take part in the shuffles.
    all.resize(values.len().next_power_of_two().max(WARP), neutral);
    let mut half = all.len() / 2;
    while half > 0 {
        for number in 0..half {
            all[number] = all[number].binary(function, all[number + half]);
        }
        half /= 2;
    }
    all[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::section::function::{Function, RowExpr, RowParameter};

    fn parameter(name: &str, block: Option<usize>) -> RowParameter {
        let name = name.to_owned();
        RowParameter { name, block }
    }

    #[test]
    fn sums_along_rows_have_one_order() {
        // A different summation order gives a different result.
        let values: Vec<f32> = (0..1000).map(|i| 1.0 / (i as f32 + 1.0)).collect();
        let sum = |threads| {
            let order = RowOrder { threads };
            f32::row(RowReduction::Sum, &values, order)
        };
        let exact: f64 = values.iter().map(|value| f64::from(*value)).sum();
        for threads in [1, 32, 96, 1024, 2048] {
            assert!((f64::from(sum(threads)) - exact).abs() < 1e-5, "{threads}");
        }
        // Two threads alternate between units.
        let each = |first: usize| {
            let units = values.chunks(UNIT).skip(first).step_by(2).flatten();
            units.fold(0.0, |sum: f32, value| sum + value)
        };
        assert_eq!(sum(2).to_bits(), (each(0) + each(1)).to_bits());
    }

    #[test]
    fn the_largest_element_is_a_number() {
        let max = |values: &[f32]| {
            let order = RowOrder { threads: 32 };
            f32::row(RowReduction::Max, values, order)
        };
        assert_eq!(max(&[1.0, f32::NAN, 3.0]), 3.0);
        assert_eq!(max(&[f32::NAN]), f32::NEG_INFINITY);
        assert_eq!(max(&[-0.0, 0.0]).to_bits(), 0);
    }

    #[test]
    fn powers_of_two_are_no_smaller() {
        for (value, power) in [
            (1.0, 1.0),
            (1.1, 2.0),
            (-3.0, -4.0),
            (0.0, 0.0),
            (1e-45, f32::MIN_POSITIVE),
            (3e38, f32::INFINITY),
            (f32::INFINITY, f32::INFINITY),
        ] {
            assert_eq!(value.unary(RowUnary::PowerOfTwo), power, "{value}");
        }
        assert!(f32::NAN.unary(RowUnary::PowerOfTwo).is_nan());
    }

    #[test]
    fn floats_of_four_bits_are_the_nearest_and_packed_in_pairs() {
        let values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (code, pair) in values.windows(2).enumerate() {
            let middle = f32::midpoint(pair[0], pair[1]);
            let even = code + code % 2;
            let ends = [middle.next_down(), middle, middle.next_up()];
            for (value, code) in ends.into_iter().zip([code, even, code + 1]) {
                assert_eq!(value.unary(RowUnary::E2m1), code as f32, "{value}");
                assert_eq!((-value).unary(RowUnary::E2m1), code as f32 + 8.0, "{value}");
            }
        }
        for (value, code) in [
            (-0.0, 8.0),
            (f32::INFINITY, 7.0),
            (f32::NEG_INFINITY, 15.0),
            (f32::NAN, 7.0),
            (-f32::NAN, 7.0),
            (1e-45, 0.0),
        ] {
            assert_eq!(value.unary(RowUnary::E2m1), code, "{value}");
        }
        let x = || Box::new(RowExpr::Name("x".to_owned()));
        let of = |results| Function {
            name: "f".to_owned(),
            parameters: vec![parameter("x", None)],
            lets: Vec::new(),
            results,
        };
        let resolve = |results| RowFunction::resolve::<String>(&of(results), &|_| Ok(DType::F32));
        let function = resolve(vec![RowExpr::Pairs(x())]).unwrap();
        let order = RowOrder { threads: 32 };
        let row = [1.0, 2.0, 15.0, 0.0, -3.0, 99.0, f32::NAN, 4.7, 9.0];
        let results = function.apply(&[row.to_vec()], 9, order);
        assert_eq!(results, [[0x21_u8, 0x0f, 0xf0, 0x40, 0x09].map(f32::from)]);
        let pairs = RowExpr::Unary(RowUnary::Abs, Box::new(RowExpr::Pairs(x())));
        let error = resolve(vec![pairs]).unwrap_err();
        assert!(error.contains("among the results alone"), "{error}");
    }

    #[test]
    fn blocks_have_a_value_each() {
        let x = || Box::new(RowExpr::Name("x".to_owned()));
        let block = || Box::new(RowExpr::BlockMax(x(), 8));
        let function = Function {
            name: "f".to_owned(),
            parameters: vec![parameter("x", None)],
            lets: Vec::new(),
            results: vec![
                *block(),
                RowExpr::Binary(RowBinary::Subtract, x(), block()),
                RowExpr::Row(RowReduction::Sum, block()),
            ],
        };
        let function = RowFunction::resolve::<String>(&function, &|_| Ok(DType::F32)).unwrap();
        let order = RowOrder { threads: 32 };
        let row: Vec<f32> = (0..19).map(|element| element as f32).collect();
        let results = function.apply(&[row], 19, order);
        assert_eq!(results[0], [7.0, 15.0, 18.0]);
        assert_eq!(results[1][7..10], [0.0, -7.0, -6.0]);
        assert_eq!(results[2], [7.0 * 8.0 + 15.0 * 8.0 + 18.0 * 3.0]);
        let function = Function {
            name: "g".to_owned(),
            parameters: vec![parameter("x", None), parameter("s", Some(8))],
            lets: Vec::new(),
            results: vec![RowExpr::Binary(
                RowBinary::Multiply,
                x(),
                Box::new(RowExpr::Name("s".to_owned())),
            )],
        };
        let function = RowFunction::resolve::<String>(&function, &|_| Ok(DType::F32)).unwrap();
        let results = function.apply(&[vec![1.0; 19], vec![2.0, 3.0, 5.0]], 19, order);
        assert_eq!(
            results[0][7..17],
            [2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 5.0]
        );
        // A row of one block has one such element, which is none of the whole row.
        assert_eq!(
            function.apply(&[vec![1.0; 3], vec![2.0]], 3, order),
            [[2.0; 3]]
        );
        for size in [0, 4, 24, 512] {
            let function = Function {
                name: "f".to_owned(),
                parameters: vec![parameter("x", None)],
                lets: Vec::new(),
                results: vec![RowExpr::BlockMax(x(), size)],
            };
            let error = RowFunction::resolve::<String>(&function, &|_| Ok(DType::F32)).unwrap_err();
            assert!(
                error.contains("expected a power of two from 8 to 256"),
                "{error}"
            );
        }
    }

    #[test]
    fn functions_give_rows_and_single_values() {
        let x = || Box::new(RowExpr::Name("x".to_owned()));
        let sum = RowExpr::Row(RowReduction::Sum, x());
        let function = Function {
            name: "f".to_owned(),
            parameters: vec![parameter("x", None), parameter("s", None)],
            lets: vec![("total".to_owned(), sum)],
            results: vec![
                RowExpr::Binary(
                    RowBinary::Multiply,
                    x(),
                    Box::new(RowExpr::Name("s".to_owned())),
                ),
                RowExpr::Name("total".to_owned()),
            ],
        };
        let function = RowFunction::resolve::<String>(&function, &|_| Ok(DType::F32)).unwrap();
        assert_eq!(function.levels(), [0, 0, 1, 0]);
        let order = RowOrder { threads: 32 };
        let results = function.apply(&[vec![1.0_f32, 2.0, 3.0], vec![2.0]], 3, order);
        assert_eq!(results, [vec![2.0, 4.0, 6.0], vec![6.0]]);
    }
}

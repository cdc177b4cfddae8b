//! Functions of rows: what stands between the sources of a step and its targets.
//!
//! A function takes rows and single values, and gives rows and single values. Its body is a tree of expressions
//! ([`Function`], as in the text); where a program is unrolled, its names and types are resolved, and it becomes a list
//! of nodes ([`RowFunction`]) that kernels, the host device and the evaluator go through in order. Everything is
//! computed in `f32`, and rounded where the text says so and where a target stores it.

mod values;

pub(crate) use values::{RowOrder, RowValue, UNIT};

use crate::dtype::DType;
use crate::named::{alternatives, named};
use crate::program::construct::ElementType;
use crate::program::expr::Comparison;
use std::fmt;
use std::sync::Arc;

/// The most arguments of a function, and the most results.
pub const MAX_ROW_ARGUMENTS: usize = 16;

/// The most operations of a function.
pub const MAX_ROW_NODES: usize = 256;

/// Elements of a block: units of one thread up to those of a warp.
const BLOCKS: std::ops::RangeInclusive<usize> = values::UNIT..=32 * values::UNIT;

/// `function norm(x, w) { let s = row_sum(x * x); return x * rsqrt(s / width) * w }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The names of its arguments.
    pub parameters: Vec<String>,
    /// Names for values, in order: each may use those before.
    pub lets: Vec<(String, RowExpr)>,
    /// What it gives, at least one.
    pub results: Vec<RowExpr>,
}

/// An expression over a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowExpr {
    /// `1e-6`.
    Number(Literal),
    /// An argument, or a value that was named before.
    Name(String),
    /// `width`: how many elements the row has.
    Width,
    /// `abs(x)`, `-x`.
    Unary(RowUnary, Box<RowExpr>),
    /// `x + y`, `min(x, y)`.
    Binary(RowBinary, Box<RowExpr>, Box<RowExpr>),
    /// `select(a < b, x, y)`: x where the comparison holds, and y elsewhere, as where an operand is no number.
    Select(Comparison, Box<[RowExpr; 4]>),
    /// `round(x, T)`: the nearest number of a type, ties to even; of 8 bits, what is too large becomes the largest.
    Round(Box<RowExpr>, ElementType),
    /// `row_sum(x)`, `row_max(x)`: one value of all elements.
    Row(RowReduction, Box<RowExpr>),
    /// `block_max(x, 128)`: of each so many elements, the largest one that is a number.
    BlockMax(Box<RowExpr>, usize),
}

/// A number of `f32`, finite and not negative, by its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Literal(u32);

impl Literal {
    /// The nearest number, if it is finite and not negative.
    pub fn new(value: f64) -> Option<Self> {
        let value = value as f32;
        (value.is_finite() && value.is_sign_positive()).then_some(Self(value.to_bits()))
    }

    /// The number.
    pub fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
}

impl fmt::Display for Literal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.value();
        if value == 0.0 || (1e-4..1e9).contains(&value) {
            write!(f, "{value}")
        } else {
            write!(f, "{value:e}")
        }
    }
}

named! {
    /// Functions of one value.
    pub enum RowUnary: "function" {
        /// `-x`.
        Negative = "-",
        /// The magnitude.
        Abs = "abs",
        /// The square root.
        Sqrt = "sqrt",
        /// 1 divided by the square root.
        Rsqrt = "rsqrt",
        /// e to the power of it.
        Exp = "exp",
        /// The least power of two that is no smaller in magnitude.
        PowerOfTwo = "power_of_two",
    }
}

impl RowUnary {
    /// Those that are called by name.
    pub const NAMED: [Self; 5] = [
        Self::Abs,
        Self::Sqrt,
        Self::Rsqrt,
        Self::Exp,
        Self::PowerOfTwo,
    ];
}

named! {
    /// Functions of two values.
    pub enum RowBinary: "function" {
        /// `+`.
        Add = "+",
        /// `-`.
        Subtract = "-",
        /// `*`.
        Multiply = "*",
        /// `/`.
        Divide = "/",
        /// The smaller one; of a number and what is none, the number.
        Min = "min",
        /// The larger one; of a number and what is none, the number.
        Max = "max",
    }
}

named! {
    /// Reductions along a row.
    pub enum RowReduction: "reduction" {
        /// The sum, in the order of a lane.
        Sum = "row_sum",
        /// The largest element that is a number.
        Max = "row_max",
    }
}

/// An operation of a function; operands are the numbers of nodes before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowNode {
    Number(Literal),
    Argument(usize),
    Width,
    Unary(RowUnary, usize),
    Binary(RowBinary, usize, usize),
    Select(Comparison, [usize; 4]),
    Round(DType, usize),
    Row(RowReduction, usize),
    BlockMax(usize, usize),
}

impl RowNode {
    /// The nodes that it is computed of.
    pub(crate) fn operands(&self) -> Vec<usize> {
        match *self {
            Self::Number(_) | Self::Argument(_) | Self::Width => Vec::new(),
            Self::Unary(_, a) | Self::Round(_, a) | Self::Row(_, a) | Self::BlockMax(_, a) => {
                vec![a]
            }
            Self::Binary(_, a, b) => vec![a, b],
            Self::Select(_, all) => all.to_vec(),
        }
    }
}

/// A function with its names and types resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowFunction {
    /// Its name.
    pub name: String,
    /// How many arguments it takes.
    pub arguments: usize,
    pub(crate) nodes: Vec<RowNode>,
    /// The nodes that it gives.
    pub(crate) results: Vec<usize>,
}

impl RowFunction {
    /// Resolves the names of `function`, and its types with `dtype`.
    ///
    /// # Errors
    /// What is wrong with the function, in words, and what `dtype` gives.
    pub(crate) fn resolve<E: From<String>>(
        function: &Function,
        dtype: &dyn Fn(&ElementType) -> Result<DType, E>,
    ) -> Result<Self, E> {
        let mut builder = Builder {
            dtype,
            names: Vec::new(),
            nodes: Vec::new(),
        };
        for (number, name) in function.parameters.iter().enumerate() {
            let node = builder.push(RowNode::Argument(number))?;
            builder.names.push((name, node));
        }
        for (name, value) in &function.lets {
            let node = builder.node(value)?;
            builder.names.push((name, node));
        }
        let results = function.results.iter();
        let results = results.map(|value| builder.node(value));
        let results = results.collect::<Result<Vec<usize>, E>>()?;
        Ok(Self {
            name: function.name.clone(),
            arguments: function.parameters.len(),
            nodes: builder.nodes,
            results,
        })
    }

    /// How many results it gives.
    pub fn results(&self) -> usize {
        self.results.len()
    }

    /// Of each node, whether it is one value for a whole row, where arguments are what `scalar` says.
    pub(crate) fn uniform(&self, scalar: &dyn Fn(usize) -> bool) -> Vec<bool> {
        let mut uniform: Vec<bool> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            uniform.push(match node {
                RowNode::Argument(number) => scalar(*number),
                RowNode::Row(..) => true,
                RowNode::BlockMax(..) => false,
                other => other.operands().iter().all(|operand| uniform[*operand]),
            });
        }
        uniform
    }

    /// Of each node that has one value for each block of elements, of how many; `uniform` are those with one for the row.
    pub(crate) fn blocks(&self, uniform: &[bool]) -> Vec<Option<usize>> {
        let mut blocks: Vec<Option<usize>> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let operands = node.operands();
            let varying = operands.iter().filter(|operand| !uniform[**operand]);
            let mut sizes = varying.map(|operand| blocks[*operand]);
            blocks.push(match node {
                RowNode::BlockMax(size, _) => Some(*size),
                RowNode::Row(..) => None,
                _ => {
                    let first = sizes.next().flatten();
                    first.filter(|first| sizes.all(|size| size == Some(*first)))
                }
            });
        }
        blocks
    }

    /// Of each node, after how many reductions along the row or blocks of it it can be computed.
    pub(crate) fn levels(&self) -> Vec<usize> {
        let mut levels: Vec<usize> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let before = node.operands().iter().map(|operand| levels[*operand]).max();
            let reduces = matches!(node, RowNode::Row(..) | RowNode::BlockMax(..));
            let reduces = usize::from(reduces);
            levels.push(before.unwrap_or(0) + reduces);
        }
        levels
    }
}

struct Builder<'f, E> {
    dtype: &'f dyn Fn(&ElementType) -> Result<DType, E>,
    names: Vec<(&'f str, usize)>,
    nodes: Vec<RowNode>,
}

impl<E: From<String>> Builder<'_, E> {
    fn push(&mut self, node: RowNode) -> Result<usize, E> {
        // The same operation of the same values is one.
        if let Some(number) = self.nodes.iter().position(|other| *other == node) {
            return Ok(number);
        }
        if self.nodes.len() == MAX_ROW_NODES {
            let message = format!("a function has at most {MAX_ROW_NODES} operations");
            return Err(message.into());
        }
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    fn node(&mut self, value: &RowExpr) -> Result<usize, E> {
        let node = match value {
            RowExpr::Number(number) => RowNode::Number(*number),
            RowExpr::Name(name) => {
                let mut names = self.names.iter().rev();
                let known = names.find(|(known, _)| known == name);
                return match known {
                    Some((_, node)) => Ok(*node),
                    None => Err(format!("unknown value '{name}' in a function").into()),
                };
            }
            RowExpr::Width => RowNode::Width,
            RowExpr::Unary(function, a) => RowNode::Unary(*function, self.node(a)?),
            RowExpr::Binary(function, a, b) => {
                let a = self.node(a)?;
                RowNode::Binary(*function, a, self.node(b)?)
            }
            RowExpr::Select(comparison, all) => {
                let mut nodes = [0; 4];
                for (node, value) in nodes.iter_mut().zip(all.iter()) {
                    *node = self.node(value)?;
                }
                RowNode::Select(*comparison, nodes)
            }
            RowExpr::Round(a, dtype) => {
                let dtype = (self.dtype)(dtype)?;
                if !computes(dtype) {
                    let types = alternatives(&DType::ROWS);
                    let message = format!("a value is rounded to {dtype}; expected {types}");
                    return Err(message.into());
                }
                RowNode::Round(dtype, self.node(a)?)
            }
            RowExpr::Row(reduction, a) => RowNode::Row(*reduction, self.node(a)?),
            RowExpr::BlockMax(a, size) => {
                if !size.is_power_of_two() || !BLOCKS.contains(size) {
                    let (least, most) = (BLOCKS.start(), BLOCKS.end());
                    let message = format!(
                        "blocks of {size} elements; expected a power of two from {least} to {most}"
                    );
                    return Err(message.into());
                }
                RowNode::BlockMax(*size, self.node(a)?)
            }
        };
        self.push(node)
    }
}

/// Whether rows of this type are computed with.
pub(crate) fn computes(dtype: DType) -> bool {
    DType::ROWS.contains(&dtype)
}

/// What a step does to a row: its sources combined to arguments, a function, and which targets get which result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowStep {
    /// The function.
    pub function: Arc<RowFunction>,
    /// What it is given, in order.
    pub arguments: Vec<RowArgument>,
    /// For each result, how many of the step's targets get it, in their order.
    pub results: Vec<usize>,
    /// Threads of the lane, by which the order of sums along the row goes.
    pub threads: usize,
}

/// An argument of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowArgument {
    /// The next sources of the step, so many, combined in their order.
    Sources(usize, crate::device::ReduceOp),
    /// The same number for all rows.
    Number(Literal),
}

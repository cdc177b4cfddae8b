//! Row functions: computation between the sources and the targets of a step.
//!
//! A function takes and returns rows and single values. Its body is a tree of expressions ([`Function`], as in the
//! text). Unrolling resolves names and types and flattens it to a list of nodes ([`RowFunction`]), which kernels, the
//! host device and the evaluator run in order. Everything is computed in `f32`, and rounded only where the text asks
//! for it and where a target stores it.

mod values;

pub(crate) use values::{RowOrder, RowValue, UNIT};

use crate::dtype::DType;
use crate::named::{alternatives, named};
use crate::program::construct::ElementType;
use crate::program::expr::Comparison;
use std::fmt;
use std::sync::Arc;

/// Maximum number of arguments of a function, and of results.
pub const MAX_ROW_ARGUMENTS: usize = 24;

/// Maximum number of operations of a function.
pub const MAX_ROW_NODES: usize = 256;

/// Valid elements per block: from one thread's unit to the units of a warp, so that a block maximum needs no
/// communication between warps.
const BLOCKS: std::ops::RangeInclusive<usize> = values::UNIT..=32 * values::UNIT;

/// `function norm(x, w) { let s = row_sum(x * x); return x * rsqrt(s / width) * w }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Its arguments.
    pub parameters: Vec<RowParameter>,
    /// Named intermediate values, in order; each may use the earlier ones.
    pub lets: Vec<(String, RowExpr)>,
    /// Results, at least one.
    pub results: Vec<RowExpr>,
}

/// An argument of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowParameter {
    /// Its name in the body.
    pub name: String,
    /// `s by 128`: it has one element for each block of so many of the row.
    pub block: Option<usize>,
}

/// An expression over a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowExpr {
    /// `1e-6`.
    Number(Literal),
    /// An argument or a named value.
    Name(String),
    /// `width`: number of elements of the row.
    Width,
    /// `abs(x)`, `-x`.
    Unary(RowUnary, Box<RowExpr>),
    /// `x + y`, `min(x, y)`.
    Binary(RowBinary, Box<RowExpr>, Box<RowExpr>),
    /// `select(a < b, x, y)`: x if the comparison holds; y otherwise, and also if an operand is NaN.
    Select(Comparison, Box<[RowExpr; 4]>),
    /// `round(x, T)`: nearest value of a type, ties to even; 8-bit types saturate.
    Round(Box<RowExpr>, ElementType),
    /// `row_sum(x)`, `row_max(x)`: reduces all elements to one value.
    Row(RowReduction, Box<RowExpr>),
    /// `block_max(x, 128)`: maximum of each block of elements, ignoring NaN.
    BlockMax(Box<RowExpr>, usize),
    /// `pairs(x)`: each two elements, whole numbers from 0 to 15, as a byte with the first in its low bits.
    Pairs(Box<RowExpr>),
}

/// A finite, non-negative `f32`, stored as its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Literal(u32);

impl Literal {
    /// The nearest `f32`, if it is finite and not negative.
    pub fn new(value: f64) -> Option<Self> {
        let value = value as f32;
        // Kept as bits, so that literals are Eq and identical nodes merge. A sign is a unary operator in the text.
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
        // Shortest decimal digits either way, which parse to the same f32.
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
        /// The exponent as `f32` stores it, 0 to 255: of a power of two, its e8m0 code.
        Exponent = "exponent",
        /// The code, 0 to 15, of the nearest float of 4 bits (e2m1), ties to even; of NaN, 7, as GPUs convert it.
        E2m1 = "e2m1",
    }
}

impl RowUnary {
    /// Functions that are called by name.
    pub const NAMED: [Self; 7] = [
        Self::Abs,
        Self::Sqrt,
        Self::Rsqrt,
        Self::Exp,
        Self::PowerOfTwo,
        Self::Exponent,
        Self::E2m1,
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

/// An operation of a function; operands are indices of earlier nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowNode {
    Number(Literal),
    Argument(usize),
    /// An argument with one element for each block of so many.
    OfBlock(usize, usize),
    Width,
    Unary(RowUnary, usize),
    Binary(RowBinary, usize, usize),
    Select(Comparison, [usize; 4]),
    Round(DType, usize),
    Row(RowReduction, usize),
    BlockMax(usize, usize),
    Pairs(usize),
}

impl RowNode {
    /// Indices of its operand nodes.
    pub(crate) fn operands(&self) -> Vec<usize> {
        match *self {
            Self::Number(_) | Self::Argument(_) | Self::OfBlock(..) | Self::Width => Vec::new(),
            Self::Unary(_, a)
            | Self::Round(_, a)
            | Self::Row(_, a)
            | Self::BlockMax(_, a)
            | Self::Pairs(a) => vec![a],
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
    /// For each argument, the elements of a block that share one of its elements, if it is given by blocks.
    pub arguments: Vec<Option<usize>>,
    pub(crate) nodes: Vec<RowNode>,
    /// Indices of the result nodes.
    pub(crate) results: Vec<usize>,
}

impl RowFunction {
    /// Resolves the names of `function`, and its types with `dtype`.
    ///
    /// # Errors
    /// A description of the defect in the function, or the error of `dtype`.
    pub(crate) fn resolve<E: From<String>>(
        function: &Function,
        dtype: &dyn Fn(&ElementType) -> Result<DType, E>,
    ) -> Result<Self, E> {
        let mut builder = Builder {
            dtype,
            names: Vec::new(),
            nodes: Vec::new(),
        };
        for (number, parameter) in function.parameters.iter().enumerate() {
            let node = builder.push(match parameter.block {
                None => RowNode::Argument(number),
                Some(size) => RowNode::OfBlock(number, checked_block(size)?),
            })?;
            builder.names.push((&parameter.name, node));
        }
        for (name, value) in &function.lets {
            let node = builder.node(value)?;
            builder.names.push((name, node));
        }
        let results = function.results.iter();
        let results = results.map(|value| builder.node(value));
        let results = results.collect::<Result<Vec<usize>, E>>()?;
        let mut operands = builder.nodes.iter().flat_map(RowNode::operands);
        // A pair has one value for two elements, which no operation by element could index.
        if operands.any(|operand| matches!(builder.nodes[operand], RowNode::Pairs(_))) {
            let message = "pairs are an operand; expected them among the results alone";
            return Err(message.to_owned().into());
        }
        Ok(Self {
            name: function.name.clone(),
            arguments: function.parameters.iter().map(|it| it.block).collect(),
            nodes: builder.nodes,
            results,
        })
    }

    /// Number of results.
    pub fn results(&self) -> usize {
        self.results.len()
    }

    /// For each node, whether it has one value per row; `scalar` tells which arguments do.
    pub(crate) fn uniform(&self, scalar: &dyn Fn(usize) -> bool) -> Vec<bool> {
        let mut uniform: Vec<bool> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            uniform.push(match node {
                RowNode::Argument(number) => scalar(*number),
                RowNode::Row(..) => true,
                // These depend on the element's index even if their operand is the same for all.
                RowNode::BlockMax(..) | RowNode::OfBlock(..) | RowNode::Pairs(_) => false,
                other => other.operands().iter().all(|operand| uniform[*operand]),
            });
        }
        uniform
    }

    /// For each node with one value per block, the block's elements; `uniform` marks the nodes with one value per
    /// row.
    pub(crate) fn blocks(&self, uniform: &[bool]) -> Vec<Option<usize>> {
        let mut blocks: Vec<Option<usize>> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let operands = node.operands();
            let varying = operands.iter().filter(|operand| !uniform[**operand]);
            let mut sizes = varying.map(|operand| blocks[*operand]);
            blocks.push(match node {
                RowNode::BlockMax(size, _) | RowNode::OfBlock(_, size) => Some(*size),
                RowNode::Pairs(_) => Some(2),
                RowNode::Row(..) => None,
                _ => {
                    let first = sizes.next().flatten();
                    // Of different block sizes, or with a value of its own per element: stored once per element.
                    first.filter(|first| sizes.all(|size| size == Some(*first)))
                }
            });
        }
        blocks
    }

    /// For each argument, whether the result depends on it.
    pub(crate) fn needs(&self, result: usize) -> Vec<bool> {
        let mut needs = vec![false; self.arguments.len()];
        let mut is_seen = vec![false; self.nodes.len()];
        let mut left = vec![self.results[result]];
        while let Some(node) = left.pop() {
            if let RowNode::Argument(number) | RowNode::OfBlock(number, _) = self.nodes[node] {
                needs[number] = true;
            }
            if !std::mem::replace(&mut is_seen[node], true) {
                left.extend(self.nodes[node].operands());
            }
        }
        needs
    }

    /// For each node, the number of reductions, over the row or blocks, that must precede it.
    pub(crate) fn levels(&self) -> Vec<usize> {
        let mut levels: Vec<usize> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let before = node.operands().iter().map(|operand| levels[*operand]).max();
            let reduces = matches!(node, RowNode::Row(..) | RowNode::BlockMax(..));
            let reduces = usize::from(reduces);
            // Nodes of one level need no synchronization among the threads of a row; a reduction starts the next
            // level.
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
        // Reuse an identical node.
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
                let size = checked_block(*size)?;
                RowNode::BlockMax(size, self.node(a)?)
            }
            RowExpr::Pairs(a) => RowNode::Pairs(self.node(a)?),
        };
        self.push(node)
    }
}

fn checked_block<E: From<String>>(size: usize) -> Result<usize, E> {
    if size.is_power_of_two() && BLOCKS.contains(&size) {
        return Ok(size);
    }
    let (least, most) = (BLOCKS.start(), BLOCKS.end());
    let message =
        format!("blocks of {size} elements; expected a power of two from {least} to {most}");
    Err(message.into())
}

/// Whether row functions accept this type.
pub(crate) fn computes(dtype: DType) -> bool {
    DType::ROWS.contains(&dtype)
}

/// Row computation of a step: how sources form arguments, the function, and how results map to targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowStep {
    /// The function.
    pub function: Arc<RowFunction>,
    /// Its arguments, in order.
    pub arguments: Vec<RowArgument>,
    /// For each result, the number of the step's targets that store it, in order.
    pub results: Vec<usize>,
    /// Threads of the lane, which determine the summation order along the row.
    pub threads: usize,
}

impl RowStep {
    /// For each target of the step, whether what is stored there depends on each of its sources.
    pub(crate) fn needs(&self) -> Vec<Vec<bool>> {
        let needs = self.results.iter().enumerate().map(|(result, targets)| {
            let needs = self.function.needs(result);
            let sources = self
                .arguments
                .iter()
                .zip(needs)
                .flat_map(|(argument, is_needed)| {
                    let count = match argument {
                        RowArgument::Sources(count, _) => *count,
                        RowArgument::Number(_) => 0,
                    };
                    std::iter::repeat_n(is_needed, count)
                });
            std::iter::repeat_n(sources.collect(), *targets)
        });
        needs.flatten().collect()
    }
}

/// An argument of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowArgument {
    /// The next `n` sources of the step, combined in order.
    Sources(usize, crate::device::ReduceOp),
    /// The same number for all rows.
    Number(Literal),
}

impl RowArgument {
    /// For each argument, whether it has a single value for the whole row; `single` tells which sources do.
    pub(crate) fn singles(arguments: &[Self], single: impl Fn(usize) -> bool) -> Vec<bool> {
        let mut next = 0;
        let one = |argument: &Self| match argument {
            Self::Number(_) => true,
            Self::Sources(count, _) => {
                // All sources of an argument are laid out alike.
                let first = next;
                next += count;
                single(first)
            }
        };
        arguments.iter().map(one).collect()
    }
}

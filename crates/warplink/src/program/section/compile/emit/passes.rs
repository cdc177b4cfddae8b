//! Which values of a row function are computed in which pass over the row.

use super::names::element_name;
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::program::section::function::{RowFunction, RowNode};
use crate::program::section::{Literal, RowBinary, RowReduction, RowUnary};

/// Kind of argument of a function.
pub(super) enum Given {
    Number,
    /// Places in a variable, combined by the operator; the number replaces a single place that is absent.
    Single(DType, ReduceOp, Option<Literal>),
    Row(DType, ReduceOp),
    /// One row of plain memory, loaded before anything waits; the number replaces one that is absent.
    Plain(DType, Option<Literal>),
    /// One plain value for each block of elements.
    Block(DType),
}

/// Assignment of nodes to passes.
#[derive(Clone)]
pub(super) struct Passes<'f> {
    pub(super) function: &'f RowFunction,
    pub(super) given: &'f [Given],
    pub(super) uniform: Vec<bool>,
    pub(super) blocks: Vec<Option<usize>>,
    pub(super) levels: Vec<usize>,
    pub(super) live: Vec<bool>,
    /// For each pass, the nodes computed for each element; the last pass stores.
    pub(super) nodes: Vec<Vec<usize>>,
    /// For each pass, the nodes taken from earlier passes.
    pub(super) taken: Vec<Vec<usize>>,
    /// Whether rows of plain memory are loaded before the first pass, all kept units together: a unit's stores would keep the
    /// next one's loads from being in flight.
    pub(super) ahead: bool,
}

impl<'f> Passes<'f> {
    pub(super) fn new(function: &'f RowFunction, given: &'f [Given]) -> Self {
        let single = |argument: usize| matches!(given[argument], Given::Number | Given::Single(..));
        let (uniform, levels) = (function.uniform(&single), function.levels());
        let blocks = function.blocks(&uniform);
        let mut live = vec![false; function.nodes.len()];
        let mut left = function.results.clone();
        // Nodes that no result depends on are not computed: their passes over the row would be wasted.
        while let Some(node) = left.pop() {
            if !std::mem::replace(&mut live[node], true) {
                left.extend(function.nodes[node].operands());
            }
        }
        let last = (0..live.len()).filter(|node| live[*node]);
        let last = last.map(|node| levels[node]).max().unwrap_or(0);
        let mut passes = Self {
            function,
            given,
            uniform,
            blocks,
            levels,
            live,
            nodes: Vec::new(),
            taken: Vec::new(),
            ahead: false,
        };
        for pass in 0..=last {
            let roots = if pass == last {
                function.results.clone()
            } else {
                let of_row = passes.reductions(pass).map(|(_, _, of)| of);
                of_row
                    .chain(passes.of_blocks(pass).map(|(_, _, of)| of))
                    .collect()
            };
            passes.add(roots);
        }
        passes
    }

    /// Row reductions at the end of a pass: node, reduction and operand node.
    pub(super) fn reductions(
        &self,
        pass: usize,
    ) -> impl Iterator<Item = (usize, RowReduction, usize)> {
        let nodes = self.function.nodes.iter().enumerate();
        nodes.filter_map(move |(number, node)| match node {
            RowNode::Row(reduction, of) if self.live[number] && self.levels[number] == pass + 1 => {
                Some((number, *reduction, *of))
            }
            _ => None,
        })
    }

    /// Block maxima at the end of a pass: node, elements per block and operand node.
    pub(super) fn of_blocks(&self, pass: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let nodes = self.function.nodes.iter().enumerate();
        nodes.filter_map(move |(number, node)| match node {
            RowNode::BlockMax(size, of) if self.live[number] && self.levels[number] == pass + 1 => {
                Some((number, *size, *of))
            }
            _ => None,
        })
    }

    pub(super) fn is_block(&self, node: usize) -> bool {
        matches!(self.function.nodes[node], RowNode::BlockMax(..))
    }

    /// Adds a pass that computes `roots`.
    fn add(&mut self, roots: Vec<usize>) {
        let (mut nodes, mut taken) = (Vec::new(), Vec::new());
        let mut left = roots;
        while let Some(node) = left.pop() {
            if self.uniform[node] || nodes.contains(&node) || taken.contains(&node) {
                continue;
            }
            let again = matches!(self.function.nodes[node], RowNode::OfBlock(..));
            let earlier = self.nodes.iter().any(|earlier| earlier.contains(&node));
            if self.is_block(node) || (earlier && !again) {
                taken.push(node);
                continue;
            }
            nodes.push(node);
            left.extend(self.function.nodes[node].operands());
        }
        nodes.sort_unstable();
        taken.sort_unstable();
        self.nodes.push(nodes);
        self.taken.push(taken);
    }

    /// Argument read by the node, if it is a row of plain memory, and the number that replaces an absent one.
    pub(super) fn plain(&self, node: usize) -> Option<(usize, DType, Option<Literal>)> {
        let RowNode::Argument(argument) = self.function.nodes[node] else {
            return None;
        };
        match self.given[argument] {
            Given::Plain(dtype, replaced) => Some((argument, dtype, replaced)),
            _ => None,
        }
    }

    /// The variable with the loaded unit of a node that is [`plain`](Self::plain).
    pub(super) fn loaded(&self, node: usize) -> String {
        if self.is_kept(node) {
            format!("kept.n{node}")
        } else {
            format!("loaded{node}")
        }
    }

    /// Whether a later pass needs the value.
    pub(super) fn is_kept(&self, node: usize) -> bool {
        let later = |taken: &Vec<usize>| taken.contains(&node);
        // The initial load is kept in its memory format.
        let after_first = self.nodes.iter().skip(1).any(|nodes| nodes.contains(&node));
        self.taken.iter().any(later) || ((after_first || self.ahead) && self.plain(node).is_some())
    }

    /// Live nodes that are rows of plain memory.
    pub(super) fn loads(&self) -> impl Iterator<Item = usize> {
        let nodes = 0..self.function.nodes.len();
        nodes.filter(|node| self.live[*node] && self.plain(*node).is_some())
    }

    /// The value of a node within a pass.
    pub(super) fn value(&self, node: usize, pass: usize) -> String {
        if self.uniform[node] {
            return format!("n{node}");
        }
        if let RowNode::Argument(_) = self.function.nodes[node]
            && (self.nodes[pass].contains(&node) || self.plain(node).is_some())
        {
            return format!("n{node}[e]");
        }
        if self.is_block(node) {
            return format!("kept.n{node}");
        }
        if self.taken[pass].contains(&node) {
            return format!("kept.n{node}[e]");
        }
        format!("n{node}")
    }

    /// Numerator and divisor of a quotient that is stored and not used otherwise, if the divisor is the same for a unit:
    /// then the unit is divided after the pass over its elements.
    pub(super) fn divided(&self, node: usize) -> Option<(usize, usize)> {
        let RowNode::Binary(RowBinary::Divide, a, b) = self.function.nodes[node] else {
            return None;
        };
        let nodes = self.live.iter().zip(&self.function.nodes);
        let mut read = nodes.filter(|(live, _)| **live);
        let is_read = read.any(|(_, other)| other.operands().into_iter().any(|it| it == node));
        let of_unit = |node: usize| self.uniform[node] || self.blocks[node].is_some();
        (of_unit(b) && !of_unit(node) && !is_read).then_some((a, b))
    }

    /// Expression that computes a node.
    pub(super) fn expression(&self, node: usize, pass: usize) -> String {
        let value = |node: usize| self.value(node, pass);
        match &self.function.nodes[node] {
            RowNode::Number(number) => float(number.value()),
            RowNode::Width => "(float)row.width".to_owned(),
            RowNode::Argument(_)
            | RowNode::OfBlock(..)
            | RowNode::Row(..)
            | RowNode::BlockMax(..) => value(node),
            RowNode::Pairs(a) => value(*a),
            RowNode::Unary(RowUnary::Negative, a) => format!("-{}", value(*a)),
            RowNode::Unary(function, a) => format!("row_{}({})", function.name(), value(*a)),
            RowNode::Binary(function, a, b) => {
                let name = match function {
                    // Functions instead of operators keep the compiler from contracting a product and a sum to one
                    // FMA, which would round differently from the host device.
                    RowBinary::Add => "detail::plus",
                    RowBinary::Subtract => "row_minus",
                    RowBinary::Multiply => "row_product",
                    RowBinary::Divide => "row_divide",
                    RowBinary::Min => "row_min",
                    RowBinary::Max => "row_max",
                };
                format!("{name}({}, {})", value(*a), value(*b))
            }
            RowNode::Select(comparison, [a, b, yes, no]) => {
                let sign: &str = comparison.name();
                let [a, b, yes, no] = [a, b, yes, no].map(|node| value(*node));
                format!("{a} {sign} {b} ? {yes} : {no}")
            }
            RowNode::Round(dtype, a) => format!("rounded<{}>({})", element_name(*dtype), value(*a)),
        }
    }

    pub(super) fn last(&self) -> usize {
        self.nodes.len() - 1
    }
}

/// An exact single-precision literal.
pub(super) fn float(value: f32) -> String {
    // By its bits: a decimal literal would be a double, and infinities have none.
    format!("__uint_as_float({:#x}u) /* {value:?} */", value.to_bits())
}

//! Syntax-tree nodes shared by host statements and kernel steps: names, loops and branches around actions, tensor
//! parts, element types and repeated items.

use super::expr::{Condition, Expr};
use super::site::Position;
use crate::dtype::DType;

/// A tensor or a part of it, narrowed by selections: `B[i][0..n]`, `transpose(B[i])`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRef {
    /// Name of the tensor or of an alias.
    pub name: String,
    /// Selections, each applied to the leading axes of the previous result.
    pub selections: Vec<Selection>,
    /// Whether the last two axes of the selected part are exchanged.
    pub transposed: bool,
}

/// A selection on the leading axis, or on several axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// `[j]`: one slice; removes the axis.
    Index(Expr),
    /// `[a..b]`: several slices; keeps the axis.
    Range(Expr, Expr),
    /// `[i of k]`: part i of k, which may be shorter than the others or empty; keeps the axis. In kernel sections
    /// only.
    Part(Expr, Expr),
    /// `[:, j, a..b]`: on each of the first axes.
    Axes(Vec<AxisSelection>),
}

/// Selection on one axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AxisSelection {
    /// `:`: the whole axis.
    All,
    /// `j`: one slice; removes the axis.
    Index(Expr),
    /// `a..b`: several slices; keeps the axis.
    Range(Expr, Expr),
}

/// The element type of a declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// `bf16`.
    Fixed(DType),
    /// The value of a parameter.
    Parameter(String),
}

impl From<DType> for ElementType {
    fn from(dtype: DType) -> Self {
        Self::Fixed(dtype)
    }
}

/// A node of a program's tree: a statement of the host, an item of `share { … }` or a step of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node<A> {
    /// Position of its first word.
    pub position: Position,
    /// Kind of node and its content.
    pub kind: NodeKind<A>,
}

/// Content of a node. The type parameter `A` is the actions specific to hosts or to kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeKind<A> {
    /// `let next = (rank + 1) % world`.
    LetInteger {
        /// The name that is bound.
        name: String,
        /// Its value.
        value: Expr,
    },
    /// `let X = G[j]`: another name for a part of a tensor.
    LetTensor {
        /// The name that is bound.
        name: String,
        /// The part. At least one selection distinguishes this from an integer binding.
        value: TensorRef,
    },
    /// `for j in 0..world { … }`.
    For(Loop<A>),
    /// `if rank == 0 { … } else { … }`.
    If(Branch<A>),
    /// An action.
    Do(A),
}

impl<A> From<NodeKind<A>> for Node<A> {
    fn from(kind: NodeKind<A>) -> Self {
        Self {
            position: Position::default(),
            kind,
        }
    }
}

impl<A> From<A> for Node<A> {
    fn from(action: A) -> Self {
        NodeKind::Do(action).into()
    }
}

impl<A> Node<A> {
    /// Blocks of the loop or branch.
    pub fn blocks(&self) -> impl Iterator<Item = &[Self]> {
        let (arms, last) = match &self.kind {
            NodeKind::For(it) => (&[][..], &it.body[..]),
            NodeKind::If(branch) => (&branch.arms[..], &branch.otherwise[..]),
            _ => Default::default(),
        };
        arms.iter().map(|arm| &arm.body[..]).chain([last])
    }

    /// Every action in the block, including nested loops and branches, in text order, each with its node.
    pub fn actions(block: &[Self]) -> impl Iterator<Item = (&Self, &A)> {
        let mut left = vec![block.iter()];
        std::iter::from_fn(move || {
            loop {
                let Some(node) = left.last_mut()?.next() else {
                    left.pop();
                    continue;
                };
                if let NodeKind::Do(action) = &node.kind {
                    return Some((node, action));
                }
                let blocks: Vec<_> = node.blocks().map(<[Self]>::iter).collect();
                left.extend(blocks.into_iter().rev());
            }
        })
    }
}

/// `for index in from..to { body }`; no iteration where `from >= to`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop<A> {
    /// The index.
    pub over: Over,
    /// Statements to repeat.
    pub body: Vec<Node<A>>,
}

/// `if condition { … } else if condition { … } else { … }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Branch<A> {
    /// Conditions with their bodies, at least one; the first condition that holds is taken.
    pub arms: Vec<Arm<A>>,
    /// Body if no condition holds.
    pub otherwise: Vec<Node<A>>,
}

/// `if condition { body }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arm<A> {
    /// Position of its `if`.
    pub position: Position,
    /// Condition to test.
    pub condition: Condition,
    /// Body if the condition holds.
    pub body: Vec<Node<A>>,
}

/// One item of a list, or one for each value of an index: `s[j] for j in 1..world`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Each<T> {
    /// The item.
    pub item: T,
    /// Index of the repetition, if any.
    pub over: Option<Over>,
}

impl<T> From<T> for Each<T> {
    fn from(item: T) -> Self {
        Self { item, over: None }
    }
}

/// `for index in from..to`, of a loop or after an item of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Over {
    /// The index.
    pub index: String,
    /// First value.
    pub from: Expr,
    /// End value, exclusive.
    pub to: Expr,
}

//! The tree that host statements and the steps of kernel sections share: names, loops and branches around actions,
//! parts of tensors, element types and repeated items.

use super::expr::{Condition, Expr};
use super::site::Position;
use crate::dtype::DType;

/// A tensor, or the part of it that selections leave: `B[i][0..n]`, `transpose(B[i])`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRef {
    /// The tensor's name, or that of an alias.
    pub name: String,
    /// Selections on the leading axes of what those before have left.
    pub selections: Vec<Selection>,
    /// Whether the last two axes of what is selected are exchanged.
    pub transposed: bool,
}

/// A selection on the leading axis, or on several axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// `[j]`: one slice; the axis goes.
    Index(Expr),
    /// `[a..b]`: several slices; the axis stays.
    Range(Expr, Expr),
    /// `[i of k]`: part i of k, which may be shorter than the others or empty; the axis stays. In kernel
    /// sections only.
    Part(Expr, Expr),
    /// `[:, j, a..b]`: on each of the first axes.
    Axes(Vec<AxisSelection>),
}

/// What is selected of one axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AxisSelection {
    /// `:`: all of it.
    All,
    /// `j`: one slice; the axis goes.
    Index(Expr),
    /// `a..b`: several slices; the axis stays.
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
    /// Where its first word is.
    pub position: Position,
    /// What it says.
    pub kind: NodeKind<A>,
}

/// What a node says; actions `A` are what hosts and kernels do not have in common.
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
        /// The part; with at least one selection, which distinguishes it from an integer.
        value: TensorRef,
    },
    /// `for j in 0..world { … }`.
    For(Loop<A>),
    /// `if rank == 0 { … } else { … }`.
    If(Branch<A>),
    /// Anything else.
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
    /// The blocks of a loop or branch.
    pub fn blocks(&self) -> impl Iterator<Item = &[Self]> {
        let (arms, last) = match &self.kind {
            NodeKind::For(it) => (&[][..], &it.body[..]),
            NodeKind::If(branch) => (&branch.arms[..], &branch.otherwise[..]),
            _ => Default::default(),
        };
        arms.iter().map(|arm| &arm.body[..]).chain([last])
    }

    /// The actions of a block and of the loops and branches in it, in the order of the text, each with its node.
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
    /// What is repeated.
    pub body: Vec<Node<A>>,
}

/// `if condition { … } else if condition { … } else { … }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Branch<A> {
    /// What is done under which condition: the first that holds; at least one.
    pub arms: Vec<Arm<A>>,
    /// What is done when none holds.
    pub otherwise: Vec<Node<A>>,
}

/// `if condition { body }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arm<A> {
    /// Where its `if` is.
    pub position: Position,
    /// What decides.
    pub condition: Condition,
    /// What is done when it holds.
    pub body: Vec<Node<A>>,
}

/// One item of a list, or one for each value of an index: `s[j] for j in 1..world`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Each<T> {
    /// The item.
    pub item: T,
    /// The index that it is repeated over.
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
    /// Its first value.
    pub from: Expr,
    /// One after its last value.
    pub to: Expr,
}

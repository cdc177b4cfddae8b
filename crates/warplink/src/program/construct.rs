//! The constructs that host statements and the steps of kernel sections share: parts of tensors, element
//! types, loops, branches and repeated items.

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

/// `for index in from..to { body }`; no iteration where `from >= to`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop<S> {
    /// The index.
    pub index: String,
    /// Its first value.
    pub from: Expr,
    /// One after its last value.
    pub to: Expr,
    /// What is repeated.
    pub body: Vec<S>,
}

/// `if condition { … } else if condition { … } else { … }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Branch<S> {
    /// What is done under which condition: the first that holds; at least one.
    pub arms: Vec<Arm<S>>,
    /// What is done when none holds.
    pub otherwise: Vec<S>,
}

/// `if condition { body }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arm<S> {
    /// Where its `if` is.
    pub position: Position,
    /// What decides.
    pub condition: Condition,
    /// What is done when it holds.
    pub body: Vec<S>,
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

/// `for index in from..to` after an item of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Over {
    /// The index.
    pub index: String,
    /// Its first value.
    pub from: Expr,
    /// One after its last value.
    pub to: Expr,
}

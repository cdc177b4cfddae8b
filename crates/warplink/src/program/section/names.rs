//! The names that a section uses and those that it binds.

use super::ir::Section;
use super::visit::{ExprUse, NameUse, Visitor};
use crate::program::construct::{Over, TensorRef};
use crate::program::expr::Expr;
use std::collections::BTreeSet;

/// The names that a section takes from around it. Those that it binds are told apart by name alone: it may
/// bind none that has a meaning around it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FreeNames {
    /// Integers; `rank`, `world` and `epoch` are not among them.
    pub(crate) integers: BTreeSet<String>,
    /// Lists, which have no meaning in a section.
    pub(crate) lists: BTreeSet<String>,
    /// Tensors and scratch.
    pub(crate) tensors: BTreeSet<String>,
    /// Operators.
    pub(crate) operators: BTreeSet<String>,
    /// Functions of rows.
    pub(crate) functions: BTreeSet<String>,
    /// Tensors of which other ranks' are accessed.
    pub(crate) remote: BTreeSet<String>,
    /// Tensors whose places are announced.
    pub(crate) announced: BTreeSet<String>,
    /// What the section itself binds.
    pub(crate) bound: BTreeSet<String>,
    /// Other names for parts of tensors.
    aliases: Vec<(String, String)>,
}

impl FreeNames {
    pub(crate) fn of(section: &Section) -> Self {
        let mut names = Self::default();
        names.bound.insert(section.lane.clone());
        names.body(&section.body);
        // Another name for a part of a tensor stands for the tensor.
        loop {
            let aliased = names.aliases.iter();
            let aliased = aliased.filter(|(alias, _)| names.remote.contains(alias));
            let more: Vec<String> = aliased.map(|(_, tensor)| tensor.clone()).collect();
            let before = names.remote.len();
            names.remote.extend(more);
            if names.remote.len() == before {
                break;
            }
        }
        for bound in &names.bound {
            names.integers.remove(bound);
            names.tensors.remove(bound);
            names.remote.remove(bound);
        }
        for known in ["rank", "world", "epoch"] {
            names.integers.remove(known);
        }
        names
    }
}

impl<'s> Visitor<'s> for FreeNames {
    fn expression(&mut self, expression: &'s Expr, _: ExprUse) {
        expression.walk(&mut |part| match part {
            Expr::Name(name) => {
                self.integers.insert(name.clone());
            }
            Expr::Element(list, _) | Expr::Count(list) => {
                self.lists.insert(list.clone());
            }
            Expr::Number(_) | Expr::Negative(_) | Expr::Log2(_) | Expr::Binary(..) => {}
        });
    }

    fn name(&mut self, name: &'s str, is: NameUse) {
        let name = name.to_owned();
        match is {
            NameUse::Tensor | NameUse::Reachable => self.tensors.insert(name),
            NameUse::Remote => self.remote.insert(name),
            NameUse::Announced => {
                self.tensors.insert(name.clone());
                self.announced.insert(name)
            }
            // Whether a tensor is there is known outside.
            NameUse::Given => self.lists.insert(format!("given({name})")),
            NameUse::Operator => self.operators.insert(name),
            NameUse::Function => self.functions.insert(name),
        };
    }

    fn index(&mut self, over: &'s Over) {
        self.bound.insert(over.index.clone());
    }

    fn integer(&mut self, name: &'s str, value: &'s Expr) {
        self.bound.insert(name.to_owned());
        self.expression(value, ExprUse::Value);
    }

    fn alias(&mut self, name: &'s str, value: &'s TensorRef) {
        self.bound.insert(name.to_owned());
        self.aliases.push((name.to_owned(), value.name.clone()));
        self.tensor(value);
    }
}

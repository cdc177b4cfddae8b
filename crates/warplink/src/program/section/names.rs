//! Names that a section uses and binds.

use super::ir::{DeviceValue, Place, Section, Step, StepKind};
use super::visit::{ExprUse, NameUse, Visitor};
use crate::program::construct::{Over, TensorRef};
use crate::program::expr::Expr;
use std::collections::BTreeSet;

/// Outer names that a section uses. Names are compared as text, which is unambiguous because a section may not shadow
/// outer names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FreeNames {
    /// Integers; `rank`, `world` and `epoch` are not among them.
    pub(crate) integers: BTreeSet<String>,
    /// Lists, which sections cannot use.
    pub(crate) lists: BTreeSet<String>,
    /// Tensors and scratch.
    pub(crate) tensors: BTreeSet<String>,
    /// Operators.
    pub(crate) operators: BTreeSet<String>,
    /// Functions of rows.
    pub(crate) functions: BTreeSet<String>,
    /// Tensors accessed on other ranks.
    pub(crate) remote: BTreeSet<String>,
    /// Tensors whose locations are announced.
    pub(crate) announced: BTreeSet<String>,
    /// Tensors whose words are read as integers.
    pub(crate) values: BTreeSet<String>,
    /// Tensors that moves write, each with one from which it may be copied.
    pub(crate) copied: BTreeSet<(String, String)>,
    /// Integers that it reads from memory.
    pub(crate) read: BTreeSet<String>,
    /// Names bound by the section itself.
    pub(crate) bound: BTreeSet<String>,
    /// Aliases for parts of tensors.
    aliases: Vec<(String, String)>,
}

impl FreeNames {
    pub(crate) fn of(section: &Section) -> Self {
        let mut names = Self::default();
        names.bound.insert(section.lane.clone());
        names.body(&section.body);
        // Resolve aliases to their tensor.
        for of in [&mut names.remote, &mut names.values] {
            // Aliases may name aliases, in any order: repeated until nothing is added.
            loop {
                let aliased = names.aliases.iter();
                let aliased = aliased.filter(|(alias, _)| of.contains(alias));
                let more: Vec<String> = aliased.map(|(_, tensor)| tensor.clone()).collect();
                let before = of.len();
                of.extend(more);
                if of.len() == before {
                    break;
                }
            }
        }
        let copied = std::mem::take(&mut names.copied);
        for (target, source) in &copied {
            for target in names.behind(target) {
                let pairs = names.behind(source).into_iter();
                let pairs = pairs.map(|source| (target.clone(), source));
                names.copied.extend(pairs);
            }
        }
        // Only after following the aliases: an alias is bound here, but its tensor is free.
        for bound in &names.bound {
            names.integers.remove(bound);
            names.tensors.remove(bound);
            names.remote.remove(bound);
            names.values.remove(bound);
        }
        // Every instance defines these itself.
        for known in ["rank", "world", "epoch"] {
            names.integers.remove(known);
        }
        names
    }

    /// The tensors that a name may stand for: aliases of several scopes may have one name.
    fn behind(&self, name: &str) -> BTreeSet<String> {
        let (mut found, mut seen) = (BTreeSet::new(), BTreeSet::new());
        let mut open = vec![name];
        while let Some(name) = open.pop() {
            if !seen.insert(name) {
                continue;
            }
            let aliased = self.aliases.iter().filter(|(alias, _)| alias == name);
            let before = open.len();
            open.extend(aliased.map(|(_, tensor)| &**tensor));
            if open.len() == before {
                found.insert(name.to_owned());
            }
        }
        found
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
            // Whether a tensor is present is known outside the section.
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

    fn device_value(&mut self, it: &'s DeviceValue) {
        self.bound.insert(it.name.clone());
        self.read.insert(it.name.clone());
        self.values.insert(it.place.tensor.name.clone());
        self.place(&it.place);
        for expression in it.expressions() {
            self.expression(expression, ExprUse::Bound);
        }
    }

    fn action(&mut self, _: &'s Step, kind: &'s StepKind) {
        if let StepKind::Move(it) = kind {
            let sources: Vec<&Place> = it.sources.iter().flat_map(|it| it.item.places()).collect();
            for target in &it.targets {
                let target = &target.item.tensor.name;
                let pairs = sources
                    .iter()
                    .map(|it| (target.clone(), it.tensor.name.clone()));
                self.copied.extend(pairs);
            }
        }
        kind.visit(self);
    }

    fn row(&mut self, words: &'s str, index: &'s Expr) {
        self.values.insert(words.to_owned());
        self.name(words, NameUse::Tensor);
        self.expression(index, ExprUse::Index);
    }

    fn alias(&mut self, name: &'s str, value: &'s TensorRef) {
        self.bound.insert(name.to_owned());
        self.aliases.push((name.to_owned(), value.name.clone()));
        self.tensor(value);
    }
}

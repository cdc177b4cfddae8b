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
    /// Tensors of whose words the values that it announces, or agrees on, are computed.
    pub(crate) compared: BTreeSet<String>,
    /// Names bound by the section itself.
    pub(crate) bound: BTreeSet<String>,
    /// Aliases for parts of tensors.
    aliases: Vec<(String, String)>,
    /// Integers, each with a name in what it is computed from; [`COMPARED`] stands for those that are compared.
    computed: Vec<(String, String)>,
    /// The integer whose expressions are visited.
    defines: Option<String>,
}

/// No name: a keyword.
const COMPARED: &str = "agree";

impl FreeNames {
    pub(crate) fn of(section: &Section) -> Self {
        let mut names = Self::default();
        names.bound.insert(section.lane.clone());
        names.body(&section.body);
        // Resolve aliases to their tensor.
        follow(&mut names.remote, &names.aliases);
        follow(&mut names.values, &names.aliases);
        let mut compared = BTreeSet::from([COMPARED.to_owned()]);
        follow(&mut compared, &names.computed);
        follow(&mut compared, &names.aliases);
        compared.retain(|name| names.values.contains(name));
        names.compared = compared;
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
            names.compared.remove(bound);
        }
        // Every instance defines these itself.
        for known in ["rank", "world", "epoch"] {
            names.integers.remove(known);
        }
        names
    }

    /// Visits the expressions that an integer is computed from.
    fn defining(&mut self, name: &str, visit: impl FnOnce(&mut Self)) {
        let outer = self.defines.replace(name.to_owned());
        visit(self);
        self.defines = outer;
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

/// Adds the names that those of `of` stand for.
fn follow(of: &mut BTreeSet<String>, names: &[(String, String)]) {
    // Names may stand for others that do, in any order: repeated until nothing is added.
    loop {
        let known = names.iter().filter(|(name, _)| of.contains(name));
        let more: Vec<String> = known.map(|(_, other)| other.clone()).collect();
        let before = of.len();
        of.extend(more);
        if of.len() == before {
            break;
        }
    }
}

impl<'s> Visitor<'s> for FreeNames {
    fn expression(&mut self, expression: &'s Expr, _: ExprUse) {
        expression.walk(&mut |part| match part {
            Expr::Name(name) => {
                let of = self.defines.iter().cloned();
                self.computed.extend(of.map(|of| (of, name.clone())));
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
        self.defining(name, |names| names.expression(value, ExprUse::Value));
    }

    fn device_value(&mut self, it: &'s DeviceValue) {
        self.bound.insert(it.name.clone());
        self.read.insert(it.name.clone());
        let words = &it.place.tensor.name;
        self.values.insert(words.clone());
        self.computed.push((it.name.clone(), words.clone()));
        self.defining(&it.name, |names| {
            names.place(&it.place);
            for expression in it.expressions() {
                names.expression(expression, ExprUse::Bound);
            }
        });
    }

    fn action(&mut self, _: &'s Step, kind: &'s StepKind) {
        if let Some(it) = kind.as_move() {
            let sources: Vec<&Place> = it.sources.iter().flat_map(|it| it.item.places()).collect();
            for target in &it.targets {
                let target = &target.item.tensor.name;
                let pairs = sources
                    .iter()
                    .map(|it| (target.clone(), it.tensor.name.clone()));
                self.copied.extend(pairs);
            }
        }
        self.defining(COMPARED, |names| {
            for value in kind.compared() {
                names.expression(value, ExprUse::Value);
            }
        });
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

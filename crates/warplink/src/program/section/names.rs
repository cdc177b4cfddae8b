//! The names that a section uses and those that it binds.

use super::ir::{Argument, Move, Operator, Place, Section, Step, StepKind, Verb};
use crate::program::construct::{AxisSelection, Each, Over, Selection, TensorRef};
use crate::program::expr::{Condition, Expr};
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
        names.steps(&section.body);
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

    fn steps(&mut self, steps: &[Step]) {
        for step in steps {
            match &step.kind {
                StepKind::LetInteger { name, value } => {
                    self.bound.insert(name.clone());
                    self.integer(value);
                }
                StepKind::LetTensor { name, value } => {
                    self.bound.insert(name.clone());
                    self.aliases.push((name.clone(), value.name.clone()));
                    self.tensor(value);
                }
                StepKind::Move(it) => self.movement(it),
                StepKind::Signal(receivers) => self.each(receivers, |names, receiver| {
                    names.integer(&receiver.rank);
                    receiver.lane.iter().for_each(|lane| names.integer(lane));
                }),
                StepKind::Wait(ranks) => self.each(ranks, Self::integer),
                StepKind::Barrier => {}
                StepKind::Announce(it) | StepKind::Agree(it) => {
                    it.values.iter().for_each(|value| self.integer(value));
                    self.tensor(&it.rows);
                    self.remote.insert(it.rows.name.clone());
                    self.tensors.extend(it.tensors.iter().cloned());
                    self.announced.extend(it.tensors.iter().cloned());
                    if let Some(peers) = &it.peers {
                        self.each(peers, Self::integer);
                    }
                }
                StepKind::For(it) => {
                    self.bound.insert(it.index.clone());
                    self.integer(&it.from);
                    self.integer(&it.to);
                    self.steps(&it.body);
                }
                StepKind::If(branch) => {
                    for arm in &branch.arms {
                        self.condition(&arm.condition);
                        self.steps(&arm.body);
                    }
                    self.steps(&branch.otherwise);
                }
            }
        }
    }

    fn movement(&mut self, it: &Move) {
        if let Verb::Reduce(Operator::Parameter(name)) = &it.verb {
            self.operators.insert(name.clone());
        }
        if let Verb::Apply(application) = &it.verb {
            self.functions.insert(application.function.clone());
            for argument in &application.arguments {
                if let Argument::Reduced(_, Operator::Parameter(name)) = argument {
                    self.operators.insert(name.clone());
                }
            }
        }
        self.each(&it.targets, Self::place);
        self.each(&it.sources, |names, source| {
            names.place(&source.place);
            if let Some((condition, place)) = &source.otherwise {
                names.condition(condition);
                names.place(place);
            }
        });
    }

    fn each<T>(&mut self, list: &[Each<T>], mut with: impl FnMut(&mut Self, &T)) {
        for each in list {
            if let Some(Over { index, from, to }) = &each.over {
                self.bound.insert(index.clone());
                self.integer(from);
                self.integer(to);
            }
            with(self, &each.item);
        }
    }

    fn place(&mut self, place: &Place) {
        self.tensor(&place.tensor);
        if place.on.is_some() {
            self.remote.insert(place.tensor.name.clone());
        }
        place.on.iter().for_each(|rank| self.integer(rank));
    }

    fn tensor(&mut self, tensor: &TensorRef) {
        self.tensors.insert(tensor.name.clone());
        for selection in &tensor.selections {
            match selection {
                Selection::Index(index) => self.integer(index),
                Selection::Range(a, b) | Selection::Part(a, b) => {
                    self.integer(a);
                    self.integer(b);
                }
                Selection::Axes(axes) => {
                    for axis in axes {
                        match axis {
                            AxisSelection::All => {}
                            AxisSelection::Index(index) => self.integer(index),
                            AxisSelection::Range(a, b) => {
                                self.integer(a);
                                self.integer(b);
                            }
                        }
                    }
                }
            }
        }
    }

    fn condition(&mut self, condition: &Condition) {
        match condition {
            Condition::Compare(_, a, b) => {
                self.integer(a);
                self.integer(b);
            }
            // Whether a tensor is there is known outside.
            Condition::Given(tensor) => {
                self.lists.insert(format!("given({tensor})"));
            }
            Condition::Reachable(tensor) => {
                self.tensors.insert(tensor.clone());
            }
            Condition::Not(a) => self.condition(a),
            Condition::And(a, b) | Condition::Or(a, b) => {
                self.condition(a);
                self.condition(b);
            }
        }
    }

    fn integer(&mut self, expression: &Expr) {
        match expression {
            Expr::Number(_) => {}
            Expr::Name(name) => {
                self.integers.insert(name.clone());
            }
            Expr::Negative(a) | Expr::Log2(a) => self.integer(a),
            Expr::Element(list, index) => {
                self.lists.insert(list.clone());
                self.integer(index);
            }
            Expr::Count(list) => {
                self.lists.insert(list.clone());
            }
            Expr::Binary(_, a, b) => {
                self.integer(a);
                self.integer(b);
            }
        }
    }
}

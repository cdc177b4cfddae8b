//! Finds the loops whose iterations parts of a lane's warps have to themselves, at the same time (`Parts` in `lanes.cuh`).
//!
//! An iteration that looks up a row waits for the words that name it, and then for the row. Where a whole lane does one after the
//! other, nothing else is in flight meanwhile. So iterations are divided if they are independent: they read what no rank stores
//! during the launch, and store elements that differ between any two of them.

use crate::program::construct::{Loop, Over, Selection, TensorRef};
use crate::program::expr::{Expr, Operator};
use crate::program::section::compile::hazard::{self, id};
use crate::program::section::function::RowNode;
use crate::program::section::{
    DeviceValue, Move, Place, RowReduction, SectionInstance, Source, Step, StepKind, Visitor,
    WordValue,
};
use std::collections::{BTreeMap, BTreeSet};

/// Identities of such loops.
pub(super) fn loops(instance: &SectionInstance) -> BTreeSet<usize> {
    let mut finder = Finder {
        instance,
        found: BTreeSet::new(),
    };
    // Parts are of whole warps of one block.
    if instance.blocks == 1
        && instance.threads > 32
        && instance.threads.is_multiple_of(32)
        && !instance.shared_tensors
    {
        finder.body(&instance.section.body);
    }
    finder.found
}

struct Finder<'s> {
    instance: &'s SectionInstance,
    found: BTreeSet<usize>,
}

impl<'s> Visitor<'s> for Finder<'s> {
    fn repeat(&mut self, it: &'s Loop<StepKind>) {
        let mut iterations = Iterations {
            instance: self.instance,
            names: Vec::new(),
            bindings: 0,
            loops: Vec::new(),
            stored: BTreeMap::new(),
            step: 0,
            looks_up: false,
            moves: false,
            independent: true,
        };
        iterations.bind(&it.over.index, true);
        iterations.body(&it.body);
        // Only a look-up leaves most of the lane idle; other iterations gain nothing from parts.
        if iterations.independent && iterations.looks_up && iterations.moves {
            self.found.insert(hazard::id_of_loop(it));
        } else {
            // Inner loops may qualify by themselves; within a divided loop none is divided again.
            self.body(&it.body);
        }
    }
}

/// A name that is bound in the loop.
struct LoopName<'s> {
    name: &'s str,
    /// Number of the binding: the same name may be bound again elsewhere.
    binding: usize,
    /// Whether its values differ between any two iterations.
    differs: bool,
}

/// Who stores elements of a tensor: the threads that divide the rows of a step, or those that store integers in a loop.
#[derive(PartialEq, Eq)]
enum Storer {
    Step(usize),
    Loop(Option<usize>),
}

/// How a tensor is stored, the same way everywhere in the loop.
#[derive(PartialEq, Eq)]
struct StoredAt {
    /// The axis whose index differs, this index, or quotient and remainder on two axes, and the bindings that they refer to.
    axis: usize,
    indices: Vec<Expr>,
    bindings: Vec<usize>,
    storer: Storer,
}

/// The steps of a loop.
struct Iterations<'s> {
    instance: &'s SectionInstance,
    names: Vec<LoopName<'s>>,
    bindings: usize,
    /// The loops around a step, within this one.
    loops: Vec<usize>,
    stored: BTreeMap<usize, StoredAt>,
    /// The current step, if it moves rows, or 0.
    step: usize,
    looks_up: bool,
    moves: bool,
    independent: bool,
}

impl<'s> Visitor<'s> for Iterations<'s> {
    fn scoped(&mut self, inner: impl FnOnce(&mut Self)) {
        let visible = self.names.len();
        inner(self);
        self.names.truncate(visible);
    }

    fn index(&mut self, over: &'s Over) {
        self.bind(&over.index, false);
    }

    fn integer(&mut self, name: &'s str, value: &'s Expr) {
        let differs = self.differs(value);
        self.bind(name, differs);
    }

    fn alias(&mut self, _: &'s str, _: &'s TensorRef) {
        // The selections of an alias are out of sight where it is used.
        self.independent = false;
    }

    fn device_value(&mut self, it: &'s DeviceValue) {
        self.read(&it.place);
        let differs = match &it.gives {
            WordValue::Word(_) => false,
            // Counts of many words need all threads.
            WordValue::Count(range) => {
                self.independent &= !range.rows && hazard::is_one_word(self.instance, &it.place);
                false
            }
            // Positions of rising numbers rise.
            WordValue::Position(number, range) => {
                self.looks_up = true;
                let mut others = vec![&range.from, &range.to];
                others.extend(it.place.tensor.selections.iter().flat_map(expressions));
                self.differs(number) && others.into_iter().all(|it| self.is_fixed(it))
            }
        };
        self.bind(&it.name, differs);
    }

    fn action(&mut self, step: &'s Step, kind: &'s StepKind) {
        self.step = 0;
        match kind {
            StepKind::Move(Move {
                targets, sources, ..
            }) => {
                self.moves = true;
                self.step = id(step);
                self.independent &= self.loops.is_empty();
                let lists = targets.iter().any(|it| it.over.is_some());
                let lists = lists || sources.iter().any(|it| it.over.is_some());
                self.independent &= !lists;
            }
            StepKind::Apply(it) => {
                self.moves = true;
                self.step = id(step);
                self.independent &= self.loops.is_empty();
                // The order of a sum along a row depends on the threads, and parts have as many as iterations leave them.
                let function = self.instance.functions.get(&it.function);
                self.independent &= function.is_some_and(|function| {
                    let mut nodes = function.nodes.iter();
                    !nodes.any(|node| matches!(node, RowNode::Row(RowReduction::Sum, _)))
                });
                let lists = it.results.iter().flatten().any(|it| it.over.is_some());
                let lists = lists || it.sources().any(|it| it.over.is_some());
                self.independent &= !lists;
            }
            StepKind::Store(_) | StepKind::Value(_) => {}
            // Signals, waits and announcements are of the whole lane, and parts meet at no barrier.
            _ => self.independent = false,
        }
        kind.visit(self);
    }

    fn repeat(&mut self, it: &'s Loop<StepKind>) {
        self.loops.push(hazard::id_of_loop(it));
        self.over(&it.over, |walk| walk.body(&it.body));
        self.loops.pop();
    }

    fn target(&mut self, place: &'s Place) {
        let tensor = self.instance.tensor(&place.tensor.name);
        let plain = tensor.filter(|tensor| self.instance.scratch_of(*tensor).is_none());
        let stored = plain.and_then(|tensor| Some((tensor, self.stored(place)?)));
        let Some((tensor, stored)) = stored else {
            self.independent = false;
            return;
        };
        // Selections of two tensors in the same memory cannot be compared.
        let memory = |tensor: usize| self.instance.tensors[tensor].memory;
        let mut others = self.stored.keys().filter(|other| **other != tensor);
        let shares = others.any(|other| memory(*other) == memory(tensor));
        let alike = self.stored.get(&tensor).is_none_or(|it| *it == stored);
        // Two steps that store one tensor in different ways may store one element from different iterations.
        self.independent &= alike && !shares;
        self.stored.insert(tensor, stored);
    }

    fn source(&mut self, source: &'s Source) {
        self.independent &= source.otherwise.is_none();
        self.read(&source.place);
    }
}

impl<'s> Iterations<'s> {
    fn bind(&mut self, name: &'s str, differs: bool) {
        self.bindings += 1;
        self.names.push(LoopName {
            name,
            binding: self.bindings,
            differs,
        });
    }

    fn bound(&self, name: &str) -> Option<&LoopName<'s>> {
        self.names.iter().rev().find(|bound| bound.name == name)
    }

    /// The bindings in the loop that an expression refers to.
    fn bindings(&self, expression: &Expr) -> Vec<usize> {
        let mut all = Vec::new();
        expression.walk(&mut |part| {
            if let Expr::Name(name) = part {
                all.extend(self.bound(name).map(|bound| bound.binding));
            }
        });
        all
    }

    /// Whether it has the same value in all iterations.
    fn is_fixed(&self, expression: &Expr) -> bool {
        self.bindings(expression).is_empty()
    }

    /// Whether its values differ between any two iterations.
    fn differs(&self, expression: &Expr) -> bool {
        match expression {
            Expr::Name(name) => self.bound(name).is_some_and(|bound| bound.differs),
            Expr::Binary(Operator::Add | Operator::Subtract, a, b) => {
                // Injective only if one side is fixed: the sum of two differing values may be the same in two
                // iterations.
                self.differs(a) && self.is_fixed(b) || self.is_fixed(a) && self.differs(b)
            }
            _ => false,
        }
    }

    /// Whether an index, or quotient and remainder by the same divisor, select another element in each iteration.
    fn select_apart(&self, indices: &[Expr]) -> bool {
        match indices {
            [index] => self.differs(index),
            // Quotient and remainder together determine the index; neither does alone.
            [
                Expr::Binary(Operator::Divide, index, by),
                Expr::Binary(Operator::Remainder, same, other),
            ] => index == same && by == other && self.is_fixed(by) && self.differs(index),
            _ => false,
        }
    }

    fn read(&mut self, place: &'s Place) {
        let mut selections = place.tensor.selections.iter();
        let simple = selections.all(|it| match it {
            Selection::Axes(_) => false,
            it => !expressions(it)
                .iter()
                .any(|it| matches!(it, Expr::Element(..))),
        });
        self.independent &= simple && hazard::is_never_stored(self.instance, place);
    }

    /// How the current step stores there, if iterations store different elements.
    fn stored(&self, place: &'s Place) -> Option<StoredAt> {
        let selections = place.tensor.selections.iter();
        let indices = selections.map(|selection| match selection {
            // A word that names a row may be one that another thread of the part stores.
            Selection::Index(Expr::Element(..)) => None,
            Selection::Index(index) => Some(index.clone()),
            _ => None,
        });
        let indices: Vec<Expr> = indices.collect::<Option<_>>()?;
        let (axis, indices) = [1, 2].into_iter().find_map(|together| {
            let mut all = indices.windows(together).enumerate();
            all.find(|(_, indices)| self.select_apart(indices))
        })?;
        Some(StoredAt {
            axis,
            indices: indices.to_vec(),
            bindings: indices.iter().flat_map(|it| self.bindings(it)).collect(),
            storer: match self.step {
                0 => Storer::Loop(self.loops.last().copied()),
                step => Storer::Step(step),
            },
        })
    }
}

/// The expressions of a selection.
fn expressions(selection: &Selection) -> Vec<&Expr> {
    match selection {
        Selection::Index(index) => vec![index],
        Selection::Range(a, b) | Selection::Part(a, b) => vec![a, b],
        Selection::Axes(_) => Vec::new(),
    }
}

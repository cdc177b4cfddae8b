//! Resolves integers that lanes read from memory.

use super::{MoveOperand, Resolver};
use crate::dtype::DType;
use crate::named::alternatives;
use crate::program::construct::{Selection, TensorRef};
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::expr::Expr;
use crate::program::section::SectionInstance;
use crate::program::section::ir::DeviceValue;
use crate::program::section::lane::{LaneStepKind, Part};
use crate::program::section::view::View;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;

/// Element types of words that lanes read.
pub(crate) const VALUE_TYPES: [DType; 3] = [DType::I32, DType::I64, DType::U32];

/// A word of memory that a lane reads as an integer.
#[derive(Clone, Copy, Debug)]
pub struct ReadWord {
    /// Number of earlier reads of the lane in the launch.
    pub number: usize,
    /// Index of the read among the lane's steps.
    pub step: usize,
    /// The word.
    pub part: Part,
    /// The largest value that the lane expects.
    pub most: i64,
}

/// Values of words that lanes read; `None` for one that is not known yet.
pub type ReadValues<'a> = dyn Fn(&ReadWord) -> Option<i64> + 'a;

/// Resolves steps with values that are as large as they may be together: a word may have a lower bound where it comes from
/// than where it is read.
pub(super) fn with_large_values<T>(
    resolve: impl Fn(&ReadValues<'_>) -> Result<T, Diagnostic>,
) -> Result<T, Diagnostic> {
    let with = |share: i64| resolve(&|word| Some(word.most / share));
    let smaller = || {
        [2, 4, i64::MAX]
            .into_iter()
            .find_map(|share| with(share).ok())
    };
    with(1).or_else(|wrong| smaller().ok_or(wrong))
}

/// Why a lane is not resolved further.
pub(super) enum Stop {
    Wrong(Diagnostic),
    /// The steps depend on a value that is not known yet.
    Unknown,
}

impl From<Diagnostic> for Stop {
    fn from(diagnostic: Diagnostic) -> Self {
        Self::Wrong(diagnostic)
    }
}

pub(super) type Resolved<T> = Result<T, Stop>;

impl<'s> Resolver<'s> {
    /// A tensor, or what an alias stands for.
    pub(super) fn whole(&self, name: &str) -> Resolved<View> {
        let alias = self.aliases.iter().rev().find(|(alias, _)| *alias == name);
        match (alias, self.instance.tensor(name)) {
            (Some((_, view)), _) => Ok(view.clone()),
            (None, Some(index)) => Ok(View::of(index, &self.instance.tensors[index])),
            (None, None) => {
                let message = format!("unknown tensor '{name}'");
                Err(self.wrong(DiagnosticKind::Malformed, message))
            }
        }
    }

    /// A part that no word of memory selects.
    pub(super) fn fixed_view(&mut self, reference: &TensorRef) -> Resolved<View> {
        let by_word =
            |selection: &Selection| matches!(selection, Selection::Index(Expr::Element(..)));
        if reference.selections.iter().any(by_word) {
            let message = format!(
                "{reference} has a row that memory names, which only moves and functions of rows have; expected \
                 'let i = ... at most ...' before it"
            );
            return Err(self.wrong(DiagnosticKind::Malformed, message));
        }
        self.view(reference)
    }

    /// `let n = C[rank] at most rows`.
    pub(super) fn value(&mut self, it: &'s DeviceValue) -> Resolved<()> {
        let most = self.integer(&it.most)?;
        if most < 0 {
            let message = format!("{} is {most}; expected at least 0", it.most);
            return Err(self.wrong(DiagnosticKind::OutOfBounds, message));
        }
        let word = self.operand(&it.place)?;
        let value = self.read(&it.place, word.part, word.single, most)?;
        self.bind(&it.name)?;
        self.integers.push((&it.name, value));
        let known = self.site.indices.iter().cloned();
        let read = (Arc::from(it.name.as_str()), value);
        self.site.indices = known.chain([read]).collect();
        Ok(())
    }

    /// `I[r]` in `X[I[r]]`: the row of `X` that a word of this rank names.
    pub(super) fn row(&mut self, list: &str, at: &Expr, rows: &View) -> Resolved<i64> {
        let at = self.integer(at)?;
        let place = format!("{list}[{at}]");
        let mut word = self.whole(list)?;
        let outcome = word.index(at);
        outcome.map_err(|wrong| {
            let message = format!("{place} is no word; expected {wrong}");
            self.wrong(DiagnosticKind::OutOfBounds, message)
        })?;
        let part = Part {
            rank: self.instance.rank,
            tensor: word.tensor,
            offset: word.offset,
            elements: 1,
        };
        let Some(most) = rows.rows().checked_sub(1) else {
            let message = format!("{place} selects a row of nothing; expected at least one row");
            return Err(self.wrong(DiagnosticKind::OutOfBounds, message));
        };
        self.words.push(part);
        self.read(&place, part, word.is_single(), most as i64)
    }

    /// Rejects a step that writes words by which its rows are named: some threads may not have read them yet.
    pub(super) fn check_words(&self, targets: &[MoveOperand]) -> Resolved<()> {
        let at = |part: &Part| {
            let tensor = &self.instance.tensors[part.tensor];
            let from = tensor.offset + part.offset;
            (part.rank, tensor.memory, from..from + part.elements)
        };
        for target in targets.iter().map(|target| at(&target.part)) {
            let overlaps = |word: &Part| {
                let word = at(word);
                (word.0, word.1) == (target.0, target.1)
                    && word.2.start < target.2.end
                    && target.2.start < word.2.end
            };
            if self.words.iter().any(overlaps) {
                let message = "the step writes a word that names one of its rows, in no order among its threads";
                return Err(self.wrong(DiagnosticKind::Race, message));
            }
        }
        Ok(())
    }

    fn read(&mut self, place: &dyn Display, part: Part, single: bool, most: i64) -> Resolved<i64> {
        let dtype = self.instance.tensors[part.tensor].dtype;
        if !single || !VALUE_TYPES.contains(&dtype) {
            let message = format!(
                "{place} is {} of {dtype}; expected one integer of {}",
                if single {
                    "an element"
                } else {
                    "several elements"
                },
                alternatives(&VALUE_TYPES)
            );
            return Err(self.wrong(DiagnosticKind::Mismatch, message));
        }
        self.step()?;
        let (number, step) = (self.read, self.steps.len());
        self.read += 1;
        self.push(LaneStepKind::Value {
            number,
            source: part,
            most,
        });
        let value = (self.values)(&ReadWord {
            number,
            step,
            part,
            most,
        });
        let value = value.ok_or(Stop::Unknown)?;
        if (0..=most).contains(&value) {
            return Ok(value);
        }
        let message = format!("{place} is {value}; expected 0 to {most}");
        Err(self.wrong(DiagnosticKind::OutOfBounds, message))
    }
}

impl SectionInstance {
    /// Tensors whose words its lanes read as integers in the first launches of a period, each with the least of the
    /// greatest values that they expect. What is wrong with the text is left to the verifier.
    pub(crate) fn value_bounds(&self) -> BTreeMap<usize, i64> {
        let mut bounds = BTreeMap::new();
        if self.read_as_values().is_empty() {
            return bounds;
        }
        // A bound may be what another value leaves.
        let valuations: [fn(&ReadWord) -> i64; 2] = [|_| 0, |word| word.most];
        let launches = (0..self.lanes).flat_map(|lane| {
            let epochs = 0..self.period.max(1);
            epochs.map(move |epoch| (lane, epoch))
        });
        for (lane, epoch) in launches {
            for value in valuations {
                let steps = self.steps_with(lane, epoch, &|word| Some(value(word)));
                for step in steps.unwrap_or_default() {
                    if let LaneStepKind::Value { source, most, .. } = step.kind {
                        let bound = bounds.entry(source.tensor).or_insert(most);
                        *bound = most.min(*bound);
                    }
                }
            }
        }
        bounds
    }
}

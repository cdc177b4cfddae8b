//! Integers in inputs that expected values depend on: `let m = C[rank] on r at most rows`, `X[J[j]]`.
//!
//! They are not known before a run. Without them, an unrolled program has the expected values of its edges alone, for the
//! greatest integers, which checks the text; [`expected_of`] unrolls it again with the inputs of a run.

use super::scope::Bound;
use super::view::View;
use super::{Budget, Unroller, unroll_knowing};
use crate::error::Rank;
use crate::named::alternatives;
use crate::program::construct::{Selection, TensorRef};
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::expr::Expr;
use crate::program::ir::{Program, StatementKind};
use crate::program::parameters::Parameters;
use crate::program::rank_program::{Expected, InputPart};
use crate::program::section::{DeviceValue, Matching, Place, VALUE_TYPES, WordRange, WordValue};
use crate::program::site::with_index;
use std::cell::Cell;

/// Reads elements of an input as integers; an error says why it cannot.
pub(in crate::program) type ReadInput<'v> = dyn Fn(&InputPart) -> Result<Vec<i64>, String> + 'v;

/// Integers of inputs that are read.
#[derive(Default)]
pub(super) struct Words<'v> {
    /// Contents of inputs, in a run.
    known: Option<&'v ReadInput<'v>>,
    /// Names in scope that stand for such integers.
    pub(super) bound: usize,
    /// Whether an expected value is being resolved, whose rows they may name.
    name_rows: bool,
    /// Whether any was read.
    pub(super) are_read: Cell<bool>,
}

impl<'v> Words<'v> {
    pub(super) fn of(known: Option<&'v ReadInput<'v>>) -> Self {
        Self {
            known,
            ..Self::default()
        }
    }

    /// Whether a name in scope stands for an assumed integer.
    pub(super) const fn are_assumed(&self) -> bool {
        self.bound > 0 && self.known.is_none()
    }
}

/// Expected values of a rank's outputs, for inputs that `read` knows.
///
/// # Errors
/// An integer that is out of range, or a part that does not exist for these integers.
pub(in crate::program) fn expected_of(
    program: &Program,
    rank: Rank,
    (world, streams): (usize, usize),
    parameters: &Parameters,
    read: &ReadInput<'_>,
) -> Result<Vec<Expected>, Diagnostic> {
    let budget = &mut Budget::default();
    let ranks = (world, streams);
    let made = unroll_knowing(budget, program, rank, ranks, parameters, Some(read))?;
    Ok(made.expected)
}

impl<'p> Unroller<'p> {
    /// `let m = C[rank] on r at most rows`, `let m = count(E on r in lo..hi)`.
    pub(super) fn input_value(&mut self, it: &'p DeviceValue) -> Result<(), Diagnostic> {
        // The caller states expected values of its own tensors.
        let is_lent = self.called.lent.is_some();
        let value = match &it.gives {
            WordValue::Word(most) => {
                let limit = self.integer(most)?;
                if limit < 0 {
                    let message = format!("{most} is {limit}; expected at least 0");
                    return Err(self.diagnostic(DiagnosticKind::OutOfBounds, message));
                }
                // No word is read there: no expectation of the called program will use it.
                if is_lent {
                    0
                } else {
                    self.word(&it.place, limit)?
                }
            }
            _ if is_lent => 0,
            WordValue::Count(range) => self.matched(&it.place, range, None)?,
            WordValue::Position(number, range) => {
                let number = self.integer(number)?;
                self.matched(&it.place, range, Some(number))?
            }
        };
        self.bind(&it.name, Bound::Integer(value))?;
        self.words.bound += 1;
        self.site.indices = with_index(&self.site.indices, it.name.as_str(), value);
        Ok(())
    }

    /// Resolves an expected value, whose rows words may name.
    pub(super) fn expecting(
        &mut self,
        resolve: impl FnOnce(&mut Self) -> Result<(), Diagnostic>,
    ) -> Result<(), Diagnostic> {
        self.words.name_rows = true;
        let resolved = resolve(self);
        self.words.name_rows = false;
        resolved
    }

    /// Rejects a statement that hosts would have to execute with integers that only devices know.
    pub(super) fn check_words(&self, kind: &StatementKind) -> Result<(), Diagnostic> {
        // Ranks must unroll alike without a run; only expected values may depend on memory.
        let states = matches!(
            kind,
            StatementKind::Value(_) | StatementKind::Expect(_) | StatementKind::ExpectRows(_)
        );
        if states || self.words.bound == 0 {
            return Ok(());
        }
        let message = "an integer in memory is known on devices alone; expected only 'expect' behind it in its block";
        Err(self.malformed(message))
    }

    /// The row of `rows` rows that a word of this rank names: `J[j]` in `X[J[j]]`; `None` for any other index.
    pub(super) fn named_row(&self, index: &Expr, rows: usize) -> Option<Result<usize, Diagnostic>> {
        let Expr::Element(list, at) = index else {
            return None;
        };
        let is_tensor = matches!(self.lookup(list), Some(Bound::Tensor(_)));
        if !self.words.name_rows || !is_tensor {
            return None;
        }
        let word = Place::from(TensorRef {
            name: list.clone(),
            selections: vec![Selection::Index((**at).clone())],
            transposed: false,
        });
        // An axis has at least one element.
        let row = self.word(&word, rows as i64 - 1);
        Some(row.map(|row| row as usize))
    }

    /// An element of an input from 0 to `most`; `most` where inputs are not known.
    fn word(&self, place: &Place, most: i64) -> Result<i64, Diagnostic> {
        let (view, operand) = self.input_at(place)?;
        self.check_word(place, &view)?;
        self.words.are_read.set(true);
        let Some(read) = self.words.known else {
            // The greatest value, which reaches the last rows: bounds of everything behind it are checked by that.
            return Ok(most);
        };
        let wrong = |message| self.diagnostic(DiagnosticKind::Expectation, message);
        let words = read(&operand).map_err(wrong)?;
        let value = words.first().copied().unwrap_or(0);
        if !(0..=most).contains(&value) {
            return Err(wrong(format!("{place} is {value}; expected 0 to {most}")));
        }
        Ok(value)
    }

    /// The number of words of an input in a range, or the position of one of them; the greatest where inputs are not
    /// known.
    fn matched(
        &self,
        place: &Place,
        range: &WordRange,
        nth: Option<i64>,
    ) -> Result<i64, Diagnostic> {
        let (view, operand) = self.input_at(place)?;
        let row = if range.rows { view.row() } else { Some(1) };
        let row = row.ok_or_else(|| {
            let message = format!("{place} has no rows of words; expected two axes");
            self.diagnostic(DiagnosticKind::Mismatch, message)
        })?;
        let matching = Matching {
            row,
            inside: range.inside,
            from: self.integer(&range.from)?,
            to: self.integer(&range.to)?,
            nth,
        };
        if view.range().is_none() || !VALUE_TYPES.contains(&view.dtype) {
            let message = format!(
                "{place} is of {}; expected contiguous integers of {}",
                view.dtype,
                alternatives(&VALUE_TYPES)
            );
            return Err(self.diagnostic(DiagnosticKind::Mismatch, message));
        }
        self.words.are_read.set(true);
        let elements = view.elements();
        let Some(read) = self.words.known else {
            return Ok(matching.most(elements));
        };
        let wrong = |message| self.diagnostic(DiagnosticKind::Expectation, message);
        let value = matching.of(&read(&operand).map_err(wrong)?);
        if value < 0 {
            let number = nth.unwrap_or_default();
            return Err(wrong(format!(
                "word {number} of {place} {range} is not there"
            )));
        }
        Ok(value)
    }

    fn check_word(&self, place: &Place, view: &View) -> Result<(), Diagnostic> {
        if view.elements() == 1 && VALUE_TYPES.contains(&view.dtype) {
            return Ok(());
        }
        let message = format!(
            "{place} is {} of {}; expected one integer of {}",
            view.elements(),
            view.dtype,
            alternatives(&VALUE_TYPES)
        );
        Err(self.diagnostic(DiagnosticKind::Mismatch, message))
    }
}

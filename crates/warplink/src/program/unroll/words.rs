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
use crate::program::section::{DeviceValue, Place, VALUE_TYPES};
use std::cell::Cell;
use std::sync::Arc;

/// Reads an element of an input as an integer; an error says why it cannot.
pub(in crate::program) type ReadInput<'v> = dyn Fn(&InputPart) -> Result<i64, String> + 'v;

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
    /// `let m = C[rank] on r at most rows`.
    pub(super) fn input_value(&mut self, it: &'p DeviceValue) -> Result<(), Diagnostic> {
        let most = self.integer(&it.most)?;
        if most < 0 {
            let message = format!("{} is {most}; expected at least 0", it.most);
            return Err(self.diagnostic(DiagnosticKind::OutOfBounds, message));
        }
        // The caller states expected values of its own tensors.
        let value = match self.called.lent {
            Some(_) => 0,
            None => self.word(&it.place, most)?,
        };
        self.bind(&it.name, Bound::Integer(value))?;
        self.words.bound += 1;
        let known = self.site.indices.iter().cloned();
        let read = (Arc::from(it.name.as_str()), value);
        self.site.indices = known.chain([read]).collect();
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
        let states = matches!(
            kind,
            StatementKind::Value(_) | StatementKind::Expect(_) | StatementKind::ExpectRows(_)
        );
        if states || self.words.bound == 0 {
            return Ok(());
        }
        let message = "an integer in memory is known on devices alone; expected only 'expect' behind it in its block";
        Err(self.diagnostic(DiagnosticKind::Malformed, message))
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
            return Ok(most);
        };
        let wrong = |message| self.diagnostic(DiagnosticKind::Expectation, message);
        let value = read(&operand).map_err(wrong)?;
        if !(0..=most).contains(&value) {
            return Err(wrong(format!("{place} is {value}; expected 0 to {most}")));
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

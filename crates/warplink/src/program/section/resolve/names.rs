//! Values of names and expressions in the text of a section.

use super::Resolver;
use super::value::Resolved;
use crate::error::Rank;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::expr::{self, Condition, Expr, below};

/// Prefix of names for conditions on announced tensors; no integer's name starts with it.
const REACHABLE: &str = "reachable(";

/// Source of the value of a name at one place of the text. Scopes are lexical, so it is the same at each evaluation.
#[derive(Clone, Copy)]
pub(super) enum Slot {
    /// An index in the integers bound at that place.
    Bound(usize),
    Constant(i64),
}

impl<'s> Resolver<'s> {
    pub(super) fn rank(&self, expression: &'s Expr) -> Resolved<Rank> {
        self.number_below("rank", expression, self.instance.world)
    }

    /// Lane given by an expression; this lane without one.
    pub(super) fn lane(&self, expression: Option<&'s Expr>) -> Resolved<usize> {
        match expression {
            Some(expression) => self.number_below("lane", expression, self.instance.lanes),
            None => Ok(self.lane),
        }
    }

    fn number_below(&self, what: &str, expression: &'s Expr, limit: usize) -> Resolved<usize> {
        let value = self.integer(expression)?;
        let number = below(what, expression, value, limit);
        number.map_err(|message| self.wrong(DiagnosticKind::OutOfBounds, message))
    }

    pub(super) fn named(&self, name: &str) -> Option<i64> {
        let bound = self.integers.iter().rev().find(|(bound, _)| *bound == name);
        bound.map_or_else(|| self.unbound(name), |(_, value)| Some(*value))
    }

    /// An integer that the section does not bind.
    fn unbound(&self, name: &str) -> Option<i64> {
        match name {
            "rank" => Some(self.instance.rank as i64),
            "world" => Some(self.instance.world as i64),
            name if name.starts_with(REACHABLE) => {
                // A rank knows whether a tensor is reachable that it alone announces.
                let known = self.agreed.iter().chain(&self.told);
                let is =
                    |tensor: &usize| name == expr::reachable(&self.instance.tensors[*tensor].name);
                let tensor = known.copied().find(is)?;
                Some(i64::from(self.answers.reaches(tensor)))
            }
            _ => self.instance.integers.get(name).copied(),
        }
    }

    /// Value of a name in an expression of the text. Most of the time of resolving would be spent on comparing names.
    fn value_of(&self, name: &str) -> Option<i64> {
        // Such names are composed for the evaluation, so their addresses mean nothing.
        if matches!(name.as_bytes().last(), Some(b')' | b']')) {
            return self.named(name);
        }
        // Keyed by the address of the name in the tree, which is unique for each occurrence: long loops compare no
        // strings.
        let known = self.slots.borrow().get(&name.as_ptr()).copied();
        let slot = match known {
            Some(slot) => slot,
            None => {
                let bound = self.integers.iter().rposition(|(it, _)| *it == name);
                let slot = match bound {
                    // The index is stable: an occurrence is always at the same depth of scopes, whichever iteration
                    // evaluates it.
                    Some(index) => Slot::Bound(index),
                    None => Slot::Constant(self.unbound(name)?),
                };
                self.slots.borrow_mut().insert(name.as_ptr(), slot);
                slot
            }
        };
        match slot {
            Slot::Bound(index) => self.integers.get(index).map(|(_, value)| *value),
            Slot::Constant(value) => Some(value),
        }
    }

    pub(super) fn integer(&self, expression: &'s Expr) -> Resolved<i64> {
        let value = expression.evaluate(&|name| self.value_of(name));
        value.map_err(|error| self.malformed(format!("{expression}: {error}")))
    }

    pub(super) fn condition(&self, condition: &'s Condition) -> Resolved<bool> {
        let value = condition.evaluate(&|name| self.value_of(name));
        value.map_err(|error| self.malformed(format!("{condition}: {error}")))
    }
}

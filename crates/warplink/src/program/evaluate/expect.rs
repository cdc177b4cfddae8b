//! Checks outputs against the program's `expect` statements.

use super::kernel::combine;
use super::value::{BoundedValue, Product};
use super::{Evaluator, Values, places};
use crate::error::Rank;
use crate::program::area::Area;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind, RankSite};
use crate::program::ir::Role;
use crate::program::rank_program::{
    Expected, ExpectedTerm, InputPart, RankProgram, TensorInstance,
};
use crate::program::unroll::expected_of;
use std::borrow::Cow;

impl Evaluator {
    /// Number of multiplications, additions and elements needed to compute the expected values.
    pub(super) fn expected_steps(&self) -> u128 {
        let of_element = |expected: &Expected| {
            let terms = expected.terms.iter().map(|term| match term {
                ExpectedTerm::Operand(_) => 1,
                ExpectedTerm::Product { depth, .. } => *depth as u128,
            });
            terms.sum::<u128>()
        };
        let all = self.ranks.iter().flat_map(|program| &program.expected);
        if self.text.is_some() {
            // The statements are known with the integers of a run; as a rule they state each element once.
            let outputs = self.ranks.iter().flat_map(|program| &program.tensors);
            let outputs = outputs.filter(|tensor| tensor.role == Role::Output);
            let elements = outputs.map(|tensor| (tensor.bytes / tensor.dtype.size()) as u128);
            return elements.sum::<u128>() * all.map(of_element).max().unwrap_or(0);
        }
        let steps = all.map(|expected| {
            let elements = expected.target.axes.iter().map(|axis| axis.extent as u128);
            elements.product::<u128>() * of_element(expected)
        });
        steps.sum()
    }

    /// Diagnostics of violated `expect` statements, one for each.
    pub(super) fn unmet(&self, values: &Values) -> Vec<Diagnostic> {
        let mut unmet: Vec<Diagnostic> = Vec::new();
        for program in &self.ranks {
            let all = match self.expected(values, program) {
                Ok(all) => all,
                Err(diagnostic) => {
                    unmet.push(diagnostic);
                    continue;
                }
            };
            for expected in &*all {
                let Err(how) = self.check(values, program.rank, expected) else {
                    continue;
                };
                let place = RankSite::new(program.rank, &expected.site);
                // One diagnostic per statement: a wrong program usually fails on all ranks alike.
                let same =
                    |other: &&mut Diagnostic| other.lines().first() == Some(&place.site.line);
                if let Some(before) = unmet.iter_mut().find(same) {
                    before.repeated += 1;
                    continue;
                }
                let name = &program.tensors[expected.target.span.tensor].name;
                let message = format!("{place}: '{name}' is not what is expected of it: {how}");
                unmet.push(Diagnostic::new(
                    DiagnosticKind::Expectation,
                    message,
                    vec![place],
                ));
            }
        }
        unmet
    }

    /// Expected values of a rank's outputs, for the inputs of a run.
    fn expected<'a>(
        &'a self,
        values: &Values,
        program: &'a RankProgram,
    ) -> Result<Cow<'a, [Expected]>, Diagnostic> {
        let Some((text, streams, parameters)) = &self.text else {
            return Ok(Cow::Borrowed(&program.expected));
        };
        let read = |operand: &InputPart| {
            let elements = self.operand(values, operand)?;
            Ok(elements.iter().map(|it| it.value as i64).collect())
        };
        let ranks = (program.world, *streams);
        expected_of(text, program.rank, ranks, parameters, &read).map(Cow::Owned)
    }

    /// Float outputs with elements that some rank sums in another order than rank 0, so that ranks may compute
    /// different sums; the first such rank for each.
    pub fn reordered<'a>(&'a self, values: &'a Values) -> Vec<(&'a str, Rank)> {
        let Some((first, others)) = self.ranks.split_first() else {
            return Vec::new();
        };
        let mut all = Vec::new();
        for (id, tensor) in first.tensors.iter().enumerate() {
            if tensor.role != Role::Output || !tensor.dtype.is_float() {
                continue;
            }
            let own = &values.tensors[first.rank][id].values;
            let differs = |program: &&RankProgram| {
                let same = |other: &TensorInstance| other.name == tensor.name;
                let Some(other) = program.tensors.iter().position(same) else {
                    return false;
                };
                let theirs = &values.tensors[program.rank][other].values;
                let mut pairs = own.iter().zip(theirs);
                pairs.any(|(one, other)| one.made.is_reordered(other.made))
            };
            if let Some(other) = others.iter().find(differs) {
                all.push((&*tensor.name, other.rank));
            }
        }
        all
    }

    /// # Errors
    /// Description of the difference between the target and its expected value.
    fn check(&self, values: &Values, rank: Rank, expected: &Expected) -> Result<(), String> {
        let tensor = &values.tensors[rank][expected.target.span.tensor];
        let dtype = tensor.dtype;
        let found = values.all_of(rank, &expected.target);
        let mut terms = Vec::with_capacity(expected.terms.len());
        for term in &expected.terms {
            terms.push(match term {
                ExpectedTerm::Operand(operand) => self.operand(values, operand)?,
                ExpectedTerm::Product {
                    a,
                    b,
                    columns,
                    depth,
                } => {
                    let (a, b) = (self.operand(values, a)?, self.operand(values, b)?);
                    let at = |(row, column): (usize, usize)| {
                        let mut product = Product::default();
                        for k in 0..*depth {
                            product.add(a[row * depth + k], b[k * columns + column]);
                        }
                        product.value(*depth, dtype)
                    };
                    let places = (0..found.len()).map(|place| (place / columns, place % columns));
                    places.map(at).collect()
                }
            });
        }
        let mut meant = match &expected.rows {
            None => combine(expected.operator, dtype, &terms, found.len()),
            Some((step, result)) => {
                let width = terms
                    .iter()
                    .map(Vec::len)
                    .max()
                    .unwrap_or(0)
                    .max(found.len());
                let mut results = step.apply(&terms, width);
                let values = results.swap_remove(*result);
                let values = values.iter().copied().cycle();
                values.take(found.len()).collect()
            }
        };
        if let Some(plus) = &expected.plus {
            let plus = self.operand(values, plus)?;
            for (value, plus) in meant.iter_mut().zip(plus.iter().cycle()) {
                *value = value.plus(*plus);
            }
        }
        for (place, (found, meant)) in found.iter().zip(&meant).enumerate() {
            let meant = meant.stored(dtype);
            // A value that may be infinite may be anything.
            if meant.bound == f64::INFINITY {
                continue;
            }
            let allowed = meant.bound + found.bound;
            let within = (found.value - meant.value).abs() <= allowed && allowed.is_finite();
            if !within && found.value.is_nan() {
                return Err(format!(
                    "element {place} is not known; expected {}",
                    meant.value
                ));
            }
            if !within {
                let (found, meant) = (found.value, meant.value);
                return Err(format!("element {place} is {found}; expected {meant}"));
            }
        }
        Ok(())
    }

    fn operand(&self, values: &Values, operand: &InputPart) -> Result<Vec<BoundedValue>, String> {
        let tensors = &self.ranks[operand.rank].tensors;
        let same = tensors
            .iter()
            .position(|tensor| tensor.name == operand.name);
        let same = same.filter(|tensor| tensors[*tensor].bytes == operand.bytes);
        let tensor = same.ok_or_else(|| {
            format!(
                "rank {} has no '{}' of {} bytes as this rank has",
                operand.rank, operand.name, operand.bytes
            )
        })?;
        let mut area = operand.area.clone();
        area.span.tensor = tensor;
        Ok(values.all_of(operand.rank, &area))
    }
}

impl Values {
    /// Values of an area that spells out every axis.
    fn all_of(&self, rank: Rank, area: &Area) -> Vec<BoundedValue> {
        let tensor = &self.tensors[rank][area.span.tensor];
        let places = places(tensor.dtype, area);
        places.map(|place| tensor.values[place]).collect()
    }
}

//! Expected values of outputs, with outer names resolved.

use super::Unroller;
use super::scope::Bound;
use super::shapes::shape_of;
use super::view::View;
use crate::device::ReduceOp;
use crate::program::diagnostic::Diagnostic;
use crate::program::ir::{Expectation, Role, TensorRef, Term};
use crate::program::rank_program::{Expected, ExpectedTerm, InputPart};
use crate::program::section::{
    Application, FunctionArgument, Otherwise, Place, ReduceOperator, RowArgument, RowStep,
};
use std::sync::Arc;

impl<'p> Unroller<'p> {
    pub(super) fn expectation(&mut self, expectation: &'p Expectation) -> Result<(), Diagnostic> {
        // Expectations of a called program are about its own interface; those of the caller's tensors are the
        // caller's.
        if self.called.lent.is_some() {
            return Ok(());
        }
        let Expectation {
            target,
            operator,
            terms,
            plus,
        } = expectation;
        let view = self.view(target)?;
        if self.made.tensors[view.tensor].role == Role::Input {
            let message = format!("{target} is an input; expected an output");
            return Err(self.malformed(message));
        }
        let operator = operator.as_ref();
        let operator = operator.map(|it| self.expected_operator(it)).transpose()?;
        let mut resolved = Vec::new();
        self.each(terms, |unroller, term| {
            resolved.push(unroller.expected_term(term, &view)?);
            Ok(())
        })?;
        if resolved.is_empty() {
            let message = "an output is expected to be made of nothing; expected at least one term";
            return Err(self.malformed(message));
        }
        // An optional bias that the caller leaves out is added to nothing.
        let absent =
            |place: &&Place| !matches!(self.lookup(&place.tensor.name), Some(Bound::Absent));
        let plus = plus.as_ref().filter(absent);
        let plus = plus.map(|place| self.input_at(place)).transpose()?;
        if let Some((plus, _)) = &plus
            && (plus.dtype != view.dtype || view.shape.last() != Some(&plus.elements()))
        {
            return Err(self.mismatch(format!(
                "{} is added to {}; expected one element for each column",
                shape_of(plus),
                shape_of(&view)
            )));
        }
        let expected = Expected {
            target: view.strided(),
            operator,
            terms: resolved,
            plus: plus.map(|(_, operand)| operand),
            rows: None,
            site: self.here(),
        };
        self.made.expected.push(expected);
        Ok(())
    }

    fn expected_operator(&self, operator: &ReduceOperator) -> Result<ReduceOp, Diagnostic> {
        match operator {
            ReduceOperator::Fixed(operator) => Ok(*operator),
            ReduceOperator::Parameter(name) => match self.lookup(name) {
                Some(Bound::Operator(operator)) => Ok(*operator),
                _ => {
                    let expected = ReduceOp::alternatives();
                    let message = format!("'{name}' is no operator; expected {expected}");
                    Err(self.malformed(message))
                }
            },
        }
    }

    /// Expected results of a function of rows.
    pub(super) fn expected_row(&mut self, application: &'p Application) -> Result<(), Diagnostic> {
        if self.called.lent.is_some() {
            return Ok(());
        }
        let Some(Bound::Function(function)) = self.lookup(&application.function) else {
            let message = format!(
                "unknown function '{}'; expected a function of rows defined before",
                application.function
            );
            return Err(self.malformed(message));
        };
        let function = function.clone();
        let (given, taken) = (application.arguments.len(), application.results.len());
        if (given, taken) != (function.arguments.len(), function.results()) {
            return Err(self.mismatch(format!(
                "'{}' takes {} arguments and gives {} results; expected these instead of {given} and {taken}",
                application.function,
                function.arguments.len(),
                function.results()
            )));
        }
        let (mut terms, mut arguments) = (Vec::new(), Vec::new());
        // Operands, each with the elements of a row that share one of its elements.
        let mut shapes: Vec<(View, usize)> = Vec::new();
        for (argument, block) in application.arguments.iter().zip(&function.arguments) {
            arguments.push(match argument {
                FunctionArgument::Number(number) => RowArgument::Number(*number),
                FunctionArgument::Sources { sources, operator } => {
                    let operator = operator.as_ref().map(|it| self.expected_operator(it));
                    let operator = operator.transpose()?;
                    let before = terms.len();
                    let mut replaced = None;
                    self.each(sources, |unroller, source| {
                        let place = match &source.otherwise {
                            Some((condition, other)) if !unroller.condition(condition)? => {
                                match other {
                                    Otherwise::Place(place) => place,
                                    Otherwise::Number(number) => {
                                        replaced = Some(*number);
                                        return Ok(());
                                    }
                                }
                            }
                            _ => &source.place,
                        };
                        let (view, operand) = unroller.input_at(place)?;
                        terms.push(ExpectedTerm::Operand(operand));
                        shapes.push((view, block.unwrap_or(1)));
                        Ok(())
                    })?;
                    let count = terms.len() - before;
                    match replaced {
                        Some(number) if count == 0 => RowArgument::Number(number),
                        _ => RowArgument::Sources(count, operator.unwrap_or(ReduceOp::Sum)),
                    }
                }
            });
        }
        let single = |source: usize| shapes.get(source).is_some_and(|it| it.0.shape.is_empty());
        let single = RowArgument::singles(&arguments, single);
        let blocks = function.blocks(&function.uniform(&|argument| single[argument]));
        let mut targets = Vec::new();
        for (result, list) in application.results.iter().enumerate() {
            self.each(list, |unroller, place| {
                let view = unroller.view(&place.tensor)?;
                let output = unroller.made.tensors[view.tensor].role != Role::Input;
                if place.on.is_some() || !output {
                    let message = format!("{place} is no output of this rank; expected one");
                    return Err(unroller.malformed(message));
                }
                targets.push((result, view.strided()));
                // Values of blocks are fewer.
                if blocks[function.results[result]].is_none() {
                    shapes.push((view, 1));
                }
                Ok(())
            })?;
        }
        let rows = shapes.iter().filter(|(view, _)| !view.shape.is_empty());
        let rows = rows.map(|(view, block)| (view.elements(), *block));
        let width = rows.clone().find(|(_, block)| *block == 1);
        let width = width.map_or(1, |(elements, _)| elements);
        let mut others = rows.filter(|(elements, block)| *elements != width.div_ceil(*block));
        if let Some((other, _)) = others.next() {
            return Err(self.mismatch(format!(
                "rows of {width} and {other} elements; expected one width"
            )));
        }
        let step = Arc::new(RowStep {
            function,
            arguments,
            results: vec![1; application.results.len()],
            threads: 1,
        });
        for (result, target) in targets {
            let expected = Expected {
                target,
                operator: None,
                terms: terms.clone(),
                plus: None,
                rows: Some((step.clone(), result)),
                site: self.here(),
            };
            self.made.expected.push(expected);
        }
        Ok(())
    }

    /// The caller may have `name` be a part of another tensor.
    pub(super) fn in_place(&mut self, name: &str, part: &TensorRef) -> Result<(), Diagnostic> {
        if self.called.lent.is_some() {
            return Ok(());
        }
        let whole = TensorRef {
            name: name.to_owned(),
            selections: Vec::new(),
            transposed: false,
        };
        let (whole, part) = (self.view(&whole)?, self.view(part)?);
        let role = |view: &View| self.made.tensors[view.tensor].role;
        let roles = [role(&whole), role(&part)];
        if !matches!(
            roles,
            // Either may be the whole tensor: a rank's input is often one part of its output.
            [Role::Input, Role::Output] | [Role::Output, Role::Input]
        ) {
            let message =
                format!("'{name}' is to be read and written; expected an input and an output");
            return Err(self.malformed(message));
        }
        if whole.dtype != part.dtype || whole.squeezed() != part.squeezed() {
            return Err(self.mismatch(format!(
                "{} is to be {}; expected the same shape and type",
                shape_of(&whole),
                shape_of(&part)
            )));
        }
        let range = self.range(&part, "read and written")?;
        self.made.in_place.push((whole.tensor, range));
        Ok(())
    }

    fn expected_term(&self, term: &Term, target: &View) -> Result<ExpectedTerm, Diagnostic> {
        match term {
            Term::Place(place) => {
                let (view, operand) = self.input_at(place)?;
                if view.dtype != target.dtype || view.squeezed() != target.squeezed() {
                    return Err(self.mismatch(format!(
                        "{} is expected to be made of {}; expected the same shape and type",
                        shape_of(target),
                        shape_of(&view)
                    )));
                }
                Ok(ExpectedTerm::Operand(operand))
            }
            Term::Product(a, b) => {
                let ((a, left), (b, right)) = (self.input_at(a)?, self.input_at(b)?);
                let fits = match (&a.shape[..], &b.shape[..]) {
                    ([rows @ .., depth], [other, columns]) => {
                        let shape = rows.iter().chain([columns]).copied();
                        let shape: Vec<usize> = shape.filter(|extent| *extent != 1).collect();
                        (depth == other && shape == target.squeezed()).then_some([*columns, *depth])
                    }
                    _ => None,
                };
                let Some([columns, depth]) = fits else {
                    return Err(self.mismatch(format!(
                        "{} is expected to be a product of {} and {}; expected matrices that give this shape",
                        shape_of(target),
                        shape_of(&a),
                        shape_of(&b)
                    )));
                };
                Ok(ExpectedTerm::Product {
                    a: left,
                    b: right,
                    columns,
                    depth,
                })
            }
        }
    }

    /// An input of a rank, which has the shape of this rank's.
    pub(super) fn input_at(&self, place: &Place) -> Result<(View, InputPart), Diagnostic> {
        let view = self.view(&place.tensor)?;
        let tensor = &self.made.tensors[view.tensor];
        if tensor.role != Role::Input {
            let message = format!("{place} is no input; expected what outputs are to be of inputs");
            return Err(self.malformed(message));
        }
        let rank = match &place.on {
            Some(rank) => self.number_below(rank, self.made.world, &format!("{place}: rank"))?,
            None => self.made.rank,
        };
        let operand = InputPart {
            rank,
            name: tensor.name.clone(),
            bytes: tensor.bytes,
            area: view.strided(),
        };
        Ok((view, operand))
    }
}

//! Selections: references to families, slots, ranges and indices, resolved to parts of tensors.

use super::Unroller;
use super::scope::Bound;
use super::view::View;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::expr::Expr;
use crate::program::ir::{AxisSelection, Selection, TensorRef};

impl Unroller<'_> {
    /// The part that `reference` selects, of a tensor that is still allocated.
    pub(super) fn view(&self, reference: &TensorRef) -> Result<View, Diagnostic> {
        let view = self.view_of(reference)?;
        // By tensor and not by name: an alias would otherwise survive the deallocation.
        if let Some(position) = self.deallocated.get(&view.tensor) {
            return Err(self.diagnostic(
                DiagnosticKind::UseAfterDeallocate,
                format!("{reference} was deallocated in {position}"),
            ));
        }
        Ok(view)
    }

    /// The bias that `reference` selects; `None` where there is none, or the caller leaves it out.
    pub(super) fn bias(&self, reference: Option<&TensorRef>) -> Result<Option<View>, Diagnostic> {
        match reference {
            Some(reference) if !matches!(self.lookup(&reference.name), Some(Bound::Absent)) => {
                self.view(reference).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn view_of(&self, reference: &TensorRef) -> Result<View, Diagnostic> {
        let name = &reference.name;
        let mut selections = &reference.selections[..];
        let mut view = match self.lookup(name) {
            Some(Bound::Tensor(view)) => view.clone(),
            Some(Bound::Family(members)) => {
                let [Selection::Index(index), rest @ ..] = selections else {
                    let message = format!("'{name}' is a family of tensors; expected '{name}[i]'");
                    return Err(self.malformed(message));
                };
                selections = rest;
                let index =
                    self.number_below(index, members.len(), &format!("{reference}: member"))?;
                members[index].clone()
            }
            Some(Bound::Absent) => {
                let message = format!(
                    "the optional input '{name}' is left out by the caller and cannot be read; \
                     expected a condition 'given({name})' around it"
                );
                return Err(self.malformed(message));
            }
            Some(Bound::Scratch(_)) => {
                let message = format!("'{name}' is scratch; expected it in a kernel only");
                return Err(self.malformed(message));
            }
            Some(_) => {
                return Err(self.malformed(format!("'{name}' is not a tensor; expected one")));
            }
            None => {
                return Err(self.malformed(format!("unknown tensor '{name}'")));
            }
        };
        for selection in selections {
            match selection {
                Selection::Index(index) => self.select_index(reference, &mut view, 0, index)?,
                Selection::Range(from, to) => {
                    self.select_range(reference, &mut view, 0, (from, to))?;
                }
                Selection::Part(..) => {
                    let message = format!(
                        "{reference} selects a part that may be empty; expected that in a kernel only"
                    );
                    return Err(self.malformed(message));
                }
                Selection::Axes(axes) => {
                    let mut axis = 0;
                    for part in axes {
                        match part {
                            AxisSelection::Index(index) => {
                                self.select_index(reference, &mut view, axis, index)?;
                                // The axis is gone from the view, so that the next selection applies to the same
                                // number.
                                continue;
                            }
                            AxisSelection::Range(from, to) => {
                                self.select_range(reference, &mut view, axis, (from, to))?;
                            }
                            AxisSelection::All => {
                                self.axis(reference, &view, axis)?;
                            }
                        }
                        axis += 1;
                    }
                }
            }
        }
        if reference.transposed && !view.transpose() {
            let message = format!("{reference} has fewer than two axes; expected a matrix");
            return Err(self.diagnostic(DiagnosticKind::Mismatch, message));
        }
        Ok(view)
    }

    /// The extent and stride of an axis.
    fn axis(
        &self,
        reference: &TensorRef,
        view: &View,
        axis: usize,
    ) -> Result<(usize, usize), Diagnostic> {
        match (view.shape.get(axis), view.strides.get(axis)) {
            (Some(&extent), Some(&stride)) => Ok((extent, stride)),
            _ => Err(self.diagnostic(
                DiagnosticKind::Mismatch,
                if view.shape.is_empty() {
                    format!("{reference} selects from a single element; expected fewer indices")
                } else {
                    let axes = view.shape.len();
                    format!("{reference} selects from {axes} axes; expected no more indices")
                },
            )),
        }
    }

    fn select_index(
        &self,
        reference: &TensorRef,
        view: &mut View,
        axis: usize,
        index: &Expr,
    ) -> Result<(), Diagnostic> {
        let (extent, stride) = self.axis(reference, view, axis)?;
        let index = match self.named_row(index, extent) {
            Some(row) => row?,
            None => self.number_below(index, extent, &format!("{reference}: index"))?,
        };
        view.offset += index * stride;
        view.shape.remove(axis);
        view.strides.remove(axis);
        Ok(())
    }

    fn select_range(
        &self,
        reference: &TensorRef,
        view: &mut View,
        axis: usize,
        (from, to): (&Expr, &Expr),
    ) -> Result<(), Diagnostic> {
        let (extent, stride) = self.axis(reference, view, axis)?;
        let (a, b) = (self.integer(from)?, self.integer(to)?);
        match (usize::try_from(a), usize::try_from(b)) {
            (Ok(first), Ok(end)) if first < end && end <= extent => {
                view.offset += first * stride;
                view.shape[axis] = end - first;
                Ok(())
            }
            _ => Err(self.diagnostic(
                DiagnosticKind::OutOfBounds,
                format!(
                    "{reference} selects {a}..{b}; expected a part of 0..{extent} that is not empty"
                ),
            )),
        }
    }
}

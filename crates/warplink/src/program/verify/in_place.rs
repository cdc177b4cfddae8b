//! Simulates kernels a second time with tensors that may alias treated as one tensor.

use super::diagnostics::Diagnostics;
use super::kernel;
use super::link::Links;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::Role;
use crate::program::rank_program::{Operation, OperationKind, RankProgram};
use crate::program::section::SectionMemory;
use std::sync::Arc;

/// Checks the kernels of programs with tensors that may alias each other.
pub(super) fn check(ranks: &[RankProgram], links: &Links, diagnostics: &mut Diagnostics<'_>) {
    if ranks.iter().all(|program| program.in_place.is_empty()) {
        return;
    }
    // Only lanes are simulated again with shared memory, so aliasing between other operations would go unchecked.
    let other = |operation: &&Operation| !matches!(operation.kind, OperationKind::Kernel(_));
    for program in ranks {
        if let Some(operation) = program.operations.iter().find(other) {
            let at = (program.rank, &operation.site);
            let message = "a program with 'inout' does something else than launch kernels; expected kernels alone";
            diagnostics.add_made(Diagnostic::at(DiagnosticKind::Malformed, at, message));
            return;
        }
    }
    let merged: Vec<RankProgram> = ranks.iter().map(merged).collect();
    kernel::check(&merged, links, diagnostics);
    for diagnostic in &mut diagnostics.list {
        diagnostic.message += "; this happens if tensors share memory, which 'inout' allows";
    }
}

/// Copy of the program in which each tensor that may alias another one does.
fn merged(program: &RankProgram) -> RankProgram {
    let mut program = program.clone();
    let in_place = std::mem::take(&mut program.in_place);
    for operation in &mut program.operations {
        let OperationKind::Kernel(section) = &mut operation.kind else {
            continue;
        };
        for tensor in &mut Arc::make_mut(section).tensors {
            let lies = in_place
                .iter()
                .find(|(id, _)| tensor.memory == SectionMemory::Tensor(*id));
            if let Some((_, range)) = lies {
                tensor.memory = SectionMemory::Tensor(range.tensor);
                // Offsets of section tensors count elements of their own type.
                tensor.offset += range.offset_bytes / tensor.dtype.size();
            }
        }
    }
    // A tensor that is both read and written is no longer an input.
    for (_, range) in &in_place {
        program.tensors[range.tensor].role = Role::Local;
    }
    program
}

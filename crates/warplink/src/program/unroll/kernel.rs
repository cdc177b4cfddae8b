//! Kernel sections and their scratch: the names around them resolved.

use super::scope::Bound;
use super::{MAX_AXES, MAX_TENSOR_BYTES, Unroller};
use crate::device::ReduceOp;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::expr::Expr;
use crate::program::ir::Role;
use crate::program::rank_program::{OperationKind, RankProgram};
use crate::program::section::{
    FreeNames, Function, MAX_LANES, MAX_THREADS, RowFunction, Scratch, ScratchInstance, Section,
    SectionInstance, SectionMemory, SectionTensor, TensorId, WorkspaceLayout, period,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Marks the tensors of kernels that share memory with no other tensor and that nothing writes, and those whose words
/// kernels read as integers.
pub(super) fn mark_inputs(program: &mut RankProgram) {
    let is_constant = |id: TensorId| {
        let mut in_place = program.in_place.iter();
        program.tensors[id].role == Role::Input
            // An input that works in place shares memory with an output, which kernels write.
            && !in_place.any(|(of, range)| *of == id || range.tensor == id)
    };
    let constant: Vec<bool> = (0..program.tensors.len()).map(is_constant).collect();
    for operation in &mut program.operations {
        let OperationKind::Kernel(section) = &mut operation.kind else {
            continue;
        };
        // Not shared yet: the sections were made by this unrolling, so that nothing is copied.
        let section = Arc::make_mut(section);
        for tensor in &mut section.tensors {
            if let SectionMemory::Tensor(id) = tensor.memory {
                tensor.constant = constant[id];
            }
        }
        for (tensor, most) in section.value_bounds() {
            if let SectionMemory::Tensor(id) = section.tensors[tensor].memory {
                let bound = &mut program.tensors[id].value_bound;
                // The least of all kernels: a value must be valid for each of them.
                *bound = Some(bound.map_or(most, |bound| most.min(bound)));
            }
        }
    }
}

impl<'p> Unroller<'p> {
    /// Declares scratch; rows of the first axis of several alternate.
    pub(super) fn scratch(&mut self, all: &'p [Scratch]) -> Result<(), Diagnostic> {
        let first = self.made.scratch.len();
        for scratch in all {
            let instance = self.one_scratch(scratch)?;
            let id = self.made.scratch.len();
            self.made.scratch.push(instance);
            self.bind(&scratch.name, Bound::Scratch(id))?;
        }
        let group = &mut self.made.scratch[first..];
        let bytes = match group {
            [one] => Some(one.bytes),
            all => ScratchInstance::alternate(all),
        };
        if bytes.is_some_and(|bytes| bytes <= MAX_TENSOR_BYTES) {
            return Ok(());
        }
        let names: Vec<&str> = all.iter().map(|one| one.name.as_str()).collect();
        let message = format!(
            "rows of {} alternate; expected at least two axes each, first axes of one extent, and at most \
             {MAX_TENSOR_BYTES} bytes",
            names.join(", ")
        );
        Err(self.diagnostic(DiagnosticKind::Mismatch, message))
    }

    fn one_scratch(&mut self, scratch: &'p Scratch) -> Result<ScratchInstance, Diagnostic> {
        let name = &scratch.name;
        // Offsets in the workspace are assigned in order; a branch on the rank would shift them between ranks, whose
        // lanes write to each other's scratch.
        if self.called.is_nested(self.blocks) {
            let message = format!(
                "'{name}' is scratch inside a loop or branch; expected it outside, since it is the same on \
                 every rank"
            );
            return Err(self.malformed(message));
        }
        let dtype = self.element_type(name, &scratch.dtype)?;
        if scratch.shape.len() > MAX_AXES {
            let message = format!(
                "'{name}' has {} axes; expected 1 to {MAX_AXES}",
                scratch.shape.len()
            );
            return Err(self.diagnostic(DiagnosticKind::Mismatch, message));
        }
        let mut shape = Vec::with_capacity(scratch.shape.len());
        for extent in &scratch.shape {
            let value = self.integer(extent)?;
            let Some(extent) = usize::try_from(value).ok().filter(|extent| *extent > 0) else {
                let message =
                    format!("extent {extent} of '{name}' is {value}; expected at least 1");
                return Err(self.diagnostic(DiagnosticKind::OutOfBounds, message));
            };
            shape.push(extent);
        }
        let measured = ScratchInstance::measure(scratch.packing, dtype, &shape);
        let Some((strides, bytes)) = measured.filter(|(_, bytes)| *bytes <= MAX_TENSOR_BYTES)
        else {
            let message =
                format!("'{name}' is too large; expected at most {MAX_TENSOR_BYTES} bytes");
            return Err(self.diagnostic(DiagnosticKind::OutOfBounds, message));
        };
        Ok(ScratchInstance {
            name: Arc::from(name.as_str()),
            persistent: scratch.persistent,
            packing: scratch.packing,
            dtype,
            shape,
            strides,
            offset_bytes: WorkspaceLayout::of(&self.made.scratch).next(scratch.packing),
            bytes,
            site: self.here(),
        })
    }

    pub(super) fn function(&mut self, function: &'p Function) -> Result<(), Diagnostic> {
        let name = &function.name;
        let resolved = RowFunction::resolve(function, &|dtype| {
            let dtype = self.element_type(name, dtype);
            dtype.map_err(|diagnostic| diagnostic.message)
        });
        let resolved = resolved.map_err(|message: String| self.malformed(message))?;
        self.bind(name, Bound::Function(Arc::new(resolved)))
    }

    pub(super) fn kernel(&mut self, section: &'p Section) -> Result<(), Diagnostic> {
        let count = |unroller: &Self, expression: &Expr, limit: usize, what: &str| {
            let value = unroller.integer(expression)?;
            let count = usize::try_from(value).ok();
            let count = count.filter(|count| (1..=limit).contains(count));
            count.ok_or_else(|| {
                let message = format!("{expression} is {value} {what}; expected 1 to {limit}");
                unroller.diagnostic(DiagnosticKind::OutOfBounds, message)
            })
        };
        let lanes = count(self, &section.lanes, MAX_LANES, "lanes")?;
        let threads = count(self, &section.threads, MAX_THREADS, "threads")?;
        let names = FreeNames::of(section);
        // The text forbids shadowing, so that each name in a section is either bound in it or outside.
        if let Some(name) = names.bound.iter().find(|n| self.lookup(n).is_some()) {
            let message = format!("'{name}' already has a meaning here; expected a new name");
            return Err(self.malformed(message));
        }
        if let Some(list) = names.lists.iter().next() {
            let message = format!(
                "'{list}' is not an integer known to the kernel; expected a 'let' outside of it"
            );
            return Err(self.malformed(message));
        }
        let mut integers = BTreeMap::new();
        for name in &names.integers {
            let value = self.integer(&Expr::Name(name.clone()))?;
            integers.insert(name.clone(), value);
        }
        let mut operators = BTreeMap::new();
        for name in &names.operators {
            let Some(Bound::Operator(operator)) = self.lookup(name) else {
                let expected = ReduceOp::alternatives();
                let message = format!("unknown operator '{name}'; expected {expected}");
                return Err(self.malformed(message));
            };
            operators.insert(name.clone(), *operator);
        }
        let mut functions = BTreeMap::new();
        for name in &names.functions {
            let Some(Bound::Function(function)) = self.lookup(name) else {
                let message = format!(
                    "unknown function '{name}'; expected copy, reduce or a function of rows defined before"
                );
                return Err(self.malformed(message));
            };
            functions.insert(name.clone(), function.clone());
        }
        let tensors = names.tensors.iter().map(|name| self.section_tensor(name));
        let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
        let value = |expression: &Expr| {
            let outside = |name: &str| match name {
                // The period must be the same on every rank, since ranks agree on epochs; a divisor may not depend on
                // the rank.
                "rank" => None,
                name if names.bound.contains(name) => None,
                name => self.integer_named(name),
            };
            expression.evaluate(&outside).ok()
        };
        let period = period(section, &value).map_err(|(position, message)| {
            let mut at = self.site.clone();
            (at.line, at.column) = (position.line, position.column);
            let mut diagnostic = self.malformed(message.clone());
            // The statement is the kernel; the misuse is in a line of its body.
            diagnostic.places[0].site = at;
            diagnostic.message = format!("{}: {message}", diagnostic.places[0]);
            diagnostic
        })?;
        let instance = SectionInstance {
            section: Arc::new(section.clone()),
            rank: self.made.rank,
            world: self.made.world,
            lanes,
            threads,
            blocks: 1,
            integers,
            operators,
            functions,
            tensors,
            // All so far, not only those of this section: ids index the program's list.
            scratch: self.made.scratch.clone().into(),
            period,
            shared_tensors: false,
            published: false,
            withheld: Vec::new(),
            carried: None,
            sizes_vary: false,
            site: self.here(),
        };
        self.enqueue(OperationKind::Kernel(Arc::new(instance)));
        Ok(())
    }

    /// A tensor around a section, by its name.
    fn section_tensor(&self, name: &str) -> Result<SectionTensor, Diagnostic> {
        let malformed = |message: String| Err(self.malformed(message));
        match self.lookup(name) {
            Some(Bound::Tensor(view)) => {
                if let Some(position) = self.deallocated.get(&view.tensor) {
                    return Err(self.diagnostic(
                        DiagnosticKind::UseAfterDeallocate,
                        format!("'{name}' was deallocated in {position}"),
                    ));
                }
                Ok(SectionTensor {
                    name: name.to_owned(),
                    memory: SectionMemory::Tensor(view.tensor),
                    dtype: view.dtype,
                    read_only: view.read_only,
                    constant: false,
                    offset: view.offset,
                    shape: view.shape.clone(),
                    strides: view.strides.clone(),
                })
            }
            Some(Bound::Scratch(id)) => {
                let scratch = &self.made.scratch[*id];
                Ok(SectionTensor {
                    name: name.to_owned(),
                    memory: SectionMemory::Scratch(*id),
                    dtype: scratch.dtype,
                    read_only: false,
                    constant: false,
                    offset: 0,
                    shape: scratch.shape.clone(),
                    strides: scratch.strides.clone(),
                })
            }
            Some(Bound::Absent) => malformed(format!(
                "the optional input '{name}' is left out by the caller; expected a condition \
                 'given({name})' around the kernel"
            )),
            Some(Bound::Family(_)) => malformed(format!(
                "'{name}' is a family of tensors; expected a 'let' outside of the kernel for one of them"
            )),
            Some(_) => malformed(format!("'{name}' is not a tensor; expected one")),
            None => malformed(format!("unknown tensor '{name}'")),
        }
    }
}

//! Resolves steps that apply row functions.

use super::value::Resolved;
use super::{MoveOperand, Resolver};
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::named::alternatives;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::section::function::{RowArgument, RowFunction, RowNode, RowStep};
use crate::program::section::ir::{Application, FunctionArgument, Source};
use crate::program::section::lane::{LaneMove, LaneStepKind};
use crate::program::section::{MAX_OPERANDS, Packing};
use std::sync::Arc;

impl<'s> Resolver<'s> {
    /// A step that applies a function to a row.
    pub(super) fn applied(&mut self, application: &'s Application) -> Resolved<()> {
        let name = &application.function;
        let Some(function) = self.instance.functions.get(name).cloned() else {
            return self.mismatch(format!("unknown function '{name}'"));
        };
        if application.arguments.len() != function.arguments.len() {
            return self.mismatch(format!(
                "'{name}' is given {} arguments; expected {}",
                application.arguments.len(),
                function.arguments.len()
            ));
        }
        if application.results.len() != function.results() {
            return self.mismatch(format!(
                "'{name}' gives {} results, which {} lists of targets take; expected one for each, with ';' between",
                function.results(),
                application.results.len()
            ));
        }
        let (mut targets, mut results) = (Vec::new(), Vec::new());
        for list in &application.results {
            let before = targets.len();
            self.each(list, |resolver, place| {
                targets.push(resolver.operand(place)?);
                Ok(())
            })?;
            results.push(targets.len() - before);
        }
        let (mut sources, mut arguments) = (Vec::new(), Vec::new());
        // For each source, the number of elements that share one of its values.
        let mut shared = Vec::new();
        for (argument, block) in application.arguments.iter().zip(&function.arguments) {
            arguments.push(match argument {
                FunctionArgument::Number(number) => RowArgument::Number(*number),
                FunctionArgument::Sources {
                    sources: list,
                    operator,
                } => {
                    let combined = operator.as_ref().map(|it| self.operator(it)).transpose()?;
                    let before = sources.len();
                    let mut number = None;
                    self.each(list, |resolver, source| {
                        if combined.is_some() {
                            sources.push(resolver.source_of_memory(source)?);
                            return Ok(());
                        }
                        match resolver.source(source)? {
                            Ok(source) => sources.push(source),
                            Err(replaced) => number = Some(replaced),
                        }
                        Ok(())
                    })?;
                    let count = sources.len() - before;
                    // All sources of an argument are laid out alike.
                    shared.resize(sources.len(), *block);
                    match number {
                        Some(number) => RowArgument::Number(number),
                        None => RowArgument::Sources(count, combined.unwrap_or(ReduceOp::Sum)),
                    }
                }
            });
        }
        let single = |source: usize| {
            sources
                .get(source)
                .is_some_and(|it: &MoveOperand| it.single)
        };
        let singles = RowArgument::singles(&arguments, single);
        let uniform = function.uniform(&|argument| singles[argument]);
        let blocks = function.blocks(&uniform);
        // For each target, the number of elements that share one value.
        let each = results.iter().zip(&function.results);
        let each = each.flat_map(|(count, result)| std::iter::repeat_n(blocks[*result], *count));
        let each: Vec<Option<usize>> = each.collect();
        let mut rows = targets.iter().zip(&each).chain(sources.iter().zip(&shared));
        // Operands with one value per block are narrower, and single ones have no width.
        let width = rows.find(|(operand, block)| block.is_none() && !operand.single);
        let Some(width) = width.map(|(row, _)| row.length) else {
            return self.mismatch(format!(
                "'{name}' is given no row; expected one among its operands"
            ));
        };
        for (count, what) in [(targets.len(), "targets"), (sources.len(), "sources")] {
            if count > MAX_OPERANDS {
                return self.mismatch(format!("{count} {what}; expected at most {MAX_OPERANDS}"));
            }
        }
        // Targets may have more types than sources: narrow types are stored, but not computed with.
        for (target, block) in targets.iter().zip(&each) {
            self.check_row(target, width, *block, &DType::ROW_TARGETS)?;
            self.check_stored_alone(target)?;
        }
        for (source, block) in sources.iter().zip(&shared) {
            self.check_row(source, width, *block, &DType::ROWS)?;
        }
        self.check_blocks(
            &arguments,
            &function.arguments,
            (&sources, &shared),
            &targets,
        )?;
        self.check_singles(&sources, &targets)?;
        self.check_packets(&sources)?;
        self.check_waits(&function, &results, &arguments, &sources)?;
        // Threads read the word that names a row without waiting for each other.
        self.check_words(&targets)?;
        self.check_arguments(&arguments, &sources)?;
        let row_nodes = &function.nodes;
        let mut next = targets.iter();
        for (count, result) in results.iter().zip(&function.results) {
            for target in next.by_ref().take(*count) {
                if target.single && !uniform[*result] {
                    let message = format!("a single element gets a row of {width}; expected a row");
                    return self.mismatch(message);
                }
                let pairs = matches!(row_nodes[*result], RowNode::Pairs(_));
                if pairs && target.dtype != DType::U8 {
                    let message = format!("pairs go to {}; expected {}", target.dtype, DType::U8);
                    return self.mismatch(message);
                }
            }
        }
        // For the cost model and diagnostics; a row step's operands each have a type of their own.
        let first = sources.first().or(targets.first());
        self.push(LaneStepKind::Move(LaneMove {
            operator: None,
            dtype: first.map_or(DType::F32, |first| first.dtype),
            rows: Some(Arc::new(RowStep {
                function,
                arguments,
                results,
                threads: self.instance.threads,
            })),
            elements: width,
            targets: targets.iter().map(|operand| operand.part).collect(),
            sources: sources.iter().map(|operand| operand.part).collect(),
        }));
        Ok(())
    }

    /// Rejects packets that no result depends on which is stored: kernels do not compute with them, and so do not wait for
    /// them. `targets` is the number of targets of each result.
    fn check_waits(
        &self,
        function: &RowFunction,
        targets: &[usize],
        arguments: &[RowArgument],
        sources: &[MoveOperand],
    ) -> Resolved<()> {
        let stored = (0..function.results()).filter(|result| targets[*result] > 0);
        let needs: Vec<Vec<bool>> = stored.map(|result| function.needs(result)).collect();
        let mut sources = sources.iter();
        for (number, argument) in arguments.iter().enumerate() {
            let RowArgument::Sources(count, _) = argument else {
                continue;
            };
            let mut given = sources.by_ref().take(*count);
            // All sources of an argument are consumed, or the next one would begin among them.
            let packets = given
                .by_ref()
                .fold(false, |any, it| any | self.packets(&it.part));
            if packets && !needs.iter().any(|needs| needs[number]) {
                return self.mismatch(format!(
                    "argument {} of '{}' is given packets, and no result that is stored depends on it; expected one that \
                     does, since kernels would not wait for these packets",
                    number + 1,
                    function.name
                ));
            }
        }
        Ok(())
    }

    /// A source that no number replaces.
    pub(super) fn source_of_memory(&mut self, source: &'s Source) -> Resolved<MoveOperand> {
        self.source(source)?.map_err(|number| {
            let message = format!(
                "{number} is no source; expected a tensor, since a number replaces an argument of a function of rows alone"
            );
            self.malformed(message)
        })
    }

    fn mismatch<T>(&self, message: String) -> Resolved<T> {
        Err(self.wrong(DiagnosticKind::Mismatch, message))
    }

    /// Rejects an operand that is neither a single value, nor a whole row of `width` elements, nor one value per
    /// `block` of them.
    fn check_row(
        &self,
        operand: &MoveOperand,
        width: usize,
        block: Option<usize>,
        types: &[DType],
    ) -> Resolved<()> {
        let tensor = &self.instance.tensors[operand.part.tensor];
        let name = &tensor.name;
        if !types.contains(&operand.dtype) {
            return self.mismatch(format!(
                "'{name}' is of {}; a function of rows expects {}",
                operand.dtype,
                alternatives(types)
            ));
        }
        let scratch = self.instance.scratch_of(operand.part.tensor);
        let packing = scratch.map_or(Packing::Plain, |scratch| scratch.packing);
        if block.is_some() && packing.is_packets() {
            let message =
                format!("values of blocks of '{name}' are packets; expected plain memory");
            return self.mismatch(message);
        }
        let width = block.map_or(width, |block| width.div_ceil(block));
        if operand.single {
            if packing.is_packets() {
                let message =
                    format!("a single value of '{name}' is a packet; expected plain memory");
                return self.mismatch(message);
            }
            return Ok(());
        }
        if operand.length != width {
            return self.mismatch(format!(
                "rows of {} and {width} elements; expected one width",
                operand.length
            ));
        }
        // Scratch is one-dimensional here, and rows in it may have any length.
        let whole = tensor.shape.last().copied().unwrap_or(1);
        if scratch.is_none() && width != whole {
            return self.mismatch(format!(
                "{width} elements of '{name}' are taken for a row; expected its last axis, of {whole}: rows are not \
                 split, since what one lane reduces along a row another does not see"
            ));
        }
        Ok(())
    }

    /// Rejects targets whose packets several threads store together.
    fn check_stored_alone(&self, target: &MoveOperand) -> Resolved<()> {
        let scratch = self.instance.scratch_of(target.part.tensor);
        if scratch.is_some_and(|scratch| scratch.packing == Packing::Packets128) {
            let name = &self.instance.tensors[target.part.tensor].name;
            return self.mismatch(format!(
                "'{name}' has packets128, which threads do not store alone; expected packets16 or packets8, or a put"
            ));
        }
        Ok(())
    }

    /// Rejects arguments by blocks that are not one plain source, which no target overwrites: threads with elements of
    /// one block read the same value, some of them after others have stored.
    fn check_blocks(
        &self,
        arguments: &[RowArgument],
        blocks: &[Option<usize>],
        (sources, shared): (&[MoveOperand], &[Option<usize>]),
        targets: &[MoveOperand],
    ) -> Resolved<()> {
        let by_blocks = arguments
            .iter()
            .zip(blocks)
            .filter(|(_, block)| block.is_some());
        for (argument, _) in by_blocks {
            if !matches!(argument, RowArgument::Sources(1, _)) {
                let message = "values of blocks are combined or a number; expected one source";
                return self.mismatch(message.to_owned());
            }
        }
        let by_blocks = sources
            .iter()
            .zip(shared)
            .filter(|(_, block)| block.is_some());
        for (source, _) in by_blocks {
            let name = &self.instance.tensors[source.part.tensor].name;
            if source.single {
                let message = format!(
                    "a single element of '{name}' is given for values of blocks; expected a row"
                );
                return self.mismatch(message);
            }
            let overlaps = |target: &MoveOperand| self.overlap(&source.part, &target.part);
            if targets.iter().any(overlaps) {
                let message = format!(
                    "values of blocks of '{name}' are read and overwritten in one step; expected other memory"
                );
                return self.mismatch(message);
            }
        }
        Ok(())
    }

    /// Rejects targets over a single value: each thread reads it for itself, some of them after others have stored.
    fn check_singles(&self, sources: &[MoveOperand], targets: &[MoveOperand]) -> Resolved<()> {
        for source in sources.iter().filter(|source| source.single) {
            if targets
                .iter()
                .any(|target| self.overlap(&source.part, &target.part))
            {
                let name = &self.instance.tensors[source.part.tensor].name;
                let message = format!(
                    "a single value of '{name}' is read and overwritten in one step, in no order among its threads"
                );
                return Err(self.wrong(DiagnosticKind::Race, message));
            }
        }
        Ok(())
    }

    /// Rejects arguments that mix rows with single values, or types.
    fn check_arguments(&self, arguments: &[RowArgument], sources: &[MoveOperand]) -> Resolved<()> {
        let mut next = sources.iter();
        for argument in arguments {
            let RowArgument::Sources(count, operator) = argument else {
                continue;
            };
            let these: Vec<&MoveOperand> = next.by_ref().take(*count).collect();
            let Some(first) = these.first() else {
                let message = "a reduction of nothing; expected at least one source";
                return self.mismatch(message.to_owned());
            };
            let fits = operator.check(first.dtype);
            fits.map_err(|error| self.wrong(DiagnosticKind::Mismatch, error.message().to_owned()))?;
            let differs =
                |other: &&&MoveOperand| (other.dtype, other.single) != (first.dtype, first.single);
            if let Some(other) = these.iter().find(differs) {
                return self.mismatch(format!(
                    "{} elements of {} and {} of {} are combined; expected as many of one type",
                    first.length, first.dtype, other.length, other.dtype
                ));
            }
        }
        Ok(())
    }
}

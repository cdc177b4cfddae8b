//! Kernel sections: the lanes of all ranks, in turns.

use super::value::Value;
use super::{Run, Values};
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::rank_program::{OperationKind, RankProgram};
use crate::program::section::{LaneStep, LaneStepKind, Part, SectionInstance, SectionMemory};
use std::collections::HashMap;
use std::sync::Arc;

/// What kernels keep from one launch to the next, on all ranks.
pub(super) struct Workspace {
    /// For each rank, its kernels in the host's order.
    sections: Vec<Vec<Arc<SectionInstance>>>,
    /// For each rank and scratch, the values, each with the launch that stored it as a packet, counted
    /// from 1.
    scratch: Vec<Vec<Vec<(Value, u64)>>>,
    /// How often a rank's lane was signalled by another, beyond what it waited for.
    signals: HashMap<(Rank, usize, Rank), u64>,
    /// How many kernels were launched before.
    epoch: u64,
    /// How many kernels each rank has come past.
    passed: Vec<usize>,
}

/// A lane under way.
struct Lane {
    rank: Rank,
    number: usize,
    steps: Vec<LaneStep>,
    next: usize,
}

impl Workspace {
    pub(super) fn new(ranks: &[RankProgram]) -> Self {
        let sections = |program: &RankProgram| {
            let operations = program.operations.iter();
            operations
                .filter_map(|operation| match &operation.kind {
                    OperationKind::Kernel(section) => Some(section.clone()),
                    _ => None,
                })
                .collect()
        };
        let scratch = |program: &RankProgram| {
            let one = |scratch: &crate::program::section::ScratchInstance| {
                let rows = scratch.shape.first().zip(scratch.strides.first());
                let elements = rows.map_or(0, |(extent, stride)| extent * stride);
                vec![(Value::UNKNOWN, 0); elements]
            };
            program.scratch.iter().map(one).collect()
        };
        Self {
            sections: ranks.iter().map(sections).collect(),
            scratch: ranks.iter().map(scratch).collect(),
            signals: HashMap::new(),
            epoch: 0,
            passed: vec![0; ranks.len()],
        }
    }
}

impl Run<'_> {
    /// Does a rank's next kernel: when the first rank is done with it, all have come, and all of it is done
    /// for all ranks.
    pub(super) fn launch(&mut self, rank: Rank) -> Result<()> {
        let number = self.workspace.passed[rank];
        self.workspace.passed[rank] += 1;
        if (number as u64) < self.workspace.epoch {
            return Ok(());
        }
        let launch = self.workspace.sections.iter();
        let launch: Option<Vec<Arc<SectionInstance>>> =
            launch.map(|own| own.get(number).cloned()).collect();
        let launch = launch.ok_or_else(|| unfinished("a rank does not launch it"))?;
        let mut lanes = Vec::new();
        for section in &launch {
            for lane in 0..section.lanes {
                lanes.push(Lane {
                    rank: section.rank,
                    number: lane,
                    steps: section.steps(lane, self.workspace.epoch)?,
                    next: 0,
                });
            }
        }
        loop {
            let mut moved = false;
            for lane in &mut lanes {
                while let Some(step) = lane.steps.get(lane.next) {
                    let done = self.workspace.perform(
                        &mut self.memory,
                        &launch,
                        (lane.rank, lane.number),
                        &step.kind,
                    );
                    if !done {
                        break;
                    }
                    lane.next += 1;
                    moved = true;
                }
            }
            if lanes.iter().all(|lane| lane.next == lane.steps.len()) {
                break;
            }
            if !moved {
                return Err(unfinished("its lanes wait for one another"));
            }
        }
        self.workspace.epoch += 1;
        Ok(())
    }
}

impl Workspace {
    /// Does a step of a lane, if what it waits for is there.
    fn perform(
        &mut self,
        memory: &mut Values,
        launch: &[Arc<SectionInstance>],
        (rank, lane): (Rank, usize),
        step: &LaneStepKind,
    ) -> bool {
        let (operator, dtype, rows, elements, targets, sources) = match step {
            LaneStepKind::Signal { peer, lane: to } => {
                *self.signals.entry((*peer, *to, rank)).or_default() += 1;
                return true;
            }
            LaneStepKind::Wait(peer) => {
                let there = self.signals.entry((rank, lane, *peer)).or_default();
                let any = *there > 0;
                *there -= u64::from(any);
                return any;
            }
            LaneStepKind::Announce {
                values,
                tensors,
                target,
            } => {
                let words = LaneStepKind::announced_words(values, tensors);
                let mut values: Vec<Value> = values
                    .iter()
                    .map(|value| Value::exact(f64::from(*value as i32)))
                    .collect();
                // All tensors are known here.
                values.resize(words, Value::exact(0.0));
                self.write(memory, &launch[target.rank], target, &values);
                return true;
            }
            LaneStepKind::Agree {
                values,
                tensors,
                source,
                ..
            } => {
                let words = LaneStepKind::announced_words(values, tensors);
                let there = self.read(memory, &launch[source.rank], source, words);
                return there.is_some();
            }
            LaneStepKind::Move {
                operator,
                dtype,
                rows,
                elements,
                targets,
                sources,
            } => (operator, *dtype, rows, *elements, targets, sources),
        };
        let mut all: Vec<Vec<Value>> = Vec::with_capacity(sources.len());
        for source in sources {
            let there = self.read(memory, &launch[source.rank], source, source.elements);
            let Some(values) = there else {
                return false;
            };
            all.push(values);
        }
        if let Some(rows) = rows {
            let results = super::rows::apply(rows, &all, elements);
            let targets = targets.iter().zip(&results);
            for (target, values) in targets {
                let section = &launch[target.rank];
                let dtype = section.tensors[target.tensor].dtype;
                let all = 0..target.elements;
                let at = |element: usize| values[if values.len() == 1 { 0 } else { element }];
                let values: Vec<Value> = all.map(|element| at(element).stored(dtype)).collect();
                self.write(memory, section, target, &values);
            }
            return true;
        }
        let values = combine(*operator, dtype, &all, elements);
        for target in targets {
            self.write(memory, &launch[target.rank], target, &values);
        }
        true
    }

    /// The values of an operand; `None` where packets of this launch are missing.
    fn read(
        &self,
        memory: &Values,
        section: &SectionInstance,
        part: &Part,
        elements: usize,
    ) -> Option<Vec<Value>> {
        let tensor = &section.tensors[part.tensor];
        let from = tensor.offset + part.offset;
        match tensor.memory {
            SectionMemory::Tensor(id) => {
                let all = &memory.tensors[part.rank][id].values;
                Some(all[from..from + elements].to_vec())
            }
            SectionMemory::Scratch(id) => {
                let all = &self.scratch[part.rank][id][from..from + elements];
                let packets = section.scratch[id].packing.is_packets();
                let there = |flag: u64| !packets || flag == self.epoch + 1;
                all.iter()
                    .map(|&(value, flag)| there(flag).then_some(value))
                    .collect()
            }
        }
    }

    fn write(
        &mut self,
        memory: &mut Values,
        section: &SectionInstance,
        part: &Part,
        values: &[Value],
    ) {
        let tensor = &section.tensors[part.tensor];
        let from = tensor.offset + part.offset;
        match tensor.memory {
            SectionMemory::Tensor(id) => {
                let all = &mut memory.tensors[part.rank][id].values;
                all[from..from + values.len()].copy_from_slice(values);
            }
            SectionMemory::Scratch(id) => {
                let all = &mut self.scratch[part.rank][id][from..from + values.len()];
                for (place, value) in all.iter_mut().zip(values) {
                    *place = (*value, self.epoch + 1);
                }
            }
        }
    }
}

/// Combines sources in order: sums of small floats in single precision, rounded at the end.
pub(super) fn combine(
    operator: Option<ReduceOp>,
    dtype: DType,
    sources: &[Vec<Value>],
    elements: usize,
) -> Vec<Value> {
    let Some(operator) = operator else {
        return sources.first().cloned().unwrap_or_default();
    };
    let between = match dtype {
        DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2 => DType::F32,
        other => other,
    };
    let at = |index: usize| {
        combined(
            operator,
            between,
            sources.len(),
            &mut sources.iter().map(|source| source[index]),
        )
        .stored(dtype)
    };
    (0..elements).map(at).collect()
}

/// What an operator makes of `count` values, with which it computes as `between`.
pub(super) fn combined(
    operator: ReduceOp,
    between: DType,
    count: usize,
    values: &mut dyn Iterator<Item = Value>,
) -> Value {
    let mut values = values.map(|value| match operator.factor() {
        Some(factor) => {
            let factor = Value::exact(factor.rounded(between).value());
            value.times_in(factor, between).stored(between)
        }
        None => value,
    });
    let first = values.next().unwrap_or(Value::UNKNOWN);
    let all = values.fold(first, |all, value| match operator {
        ReduceOp::Sum | ReduceOp::Average | ReduceOp::ScaledSum(_) => {
            all.plus(value).stored(between)
        }
        ReduceOp::Product => all.times_in(value, between).stored(between),
        ReduceOp::Max => all.larger(value),
        ReduceOp::Min => all.smaller(value),
    });
    match operator {
        ReduceOp::Average => all.divided(count, between),
        _ => all,
    }
}

fn unfinished(what: &str) -> Error {
    Error::new(
        ErrorKind::Verification,
        format!("a kernel does not end: {what}"),
    )
    .with_operation("evaluate a program")
    .with_help("verify the program first")
}

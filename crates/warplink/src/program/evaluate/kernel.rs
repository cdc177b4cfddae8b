//! Interprets steps of lanes over values.

use super::value::BoundedValue;
use super::{Evaluation, Values};
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::diagnostic::Diagnostic;
use crate::program::machine::{Actor, Domain, Machine};
use crate::program::rank_program::RankProgram;
use crate::program::section::{
    LaneStep, LaneStepKind, Matching, OperandMemory, Part, ScratchInstance, SectionInstance,
    SectionMemory,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// State of all ranks that persists across launches.
pub(super) struct Workspace<'a> {
    lanes: Machine<()>,
    /// For each rank, its kernels in the host's order.
    sections: Vec<Vec<&'a SectionInstance>>,
    /// For each rank and scratch, the values, each with the launch, counted from 1, that stored it as a packet.
    scratch: Vec<Vec<Vec<(BoundedValue, u64)>>>,
    /// Epoch of the run's first launch.
    first: u64,
    /// Number of launched kernels.
    launched: u64,
    /// Number of kernels that each rank has passed.
    passed: Vec<usize>,
}

/// Memory accessible to the lanes of a launch.
struct LaunchMemory<'r, 'a> {
    sections: &'r [Vec<&'a SectionInstance>],
    scratch: &'r mut [Vec<Vec<(BoundedValue, u64)>>],
    tensors: &'r mut Values,
    epoch: u64,
    /// Values that lanes of a rank have read, by the number of the read.
    known: BTreeMap<(u32, u32), BTreeMap<usize, i64>>,
    /// Why a lane cannot go on with a value that it has read.
    failed: Option<Diagnostic>,
}

impl<'a> Workspace<'a> {
    /// The state before run `run`.
    pub(super) fn new(ranks: &'a [RankProgram], run: u64) -> Self {
        let sections: Vec<Vec<_>> = ranks.iter().map(|it| it.sections().collect()).collect();
        let launches = sections.first().map_or(0, Vec::len) as u64;
        let widths = sections.iter().flatten().map(|section| section.lanes);
        let scratch = |program: &RankProgram| {
            let one = |scratch: &ScratchInstance| {
                let rows = scratch.shape.first().zip(scratch.strides.first());
                let elements = rows.map_or(0, |(extent, stride)| extent * stride);
                vec![(BoundedValue::UNKNOWN, 0); elements]
            };
            program.scratch.iter().map(one).collect()
        };
        Self {
            lanes: Machine::new(ranks.len(), widths.max().unwrap_or(0)),
            sections,
            scratch: ranks.iter().map(scratch).collect(),
            first: run * launches,
            launched: 0,
            passed: vec![0; ranks.len()],
        }
    }
}

impl Evaluation<'_> {
    /// Executes a rank's next kernel. When the first rank completes it, all ranks have arrived, so it is executed for
    /// all ranks at once.
    pub(super) fn launch(&mut self, rank: Rank) -> Result<()> {
        let workspace = &mut self.workspace;
        let number = workspace.passed[rank];
        workspace.passed[rank] += 1;
        // All ranks' lanes ran when the first rank reached this launch; the others have nothing left to do.
        if (number as u64) < workspace.launched {
            return Ok(());
        }
        let mut memory = LaunchMemory {
            sections: &workspace.sections,
            scratch: &mut workspace.scratch,
            tensors: &mut self.memory,
            epoch: workspace.first + workspace.launched,
            known: BTreeMap::new(),
            failed: None,
        };
        for (rank, sections) in workspace.sections.iter().enumerate() {
            let section = sections.get(number);
            // Ranks run together, as lanes wait for lanes of other ranks.
            let section = section.ok_or_else(|| unfinished("a rank does not launch it"))?;
            let steps = (0..section.lanes).map(|lane| memory.steps(number, rank, lane));
            let steps = steps.collect::<Result<Vec<_>, _>>()?;
            workspace.lanes.start(rank, number, steps);
        }
        while workspace.lanes.run(&mut memory).is_some() {}
        if let Some(diagnostic) = memory.failed {
            return Err(diagnostic.into());
        }
        if workspace.lanes.blocked().next().is_some() {
            return Err(unfinished("its lanes wait for one another"));
        }
        workspace.launched += 1;
        Ok(())
    }
}

impl Domain for LaunchMemory<'_, '_> {
    type Signal = ();

    fn section(&self, number: usize, rank: Rank) -> &SectionInstance {
        self.sections[rank][number]
    }

    fn signal(&mut self, _: Actor, _: usize, _: Option<Actor>) {}

    fn wait(&mut self, _: Actor, _: Actor, (): ()) {}

    fn has_packets(&mut self, actor: Actor, rank: Rank, packets: &OperandMemory) -> bool {
        let SectionMemory::Scratch(id) = packets.memory else {
            return true;
        };
        let all = &self.scratch[rank][id][packets.elements.clone()];
        // Equality, as kernels compare flags.
        all.iter().all(|(_, flag)| *flag == flag_of(actor))
    }

    fn perform(&mut self, actor: Actor, step: &LaneStepKind) {
        let sources = step.sources().iter();
        let sources: Vec<Vec<BoundedValue>> =
            sources.map(|source| self.read(actor, source)).collect();
        let it = match step {
            LaneStepKind::Announce { values, target, .. } => {
                let words = values
                    .iter()
                    .map(|it| BoundedValue::exact(f64::from(*it as i32)));
                let mut values: Vec<BoundedValue> = words.collect();
                // All tensors are known here, so the remaining words are zero.
                // Exact as i32, the scratch's type; only the agreement reads these words, which does not compare
                // here.
                values.resize(target.elements, BoundedValue::exact(0.0));
                return self.write(actor, target, &values);
            }
            LaneStepKind::Store { value, target } => {
                return self.write(actor, target, &[BoundedValue::exact(*value as f64)]);
            }
            LaneStepKind::Move(it) => it,
            LaneStepKind::Value {
                number,
                source,
                matching,
                ..
            } => {
                let value = self.word(actor.launch as usize, source, *matching);
                let lane = (actor.rank, actor.lane);
                self.known.entry(lane).or_default().insert(*number, value);
                return;
            }
            LaneStepKind::Agree { .. } | LaneStepKind::Signal { .. } | LaneStepKind::Wait(_) => {
                return;
            }
        };
        if let Some(rows) = &it.rows {
            let results = rows.apply(&sources, it.elements);
            for (target, values) in it.targets.iter().zip(rows.by_target(&results)) {
                let section = self.section(actor.launch as usize, target.rank);
                let dtype = section.tensors[target.tensor].dtype;
                let all = 0..target.elements;
                let at = |element: usize| values[if values.len() == 1 { 0 } else { element }];
                let values: Vec<BoundedValue> =
                    all.map(|element| at(element).stored(dtype)).collect();
                self.write(actor, target, &values);
            }
            return;
        }
        let values = combine(it.operator, it.dtype, &sources, it.elements);
        for target in &it.targets {
            self.write(actor, target, &values);
        }
    }

    fn resume(&mut self, actor: Actor) -> Option<Arc<[LaneStep]>> {
        let (number, rank) = (actor.launch as usize, actor.rank as Rank);
        match self.steps(number, rank, actor.lane as usize) {
            Ok(steps) => Some(steps),
            Err(diagnostic) => {
                self.failed.get_or_insert(diagnostic);
                None
            }
        }
    }
}

impl LaunchMemory<'_, '_> {
    /// Steps of a lane, as far as the values that it reads are known.
    fn steps(&self, number: usize, rank: Rank, lane: usize) -> Result<Arc<[LaneStep]>, Diagnostic> {
        let section = self.section(number, rank);
        let known = self.known.get(&(rank as u32, lane as u32));
        let steps = section.steps_with(lane, self.epoch, &|word| {
            let value = known.and_then(|known| known.get(&word.number)).copied();
            let constant = section.is_constant(&word.part);
            // A constant is known before the launch; another word only once the lane has reached the read.
            value.or_else(|| constant.then(|| self.word(number, &word.part, word.matching)))
        });
        steps.map(Arc::from)
    }

    /// Value of a word, or of the words that are matched; -1, which is out of any range, for one that is unknown.
    fn word(&self, number: usize, word: &Part, matching: Option<Matching>) -> i64 {
        let operand = self.section(number, word.rank).operand(word);
        let values = operand.map(|operand| self.values(word.rank, &operand));
        let values = values.unwrap_or_default();
        // An integer that is not exact has no meaning as an index: out of every range, it is reported where it is
        // read.
        if values.iter().any(|value| value.bound != 0.0) {
            return -1;
        }
        let mut words = values.into_iter().map(|value| value.value as i64);
        match matching {
            Some(matching) => matching.of(&words.collect::<Vec<_>>()),
            None => words.next().unwrap_or(-1),
        }
    }

    /// Values of an operand.
    fn values(&self, rank: Rank, operand: &OperandMemory) -> Vec<BoundedValue> {
        let elements = operand.elements.clone();
        match operand.memory {
            SectionMemory::Tensor(id) => self.tensors.tensors[rank][id].values[elements].to_vec(),
            SectionMemory::Scratch(id) => {
                let all = &self.scratch[rank][id][elements];
                all.iter().map(|(value, _)| *value).collect()
            }
        }
    }

    /// Memory of an operand that has elements.
    fn operand(&self, actor: Actor, part: &Part) -> Option<OperandMemory> {
        let section = self.section(actor.launch as usize, part.rank);
        section.operand(part)
    }

    fn read(&self, actor: Actor, part: &Part) -> Vec<BoundedValue> {
        let operand = self.operand(actor, part);
        operand.map_or_else(Vec::new, |operand| self.values(part.rank, &operand))
    }

    fn write(&mut self, actor: Actor, part: &Part, values: &[BoundedValue]) {
        let Some(operand) = self.operand(actor, part) else {
            return;
        };
        match operand.memory {
            SectionMemory::Tensor(id) => {
                let all = &mut self.tensors.tensors[part.rank][id].values;
                all[operand.elements].copy_from_slice(values);
            }
            SectionMemory::Scratch(id) => {
                let all = &mut self.scratch[part.rank][id][operand.elements];
                for (place, value) in all.iter_mut().zip(values) {
                    *place = (*value, flag_of(actor));
                }
            }
        }
    }
}

/// Flag of the packets that a step stores.
fn flag_of(actor: Actor) -> u64 {
    u64::from(actor.launch) + 1
}

/// Combines sources in order: sums of small floats in single precision, rounded at the end.
pub(super) fn combine(
    operator: Option<ReduceOp>,
    dtype: DType,
    sources: &[Vec<BoundedValue>],
    elements: usize,
) -> Vec<BoundedValue> {
    let Some(operator) = operator else {
        return sources.first().cloned().unwrap_or_default();
    };
    // Kernels round once, when they store.
    let between = dtype.wide();
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

/// Result of an operator on `count` values, computed in type `between`.
pub(super) fn combined(
    operator: ReduceOp,
    between: DType,
    count: usize,
    values: &mut dyn Iterator<Item = BoundedValue>,
) -> BoundedValue {
    let mut values = values.map(|value| match operator.factor() {
        Some(factor) => {
            let factor = BoundedValue::exact(factor.rounded(between).value());
            value.times_in(factor, between).stored(between)
        }
        None => value,
    });
    let first = values.next().unwrap_or(BoundedValue::UNKNOWN);
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

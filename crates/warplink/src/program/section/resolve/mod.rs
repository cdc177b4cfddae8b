//! Resolves the text of a section to the steps of one lane in one launch.

mod frames;
mod meeting;
mod names;
mod resolution;
mod rows;
mod value;

pub(crate) use resolution::Resolution;
pub(crate) use value::VALUE_TYPES;
pub use value::{ReadValues, ReadWord};

use super::function::Literal;
use super::instance::SectionInstance;
use super::ir::{Move, Otherwise, Place, ReduceOperator, Source, Step, StepKind, Verb};
use super::lane::{LaneMove, LaneStep, LaneStepKind, Part};
use super::remainders;
use super::view::View;
use super::{MAX_LANE_STEPS, MAX_OPERANDS};
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::program::construct::{Each, Loop, NodeKind, Selection, TensorRef};
use crate::program::diagnostic::{Diagnostic, DiagnosticKind, RankSite};
use crate::program::expr::Expr;
use crate::program::site::{Position, Site, with_index};
use frames::{Frame, StepStart};
use names::Slot;
use resolution::Answers;
use rustc_hash::FxHashMap;
use std::cell::{OnceCell, RefCell};
use std::fmt::Display;
use value::{Resolved, Stop, with_large_values};

impl SectionInstance {
    /// Steps of the lane in the launch with this `epoch` (number of earlier uses of the workspace), if all ranks can
    /// reach the announced tensors, and every value that it reads from memory is the largest.
    ///
    /// # Errors
    /// The first error in the text: names, bounds, shapes, types.
    pub fn steps(&self, lane: usize, epoch: u64) -> Result<Vec<LaneStep>, Diagnostic> {
        with_large_values(|values| self.steps_with(lane, epoch, values))
    }

    /// As [`steps`](Self::steps), with the values that the lane reads from memory. If one of them is not known yet, the
    /// steps end with its read, and are a prefix of those with more values.
    ///
    /// # Errors
    /// As [`steps`](Self::steps), and a value that is out of range.
    pub fn steps_with(
        &self,
        lane: usize,
        epoch: u64,
        values: &ReadValues<'_>,
    ) -> Result<Vec<LaneStep>, Diagnostic> {
        let reachable = |tensor| !self.withheld.contains(&tensor);
        let found = self.steps_where(lane, epoch, &reachable, values);
        found.map(|(steps, _)| steps)
    }

    /// As [`steps_with`](Self::steps_with), with `reachable` deciding which announced tensors all ranks can reach.
    /// Steps before a condition on a tensor do not depend on it. Also gives the number of statements and iterations that it took,
    /// many of which may make no step.
    pub(crate) fn steps_where(
        &self,
        lane: usize,
        epoch: u64,
        reachable: &dyn Fn(usize) -> bool,
        values: &ReadValues<'_>,
    ) -> Result<(Vec<LaneStep>, usize), Diagnostic> {
        let resolver = self.resolved(lane, epoch, reachable, (values, u64::MAX))?;
        Ok((resolver.steps, resolver.taken))
    }

    /// As [`steps`](Self::steps), with loops sampled to about `most` iterations; each step has the number of steps
    /// that it represents.
    pub(crate) fn sampled_steps(
        &self,
        lane: usize,
        epoch: u64,
        most: u64,
    ) -> Result<(Vec<LaneStep>, Vec<f64>), Diagnostic> {
        with_large_values(|values| {
            // Costs are those of the usual case: all tensors reachable.
            let resolver = self.resolved(lane, epoch, &|_| true, (values, most))?;
            Ok((resolver.steps, resolver.weights))
        })
    }

    fn resolved<'s>(
        &'s self,
        lane: usize,
        epoch: u64,
        reachable: &'s dyn Fn(usize) -> bool,
        (values, most): (&'s ReadValues<'s>, u64),
    ) -> Result<Resolver<'s>, Diagnostic> {
        let answers = Answers::Asked { reachable, values };
        let mut resolver = Resolver::new(self, (lane, epoch), answers, most);
        match resolver.go_on() {
            // A caller without the next value gets the steps up to it.
            Ok(()) | Err(Stop::Unknown) => Ok(resolver),
            Err(Stop::Wrong(diagnostic)) => Err(diagnostic),
        }
    }
}

struct Resolver<'s> {
    instance: &'s SectionInstance,
    lane: usize,
    /// Integers bound by the section, innermost last.
    integers: Vec<(&'s str, i64)>,
    /// By the address of a name in the text, once it has been evaluated there.
    slots: RefCell<FxHashMap<*const u8, Slot>>,
    aliases: Vec<(&'s str, View)>,
    steps: Vec<LaneStep>,
    /// Weight of each step, weight of the next step, and the approximate limit of sampled iterations per loop.
    weights: Vec<f64>,
    weight: f64,
    most: u64,
    taken: usize,
    site: Site,
    /// Announced tensors: all, those that this lane has announced, those that it has agreed on, those that it has
    /// asked for without having agreed on them, and those known to be reachable at this point.
    announced: OnceCell<Vec<usize>>,
    told: Vec<usize>,
    agreed: Vec<usize>,
    asked: Vec<(usize, Position)>,
    reached: Vec<usize>,
    answers: Answers<'s>,
    /// Blocks in progress, outermost first; and the start of the step that needs a value not yet known.
    frames: Vec<Frame<'s>>,
    unfinished: Option<StepStart>,
    /// Number of values read so far, and the words that name rows of the current step.
    read: usize,
    words: Vec<Part>,
}

/// A resolved operand of a move.
struct MoveOperand {
    part: Part,
    dtype: DType,
    extent: usize,
    length: usize,
    /// Whether no axis is left.
    single: bool,
}

impl<'s> Resolver<'s> {
    /// At the start of the section. Loops are sampled to about `most` iterations.
    fn new(
        instance: &'s SectionInstance,
        (lane, epoch): (usize, u64),
        answers: Answers<'s>,
        most: u64,
    ) -> Self {
        let section = &instance.section;
        // As kernels do: products with an unreduced epoch would overflow eventually.
        let epoch = epoch % instance.period.max(1);
        let mut resolver = Self {
            instance,
            lane,
            announced: OnceCell::new(),
            told: Vec::new(),
            agreed: Vec::new(),
            asked: Vec::new(),
            reached: Vec::new(),
            answers,
            frames: Vec::new(),
            unfinished: None,
            read: 0,
            words: Vec::new(),
            integers: vec![(&section.lane, lane as i64), ("epoch", epoch as i64)],
            slots: RefCell::default(),
            aliases: Vec::new(),
            steps: Vec::new(),
            weights: Vec::new(),
            weight: 1.0,
            most,
            taken: 0,
            site: Site {
                indices: with_index(&instance.site.indices, &*section.lane, lane as i64),
                ..instance.site.clone()
            },
        };
        resolver.enter(&section.body);
        resolver
    }

    fn wrong(&self, kind: DiagnosticKind, message: impl Into<String>) -> Stop {
        let place = RankSite::new(self.instance.rank, &self.site);
        Diagnostic::new(kind, format!("{place}: {}", message.into()), vec![place]).into()
    }

    fn malformed(&self, message: impl Into<String>) -> Stop {
        self.wrong(DiagnosticKind::Malformed, message)
    }

    fn step(&mut self) -> Resolved<()> {
        self.taken += 1;
        if self.taken <= MAX_LANE_STEPS {
            return Ok(());
        }
        Err(self.malformed(format!(
            "the lane is too long; expected at most {MAX_LANE_STEPS} steps"
        )))
    }

    fn at(&mut self, position: Position) {
        self.site.line = position.line;
        self.site.column = position.column;
    }

    /// Runs `inner` in a new scope.
    fn scoped<T>(&mut self, inner: impl FnOnce(&mut Self) -> Resolved<T>) -> Resolved<T> {
        let scope = self.scope();
        let result = inner(self)?;
        self.leave(scope);
        Ok(result)
    }

    fn bind(&mut self, name: &'s str) -> Resolved<()> {
        let bound = self.integers.iter().any(|(other, _)| *other == name)
            || self.aliases.iter().any(|(other, _)| *other == name);
        if !bound {
            return Ok(());
        }
        Err(self.malformed(format!(
            "'{name}' already has a meaning here; expected a new name"
        )))
    }

    fn one(&mut self, step: &'s Step) -> Resolved<()> {
        self.step()?;
        self.at(step.position);
        match &step.kind {
            NodeKind::LetInteger { name, value } => {
                let value = self.integer(value)?;
                self.bind(name)?;
                self.integers.push((name, value));
            }
            NodeKind::LetTensor { name, value } => {
                let view = self.fixed_view(value)?;
                self.bind(name)?;
                self.aliases.push((name, view));
            }
            NodeKind::For(it) => self.repeat(it)?,
            NodeKind::If(branch) => self.choose(branch)?,
            NodeKind::Do(kind) => self.action(kind)?,
        }
        Ok(())
    }

    fn action(&mut self, kind: &'s StepKind) -> Resolved<()> {
        self.words.clear();
        match kind {
            StepKind::Move(it) => self.movement(it)?,
            StepKind::Apply(it) => self.applied(it)?,
            StepKind::Value(it) => self.value(it)?,
            StepKind::Store(it) => self.store(it)?,
            StepKind::Signal(receivers) => self.each(receivers, |resolver, receiver| {
                let peer = resolver.rank(&receiver.rank)?;
                let lane = resolver.lane(receiver.lane.as_ref())?;
                resolver.push(LaneStepKind::Signal { peer, lane });
                Ok(())
            })?,
            StepKind::Wait(ranks) => self.each(ranks, |resolver, rank| {
                let rank = resolver.rank(rank)?;
                resolver.push(LaneStepKind::Wait(rank));
                Ok(())
            })?,
            StepKind::Barrier => {
                let (rank, world) = (self.instance.rank, self.instance.world);
                let others = || (1..world).map(|r| (rank + r) % world);
                let lane = self.lane;
                others().for_each(|peer| self.push(LaneStepKind::Signal { peer, lane }));
                others().for_each(|peer| self.push(LaneStepKind::Wait(peer)));
                // Counted by the ranks too: a loop of barriers would otherwise make many more steps than the limit.
                self.taken += 2 * world;
            }
            StepKind::Announce(it) => self.meeting(it, true)?,
            StepKind::Agree(it) => self.meeting(it, false)?,
        }
        Ok(())
    }

    /// Number of iterations after which a loop's behaviour repeats, for sampling.
    fn period(&self, it: &Loop<StepKind>) -> u64 {
        // Nothing is sampled, so that no period is needed.
        if self.most == u64::MAX {
            return 1;
        }
        let value = |expression: &Expr| expression.evaluate(&|name| self.named(name)).ok();
        // At least one whole period is taken, so that this bounds the steps to about three times `most`.
        remainders::period(it, &value, self.most.saturating_mul(2))
    }

    fn push(&mut self, kind: LaneStepKind) {
        let site = self.site.clone();
        self.steps.push(LaneStep { kind, site });
        self.weights.push(self.weight);
    }

    fn each<T>(
        &mut self,
        list: &'s [Each<T>],
        mut with: impl FnMut(&mut Self, &'s T) -> Resolved<()>,
    ) -> Resolved<()> {
        for each in list {
            let Some(over) = &each.over else {
                self.step()?;
                with(self, &each.item)?;
                continue;
            };
            let (from, to) = (self.integer(&over.from)?, self.integer(&over.to)?);
            for value in from..to {
                self.step()?;
                self.scoped(|resolver| {
                    resolver.bind(&over.index)?;
                    resolver.integers.push((&over.index, value));
                    with(resolver, &each.item)
                })?;
            }
        }
        Ok(())
    }

    fn movement(&mut self, it: &'s Move) -> Resolved<()> {
        let operator = match &it.verb {
            Verb::Put | Verb::Get | Verb::Copy => None,
            Verb::Reduce(operator) => Some(self.operator(operator)?),
        };
        let (mut targets, mut sources) = (Vec::new(), Vec::new());
        self.each(&it.targets, |resolver, place| {
            targets.push(resolver.operand(place)?);
            Ok(())
        })?;
        self.each(&it.sources, |resolver, source| {
            sources.push(resolver.source_of_memory(source)?);
            Ok(())
        })?;
        for (count, what) in [(targets.len(), "targets"), (sources.len(), "sources")] {
            if count > MAX_OPERANDS {
                let message = format!("{count} {what}; expected at most {MAX_OPERANDS}");
                return Err(self.malformed(message));
            }
        }
        let Some(first) = sources.first() else {
            return Err(self.wrong(
                DiagnosticKind::Mismatch,
                "a reduction of nothing; expected at least one source",
            ));
        };
        for other in targets.iter().chain(&sources) {
            if other.dtype != first.dtype {
                let message = format!(
                    "{} and {} do not fit; expected one type",
                    first.dtype, other.dtype
                );
                return Err(self.wrong(DiagnosticKind::Mismatch, message));
            }
            if other.extent != first.extent {
                let message = format!(
                    "operands of {} and {} elements; expected one length",
                    first.extent, other.extent
                );
                return Err(self.wrong(DiagnosticKind::Mismatch, message));
            }
        }
        if let Some(operator) = operator {
            let fits = operator.check(first.dtype);
            fits.map_err(|error| self.wrong(DiagnosticKind::Mismatch, error.message().to_owned()))?;
        }
        self.check_packets(&sources)?;
        self.check_words(&targets)?;
        let lengths = targets.iter().chain(&sources).map(|operand| operand.length);
        // Extents agree, but a part at a tensor's end is clipped; moves stop at the shortest operand.
        let elements = lengths.min().unwrap_or(0);
        let part = |operand: &MoveOperand| Part {
            elements,
            ..operand.part
        };
        self.push(LaneStepKind::Move(LaneMove {
            operator,
            dtype: first.dtype,
            rows: None,
            elements,
            targets: targets.iter().map(part).collect(),
            sources: sources.iter().map(part).collect(),
        }));
        Ok(())
    }

    fn check_packets(&self, sources: &[MoveOperand]) -> Resolved<()> {
        let theirs = |source: &MoveOperand| {
            self.packets(&source.part) && source.part.rank != self.instance.rank
        };
        if sources.iter().any(theirs) {
            return Err(self.wrong(
                DiagnosticKind::Mismatch,
                "packets of another rank are read; expected this rank's, since a rank waits on its own memory",
            ));
        }
        Ok(())
    }

    fn operator(&self, operator: &ReduceOperator) -> Resolved<ReduceOp> {
        match operator {
            ReduceOperator::Fixed(operator) => Ok(*operator),
            ReduceOperator::Parameter(name) => {
                let operator = self.instance.operators.get(name).copied();
                operator.ok_or_else(|| {
                    let expected = ReduceOp::alternatives();
                    let message = format!("unknown operator '{name}'; expected {expected}");
                    self.malformed(message)
                })
            }
        }
    }

    fn packets(&self, part: &Part) -> bool {
        let scratch = self.instance.scratch_of(part.tensor);
        scratch.is_some_and(|scratch| scratch.packing.is_packets())
    }

    /// A source, or the number that replaces it.
    fn source(
        &mut self,
        source: &'s Source,
    ) -> Resolved<std::result::Result<MoveOperand, Literal>> {
        if let Some((condition, _)) = &source.otherwise {
            let Site { line, column, .. } = self.site;
            // Before it is evaluated, like that of a branch.
            self.note_asked(condition, Position { line, column });
        }
        let place = match &source.otherwise {
            Some((condition, otherwise)) if !self.condition(condition)? => match otherwise {
                Otherwise::Place(place) => place,
                Otherwise::Number(number) => return Ok(Err(*number)),
            },
            _ => &source.place,
        };
        self.operand(place).map(Ok)
    }

    fn operand(&mut self, place: &'s Place) -> Resolved<MoveOperand> {
        let rank = match &place.on {
            Some(rank) => self.rank(rank)?,
            None => self.instance.rank,
        };
        let view = self.view(&place.tensor)?;
        let Some((extent, length)) = view.elements() else {
            let message = format!(
                "{} has rows with padding between them; expected one row",
                place.tensor
            );
            return Err(self.wrong(DiagnosticKind::Mismatch, message));
        };
        let part = Part {
            rank,
            tensor: view.tensor,
            offset: view.offset,
            elements: length,
        };
        let may_be_far = place.on.is_some() && !self.reached.contains(&part.tensor);
        let is_scratch = self.instance.scratch_of(part.tensor).is_some();
        // Listed only where it matters, since that takes long.
        let announced = || self.announced.get_or_init(|| self.instance.announced());
        if may_be_far && !is_scratch && announced().contains(&part.tensor) {
            let name = &self.instance.tensors[part.tensor].name;
            let message = format!(
                "{place} is used where it may not be reachable; expected 'if reachable({name})' around it"
            );
            return Err(self.malformed(message));
        }
        self.check_whole_packets(place, &part)?;
        Ok(MoveOperand {
            part,
            dtype: self.instance.tensors[part.tensor].dtype,
            extent,
            length,
            single: view.is_single(),
        })
    }

    /// Rejects a part of packets that starts within one: threads read whole packets.
    fn check_whole_packets(&self, place: &dyn Display, part: &Part) -> Resolved<()> {
        let Some(scratch) = self.instance.scratch_of(part.tensor) else {
            return Ok(());
        };
        if part.elements == 0 || scratch.packed(part.offset, part.elements).is_some() {
            return Ok(());
        }
        let message = format!(
            "{place} starts within a packet; expected a multiple of {} bytes",
            scratch.packing.packet().0
        );
        Err(self.wrong(DiagnosticKind::Mismatch, message))
    }

    fn view(&mut self, reference: &'s TensorRef) -> Resolved<View> {
        let mut view = self.whole(&reference.name)?;
        if reference.transposed {
            let message = format!("{reference} is transposed; expected elements in order");
            return Err(self.wrong(DiagnosticKind::Mismatch, message));
        }
        for selection in &reference.selections {
            // Evaluated one after another, each on the outcome of the former, as the emitter does.
            let (said, outcome) = match selection {
                Selection::Index(index) => {
                    let index = match index {
                        Expr::Element(list, at) => self.row(list, at, &view)?,
                        index => self.integer(index)?,
                    };
                    (index.to_string(), view.index(index))
                }
                Selection::Range(from, to) => {
                    let (from, to) = (self.integer(from)?, self.integer(to)?);
                    (format!("{from}..{to}"), view.range(from, to))
                }
                Selection::Axes(_) => {
                    let message =
                        format!("{reference} selects on several axes; expected one after another");
                    return Err(self.malformed(message));
                }
                Selection::Part(index, parts) => {
                    let (index, parts) = (self.integer(index)?, self.integer(parts)?);
                    (format!("{index} of {parts}"), view.part(index, parts))
                }
            };
            outcome.map_err(|wrong| {
                self.wrong(
                    DiagnosticKind::OutOfBounds,
                    format!("{reference} selects {said}; expected {wrong}"),
                )
            })?;
        }
        Ok(view)
    }
}

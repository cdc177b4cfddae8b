//! A plan of either operation: one program, bound once for each index of the outer dimensions.

use super::operands::{Bound, bindings};
use super::{Choice, Lowering, Options, trial};
use crate::device::{DeviceSlice, Graph, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::program::cost::HardwareModel;
use crate::program::execute::Digest;
use crate::program::lower::{Decision, Problem, choose};
use crate::program::{Bindings, Executor, Plan, PrepareOptions};
use std::fmt;

/// An operation that is ready to run on given memory, any number of times.
///
/// Every rank makes the same plans in the same order. Drop a plan when the streams that it ran on
/// are done; the memory is kept until then.
pub struct OverlapPlan {
    executor: Executor,
    choice: Choice,
    plans: Vec<Plan>,
}

impl fmt::Debug for OverlapPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OverlapPlan")
            .field("subject", &self.choice.subject)
            .field("lowering", &self.choice.name())
            .field("plans", &self.plans.len())
            .finish()
    }
}

impl OverlapPlan {
    /// Chooses the lowering of `problem`, verifies it, and binds it to part `index` of every one of
    /// `tensors`, for each outer index. Every rank calls this at the same time, and all learn what any
    /// of them fails for.
    pub(super) fn new<P: Problem>(
        executor: &Executor,
        problem: &P,
        options: &Options,
        tensors: Result<Vec<Bound>>,
    ) -> Result<Self> {
        Self::make(executor, problem, options, tensors)
            .map_err(|error| error.with_rank(executor.rank()))
    }

    fn make<P: Problem>(
        executor: &Executor,
        problem: &P,
        options: &Options,
        tensors: Result<Vec<Bound>>,
    ) -> Result<Self> {
        let outer = options.outer;
        // Before anything can fail on one rank alone, since ranks agree on it.
        let agreed = executor.hardware_model();
        let local = || {
            if outer == 0 {
                return Err(Error::invalid("outer is 0; expected at least 1"));
            }
            let tensors = tensors?;
            let parts = (0..outer).map(|index| bindings(&tensors, index, outer));
            let parts = parts.collect::<Result<Vec<_>>>()?;
            let model = match &options.model {
                Some(model) => model.clone(),
                None => agreed?.clone(),
            };
            let choice = choose_first(executor, problem, options, &model)?;
            Ok((choice, tensors, parts, model))
        };
        let local = local();
        // Before the engine is joined, which those join who have chosen alike.
        let digest = local
            .as_ref()
            .map_err(Error::clone)
            .and_then(|(choice, ..)| {
                let lowered = &choice.lowered;
                let digest = Digest::of(lowered.program(), &lowered.parameters, lowered.streams)?;
                let names: Vec<_> = choice.estimates.iter().map(|one| one.name()).collect();
                Ok(digest
                    .with("outer", outer)
                    .with("trials", options.trials)
                    .with("lowerings", names.join(",")))
            });
        executor.agree(digest.as_ref())?;
        let (choice, tensors, parts, model) = local?;
        let prepare = || {
            let mut choice = available(executor, problem, options, &model, choice)?;
            let prepare = PrepareOptions {
                streams: choice.lowered.streams,
                verify: options.verify,
            };
            if options.trials && choice.decision != Decision::Request {
                let tensors = (&tensors[..], outer);
                trial::decide(&mut choice, model.uncertainty, executor, prepare, tensors)?;
            }
            let lowered = &choice.lowered;
            let prepared = executor.prepare(lowered.program(), &lowered.parameters, prepare)?;
            Ok((choice, prepared))
        };
        let prepared = prepare();
        let (choice, prepared) = prepared.inspect_err(|error| executor.give_up_binding(error))?;
        let plans = parts
            .iter()
            .map(|part| prepared.bind(part))
            .collect::<Result<_>>()?;
        if choice.decision == Decision::Trial {
            // What the lowerings that lost wrote to.
            executor.release_free();
        }
        Ok(Self {
            executor: executor.clone(),
            choice,
            plans,
        })
    }

    /// Enqueues one run, starting from and joining back into `stream`. Does not block. The next may
    /// be enqueued before it is done.
    ///
    /// # Errors
    /// The device's fault, and what an operation says that cannot be enqueued.
    pub fn run(&self, stream: &Stream) -> Result<()> {
        self.plans.iter().try_for_each(|plan| plan.run(stream))
    }

    /// Whether the program has an output of that name, as the program names it, which a run writes.
    pub fn is_output(&self, name: &str) -> bool {
        self.plans.iter().any(|plan| plan.is_output(name))
    }

    /// The tensors (`A`, `B[0]`, `C[0]`, …, as the program names them) that [`run_on`](Self::run_on) takes
    /// other memory for.
    pub fn replaceable(&self) -> Vec<&str> {
        self.plans
            .first()
            .map(Plan::replaceable)
            .unwrap_or_default()
    }

    /// As [`run`](Self::run), with `memory` in the place of that of some tensors, for this run alone; see
    /// [`Plan::run_on`]. With [`Options::outer`] above 1, memory is as long as when the plan was made.
    ///
    /// # Errors
    /// As [`Plan::run_on`].
    pub fn run_on(&self, stream: &Stream, memory: &Bindings) -> Result<()> {
        let outer = self.plans.len();
        self.plans.iter().enumerate().try_for_each(|(index, plan)| {
            let part = |(name, slice): (&String, &DeviceSlice)| {
                let own = plan.tensor(name).map_or(0, DeviceSlice::bytes);
                let slice = if own.checked_mul(outer) == Some(slice.bytes()) && outer > 1 {
                    slice.slice(index * own..(index + 1) * own)?
                } else {
                    slice.clone()
                };
                Ok((name.clone(), slice))
            };
            let parts = memory.iter().map(part).collect::<Result<Bindings>>()?;
            plan.run_on(stream, &parts)
        })
    }

    /// Turns the plan into one graph. Blocks while the graph is prepared.
    ///
    /// # Errors
    /// As [`run`](Self::run), and what the device says that cannot capture.
    pub fn capture(self) -> Result<CapturedOverlap> {
        let stream = self.executor.create_stream()?;
        stream.begin_capture()?;
        let recorded = self.run(&stream);
        let graph = stream.end_capture();
        recorded?;
        Ok(CapturedOverlap {
            graph: graph?,
            plan: self,
        })
    }

    /// The lowering, and why.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// The text of the host program that runs.
    pub fn text(&self) -> &str {
        self.choice.lowered.lowering.text()
    }

    /// The bound programs, one for each outer index.
    pub fn plans(&self) -> &[Plan] {
        &self.plans
    }

    /// Enqueues a run, and keeps the plan until it is done.
    pub(super) fn once(self, stream: &Stream) -> Result<Choice> {
        if stream.is_capturing()? {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a plan of one use cannot be captured",
            )
            .with_rank(self.executor.rank())
            .with_help("make a plan before the capture, and run that in it"));
        }
        let enqueued = self.run(stream);
        // Also where that failed: some of it may have been enqueued.
        self.executor.keep_until_done(self.plans, stream);
        enqueued.map(|()| self.choice)
    }
}

/// The choice among all that is allowed, whether or not the collective engine's library is there.
fn choose_first<P: Problem>(
    executor: &Executor,
    problem: &P,
    options: &Options,
    model: &HardwareModel,
) -> Result<Choice> {
    let allowed: Vec<Lowering> = match &options.lowering {
        Some(lowering) => vec![lowering.clone()],
        None => P::lowerings()?
            .into_iter()
            .chain(options.added.iter().cloned())
            .collect(),
    };
    choose(problem, &allowed, executor.world(), options.streams, model)
}

/// The choice; without the lowerings that need the collective engine where there is none for these
/// ranks and nobody asked for one. Every rank comes to the same end: they join the engine together.
fn available<P: Problem>(
    executor: &Executor,
    problem: &P,
    options: &Options,
    model: &HardwareModel,
    choice: Choice,
) -> Result<Choice> {
    let mut estimates = choice.estimates.iter();
    let needs_engine = estimates.any(|estimate| estimate.needs_engine);
    if choice.decision == Decision::Request || !needs_engine {
        return Ok(choice);
    }
    match executor.collective_engine() {
        Err(error) if is_unavailable(&error) => {
            let without: Vec<Lowering> = choice
                .estimates
                .into_iter()
                .filter(|estimate| !estimate.needs_engine)
                .map(|estimate| estimate.lowered.lowering)
                .collect();
            let world = executor.world();
            let mut choice = choose(problem, &without, world, options.streams, model)?;
            choice.decision = Decision::Model;
            Ok(choice)
        }
        Err(error) => Err(error),
        Ok(_) => Ok(choice),
    }
}

/// Whether there is no collective engine for these ranks, which all of them find.
fn is_unavailable(error: &Error) -> bool {
    let kinds = [ErrorKind::LibraryMissing, ErrorKind::Unsupported];
    kinds.contains(&error.kind())
}

/// A plan as one graph, launched in the place of its runs. Launches of one plan and runs of it take
/// turns in the same order on every rank.
pub struct CapturedOverlap {
    // Before the plan, whose memory and streams it uses.
    graph: Graph,
    plan: OverlapPlan,
}

impl fmt::Debug for CapturedOverlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CapturedOverlap").field(&self.plan).finish()
    }
}

impl CapturedOverlap {
    /// Enqueues the whole on `stream`. Does not block.
    ///
    /// # Errors
    /// The device's fault.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.graph.launch(stream)
    }

    /// How many operations the graph holds.
    pub fn operations(&self) -> usize {
        self.graph.operations()
    }

    /// The lowering, and why.
    pub fn choice(&self) -> &Choice {
        self.plan.choice()
    }
}

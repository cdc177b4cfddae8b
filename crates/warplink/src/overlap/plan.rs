//! A plan of either operation: one program, bound once for each outer index.

use super::operands::{BoundOperands, bindings};
use super::{Choice, Lowering, Options, trial};
use crate::debug::{debug_fields, debug_text};
use crate::device::{DeviceSlice, Graph, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::program::cost::HardwareModel;
use crate::program::execute::Digest;
use crate::program::lower::{Decision, Problem, choose};
use crate::program::{Bindings, Executor, Plan, PrepareOptions};

/// An operation bound to memory, which can run any number of times.
///
/// Every rank creates the same plans in the same order. Drop a plan once its streams are done; memory is kept
/// until then.
pub struct OverlapPlan {
    executor: Executor,
    choice: Choice,
    plans: Vec<Plan>,
}

debug_fields!(OverlapPlan, |it|
    subject: it.choice.subject,
    lowering: it.choice.name(),
    plans: it.plans.len()
);

impl OverlapPlan {
    /// Selects and verifies the lowering of `problem`, and binds it to part `index` of each of `tensors`, for
    /// each outer index. Collective; if any rank fails, all learn its error.
    pub(super) fn new<P: Problem>(
        executor: &Executor,
        problem: &P,
        options: &Options,
        tensors: Result<Vec<BoundOperands>>,
    ) -> Result<Self> {
        Self::make(executor, problem, options, tensors)
            .map_err(|error| error.with_rank(executor.rank()))
    }

    fn make<P: Problem>(
        executor: &Executor,
        problem: &P,
        options: &Options,
        tensors: Result<Vec<BoundOperands>>,
    ) -> Result<Self> {
        let outer = options.outer;
        // Before anything can fail on one rank alone, since agreeing on the model is collective.
        let agreed = executor.hardware_model();
        // Errors are kept until all ranks have exchanged digests: a rank that returned early would leave peers
        // waiting.
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
        // Before joining the engine, which only ranks with the same choice may do.
        let digest = local
            .as_ref()
            .map_err(Error::clone)
            .and_then(|(choice, ..)| {
                let lowered = &choice.lowered;
                let digest = Digest::of(lowered.program(), &lowered.parameters, lowered.streams)?;
                let names: Vec<_> = choice.estimates.iter().map(|one| one.name()).collect();
                // These select whose collectives all ranks join.
                let digest = match options.multiprocessors {
                    Some(most) => digest.with("multiprocessors", most),
                    None => digest,
                };
                Ok(digest
                    .with("library", options.library)
                    // Not part of the program, but of the number of collective calls that follow, as are trials and
                    // the candidates.
                    .with("outer", outer)
                    .with("trials", options.trials)
                    .with("lowerings", names.join(",")))
            });
        executor.agree(digest.as_ref())?;
        let (choice, tensors, parts, model) = local?;
        let prepare = || {
            let prepare = PrepareOptions {
                streams: choice.lowered.streams,
                verify: options.verify,
                library: options.library,
                multiprocessors: options.multiprocessors,
            };
            let mut choice = available(executor, problem, (options, &prepare), &model, choice)?;
            let prepare = PrepareOptions {
                streams: choice.lowered.streams,
                ..prepare
            };
            // A requested lowering has no competitor.
            if options.trials && choice.decision != Decision::Request {
                let tensors = (&tensors[..], outer);
                trial::decide(&mut choice, model.uncertainty, executor, prepare, tensors)?;
            }
            let lowered = &choice.lowered;
            let prepared = executor.prepare(lowered.program(), &lowered.parameters, prepare)?;
            Ok((choice, prepared))
        };
        let prepared = prepare();
        // Peers that have got further wait in `bind` for this rank; this ends their wait with the error.
        let (choice, prepared) = prepared.inspect_err(|error| executor.give_up_binding(error))?;
        let plans = parts
            .iter()
            .map(|part| prepared.bind(part))
            .collect::<Result<_>>()?;
        if choice.decision == Decision::Trial {
            // Outputs of the lowerings that lost the trial.
            executor.release_free();
        }
        Ok(Self {
            executor: executor.clone(),
            choice,
            plans,
        })
    }

    /// Enqueues one run that starts from and joins back into `stream`. Does not block. The next run may be
    /// enqueued before this one is done.
    ///
    /// # Errors
    /// The device's fault, and errors of operations that cannot be enqueued.
    pub fn run(&self, stream: &Stream) -> Result<()> {
        self.plans.iter().try_for_each(|plan| plan.run(stream))
    }

    /// Whether the program has an output with that name.
    pub fn is_output(&self, name: &str) -> bool {
        self.plans.iter().any(|plan| plan.is_output(name))
    }

    /// Tensors (`A`, `B[0]`, `C[0]`, …) whose memory [`run_on`](Self::run_on) can replace.
    pub fn replaceable(&self) -> Vec<&str> {
        self.plans
            .first()
            .map(Plan::replaceable)
            .unwrap_or_default()
    }

    /// As [`run`](Self::run), but with `memory` for some tensors in this run; see [`Plan::run_on`]. With
    /// [`Options::outer`] above 1, its length must be unchanged.
    ///
    /// # Errors
    /// As [`Plan::run_on`].
    pub fn run_on(&self, stream: &Stream, memory: &Bindings) -> Result<()> {
        let outer = self.plans.len();
        self.plans.iter().enumerate().try_for_each(|(index, plan)| {
            let part = |(name, slice): (&String, &DeviceSlice)| {
                let own = plan.tensor(name).map_or(0, DeviceSlice::bytes);
                // Memory of `outer` times the length is divided; shared operands, such as B, have the length of one
                // plan.
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

    /// As [`run_on`](Self::run_on), for runs that recur; see [`Plan::launch_on`].
    ///
    /// # Errors
    /// As [`Plan::launch_on`].
    pub fn launch_on(
        &self,
        stream: &Stream,
        addresses: &[u64],
        memory: impl FnOnce() -> Result<Bindings>,
    ) -> Result<()> {
        match &self.plans[..] {
            [plan] => plan.launch_on(stream, addresses, memory),
            // Several plans share the caller's arrays by parts, so that addresses alone do not identify them.
            _ => self.run_on(stream, &memory()?),
        }
    }

    /// Captures the plan into one graph. Blocks meanwhile.
    ///
    /// # Errors
    /// As [`run`](Self::run), and errors of a device that cannot capture.
    pub fn capture(self) -> Result<CapturedOverlap> {
        let stream = self.executor.create_stream()?;
        stream.begin_capture()?;
        let recorded = self.run(&stream);
        // Even if recording failed: the stream would stay in capture mode.
        let graph = stream.end_capture();
        recorded?;
        Ok(CapturedOverlap {
            graph: graph?,
            plan: self,
        })
    }

    /// The lowering and the reason for it.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Text of the host program.
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
            return Err(Error::unsupported("a plan of one use cannot be captured")
                .with_rank(self.executor.rank())
                .with_help("create a plan before the capture, and run it there"));
        }
        let enqueued = self.run(stream);
        // Even after a failure: some of it may have been enqueued.
        self.executor.keep_until_done(self.plans, stream);
        enqueued.map(|()| self.choice)
    }
}

/// The choice among all allowed lowerings, whether or not the collective engine's library is available.
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

/// The choice, without lowerings that need the collective engine if these ranks have none and none was
/// forced. All ranks decide alike: they join the engine together.
fn available<P: Problem>(
    executor: &Executor,
    problem: &P,
    (options, prepare): (&Options, &PrepareOptions),
    model: &HardwareModel,
    choice: Choice,
) -> Result<Choice> {
    let mut estimates = choice.estimates.iter();
    let needs_engine = estimates.any(|estimate| estimate.needs_engine);
    // A lowering by request fails with the engine's own error instead of being replaced.
    if choice.decision == Decision::Request || !needs_engine {
        return Ok(choice);
    }
    // Only if there is no engine here at all; other errors would recur with any lowering that needs one.
    match executor.join_collectives(prepare) {
        Err(error) if is_unavailable(&error) => {
            let without: Vec<Lowering> = choice
                .estimates
                .into_iter()
                .filter(|estimate| !estimate.needs_engine)
                .map(|estimate| estimate.lowered.lowering)
                .collect();
            let world = executor.world();
            let mut choice = choose(problem, &without, world, options.streams, model)?;
            // Also if only one is left, which `choose` would report as requested.
            choice.decision = Decision::Model;
            Ok(choice)
        }
        Err(error) => Err(error),
        Ok(()) => Ok(choice),
    }
}

/// Whether these ranks have no collective engine, which all of them find alike.
fn is_unavailable(error: &Error) -> bool {
    let kinds = [ErrorKind::LibraryMissing, ErrorKind::Unsupported];
    kinds.contains(&error.kind())
}

/// A plan as one graph, launched in place of runs. Launches and runs of a plan must have the same order on
/// every rank.
pub struct CapturedOverlap {
    // Dropped before the plan, whose memory and streams it uses.
    graph: Graph,
    plan: OverlapPlan,
}

debug_text!(CapturedOverlap, |it| "CapturedOverlap({:?})", it.plan);

impl CapturedOverlap {
    /// Enqueues the graph on `stream`. Does not block.
    ///
    /// # Errors
    /// The device's fault.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        match self.plan.plans.first() {
            // By way of a plan, which orders the graph's collectives among other runs of them.
            Some(plan) => plan.launch(&self.graph, stream),
            None => self.graph.launch(stream),
        }
    }

    /// Number of operations in the graph.
    pub fn operations(&self) -> usize {
        self.graph.operations()
    }

    /// The lowering and the reason for it.
    pub fn choice(&self) -> &Choice {
        self.plan.choice()
    }
}

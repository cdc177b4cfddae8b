//! What both kinds of plan share: one program bound once for each index of the outer dimensions.

use super::{Choice, Options, Variant};
use crate::device::{DeviceSlice, Graph, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::program::lower::Lowered;
use crate::program::{Bindings, Executor, Plan, PrepareOptions};
use std::fmt;

/// A lowered program, bound as often as there are outer indices.
pub(super) struct Runs {
    executor: Executor,
    pub(super) choice: Choice,
    pub(super) lowered: Lowered,
    pub(super) plans: Vec<Plan>,
}

impl Runs {
    /// Prepares `lowered` and binds it to part `index` of every one of `tensors`, for each outer
    /// index. Every rank calls this at the same time.
    pub(super) fn new(
        executor: &Executor,
        choice: Choice,
        lowered: Lowered,
        options: &Options,
        tensors: &[Bound],
    ) -> Result<Self> {
        let prepare = PrepareOptions {
            streams: lowered.streams,
            verify: options.verify,
        };
        let prepared = executor.prepare(&lowered.program, &lowered.parameters, prepare)?;
        let outer = options.outer;
        let bindings = (0..outer)
            .map(|index| {
                tensors
                    .iter()
                    .map(|tensor| Ok((tensor.name.clone(), tensor.part(index, outer)?)))
                    .collect::<Result<Bindings>>()
            })
            .collect::<Result<Vec<_>>>()
            .map_err(|error| error.on_rank(executor.rank()))?;
        let plans = bindings
            .iter()
            .map(|bindings| prepared.bind(bindings))
            .collect::<Result<_>>()?;
        Ok(Self {
            executor: executor.clone(),
            choice,
            lowered,
            plans,
        })
    }

    pub(super) fn run(&self, stream: &Stream) -> Result<()> {
        self.plans.iter().try_for_each(|plan| plan.run(stream))
    }

    pub(super) fn capture(self) -> Result<CapturedOverlap> {
        let stream = self.executor.create_stream()?;
        stream.begin_capture()?;
        let recorded = self.run(&stream);
        let graph = stream.end_capture();
        recorded?;
        Ok(CapturedOverlap {
            graph: graph?,
            runs: self,
        })
    }

    /// Enqueues a run, and keeps the plans until it is done.
    pub(super) fn once(self, stream: &Stream) -> Result<Choice> {
        if stream.is_capturing()? {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a plan of one use cannot be captured",
            )
            .on_rank(self.executor.rank())
            .help("make a plan before the capture, and run that in it"));
        }
        let enqueued = self.run(stream);
        // Also where that failed: some of it may have been enqueued.
        self.executor.keep_until_done(self.plans, stream);
        enqueued.map(|()| self.choice)
    }

    pub(super) fn debug(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("subject", &self.choice.subject)
            .field("variant", &self.choice.variant)
            .field("plans", &self.plans.len())
            .finish()
    }
}

/// A caller's slice for a tensor of the program.
pub(super) struct Bound {
    name: String,
    slice: DeviceSlice,
    /// Whether every outer index has a part of it, rather than all of it.
    parted: bool,
}

impl Bound {
    /// A tensor that has a part for each outer index: A, C and G.
    pub(super) fn parted(name: impl Into<String>, slice: &DeviceSlice) -> Self {
        Self {
            name: name.into(),
            slice: slice.clone(),
            parted: true,
        }
    }

    /// A tensor that all outer indices use: B and the bias.
    pub(super) fn shared(name: impl Into<String>, slice: &DeviceSlice) -> Self {
        Self {
            name: name.into(),
            slice: slice.clone(),
            parted: false,
        }
    }

    fn part(&self, index: usize, outer: usize) -> Result<DeviceSlice> {
        if !self.parted || outer == 1 {
            return Ok(self.slice.clone());
        }
        let bytes = self.slice.bytes();
        if !bytes.is_multiple_of(outer) {
            return Err(Error::invalid(format!(
                "'{}' has {bytes} bytes, which are not {outer} equal parts",
                self.name
            )));
        }
        let each = bytes / outer;
        self.slice.slice(index * each..(index + 1) * each)
    }
}

/// The names of several right operands, their biases or results, as the lowering gives them.
pub(super) fn several(
    name: &str,
    slices: &[DeviceSlice],
    wanted: usize,
    make: fn(String, &DeviceSlice) -> Bound,
) -> Result<Vec<Bound>> {
    if slices.len() != wanted {
        return Err(Error::invalid(format!(
            "{} slices are given for {name}, but the problem has {wanted}",
            slices.len()
        )));
    }
    let numbered = |index: usize| match wanted {
        1 => name.to_owned(),
        _ => format!("{name}{index}"),
    };
    Ok(slices
        .iter()
        .enumerate()
        .map(|(index, slice)| make(numbered(index), slice))
        .collect())
}

/// The choice, or the best variant after the collective where the library for that is missing and
/// nobody asked for it. Every rank comes to the same end: they join the engine together.
pub(super) fn available(executor: &Executor, mut choice: Choice) -> Result<Choice> {
    if choice.forced || choice.variant != Variant::Collective {
        return Ok(choice);
    }
    match executor.collective_engine() {
        Err(error) if error.kind() == ErrorKind::LibraryMissing => {
            choice
                .estimates
                .retain(|estimate| estimate.variant != Variant::Collective);
            if let Some(best) = choice.estimates.first() {
                choice.variant = best.variant;
            }
            Ok(choice)
        }
        Err(error) => Err(error),
        Ok(_) => Ok(choice),
    }
}

/// Fails where there is no product at all.
pub(super) fn check(options: &Options) -> Result<()> {
    match options.outer {
        0 => Err(Error::invalid("there are 0 products: outer is at least 1")),
        _ => Ok(()),
    }
}

/// A plan as one graph, launched in the place of its runs. Launches of one plan and runs of it take
/// turns in the same order on every rank.
pub struct CapturedOverlap {
    // Before the plans, whose memory and streams it uses.
    graph: Graph,
    runs: Runs,
}

impl fmt::Debug for CapturedOverlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.runs.debug("CapturedOverlap", f)
    }
}

impl CapturedOverlap {
    /// Enqueues the whole on `stream`. Does not block.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.graph.launch(stream)
    }

    /// How many operations the graph holds.
    pub fn operations(&self) -> usize {
        self.graph.operations()
    }

    /// The variant, and why.
    pub fn choice(&self) -> &Choice {
        &self.runs.choice
    }
}

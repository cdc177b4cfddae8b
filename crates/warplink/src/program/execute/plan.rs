//! A program bound to memory: enqueued any number of times, or captured into a graph.

use super::command::{Command, CommandKind};
use super::context::{DirectCollectives, RankContext};
use super::kernel::{BoundKernels, KernelReport, TracedKernel};
use super::launches::Launches;
use super::memory::{Bindings, PlanMemory};
use super::replaced::Replaced;
use super::trace::{Trace, Tracer};
use crate::device::{Compute, DeviceSlice, Graph, InUse, Priority, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::p2p::Transfer;
use crate::program::diagnostic::Diagnostic;
use crate::program::rank_program::{OperationKind, RankProgram, TensorId};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A program that is ready to run. Runs follow one another on the caller's stream; the next may be enqueued before
/// the last completes. The plan may be dropped at any time: resources of its runs in flight are kept until the
/// streams have completed them. A graph that others captured it into does not keep them.
pub struct Plan {
    pub(super) parts: InUse<PlanParts>,
}

/// Kernels that record the start times of their steps, by operation.
type TracedKernels = BTreeMap<usize, Arc<InUse<TracedKernel>>>;

/// Contents of a plan.
pub(super) struct PlanParts {
    // Graphs use everything else.
    pub(super) launches: Launches,
    pub(super) context: RankContext,
    pub(super) name: String,
    pub(super) program: Arc<RankProgram>,
    // Commands and transfers hold ranges of the memory, so they are dropped before it.
    pub(super) commands: Vec<Command>,
    /// Collectives that its commands enqueue, if they do.
    pub(super) collectives: Option<Arc<dyn DirectCollectives>>,
    pub(super) transfers: Vec<Arc<Transfer>>,
    pub(super) kernels: Option<BoundKernels>,
    // By index; `None` for the caller's stream.
    pub(super) streams: Vec<Option<Stream>>,
    pub(super) memory: PlanMemory,
    /// Tensors whose memory a run may replace.
    pub(super) replaceable: HashSet<TensorId>,
    pub(super) compute: Option<Arc<dyn Compute>>,
    pub(super) eager_only: Option<Arc<Diagnostic>>,
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan")
            .field("name", &self.parts.name)
            .field("commands", &self.parts.commands.len())
            .finish_non_exhaustive()
    }
}

impl Plan {
    pub(super) fn new(parts: PlanParts) -> Self {
        let in_flight = parts.context.in_flight.clone();
        Self {
            parts: InUse::new(parts, &in_flight),
        }
    }

    /// Name of the program.
    pub fn name(&self) -> &str {
        &self.parts.name
    }

    /// Number of operations that one run enqueues.
    pub fn operations(&self) -> usize {
        self.parts.commands.len()
    }

    /// Memory of the tensor `name`, bound or allocated, if this rank accesses it. If a loop allocated several under
    /// one name, the first.
    pub fn tensor(&self, name: &str) -> Option<&DeviceSlice> {
        let tensors = &self.parts.program.tensors;
        let id = tensors.iter().position(|tensor| *tensor.name == *name)?;
        self.parts.memory.callers_slice(id)
    }

    /// Whether the program has an output of that name, which a run writes.
    pub fn is_output(&self, name: &str) -> bool {
        self.parts.program.is_output(name)
    }

    /// Returns an out-of-range integer that a kernel of an earlier run has read from memory, or a peer's announcement that
    /// differs from this rank's, as an error that names its location. The lane that found it has stored nothing more, and
    /// waits of this rank's lanes are aborted; this call then fails the communicator on all ranks, so that those of the
    /// peers end, too. Blocks for the time of a small read from the device. On devices that take closures, the stream fails
    /// with that error instead. [`Communicator::synchronize`](crate::Communicator::synchronize) does the same for all plans;
    /// this is for callers who synchronize by other means.
    ///
    /// # Errors
    /// The device's, if the read fails.
    pub fn refused_value(&self) -> Result<Option<Error>> {
        let Some(kernels) = &self.parts.kernels else {
            return Ok(None);
        };
        let context = &self.parts.context;
        let found = kernels
            .reach
            .noted_in(&self.parts.program, &*context.device)?;
        Ok(found.inspect(|error| context.fault.fail(error.clone())))
    }

    /// Its kernels, in launch order.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] if the device cannot report their resources.
    pub fn kernels(&self) -> Result<Vec<KernelReport>> {
        let commands = self.parts.commands.iter();
        let kernels = commands.filter_map(|command| match &command.kind {
            CommandKind::Kernel(kernel) => Some((command.operation, kernel)),
            _ => None,
        });
        let reports = kernels.map(|(operation, kernel)| {
            let line = self.parts.program.operations[operation].site.line;
            kernel.report(line)
        });
        reports.collect()
    }

    /// Reason why the program cannot run as a graph, if the verifier found one.
    pub fn eager_only(&self) -> Option<&Diagnostic> {
        self.parts.eager_only.as_deref()
    }

    fn not_capturable(&self, diagnostic: &Diagnostic) -> Error {
        Error::invalid(diagnostic.to_string())
            .with_operation(format!("capture '{}'", self.parts.name))
            .with_help("run the plan without a graph, or change the program")
    }

    /// Enqueues one run, which starts after the work on `stream` and joins back into it. Does not block.
    ///
    /// # Errors
    /// The device's fault, or the error of an operation that cannot be enqueued, with its place in the program.
    pub fn run(&self, stream: &Stream) -> Result<()> {
        self.run_on(stream, &Bindings::new())
    }

    /// Like [`run`](Self::run), for a `stream` that captures a graph while plans of the same executor may run
    /// eagerly: uses separate pool streams, because those of eager runs would become part of the capture.
    pub(crate) fn run_recorded(&self, stream: &Stream) -> Result<()> {
        self.check_capture(stream)?;
        let parts = &self.parts;
        let streams = match stream.capture_id()? {
            Some(capture) => {
                let kinds = &parts.program.streams;
                &parts.memory.pool.recorded_streams(capture, kinds)?
            }
            None => &parts.streams,
        };
        self.enqueue_on((stream, streams), None, &Bindings::new())
    }

    /// Fails if `stream` captures a program that cannot be captured. This gives a caller who records a run the
    /// verifier's diagnostic instead of a driver error.
    fn check_capture(&self, stream: &Stream) -> Result<()> {
        match &self.parts.eager_only {
            Some(diagnostic) if stream.is_capturing()? => Err(self.not_capturable(diagnostic)),
            _ => Ok(()),
        }
    }

    /// Inputs and outputs that [`run_on`](Self::run_on) can replace: those that no peer and no kernel of the program
    /// accesses. May differ between ranks.
    pub fn replaceable(&self) -> Vec<&str> {
        let tensors = &self.parts.program.tensors;
        let names = self.parts.replaceable.iter().map(|id| &*tensors[*id].name);
        let mut names: Vec<&str> = names.collect();
        names.sort_unstable();
        names
    }

    /// Like [`run`](Self::run), with `memory` substituted for that of some inputs and outputs in this run alone: data
    /// need not be copied, and peers need not be notified. The caller keeps `memory` alive until `stream` has
    /// completed the run, and guarantees that written memory overlaps neither the plan's memory nor other memory
    /// passed here. The run takes more host time than one on the plan's own memory.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run); [`ErrorKind::InvalidArgument`] for a tensor that is not
    /// [replaceable](Self::replaceable), or memory of another length; nothing is enqueued in these two cases.
    pub fn run_on(&self, stream: &Stream, memory: &Bindings) -> Result<()> {
        self.check_capture(stream)?;
        self.enqueue_on((stream, &self.parts.streams), None, memory)
    }

    /// Enqueues a run with `memory` substituted, as a part of `launch` if there is one.
    pub(super) fn enqueue_on(
        &self,
        streams: (&Stream, &[Option<Stream>]),
        launch: Option<u64>,
        memory: &Bindings,
    ) -> Result<()> {
        let parts = &self.parts;
        let replaced = self
            .replaced(memory)
            .map_err(|error| error.with_operation(format!("run '{}'", parts.name)))?;
        self.for_each_command_on(streams, |command, stream| {
            command.enqueue(stream, launch, &replaced)
        })
    }

    /// Substitutes for the plan's memory in a run on `memory`.
    pub(super) fn replaced<'a>(&'a self, memory: &'a Bindings) -> Result<Replaced<'a>> {
        let parts = &self.parts;
        let further = (&parts.replaceable, parts.compute.as_ref());
        Replaced::new(&parts.program, &parts.memory, further, memory)
    }

    /// Like [`run`](Self::run); reports the host time to enqueue each operation, with the operation's name.
    pub fn run_timed(
        &self,
        stream: &Stream,
        tell: &mut dyn FnMut(&'static str, Duration),
    ) -> Result<()> {
        self.for_each_command(stream, |command, stream| {
            let start = Instant::now();
            command.enqueue(stream, None, &Replaced::default())?;
            tell(command.kind.name(), start.elapsed());
            Ok(())
        })
    }

    /// Captures the plan into one graph, which is launched instead of calling [`run`](Self::run). Blocks while the
    /// graph is prepared. A plan is captured once; every rank interleaves runs and launches of one plan in the same
    /// order. In a graph, a repeated post waits for completion of the previous one.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run), and [`ErrorKind::InvalidArgument`] if the program runs [eagerly
    /// only](Self::eager_only).
    pub fn capture(self) -> Result<CapturedPlan> {
        if let Some(diagnostic) = &self.parts.eager_only {
            return Err(self.not_capturable(diagnostic));
        }
        // A stream of its own: during a capture, other work of the caller's stream would become part of the graph.
        let stream = self.parts.context.device.create_stream(Priority::Normal)?;
        stream.begin_capture()?;
        let recorded = self.run(&stream);
        // Also after a failure, as the stream and its forks would otherwise stay in capture.
        let graph = stream.end_capture();
        recorded?;
        self.parts
            .transfers
            .iter()
            .try_for_each(|transfer| transfer.check_recorded())?;
        Ok(CapturedPlan {
            graph: InUse::new(graph?, &self.parts.context.in_flight),
            plan: self,
        })
    }

    /// Launches a graph that has captured runs, in order with other runs of collectives.
    pub(crate) fn launch(&self, graph: &Graph, stream: &Stream) -> Result<()> {
        self.parts.note(stream);
        match &self.parts.collectives {
            Some(collectives) => collectives.launch(stream, &mut || graph.launch(stream)),
            None => graph.launch(stream),
        }
    }

    /// Runs once with timing events before and after every operation, and returns the times of all ranks on rank 0.
    /// Collective: every rank calls it at the same time. Blocks until the run completes everywhere. The events add
    /// time of their own, so a traced run is slower. Each kernel is replaced by one that also records the start times
    /// of its lanes' steps.
    pub fn trace(&self, stream: &Stream) -> Result<Option<Trace>> {
        let kernels = self.traced_kernels()?;
        let mut tracer = Tracer::start(&self.parts.context, stream)?;
        self.for_each_command(stream, |command, stream| {
            if command.kind.is_event() {
                // No spans: the time of a wait for an event is visible between its neighbours.
                return command.enqueue(stream, None, &Replaced::default());
            }
            let operation = &self.parts.program.operations[command.operation];
            let begin = tracer.mark(stream)?;
            let kernel = kernels.get(&command.operation);
            match kernel {
                Some(kernel) => {
                    kernel.note(stream);
                    kernel.launch.enqueue(stream)?;
                }
                None => command.enqueue(stream, None, &Replaced::default())?,
            }
            let end = tracer.mark(stream)?;
            let stream = self.parts.program.streams[command.stream];
            tracer.span(operation, stream, (begin, end), kernel.cloned());
            Ok(())
        })?;
        stream.synchronize(self.parts.context.deadline())?;
        tracer.finish(&self.parts.context, &self.parts.name)
    }

    /// Tracing variants of the plan's kernels, by operation. Blocks until all ranks have loaded theirs: loading a
    /// kernel may wait for running ones, which could deadlock with kernels that wait for a peer.
    fn traced_kernels(&self) -> Result<TracedKernels> {
        let PlanParts {
            context,
            program,
            kernels,
            ..
        } = &*self.parts;
        let Some(kernels) = kernels else {
            return Ok(TracedKernels::new());
        };
        let operations = program.operations.iter().enumerate();
        let traced = operations.filter_map(|(index, operation)| match &operation.kind {
            OperationKind::Kernel(section) => Some((index, section)),
            _ => None,
        });
        let traced = traced.map(|(index, section)| {
            let kernel = kernels.traced(&*context.device, section)?;
            Ok((index, Arc::new(InUse::new(kernel, &context.in_flight))))
        });
        context.agree_on(traced.collect())
    }

    /// Calls `enqueue` for every command with its stream; `caller` is the caller's stream.
    fn for_each_command(
        &self,
        caller: &Stream,
        enqueue: impl FnMut(&Command, &Stream) -> Result<()>,
    ) -> Result<()> {
        self.for_each_command_on((caller, &self.parts.streams), enqueue)
    }

    fn for_each_command_on(
        &self,
        (caller, streams): (&Stream, &[Option<Stream>]),
        mut enqueue: impl FnMut(&Command, &Stream) -> Result<()>,
    ) -> Result<()> {
        // Work of other streams joins back into the caller's, so its use alone needs recording.
        self.parts.note(caller);
        self.parts.memory.copy_in(caller)?;
        for command in &self.parts.commands {
            let stream = streams[command.stream].as_ref().unwrap_or(caller);
            enqueue(command, stream).map_err(|error| {
                // After a failure nothing joins back, so the use of each stream is recorded.
                let own = streams.iter().flatten();
                own.for_each(|stream| self.parts.note(stream));
                self.locate(command, error)
            })?;
        }
        let PlanParts {
            memory, program, ..
        } = &*self.parts;
        memory.copy_out(program, caller)
    }

    fn locate(&self, command: &Command, error: Error) -> Error {
        // The lost rank is the cause; the operation that happened to notice it is not.
        if error.kind() == ErrorKind::PeerLost {
            return error;
        }
        let operation = &self.parts.program.operations[command.operation];
        error.with_operation(format!(
            "enqueue {} of '{}', {}",
            operation.kind.name(),
            self.parts.name,
            operation.site
        ))
    }
}

/// A plan captured into a graph.
#[derive(Debug)]
pub struct CapturedPlan {
    // Declared before the plan to be dropped first: it uses the plan's memory and streams.
    graph: InUse<Graph>,
    plan: Plan,
}

impl CapturedPlan {
    /// Enqueues the whole plan on `stream`. Does not block.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.graph.note(stream);
        self.plan.launch(&self.graph, stream)
    }

    /// The plan that was captured.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Number of operations in the graph.
    pub fn operations(&self) -> usize {
        self.graph.operations()
    }
}

//! `warplink program run`: a program on random inputs.

use super::check::{self, Check, Compared};
use super::inputs::Inputs;
use super::{ProgramSource, Text};
use crate::commands::bench::clock::{BenchClock, Submission};
use crate::commands::bench::peers::place;
use crate::commands::ranks;
use crate::gemm::common_seed;
use crate::memory;
use crate::options::{Options, at_least};
use crate::report::{Object, check_output, counted, exit_code, print_result, write_trace};
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;
use warplink::Communicator;
use warplink::device::{Priority, Stream};
use warplink::program::ir::Role;
use warplink::program::{Bindings, Executor, Plan, PrepareOptions, Trace};

/// Run a program on random inputs
///
/// Verifies the program, binds random inputs, and times it on the device. Then runs it on other inputs each time, also
/// in a graph, and compares the outputs with values computed on the host; the exit status is 1 if a value is wrong.
/// Times are medians over all samples; the slowest rank counts. A trace can be opened in Perfetto (ui.perfetto.dev); it has
/// a track per rank and stream, and one per lane of its kernels with the steps of that lane.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    warplink program run examples/programs/ring_pass.wlp -n 2 --param n=1024 --trace trace.json")]
pub(super) struct RunCommand {
    #[command(flatten)]
    source: ProgramSource,
    /// Write a trace of one run to this file
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
    /// Samples per time
    #[arg(long, value_name = "N", default_value = "10", value_parser = at_least::<u16>(1))]
    samples: u16,
    /// Seed of the inputs [default: random]
    #[arg(long, value_name = "SEED", value_parser = at_least::<u64>(0))]
    seed: Option<u64>,
    /// Announced tensor that kernels treat as unreachable, on the host device; may be repeated
    #[arg(long, value_name = "TENSOR")]
    unreachable: Vec<String>,
    /// Maximum multiprocessors of kernels that wait for other ranks; a program with more lanes is rejected
    #[arg(long, value_name = "N", value_parser = at_least::<u16>(1))]
    multiprocessors: Option<u16>,
    /// Run even if the verifier finds violations; the program may hang until the timeout
    #[arg(long)]
    unverified: bool,
    /// Do not compare the outputs with computed values; large programs are never compared
    #[arg(long)]
    no_check: bool,
}

/// The result as JSON and as text, and whether it is right.
type RunOutcome = (Object, String, bool);

impl RunCommand {
    pub(super) fn run(self, options: &Options) -> Result<ExitCode> {
        // Before any rank starts, so that an error is printed once.
        let text = self.source.read_for_ranks()?;
        if let Some(path) = &self.trace {
            check_output(path)?;
        }
        let check = |_, world| {
            if !self.unverified {
                text.verify(world, self.source.streams.into())?;
            }
            Ok(())
        };
        ranks::run_checked(options, check, |comm| {
            let ((object, lines, right), trace) = self.outcome(comm, &text)?;
            if comm.rank() == 0 {
                print_result(options.json, &object, || lines)?;
            }
            // After the result, so that a failed write of the trace does not lose it.
            if let (Some(path), Some(trace)) = (&self.trace, trace?) {
                write_trace(path, &trace)?;
            }
            Ok(exit_code(right))
        })
    }

    /// The measured outcome, and the requested trace; that of rank 0 covers all ranks.
    fn outcome(
        &self,
        comm: &Communicator,
        text: &Text,
    ) -> Result<(RunOutcome, warplink::Result<Option<Trace>>)> {
        let seed = common_seed(comm, self.seed)?;
        let executor = comm.executor();
        let plan = self.plan(comm, &executor, text, Inputs::new(seed))?;
        let check = if self.no_check {
            Err("--no-check is set".to_owned())
        } else {
            Check::new(
                comm,
                &self.source,
                text,
                Inputs::new(seed),
                &self.unreachable,
            )
        };
        let clock = BenchClock::new(comm, Priority::Normal)?;
        let work = |stream: &Stream| Ok(plan.run(stream)?);
        let measure = |submission| clock.measure(self.samples.into(), submission, 1, &work);
        let mut compared = Vec::new();
        let eager = measure(Submission::Eager)?;
        if let Ok(check) = &check {
            let run = || clock.run(Submission::Eager, &work);
            compared.extend(check.runs(comm, &plan, (1, "in an eager run"), run)?);
        }
        let eager_only = plan.eager_only().map(ToString::to_string);
        let captured = match eager_only {
            None => Some(measure(Submission::Captured)?),
            Some(_) => None,
        };
        if let (Ok(check), Some(_)) = (&check, &captured) {
            let graph = clock.capture(&work)?;
            // One graph for all runs.
            let launch = |stream: &Stream| Ok(graph.launch(stream)?);
            let run = || clock.run(Submission::Eager, &launch);
            // Other runs than the eager ones, so that their results in the outputs do not pass for those of the
            // graph.
            compared.extend(check.runs(comm, &plan, (100, "in a graph"), run)?);
        }
        let values = check::gather(comm, &compared)?;
        // After all else: tracing replaces kernels, and its failure must not lose the results.
        let trace = match self.trace {
            Some(_) => plan.trace(&clock.stream),
            None => Ok(None),
        };
        let (program, device) = (&text.program.name, comm.device().name());
        let warnings = check.as_ref().map(Check::warnings).unwrap_or_default();
        let not_checked = check.err();
        let times = match &captured {
            Some(times) => format!("{:.1} us captured", times.median * 1e6),
            None => "not captured".to_owned(),
        };
        let mut lines = vec![format!(
            "{program}: {} on rank 0 of {}, {device}; {:.1} us eager, {times}",
            counted(plan.operations(), "operation"),
            comm.world(),
            eager.median * 1e6,
        )];
        lines.extend(eager_only.clone());
        lines.extend(values.iter().map(ToString::to_string));
        lines.extend(warnings.iter().map(|text| format!("warning: {text}")));
        lines.extend(
            not_checked
                .iter()
                .map(|why| format!("values are not checked: {why}")),
        );
        let right = values.iter().all(Compared::is_right);
        let object = Object::default()
            .key("program", program)
            .key("device", device)
            .key("ranks", comm.world())
            .key("operations", plan.operations())
            .key("eager", eager)
            .optional("captured", captured)
            .optional("eager_only", eager_only)
            .key("seed", seed)
            .key("values", &values)
            .optional("warnings", Some(warnings).filter(|all| !all.is_empty()))
            .optional("not_checked", not_checked);
        let outcome = (object, lines.join("\n") + "\n", right);
        Ok((outcome, trace))
    }

    fn plan(
        &self,
        comm: &Communicator,
        executor: &Executor,
        text: &Text,
        inputs: Inputs,
    ) -> Result<Plan> {
        let options = PrepareOptions {
            streams: self.source.streams.into(),
            verify: !self.unverified,
            multiprocessors: self.multiprocessors.map(usize::from),
            ..PrepareOptions::default()
        };
        let prepared = executor
            .prepare(&text.program, &text.parameters, options)?
            .without_reaching(&self.unreachable)?;
        let mut bindings = Bindings::new();
        let tensors = &prepared.rank_program().tensors;
        let all = tensors.iter().map(|tensor| tensor.bytes as u128).sum();
        let largest = tensors.iter().map(|tensor| tensor.bytes as u128).max();
        let kind = comm.device().kind();
        // The host holds one tensor at a time while inputs are made.
        memory::check(kind, comm.world(), largest.unwrap_or(0), all)?;
        for (index, tensor) in tensors.iter().enumerate() {
            if tensor.role == Role::Input {
                let bytes = inputs.of(comm.rank(), index, tensor);
                bindings.insert(tensor.name.to_string(), place(comm, &bytes)?);
            }
        }
        Ok(prepared.bind(&bindings)?)
    }
}

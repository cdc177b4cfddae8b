//! `warplink program verify`: a program's violations, and whether its `expect` statements hold.

use super::inputs::Inputs;
use super::{ProgramSource, Text, check, diagnostics, show};
use crate::commands::bench::report::or_empty;
use crate::options::{Options, without_ranks};
use crate::report::{JsonError, Object, counted, exit_code, print_result};
use anyhow::Result;
use clap::Args;
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::ExitCode;
use warplink::program::evaluate::Evaluator;
use warplink::program::{self, Diagnostic, Report};

/// Check a program for deadlocks, races, lost signals and uninitialized bytes
///
/// Analyses the program of every rank without running it. Then computes its outputs for random inputs on this
/// host and compares them with its `expect` statements, for every combination of reachable and unreachable tensors.
/// Prints each violation with the lines involved; the exit status is 1 if there are any. If the computation would
/// take longer than a few seconds, it is skipped, and the output gives the reason.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  \
    warplink program verify examples/programs/ring_pass.wlp --ranks 8 --param n=1024",
    args = without_ranks("Number of ranks [default: 2]", &show::UNUSED)
)]
pub(super) struct Verify {
    #[command(flatten)]
    source: ProgramSource,
}

/// Results of a program's `expect` statements, all of which held.
#[derive(Default)]
struct Expectations {
    /// Those of all ranks, with loops unrolled.
    stated: usize,
    /// How many times they were evaluated, each with other announced tensors out of reach.
    evaluations: usize,
    /// Why they were not evaluated.
    not_evaluated: Option<String>,
}

impl Verify {
    pub(super) fn run(self, options: &Options) -> Result<ExitCode> {
        let read = self.source.read()?;
        let ranks = options.ranks.unwrap_or(2);
        let streams = self.source.streams.into();
        let mut verdict = program::verify(&read.program, ranks, streams, &read.parameters);
        let mut expectations = Expectations::default();
        if verdict.is_ok() {
            match expectations.evaluate(&read, ranks, streams)? {
                unmet if unmet.is_empty() => {}
                unmet => verdict = Err(unmet),
            }
        }
        let file = &self.source.file;
        let object = Object::default()
            .key("file", file)
            .key("ranks", ranks)
            .key("passed", verdict.is_ok());
        let (object, text) = match &verdict {
            Ok(report) => {
                let why = report.eager_only.as_ref();
                let why = or_empty(why, |why| diagnostics::excerpts(why, file, &read.text));
                let object = object
                    .object("report", counts(report))
                    .object("expectations", expectations.object())
                    .objects("diagnostics", []);
                (object, format!("{report}\n{}{why}", expectations.line()))
            }
            Err(found) => {
                let explained = |one| diagnostics::explain(one, file, &read.text) + "\n";
                let (explained, help) = (found.iter().map(explained), read.help());
                let text = format!(
                    "{}{}'{}' did not pass verification for {}\n",
                    explained.collect::<String>(),
                    or_empty(help.as_ref(), |help| format!("help: {help}\n")),
                    read.program.name,
                    counted(ranks, "rank")
                );
                // As of every command that fails.
                let error = JsonError::from(&anyhow::Error::from(read.refused(found)));
                let object = object
                    .objects("diagnostics", found.iter().map(diagnostics::object))
                    .optional("help", help)
                    .key("error", error);
                (object, text)
            }
        };
        print_result(options.json, &object, || text)?;
        Ok(exit_code(verdict.is_ok()))
    }
}

impl Expectations {
    /// Evaluates a program that the verifier accepts, and returns the violated expectations.
    fn evaluate(&mut self, text: &Text, world: usize, streams: usize) -> Result<Vec<Diagnostic>> {
        if !text.program.expects() {
            return Ok(Vec::new());
        }
        let mut evaluator = Evaluator::new(&text.program, world, streams, &text.parameters)?;
        let ranks = evaluator.ranks().iter();
        self.stated = ranks.map(|program| program.expected.len()).sum();
        let withheld = withheld(&evaluator);
        let runs = withheld.len() * evaluator.period() as usize;
        if let Err(why) = check::computable(&evaluator, runs) {
            self.not_evaluated = Some(why);
            return Ok(Vec::new());
        }
        // One evaluation for each set of unreachable tensors: they take other branches of the kernels.
        for (run, names) in withheld.iter().enumerate() {
            evaluator = evaluator.without_reaching(names)?;
            // A fixed seed, so that a verdict can be reproduced.
            let inputs = Inputs::new(0).of_run(run as u64);
            let unmet = evaluator.violations(|rank, id, tensor| inputs.of(rank, id, tensor))?;
            if !unmet.is_empty() {
                return Ok(unmet);
            }
            self.evaluations += 1;
        }
        Ok(Vec::new())
    }

    fn object(&self) -> Object {
        Object::default()
            .key("stated", self.stated)
            .key("evaluations", self.evaluations)
            .optional("not_evaluated", self.not_evaluated.as_ref())
    }

    /// The line about them, if there are any.
    fn line(&self) -> String {
        match &self.not_evaluated {
            _ if self.stated == 0 => String::new(),
            Some(why) => format!("expectations are not evaluated: {why}\n"),
            None => format!(
                "outputs are as expected: {} in {}\n",
                counted(self.stated, "statement"),
                counted(self.evaluations, "evaluation")
            ),
        }
    }
}

fn counts(report: &Report) -> Object {
    // A JSON value has no integers beyond 64 bits.
    let bytes = u64::try_from(report.bytes);
    let bytes = bytes.map_or_else(|_| Value::from(report.bytes as f64), Value::from);
    let object = Object::default()
        .key("operations", report.operations)
        .key("streams", report.streams)
        .key("transfers", report.transfers)
        .key("exchanges", report.exchanges)
        .key("bytes", bytes);
    match &report.eager_only {
        Some(diagnostic) => object.object("eager_only", diagnostics::object(diagnostic)),
        None => object,
    }
}

/// The announced tensors to withhold in each evaluation: none, each alone, and all.
fn withheld(evaluator: &Evaluator) -> Vec<Vec<String>> {
    let ranks = evaluator.ranks().iter();
    let names: BTreeSet<String> = ranks
        .flat_map(|program| program.announced())
        .map(str::to_owned)
        .collect();
    // None, each alone, and all: every subset would be exponentially many.
    let mut sets = vec![Vec::new()];
    sets.extend(names.iter().map(|name| vec![name.clone()]));
    if names.len() > 1 {
        sets.push(names.into_iter().collect());
    }
    sets
}

//! The frame of a benchmark: its options, its runs on all ranks, and the output of its figures.
//!
//! A benchmark is a [`Case`]: it declares its name, its sizes and its samples, and measures. This file
//! gives all of them the same options, the same help for them, and the same handling of results.

use super::clock::Submission;
use super::plot;
use super::report::Figures;
use crate::commands::ranks;
use crate::names::OneOrBoth;
use crate::options::{Options, at_least};
use crate::report::bytes::ByteSize;
use crate::report::progress::Progress;
use crate::report::{Object, check_output, exit_code, print_result, write_file};
use anyhow::{Context, Result, ensure};
use clap::{ArgMatches, Args, Command, FromArgMatches};
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;
use warplink::{Communicator, DeviceKind};

/// A benchmark, with the options that only it has.
pub(crate) trait Case: Args {
    /// Its name on the command line and in JSON.
    const NAME: &'static str;
    /// Samples of a figure by default: on cuda, and on host.
    const SAMPLES: [u16; 2] = [9, 9];
    /// The sizes by default, of a benchmark that has some.
    const SIZES: Option<SizeRange> = None;
    /// Whether `--submission` selects how work is submitted.
    const SUBMISSIONS: bool = false;
    /// Whether rows are printed while it measures; then no table follows.
    const LIVE: bool = false;

    /// Opens files, before any rank starts. An exit code ends the command without a measurement.
    fn prepare(&mut self, _options: &Options) -> Result<Option<ExitCode>> {
        Ok(None)
    }

    /// Fails if the options contradict one another, or do not fit the ranks or the memory.
    fn check(&self, setup: &Setup) -> Result<()>;

    /// Measures, on every rank.
    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Figures>;
}

/// Sizes from one to another by a factor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SizeRange {
    /// Of a size, for the help.
    pub(crate) noun: &'static str,
    /// Whether sizes are bytes.
    pub(crate) bytes: bool,
    pub(crate) from: u64,
    /// On cuda, and on host.
    pub(crate) to: [u64; 2],
    pub(crate) step: u64,
}

impl SizeRange {
    /// Sizes in bytes.
    pub(crate) const fn of_bytes(from: u64, to: [u64; 2], step: u64) -> Self {
        Self {
            noun: "size",
            bytes: true,
            from,
            to,
            step,
        }
    }

    fn show(&self, size: u64) -> String {
        if self.bytes {
            ByteSize(size).to_string()
        } else {
            size.to_string()
        }
    }
}

/// The ranks, sizes and samples of one run.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) kind: DeviceKind,
    pub(crate) world: usize,
    pub(crate) samples: usize,
    pub(crate) sizes: Vec<usize>,
    /// The option that gave the smallest size.
    smallest: &'static str,
    pub(crate) submissions: Vec<Submission>,
    pub(crate) json: bool,
}

impl Setup {
    pub(crate) fn largest(&self) -> usize {
        self.sizes.iter().copied().max().unwrap_or(0)
    }

    /// Fails if a size has fewer than `least` bytes, in words `unit`.
    pub(crate) fn check_least(&self, least: usize, unit: &str) -> Result<()> {
        let size = self.sizes.iter().copied().min().unwrap_or(least);
        ensure!(
            size >= least,
            "{} is {}; expected at least {least} bytes, {unit}",
            self.smallest,
            ByteSize(size as u64)
        );
        Ok(())
    }

    /// Fails if the job has one rank, which has no peer for `what`.
    pub(crate) fn check_peers(&self, what: &str) -> Result<()> {
        ensure!(
            self.world >= 2,
            "a job of one rank has no peer to {what}; expected at least two; help: use --ranks 2"
        );
        Ok(())
    }

    /// Progress over `steps`, shown by rank 0.
    pub(crate) fn progress(comm: &Communicator, steps: usize, name: &'static str) -> Progress {
        Progress::new(steps as u64, name, comm.rank() == 0)
    }
}

/// The value for a kind of device.
pub(crate) fn by_device<T: Copy>(kind: DeviceKind, [cuda, host]: [T; 2]) -> T {
    match kind {
        DeviceKind::Cuda => cuda,
        DeviceKind::Host => host,
    }
}

// Options without a comment above their struct: it would become the help of the benchmark.
#[derive(Debug, Args)]
struct Common {
    #[arg(long, value_name = "N", display_order = 900, value_parser = at_least::<u16>(1))]
    samples: Option<u16>,
    /// Write the result as JSON to this file
    #[arg(long, value_name = "FILE.json", display_order = 901)]
    output: Option<PathBuf>,
    /// Draw the figures as SVG to this file
    #[arg(long, value_name = "FILE.svg", display_order = 902)]
    plot: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct Sizes {
    #[arg(long, display_order = 1)]
    from: Option<ByteSize>,
    #[arg(long, display_order = 2)]
    to: Option<ByteSize>,
    #[arg(long, value_name = "N", display_order = 3, value_parser = at_least::<u64>(2))]
    step: Option<u64>,
    /// These sizes instead, separated by commas
    #[arg(long, value_delimiter = ',', display_order = 4, conflicts_with_all = ["from", "to", "step"])]
    sizes: Vec<ByteSize>,
}

#[derive(Debug, Args)]
struct Submissions {
    /// How work is submitted: eager (operation by operation), captured (as a graph) or both
    #[arg(
        long,
        value_name = "SUBMISSION",
        default_value = "both",
        display_order = 899
    )]
    submission: OneOrBoth<Submission>,
}

/// A benchmark with all of its options.
#[derive(Debug)]
pub(crate) struct Bench<C> {
    case: C,
    common: Common,
    sizes: Option<Sizes>,
    submissions: Option<Submissions>,
}

impl<C: Case> Args for Bench<C> {
    fn augment_args(command: Command) -> Command {
        let [cuda, host] = C::SAMPLES;
        let samples = if cuda == host {
            format!("Samples per figure [default: {cuda}]")
        } else {
            format!("Samples per figure [default: {cuda} on cuda, {host} on host]")
        };
        let mut command =
            Common::augment_args(command).mut_arg("samples", |option| option.help(samples));
        if let Some(range) = C::SIZES {
            // Without the space, in the form that a shell passes as one word.
            let show = |size| range.show(size).replace(' ', "");
            let [cuda, host] = range.to.map(&show);
            let to = if cuda == host {
                cuda
            } else {
                format!("{cuda} on cuda, {host} on host")
            };
            let to = format!(
                "Largest {}, always measured [default: {to}; --from if that is larger]",
                range.noun
            );
            let from = format!("Smallest {} [default: {}]", range.noun, show(range.from));
            let step = format!("Factor between sizes [default: {}]", range.step);
            let unit = if range.bytes { "BYTES" } else { "N" };
            command = Sizes::augment_args(command)
                .mut_arg("from", |option| option.help(from).value_name(unit))
                .mut_arg("to", |option| option.help(to).value_name(unit))
                .mut_arg("step", |option| option.help(step))
                .mut_arg("sizes", |option| option.value_name(unit));
        }
        if C::SUBMISSIONS {
            command = Submissions::augment_args(command);
        }
        C::augment_args(command)
    }

    // Required by clap for updates of parsed arguments, which this command does not make.
    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<C: Case> FromArgMatches for Bench<C> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self {
            case: C::from_arg_matches(matches)?,
            common: Common::from_arg_matches(matches)?,
            sizes: C::SIZES
                .map(|_| Sizes::from_arg_matches(matches))
                .transpose()?,
            submissions: C::SUBMISSIONS
                .then(|| Submissions::from_arg_matches(matches))
                .transpose()?,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<C: Case> Bench<C> {
    pub(crate) fn run(mut self, options: &Options) -> Result<ExitCode> {
        // Before the paths are checked: a command that ends here writes no files.
        if let Some(code) = self.case.prepare(options)? {
            return Ok(code);
        }
        // Before any rank starts, so that a wrong path costs no measurement.
        for path in [&self.common.output, &self.common.plot]
            .into_iter()
            .flatten()
        {
            check_output(path)?;
        }
        if let Some(path) = &self.common.plot {
            let other = path
                .extension()
                .filter(|it| !it.eq_ignore_ascii_case("svg"));
            ensure!(
                other.is_none(),
                "--plot is {}; expected a name that ends in .svg, as figures are drawn as SVG",
                path.display()
            );
        }
        let setup = |kind, world| {
            let setup = self.setup(kind, world, options.json)?;
            self.case.check(&setup)?;
            Ok(setup)
        };
        let check = |kind, world| setup(kind, world).map(drop);
        ranks::run_checked(options, check, |comm| {
            // Again: ranks that another launcher started have not been checked.
            let setup = setup(comm.device().kind(), comm.world())?;
            let figures = self.case.measure(comm, &setup)?;
            // Figures are gathered from all ranks while they are measured, so one rank has everything to report.
            if comm.rank() == 0 {
                self.report(comm, &figures, options.json)?;
            }
            Ok(exit_code(figures.is_right))
        })
    }

    /// Prints the figures first, so that a file that cannot be written does not lose them.
    fn report(&self, comm: &Communicator, figures: &Figures, json: bool) -> Result<()> {
        let report = BenchReport {
            head: Object::default()
                .key("benchmark", C::NAME)
                .key("device", comm.device().name())
                .key("ranks", comm.world()),
            figures: &figures.object,
        };
        if json || !C::LIVE {
            let text = || format!("{}\n\n{}", figures.title, figures.tables);
            print_result(json, &report, text)?;
        }
        if let Some(path) = &self.common.output {
            let text = serde_json::to_vec_pretty(&report).context("write the figures as JSON")?;
            write_file(path, &text)?;
        }
        if let Some(path) = &self.common.plot {
            let drawing = plot::draw(&figures.title, &figures.drawing);
            write_file(path, drawing.context("draw the figures")?.as_bytes())?;
        }
        Ok(())
    }

    fn setup(&self, kind: DeviceKind, world: usize, json: bool) -> Result<Setup> {
        let sizes = match (C::SIZES, &self.sizes) {
            (Some(range), Some(sizes)) => sizes.list(range, kind)?,
            _ => Vec::new(),
        };
        let samples = self.common.samples;
        let is_list = self
            .sizes
            .as_ref()
            .is_some_and(|sizes| !sizes.sizes.is_empty());
        Ok(Setup {
            kind,
            world,
            samples: samples.unwrap_or(by_device(kind, C::SAMPLES)).into(),
            sizes,
            smallest: if is_list {
                "the smallest of --sizes"
            } else {
                "--from"
            },
            submissions: self
                .submissions
                .as_ref()
                .map_or_else(Vec::new, |given| given.submission.0.clone()),
            json,
        })
    }
}

/// Output of `--json`.
#[derive(Serialize)]
struct BenchReport<'a> {
    #[serde(flatten)]
    head: Object,
    #[serde(flatten)]
    figures: &'a Object,
}

impl Sizes {
    /// All sizes: by the factor, and the largest in any case.
    fn list(&self, range: SizeRange, kind: DeviceKind) -> Result<Vec<usize>> {
        let from = self.from.map_or(range.from, |from| from.0);
        // A --from above the default of --to, which was not given, is no contradiction.
        let largest = by_device(kind, range.to).max(from);
        let to = self.to.map_or(largest, |to| to.0);
        let (smallest, largest) = (range.show(from), range.show(to));
        ensure!(from > 0, "--from is {smallest}; expected at least 1");
        ensure!(
            from <= to,
            "--from is {smallest} and --to is {largest}; expected --from to be at most --to"
        );
        let factor = self.step.unwrap_or(range.step);
        // Ends where a size would overflow: wrapped sizes would be small again, and never reach --to.
        let sizes = std::iter::successors(Some(from), |size| size.checked_mul(factor));
        let sizes: Vec<u64> = match &self.sizes[..] {
            [] => sizes.take_while(|size| *size < to).chain([to]).collect(),
            given => given.iter().map(|size| size.0).collect(),
        };
        ensure!(
            !sizes.contains(&0),
            "--sizes has 0; expected at least 1 for each"
        );
        let size = |size| usize::try_from(size).context("sizes fit the memory");
        sizes.into_iter().map(size).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_go_up_to_the_largest() {
        let range = SizeRange::of_bytes(4, [64, 16], 2);
        for (given, kind, expected) in [
            (
                (None, None, None, &[][..]),
                DeviceKind::Host,
                &[4, 8, 16][..],
            ),
            ((None, None, Some(4), &[]), DeviceKind::Cuda, &[4, 16, 64]),
            (
                (Some(3), Some(13), None, &[]),
                DeviceKind::Host,
                &[3, 6, 12, 13],
            ),
            ((Some(99), None, None, &[]), DeviceKind::Cuda, &[99]),
            ((None, None, None, &[7, 1]), DeviceKind::Host, &[7, 1]),
            ((Some(9), Some(8), None, &[]), DeviceKind::Host, &[]),
            ((Some(0), None, None, &[]), DeviceKind::Host, &[]),
            ((None, None, None, &[0]), DeviceKind::Host, &[]),
        ] {
            let (from, to, step, sizes) = given;
            let options = Sizes {
                from: from.map(ByteSize),
                to: to.map(ByteSize),
                step,
                sizes: sizes.iter().copied().map(ByteSize).collect(),
            };
            let listed = options.list(range, kind).unwrap_or_default();
            assert_eq!(listed, expected, "{given:?}");
        }
    }
}

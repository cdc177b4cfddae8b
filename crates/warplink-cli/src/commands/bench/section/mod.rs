//! `warplink bench section`: a program made of kernel sections, beside the vendor's collective.

mod report;

use super::collective::data::{Inputs, different};
use super::timing::{Clock, Submission, Work};
use crate::commands::program::{Source, Text};
use crate::commands::ranks;
use crate::gemm::common_seed;
use crate::memory;
use crate::options::Options;
use crate::report::bytes::Bytes;
use crate::report::{print_json, print_message, print_text};
use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use report::{Kernel, Report, Row};
use std::collections::HashSet;
use std::process::ExitCode;
use warplink::collective::{Call, CollectiveKind};
use warplink::device::{AllocationKind, DeviceSlice, Priority, ReduceOp, Stream};
use warplink::program::ir::{Role, Statement, StatementKind};
use warplink::program::{Bindings, Executor, Parameters, Plan, PrepareOptions, Program};
use warplink::{Communicator, DType, ErrorKind};

/// Time a program of kernel sections
///
/// Runs the program in graphs of many runs, for each size and each combination of the values to try, and
/// the vendor's collective in turn with it. The program has one input and one output. Times are medians for a
/// run, of the slowest rank; the column named after the collective has its time in us. 'speedup' is that time
/// divided by the program's: below 1, the collective is faster. 'differ' says how many elements of all ranks'
/// outputs are not exactly the collective's, in some runs with other inputs each time; the exit status is 1 if there are any. The other columns are the
/// kernels' lanes and threads, their registers, how many of their blocks fit a multiprocessor, and the values of
/// --try.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink bench section examples/programs/all_reduce_one_shot.wlp -n 2 --param T=bf16 --sizes 1KiB,64KiB\n  \
    warplink bench section examples/programs/all_reduce_read.wlp -n 2 --try lanes=32,64 --try threads=512,1024")]
pub(crate) struct Section {
    #[command(flatten)]
    source: Source,
    /// Sizes of the input, separated by commas
    #[arg(
        long,
        value_name = "BYTES",
        value_delimiter = ',',
        default_value = "1KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB"
    )]
    sizes: Vec<Bytes>,
    /// The parameter that is the number of elements
    #[arg(long, value_name = "NAME", default_value = "n")]
    length: String,
    /// Values of a parameter to try; may be repeated
    #[arg(long = "try", value_name = "NAME=A,B", value_parser = values)]
    tried: Vec<(String, Vec<i64>)>,
    /// What it is compared with, as in program text
    #[arg(
        long,
        value_enum,
        value_name = "COLLECTIVE",
        default_value = "all_reduce"
    )]
    against: Against,
    /// Samples per time
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u16).range(1..))]
    samples: u16,
    /// Runs in a graph [default: 4 to 100, by size]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    runs: Option<u16>,
    /// Do not verify the program first
    #[arg(long)]
    unverified: bool,
    /// Print every combination, not only the fastest for each size
    #[arg(long)]
    all: bool,
}

/// What a program is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Against {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Nothing,
}

impl Against {
    const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Nothing => "nothing",
        }
    }
}

/// How many runs in a row are compared, each with inputs of its own.
const COMPARED: u64 = 4;

/// The memory of a rank for one size.
struct Memory {
    dtype: DType,
    seed: u64,
    input: (String, DeviceSlice),
    output: (String, DeviceSlice),
    /// For the collective.
    expected: DeviceSlice,
}

impl Section {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        let text = self.source.read_for_ranks()?;
        ranks::run_checked(
            options,
            |kind, world| {
                self.check(&text)?;
                // What comes out may be longer, but is not shorter than a part of what goes in.
                let largest = self.sizes.iter().map(|size| u128::from(size.0)).max();
                let largest = largest.unwrap_or(0);
                memory::check(kind, world, largest, largest)
            },
            |comm| {
                let report = self.measure(comm, &text.program, &text.parameters)?;
                if comm.rank() == 0 {
                    if options.json {
                        print_json(&report)?;
                    } else {
                        print_text(&report.text())?;
                    }
                }
                Ok(if report.is_right() {
                    ExitCode::SUCCESS
                } else {
                    ExitCode::FAILURE
                })
            },
        )
    }

    /// Fails where nothing could be measured, or not what the arguments say.
    fn check(&self, text: &Text) -> Result<()> {
        let (name, length) = (&text.program.name, &self.length);
        let subprograms = text.program.subprograms.iter();
        let mut bodies = subprograms.map(|subprogram| &subprogram.body);
        ensure!(
            has_kernel(&text.program.body) || bodies.any(|body| has_kernel(body)),
            "program '{name}' has no kernel section; expected at least one; help: time it with warplink program run"
        );
        let parameters = text.program.parameters.iter();
        let parameters: Vec<&str> = parameters.map(|it| it.name.as_str()).collect();
        ensure!(
            parameters.contains(&length.as_str()),
            "--length is '{length}', which is no parameter of '{name}'; expected one of {}",
            parameters.join(", ")
        );
        ensure!(
            text.parameters.value(length).is_none(),
            "--param gives '{length}' a value; expected none, since it is the number of elements, which --sizes \
             gives; help: leave it out, or name another parameter with --length"
        );
        let tried = self.tried.iter().map(|(name, _)| name.as_str());
        let known: Vec<&str> = tried.chain([length.as_str()]).collect();
        let missing = text.missing_options(&known);
        ensure!(
            missing.is_empty(),
            "program '{name}' has parameters without values; expected one for each; help: give {}",
            missing.join(" ")
        );
        let given = text.parameters.iter().map(|(name, _)| name);
        for given in given.chain(self.tried.iter().map(|(name, _)| name.as_str())) {
            ensure!(
                parameters.contains(&given),
                "unknown parameter '{given}' of '{name}'; expected {}",
                parameters.join(", ")
            );
        }
        for (at, (tried, _)) in self.tried.iter().enumerate() {
            ensure!(
                text.parameters.value(tried).is_none(),
                "--param and --try both give '{tried}' values; expected one of them"
            );
            ensure!(
                self.tried
                    .iter()
                    .skip(at + 1)
                    .all(|(name, _)| name != tried),
                "--try gives '{tried}' values twice; expected once"
            );
        }
        ensure!(
            self.tried.iter().all(|(name, _)| name != length),
            "--try gives '{length}' values; expected none, since it is the number of elements, which --sizes \
             gives; help: leave it out, or name another parameter with --length"
        );
        Ok(())
    }

    fn measure(
        &self,
        comm: &Communicator,
        program: &Program,
        parameters: &Parameters,
    ) -> Result<Report> {
        let clock = Clock::new(comm, Priority::Normal)?;
        let executor = comm.executor();
        let seed = common_seed(comm, None)?;
        let mut rows: Vec<Row> = Vec::new();
        // Each value is said to be skipped once for each reason, and not for each size.
        let mut said = HashSet::new();
        for size in &self.sizes {
            let bytes = usize::try_from(size.0).context("sizes fit the memory")?;
            let mut best: Option<Row> = None;
            let (before, mut refused, mut skipped) = (rows.len(), None, Vec::new());
            for values in combinations(&self.tried) {
                let mut parameters = parameters.clone();
                for (name, value) in &values {
                    parameters.insert(name.as_str(), *value);
                }
                let row = match self.row(&clock, &executor, program, parameters, bytes, seed) {
                    Ok(mut row) => {
                        row.values = values;
                        row
                    }
                    // On all ranks alike: the program does not take these values.
                    Err(error) if is_refusal(&error) => {
                        let values = values.iter().map(|(name, value)| format!("{name}={value}"));
                        let values = values.collect::<Vec<_>>().join(" ");
                        skipped.push(format!("{values} skipped: {error:#}"));
                        refused = Some(error);
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                if self.all {
                    rows.push(row);
                } else if best
                    .as_ref()
                    .is_none_or(|best| row.seconds.median < best.seconds.median)
                {
                    best = Some(row);
                }
            }
            rows.extend(best);
            // Some of the values that are tried may not suit a program, but not all of them.
            if let (true, Some(error)) = (rows.len() == before, refused) {
                return Err(error);
            }
            if comm.rank() == 0 {
                for text in skipped.iter().filter(|text| !said.contains(*text)) {
                    print_message(text);
                }
                said.extend(skipped);
            }
        }
        Ok(Report {
            benchmark: "section",
            program: program.name.clone(),
            device: comm.device().name(),
            ranks: comm.world(),
            against: self.against.name(),
            rows,
        })
    }

    fn row(
        &self,
        clock: &Clock<'_>,
        executor: &Executor,
        program: &Program,
        mut parameters: Parameters,
        bytes: usize,
        seed: u64,
    ) -> Result<Row> {
        let comm = clock.comm;
        let options = PrepareOptions {
            streams: self.source.streams.into(),
            verify: !self.unverified,
        };
        // The element type is known when the program is unrolled for some length.
        parameters.insert(self.length.as_str(), 1);
        let unchecked = PrepareOptions {
            verify: false,
            ..options
        };
        let dtype = tensors(
            &executor.prepare(program, &parameters, unchecked)?,
            Role::Input,
        )?
        .1;
        let elements = bytes / dtype.size();
        parameters.insert(self.length.as_str(), i64::try_from(elements)?);
        let prepared = executor.prepare(program, &parameters, options)?;
        let memory = Memory::new(comm, &prepared, seed)?;
        let mut bindings = Bindings::new();
        bindings.insert(memory.input.0.clone(), memory.input.1.clone());
        bindings.insert(memory.output.0.clone(), memory.output.1.clone());
        let plan = prepared.bind(&bindings)?;
        let collective = self.collective(executor, &memory, comm)?;

        let runs = self.runs.map_or_else(
            || match bytes {
                ..=0x4_0000 => 100,
                0x4_0001..=0x40_0000 => 40,
                0x40_0001..=0x100_0000 => 12,
                _ => 4,
            },
            usize::from,
        );
        let repeat = |plan: &Plan, stream: &Stream| -> Result<()> {
            (0..runs).try_for_each(|_| Ok(plan.run(stream)?))
        };
        let section: Work<'_> = &|stream| repeat(&plan, stream);
        let vendor: Work<'_> = &|stream| match &collective {
            Some(plan) => repeat(plan, stream),
            None => Ok(()),
        };
        let works = [section, vendor];
        let works = if collective.is_some() {
            &works[..]
        } else {
            &works[..1]
        };
        let times = clock.measure_in_turn(self.samples.into(), Submission::Captured, works)?;
        let mut times = times
            .into_iter()
            .map(|times| times.stream.divided(runs as f64));
        let different = match &collective {
            Some(collective) => Some(memory.compare(clock, [&plan, collective])?),
            None => None,
        };
        Ok(Row {
            bytes: elements * dtype.size(),
            values: Vec::new(),
            seconds: times.next().context("nothing was timed")?,
            collective: times.next(),
            different,
            kernels: plan.kernels()?.into_iter().map(Kernel::from).collect(),
        })
    }

    /// The plan of the vendor's collective over the same input; none where it is not wanted or missing.
    fn collective(
        &self,
        executor: &Executor,
        memory: &Memory,
        comm: &Communicator,
    ) -> Result<Option<Plan>> {
        let arguments = match self.against {
            Against::Nothing => return Ok(None),
            Against::AllReduce | Against::ReduceScatter => ", sum",
            Against::AllGather | Against::AllToAll => "",
        };
        let dtype = memory.dtype;
        let [input, output] =
            [&memory.input.1, &memory.expected].map(|slice| slice.bytes() / dtype.size());
        let world = comm.world();
        let fits = match self.against {
            Against::Nothing => true,
            Against::AllReduce | Against::AllToAll => input == output,
            Against::AllGather => input * world == output,
            Against::ReduceScatter => input == output * world,
        };
        ensure!(
            fits,
            "the input has {input} elements and the output {output}, which no {} of {world} ranks has; \
             help: name the collective with --against, or --against nothing",
            self.against.name()
        );
        let text = format!(
            "program vendor() {{\n input X: {dtype}[{input}]\n output Y: {dtype}[{output}]\n Y = {}(X{arguments})\n}}\n",
            self.against.name()
        );
        let program = Program::parse(&text)?;
        let prepared = executor.prepare(&program, &Parameters::new(), PrepareOptions::default())?;
        let mut bindings = Bindings::new();
        bindings.insert("X".to_owned(), memory.input.1.clone());
        bindings.insert("Y".to_owned(), memory.expected.clone());
        match prepared.bind(&bindings) {
            Ok(plan) => Ok(Some(plan)),
            // Missing on every rank or on none: they join it together.
            Err(error) if error.kind() == ErrorKind::LibraryMissing => {
                if comm.rank() == 0 {
                    print_message(&format!("without {}: {error:#}", self.against.name()));
                }
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl Memory {
    fn new(comm: &Communicator, prepared: &warplink::program::Prepared, seed: u64) -> Result<Self> {
        let device = comm.device();
        let (input, dtype, bytes) = tensors(prepared, Role::Input)?;
        let (output, _, output_bytes) = tensors(prepared, Role::Output)?;
        let (host, all) = (
            bytes.max(output_bytes) as u128,
            bytes as u128 + 2 * output_bytes as u128,
        );
        memory::check(device.kind(), comm.world(), host, all)?;
        let allocate = |bytes| device.allocate(bytes, AllocationKind::Plain);
        let (source, target, expected) = (
            allocate(bytes)?,
            allocate(output_bytes)?,
            allocate(output_bytes)?,
        );
        let memory = Self {
            dtype,
            seed,
            input: (input, source),
            output: (output, target),
            expected,
        };
        memory.fill(comm, 0)?;
        Ok(memory)
    }

    /// Gives a rank the input of a run: small integers, of which every sum is exact in whatever order it is taken.
    fn fill(&self, comm: &Communicator, run: u64) -> Result<()> {
        let inputs = Inputs {
            call: Call {
                kind: CollectiveKind::AllReduce,
                op: Some(ReduceOp::Sum),
                dtype: self.dtype,
                count: self.input.1.bytes() / self.dtype.size(),
                root: None,
            },
            world: comm.world(),
            seed: self.seed.wrapping_add(run),
        };
        let data = inputs.of(comm.rank())?;
        Ok(comm.device().upload(&self.input.1, &data)?)
    }

    /// Replays graphs of both plans with other inputs each time; how many elements differ in all.
    fn compare(&self, clock: &Clock<'_>, plans: [&Plan; 2]) -> Result<u64> {
        let (comm, stream) = (clock.comm, &clock.stream);
        let graphs = plans.map(|plan| -> Result<_> {
            stream.begin_capture()?;
            plan.run(stream)?;
            Ok(stream.end_capture()?)
        });
        let [section, vendor] = graphs;
        let (section, vendor) = (section?, vendor?);
        (1..=COMPARED).try_fold(0, |sum, run| {
            self.fill(comm, run)?;
            section.launch(stream)?;
            vendor.launch(stream)?;
            comm.synchronize(stream)?;
            Ok(sum + self.different(comm)?)
        })
    }

    /// How many elements of the two outputs differ, on all ranks together.
    fn different(&self, comm: &Communicator) -> Result<u64> {
        let download = |slice: &DeviceSlice| -> Result<Vec<u8>> {
            let mut bytes = vec![0; slice.bytes()];
            comm.device().download(slice, &mut bytes)?;
            Ok(bytes)
        };
        let (here, there) = (download(&self.output.1)?, download(&self.expected)?);
        let own = different(self.dtype, &here, &there) as u64;
        let all = comm.all_gather_bytes(&own.to_le_bytes())?;
        all.iter().try_fold(0, |sum, rank| {
            let rank = rank.as_slice().try_into().context("read a rank's count")?;
            Ok(sum + u64::from_le_bytes(rank))
        })
    }
}

/// The only tensor of a role: its name, type and bytes.
fn tensors(prepared: &warplink::program::Prepared, role: Role) -> Result<(String, DType, usize)> {
    let tensors = &prepared.rank_program().tensors;
    let found: Vec<_> = tensors
        .iter()
        .filter(|tensor| tensor.role == role)
        .collect();
    let what = if role == Role::Input {
        "input"
    } else {
        "output"
    };
    ensure!(
        found.len() == 1,
        "the program has {} tensors that are {what}; expected one",
        found.len()
    );
    let found = found.first().context("there is no such tensor")?;
    Ok((found.name.to_string(), found.dtype, found.bytes))
}

/// Whether a kernel section stands among the statements, or within them.
fn has_kernel(body: &[Statement]) -> bool {
    body.iter().any(|statement| match &statement.kind {
        StatementKind::Kernel(_) => true,
        StatementKind::For(repetition) => has_kernel(&repetition.body),
        StatementKind::Fork { body, .. } => has_kernel(body),
        StatementKind::If(branch) => {
            let mut arms = branch.arms.iter();
            arms.any(|arm| has_kernel(&arm.body)) || has_kernel(&branch.otherwise)
        }
        _ => false,
    })
}

/// Every combination of one value for each parameter.
fn combinations(tried: &[(String, Vec<i64>)]) -> Vec<Vec<(String, i64)>> {
    tried.iter().fold(vec![Vec::new()], |all, (name, values)| {
        let with = |before: &Vec<(String, i64)>, value: &i64| {
            let mut next = before.clone();
            next.push((name.clone(), *value));
            next
        };
        all.iter()
            .flat_map(|before| values.iter().map(move |value| with(before, value)))
            .collect()
    })
}

/// `lanes=8,16`.
fn values(text: &str) -> Result<(String, Vec<i64>), String> {
    let read = || {
        let (name, values) = text.split_once('=')?;
        let values: Vec<i64> = values
            .split(',')
            .map(|value| value.trim().parse().ok())
            .collect::<Option<_>>()?;
        warplink::program::text::is_name(name.trim()).then(|| (name.trim().to_owned(), values))
    };
    read().ok_or_else(|| "expected a name and integers, as in lanes=8,16".to_owned())
}

/// Whether the program does not take the values, on any rank.
fn is_refusal(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<warplink::Error>()
        .is_some_and(|error| {
            matches!(
                error.kind(),
                ErrorKind::InvalidArgument | ErrorKind::Verification | ErrorKind::Unsupported
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_values_are_combined() {
        let tried = [("a".to_owned(), vec![1, 2]), ("b".to_owned(), vec![3])];
        let named = |a, b| vec![("a".to_owned(), a), ("b".to_owned(), b)];
        assert_eq!(combinations(&tried), [named(1, 3), named(2, 3)]);
        assert_eq!(combinations(&[]), [Vec::new()]);
        assert_eq!(values("lanes=8, 16"), Ok(("lanes".to_owned(), vec![8, 16])));
        assert!(values("lanes").is_err() && values("lanes=x").is_err());
    }
}

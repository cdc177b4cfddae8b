//! `warplink bench section`: a program of kernel sections, compared with the vendor's collective.

mod memory;

use crate::commands::bench::case::{Case, Setup, SizeRange};
use crate::commands::bench::clock::{BenchClock, Submission, Times, Work};
use crate::commands::bench::peers::{optional, vendor};
use crate::commands::bench::report::{Figures, Row, job, micros, or_empty};
use crate::commands::program::{ProgramSource, Text, parameter};
use crate::gemm::common_seed;
use crate::names::name_of;
use crate::options::{Options, at_least};
use crate::report::bytes::ByteSize;
use crate::report::{Object, print_message};
use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use memory::{SectionBuffers, tensors};
use std::collections::HashSet;
use std::process::ExitCode;
use warplink::collective::{Call, CollectiveKind, Collectives};
use warplink::device::{KernelResources, Priority, ReduceOp};
use warplink::program::ir::{Role, Statement, StatementKind};
use warplink::program::{Executor, KernelReport, Parameters, PrepareOptions, Program, Value};
use warplink::{Communicator, ErrorKind};

/// Measure a program of kernel sections
///
/// Runs the program in graphs of many runs, for each size and each combination of the values to try, alternating
/// with the vendor's collective. The program has one input and one output. Times are medians for a
/// run, of the slowest rank; the column named after the collective has its time in us. 'speedup' is that time
/// divided by the program's: below 1, the collective is faster. 'differ' is the number of elements of all ranks'
/// outputs that are not equal to the collective's, in several runs with new inputs; the exit status is 1 if
/// there are any. The other columns are the kernels' lanes and threads, their registers, the number of their blocks
/// that fit a multiprocessor, and the values of --try.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink bench section examples/programs/all_reduce_one_shot.wlp --param T=bf16 --sizes 1KiB\n  \
    warplink bench section examples/programs/all_reduce_read.wlp -n 2 --try lanes=32,64")]
pub(crate) struct Section {
    #[command(flatten)]
    source: ProgramSource,
    /// The parameter that is the number of elements
    #[arg(long, value_name = "NAME", default_value = "n")]
    length: String,
    /// Values of a parameter to try, such as lanes=32,64; may be repeated
    #[arg(long = "try", value_name = "NAME=A,B", value_parser = values)]
    tried: Vec<(String, Vec<i64>)>,
    /// The collective that it is compared with, as in program text
    #[arg(
        long,
        value_enum,
        value_name = "COLLECTIVE",
        default_value = "all_reduce"
    )]
    against: Against,
    /// Runs in a graph [default: 4 to 100, by size]
    #[arg(long, value_name = "N", value_parser = at_least::<u16>(1))]
    runs: Option<u16>,
    /// Do not verify the program first
    #[arg(long)]
    unverified: bool,
    /// Print every combination, not only the fastest for each size
    #[arg(long)]
    all: bool,
    #[arg(skip)]
    text: Option<Text>,
}

/// The collective that a program is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Against {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Nothing,
}

/// Values of the parameters of --try.
type TriedValues = Vec<(String, i64)>;

/// Figures of one size with some values.
struct SectionTimes {
    bytes: usize,
    values: TriedValues,
    seconds: Times,
    collective: Option<Times>,
    /// Elements of all ranks' outputs that differ.
    different: Option<u64>,
    kernels: Vec<KernelReport>,
}

impl Case for Section {
    const NAME: &'static str = "section";
    const SAMPLES: [u16; 2] = [10, 10];
    const SIZES: Option<SizeRange> = Some(SizeRange::of_bytes(1 << 10, [16 << 20, 64 << 10], 4));

    fn prepare(&mut self, _: &Options) -> Result<Option<ExitCode>> {
        self.text = Some(self.source.read_for_ranks()?);
        Ok(None)
    }

    /// Fails if nothing can be measured, or the options do not fit the program.
    fn check(&self, setup: &Setup) -> Result<()> {
        let text = self.text()?;
        let (name, length) = (&text.program.name, self.length.as_str());
        let subprograms = text.program.subprograms.iter();
        let mut bodies = subprograms.map(|subprogram| &subprogram.body);
        ensure!(
            has_kernel(&text.program.body) || bodies.any(|body| has_kernel(body)),
            "program '{name}' has no kernel section; expected at least one; help: time it with warplink program run"
        );
        let parameters = text.program.parameters.iter();
        let parameters: Vec<&str> = parameters.map(|it| it.name.as_str()).collect();
        let expected = parameters.join(", ");
        ensure!(
            parameters.contains(&length),
            "--length is '{length}', which is no parameter of '{name}'; expected one of {expected}"
        );
        let given: Vec<&str> = text.parameters.iter().map(|(name, _)| name).collect();
        let tried: Vec<&str> = self.tried.iter().map(|(name, _)| name.as_str()).collect();
        for (option, names, values) in [("--param", &given, "a value"), ("--try", &tried, "values")]
        {
            ensure!(
                !names.contains(&length),
                "{option} gives '{length}' {values}; expected none, since it is the number of elements, which the \
                 sizes give; help: leave it out, or name another parameter with --length"
            );
            let unknown = names.iter().find(|name| !parameters.contains(name));
            ensure!(
                unknown.is_none(),
                "unknown parameter '{}' of '{name}'; expected {expected}",
                unknown.unwrap_or(&"")
            );
        }
        for (at, twice) in tried.iter().enumerate() {
            ensure!(
                !given.contains(twice),
                "--param and --try both give '{twice}' values; expected one of them"
            );
            ensure!(
                !tried[..at].contains(twice),
                "--try gives '{twice}' values twice; expected once"
            );
        }
        let missing = text.missing_options(&[&tried[..], &[length]].concat());
        ensure!(
            missing.is_empty(),
            "program '{name}' has parameters without values; expected one for each; help: give {}",
            missing.join(" ")
        );
        // The output is at least as long as a part of the input.
        let largest = setup.largest() as u128;
        crate::memory::check(setup.kind, setup.world, largest, largest)
    }

    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Figures> {
        let text = self.text()?;
        let clock = BenchClock::new(comm, Priority::Normal)?;
        let executor = comm.executor();
        let seed = common_seed(comm, None)?;
        let mut rows = Vec::new();
        // Each reason to skip values is printed once, and not for each size.
        let mut printed = HashSet::new();
        for &bytes in &setup.sizes {
            let (mut measured, mut refused, mut skipped) = (Vec::new(), None, Vec::new());
            for values in combinations(&self.tried) {
                let mut parameters = text.parameters.clone();
                for (name, value) in &values {
                    parameters.insert(name.as_str(), *value);
                }
                let program = (&text.program, parameters);
                match self.times(&clock, &executor, program, (bytes, seed), setup.samples) {
                    Ok(times) => measured.push(SectionTimes { values, ..times }),
                    // On all ranks alike: the program does not take these values.
                    Err(error) if is_refusal(&error) => {
                        skipped.push(format!("{} skipped: {error:#}", assignments(&values)));
                        refused = Some(error);
                    }
                    Err(error) => return Err(error),
                }
            }
            // Some of the values that are tried may not suit a program, but not all of them.
            if let (true, Some(error)) = (measured.is_empty(), refused) {
                return Err(error);
            }
            if comm.rank() == 0 {
                for text in skipped.iter().filter(|text| !printed.contains(*text)) {
                    print_message(text);
                }
                printed.extend(skipped);
            }
            if !self.all {
                measured.sort_by(|a, b| a.seconds.median.total_cmp(&b.seconds.median));
                measured.truncate(1);
            }
            let row = |times: &SectionTimes| times.row(&text.program.name, self.against);
            rows.extend(measured.iter().map(row));
        }
        let program = &text.program.name;
        let title = format!("{program}, {}; runs in graphs", job(comm));
        let object = Object::default()
            .key("program", program)
            .key("against", name_of(&self.against));
        Ok(Figures::of_rows(title, object, rows))
    }
}

impl Section {
    fn text(&self) -> Result<&Text> {
        self.text.as_ref().context("the program was not read")
    }

    fn times(
        &self,
        clock: &BenchClock<'_>,
        executor: &Executor,
        (program, mut parameters): (&Program, Parameters),
        (bytes, seed): (usize, u64),
        samples: usize,
    ) -> Result<SectionTimes> {
        let comm = clock.comm;
        let options = PrepareOptions {
            streams: self.source.streams.into(),
            verify: !self.unverified,
            ..PrepareOptions::default()
        };
        // The element type is known when the program is unrolled for some length.
        parameters.insert(self.length.as_str(), 1);
        // The program is verified below, with its real length.
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
        let memory = SectionBuffers::new(comm, &prepared, seed)?;
        let plan = prepared.bind(&[memory.input.clone(), memory.output.clone()].into())?;
        let collective = self.collective(comm, &memory)?;

        let runs = self.runs.map_or_else(
            || match bytes {
                ..=0x4_0000 => 100,
                0x4_0001..=0x40_0000 => 40,
                0x40_0001..=0x100_0000 => 12,
                _ => 4,
            },
            usize::from,
        );
        let mut works: Vec<Work<'_>> = vec![Box::new(|stream| Ok(plan.run(stream)?))];
        if let Some((collectives, call)) = &collective {
            let (input, output) = (&memory.input.1, &memory.expected);
            works.push(Box::new(move |stream| {
                Ok(collectives.enqueue(call, output, input, stream)?)
            }));
        }
        let times = clock.measure_in_turn(samples, Submission::Captured, runs, &works)?;
        let mut times = times.into_iter().map(|times| times.stream);
        let different = match &works[..] {
            [section, vendor] => Some(memory.compare(clock, [section, vendor])?),
            _ => None,
        };
        Ok(SectionTimes {
            bytes: elements * dtype.size(),
            values: Vec::new(),
            seconds: times.next().context("nothing was timed")?,
            collective: times.next(),
            different,
            kernels: plan.kernels()?,
        })
    }

    /// The vendor's collective over the same input; none if it is not wanted or missing.
    fn collective(
        &self,
        comm: &Communicator,
        memory: &SectionBuffers,
    ) -> Result<Option<(Collectives, Call)>> {
        let kind = match self.against {
            Against::Nothing => return Ok(None),
            Against::AllReduce => CollectiveKind::AllReduce,
            Against::AllGather => CollectiveKind::AllGather,
            Against::ReduceScatter => CollectiveKind::ReduceScatter,
            Against::AllToAll => CollectiveKind::AllToAll,
        };
        let [input, output] =
            [&memory.input.1, &memory.expected].map(|slice| slice.bytes() / memory.dtype.size());
        let (world, rows) = (comm.world(), kind.rows(comm.world()));
        let count = input / rows.0;
        ensure!(
            (input, output) == (count * rows.0, count * rows.1),
            "the input has {input} elements and the output {output}, which no {kind} of {world} ranks has; \
             help: name the collective with --against, or --against nothing"
        );
        let call = Call {
            kind,
            op: kind.reduces().then_some(ReduceOp::Sum),
            dtype: memory.dtype,
            count,
            root: None,
        };
        let vendor = optional(comm, kind.name(), vendor(comm))?;
        Ok(vendor.map(|(collectives, _)| (collectives, call)))
    }
}

impl SectionTimes {
    fn row(&self, program: &str, against: Against) -> Row {
        let (seconds, against) = (self.seconds.median, name_of(&against));
        let collective = self.collective.map(|times| times.median);
        let each = |of: &dyn Fn(&KernelReport) -> String| {
            let all: Vec<String> = self.kernels.iter().map(of).collect();
            all.join(", ")
        };
        let resource = |of: fn(&KernelResources) -> u32| {
            each(&|kernel| or_empty(kernel.resources.as_ref().map(of), |it| it.to_string()))
        };
        let kernels = self.kernels.iter().map(kernel_object);
        let line = format!("{program} {}", assignments(&self.values));
        let row = Row::of(ByteSize(self.bytes as u64).to_string())
            .count("bytes", self.bytes as u64)
            .key("values", &self.values)
            .key("seconds", self.seconds)
            .optional("collective", self.collective)
            .optional("different", self.different)
            .objects("kernels", kernels)
            .number("us", micros(seconds))
            .number("GB/s", format!("{:.1}", self.bytes as f64 / seconds / 1e9))
            .number_or_empty(&against, collective, micros)
            .number_or_empty("speedup", collective, |time| {
                format!("{:.2}", time / seconds)
            })
            .number_or_empty("differ", self.different, |count| count.to_string())
            .number(
                "lanes x threads",
                each(&|of| format!("{} x {}", of.lanes, of.threads)),
            )
            .number("registers", resource(|it| it.registers))
            .number("blocks fit", resource(|it| it.blocks_per_multiprocessor))
            .words("values", assignments(&self.values))
            .right(self.different.unwrap_or(0) == 0)
            .point("time in us", line.trim_end(), seconds * 1e6, true);
        match collective {
            Some(time) => row.point("time in us", against, time * 1e6, true),
            None => row,
        }
    }
}

fn kernel_object(kernel: &KernelReport) -> Object {
    let of = |value: fn(&KernelResources) -> u32| kernel.resources.as_ref().map(value);
    Object::default()
        .key("line", kernel.line)
        .key("lanes", kernel.lanes)
        .key("threads", kernel.threads)
        .optional("registers", of(|it| it.registers))
        .optional("shared_bytes", of(|it| it.shared_bytes))
        .optional("local_bytes", of(|it| it.local_bytes))
        .optional(
            "blocks_per_multiprocessor",
            of(|it| it.blocks_per_multiprocessor),
        )
}

/// `lanes=8 threads=64`.
fn assignments(values: &[(String, i64)]) -> String {
    let values = values.iter().map(|(name, value)| format!("{name}={value}"));
    values.collect::<Vec<_>>().join(" ")
}

/// Whether the statements, or those within them, have a kernel section.
fn has_kernel(body: &[Statement]) -> bool {
    Statement::actions(body).any(|(_, action)| match action {
        StatementKind::Kernel(_) => true,
        StatementKind::Fork { body, .. } => has_kernel(body),
        _ => false,
    })
}

/// Every combination of one value for each parameter.
fn combinations(tried: &[(String, Vec<i64>)]) -> Vec<TriedValues> {
    // Without any parameter to try, there is one combination, of no values.
    tried.iter().fold(vec![Vec::new()], |all, (name, values)| {
        let with = |before: &TriedValues, value: &i64| {
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
    match parameter(text) {
        Ok((name, Value::Integer(value))) => Ok((name, vec![value])),
        Ok((name, Value::List(values))) => Ok((name, values)),
        _ => Err("expected a name and integers, as in lanes=8,16".to_owned()),
    }
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

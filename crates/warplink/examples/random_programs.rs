//! Random programs and mutants, for a given number or time: compares the verifier's verdict on each with an independent
//! interpreter, and with runs of accepted programs on the host device. With `--sections`, programs of kernels; with
//! `--values`, those that read counts and rows from memory; with `--signals`, programs that post and wait without a plan.
//!
//! ```sh
//! cargo run --release -p warplink --example random_programs -- --count 20000
//! cargo run --release -p warplink --example random_programs -- --seconds 600 --seed 1000000 --jobs 4
//! cargo run --release -p warplink --example random_programs -- --only 5449
//! cargo run --release -p warplink --example random_programs -- --sections --count 20000
//! cargo run --release -p warplink --example random_programs -- --values --count 20000
//! cargo run --release -p warplink --example random_programs -- --signals --count 20000
//! ```
//!
//! Each program has a seed; `--count` seeds count up from `--seed`, and the processes of `--jobs` take
//! them in turns. The first disagreement prints its seed and text and ends the run with status 1. The last line
//! has the counts; texts that a mutation made unreadable are not counted as programs.

// It is a test.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

#[path = "../tests/program_support/mod.rs"]
mod program_support;
#[path = "../tests/section_support/mod.rs"]
mod section_support;

use program_support::device::Runner;
use program_support::evidence::check;
use program_support::sample::{Allowed, sample, signals};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::set_current_timer_slack;
use section_support::sample::Pieces;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::num::NonZeroU64;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const HELP: &str = "\
Usage: random_programs [--count N | --seconds S] [--seed FIRST] [--jobs N] [--changes N]
                       [--sections | --values | --signals] [--no-device]
       random_programs --only SEED [--changes N] [--sections | --values | --signals] [--no-device]";

/// How long a program may take on the device.
const LIMIT: Duration = Duration::from_secs(180);

/// How many seeds have one whose launches are ended by integers beyond their bounds on the device, too.
const BEYOND: u64 = 8;

/// How often the counts so far are printed.
const EVERY: Duration = Duration::from_secs(60);

/// Prefixes of a job's output lines: the next seed, a line of a failure, the class of a program and of a
/// mutant.
const NEXT: char = '>';
const WRONG: char = '!';
const PROGRAM: char = '=';
const MUTANT: char = '~';

const DISAGREEMENT: &str = "DISAGREEMENT";
/// Begins the class of a section that reads values from memory.
const WITH_VALUES: &str = "values: ";
const UNREADABLE: &str = "refused by the parser";

#[derive(Clone)]
struct Options {
    first: u64,
    count: u64,
    seconds: u64,
    jobs: u64,
    /// Which of the jobs this process is; none where it starts them.
    job: Option<u64>,
    changes: usize,
    /// Programs of kernels, instead of those of streams.
    sections: bool,
    /// Programs of kernels that read values from memory.
    values: bool,
    /// Programs of posts and waits alone.
    signals: bool,
    device: bool,
}

#[derive(Default)]
struct Counts {
    classes: BTreeMap<String, u64>,
    unreadable: u64,
    mutants: u64,
    disagreements: u64,
}

impl Counts {
    /// How many sections read values from memory.
    fn values(&self) -> u64 {
        let classes = self.classes.iter();
        let with = classes.filter(|(class, _)| class.starts_with(WITH_VALUES));
        with.map(|(_, count)| count).sum()
    }

    /// The counts so far, in one line.
    fn line(&self, options: &Options, start: Instant) -> String {
        let all = self.classes.values().sum::<u64>() - self.unreadable;
        let is_section = options.sections || options.values;
        let (programs, sections) = if is_section { (0, all) } else { (all, 0) };
        let (unreadable, seconds) = (self.unreadable, start.elapsed().as_secs_f64());
        format!(
            "{programs} programs and {sections} sections, {} of them mutants and {} with values from memory \
             ({unreadable} unreadable ones left out), in {seconds:.0} s: {} disagreements",
            self.mutants - unreadable,
            self.values(),
            self.disagreements
        )
    }
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        first: 0,
        count: u64::MAX,
        seconds: u64::MAX,
        jobs: 2,
        job: None,
        changes: 3,
        sections: false,
        values: false,
        signals: false,
        device: true,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let switch = match &*name {
            "--no-device" => Some((&mut options.device, false)),
            "--sections" => Some((&mut options.sections, true)),
            "--values" => Some((&mut options.values, true)),
            "--signals" => Some((&mut options.signals, true)),
            _ => None,
        };
        if let Some((switch, to)) = switch {
            *switch = to;
            continue;
        }
        let value = arguments
            .next()
            .ok_or_else(|| format!("{name} needs a value"))?;
        let number: u64 = value
            .parse()
            .map_err(|_| format!("'{value}' is not a number; expected one after {name}"))?;
        match &*name {
            "--count" => options.count = number,
            "--seconds" => options.seconds = number,
            "--seed" => options.first = number,
            "--only" => (options.first, options.count, options.jobs) = (number, 1, 1),
            "--jobs" => options.jobs = number.clamp(1, 256),
            "--job" => options.job = Some(number),
            "--changes" => options.changes = number as usize,
            _ => return Err(format!("unknown option {name}")),
        }
    }
    if options.count == u64::MAX && options.seconds == u64::MAX {
        return Err("expected --count, --seconds or --only".to_owned());
    }
    Ok(options)
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}\n{HELP}");
            return ExitCode::from(2);
        }
    };
    if let Some(job) = options.job {
        work(&options, job);
        return ExitCode::SUCCESS;
    }
    // Every rank maps memory by descriptors.
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let _ = setrlimit(Resource::Nofile, raised);
    let start = Instant::now();
    let counts = Mutex::new(Counts::default());
    let left = AtomicUsize::new(options.jobs as usize);
    std::thread::scope(|scope| {
        for job in 0..options.jobs {
            let (options, counts, left) = (&options, &counts, &left);
            scope.spawn(move || {
                follow(options, job, counts);
                left.fetch_sub(1, Ordering::Relaxed);
            });
        }
        let mut said = Instant::now();
        while left.load(Ordering::Relaxed) > 0 {
            std::thread::sleep(Duration::from_millis(100));
            if said.elapsed() >= EVERY {
                said = Instant::now();
                println!("{}", counts.lock().unwrap().line(&options, start));
            }
        }
    });
    let counts = counts.into_inner().unwrap();
    for (class, count) in &counts.classes {
        println!("{count:>9}  {class}");
    }
    println!("{}", counts.line(&options, start));
    ExitCode::from(u8::from(counts.disagreements > 0))
}

/// Starts a job and counts what it says, until it ends or any job finds a disagreement.
fn follow(options: &Options, job: u64, counts: &Mutex<Counts>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    for (name, number) in [
        ("--count", options.count),
        ("--seconds", options.seconds),
        ("--seed", options.first),
        ("--jobs", options.jobs),
        ("--job", job),
        ("--changes", options.changes as u64),
    ] {
        command.arg(name).arg(number.to_string());
    }
    if !options.device {
        command.arg("--no-device");
    }
    if options.sections {
        command.arg("--sections");
    }
    if options.values {
        command.arg("--values");
    }
    if options.signals {
        command.arg("--signals");
    }
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut seed: Option<u64> = None;
    let mut wrong = String::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        let mut rest = line.chars();
        let kind = rest.next();
        let mut counts = counts.lock().unwrap();
        if counts.disagreements > 0 {
            let _ = child.kill();
            let _ = child.wait();
            return;
        }
        match kind {
            Some(NEXT) => seed = rest.as_str().parse().ok(),
            Some(WRONG) => wrong = wrong + rest.as_str() + "\n",
            Some(PROGRAM | MUTANT) => {
                counts.mutants += u64::from(kind == Some(MUTANT));
                counts.unreadable += u64::from(rest.as_str() == UNREADABLE);
                if rest.as_str() == DISAGREEMENT {
                    counts.disagreements += 1;
                    println!("{}", std::mem::take(&mut wrong));
                }
                *counts.classes.entry(rest.as_str().to_owned()).or_default() += 1;
                seed = None;
            }
            _ => println!("job {job}: {line}"),
        }
    }
    let status = child.wait().unwrap();
    if !status.success() || seed.is_some() {
        let mut counts = counts.lock().unwrap();
        counts.disagreements += 1;
        *counts.classes.entry(DISAGREEMENT.to_owned()).or_default() += 1;
        println!("job {job} ended ({status}) at seed {seed:?}\n{wrong}");
    }
}

/// Checks the programs of one job, and says what they show.
fn work(options: &Options, job: u64) {
    let start = Instant::now();
    // Minimal timer slack: otherwise the kernel adds up to 50 µs to every random delay.
    let _ = set_current_timer_slack(NonZeroU64::new(1));
    let mut runner = Runner::new(options.first + 1000 * job, LIMIT);
    let mut number = job;
    while number < options.count && start.elapsed().as_secs() < options.seconds {
        let seed = options.first.wrapping_add(number);
        println!("{NEXT}{seed}");
        let (class, mutant) = if options.sections || options.values {
            section(options, seed, &mut runner)
        } else {
            one(options, seed, &mut runner)
        };
        println!("{}{class}", if mutant { MUTANT } else { PROGRAM });
        number += options.jobs;
    }
}

/// The class of the program of one seed, and whether it is a mutant.
fn one(options: &Options, seed: u64, runner: &mut Runner) -> (String, bool) {
    let allowed = Allowed {
        engine: true,
        changes: options.changes,
    };
    let made = if options.signals {
        signals(seed)
    } else {
        sample(seed, allowed)
    };
    let sample = match made {
        Err(_) => return (UNREADABLE.to_owned(), true),
        Ok(sample) => sample,
    };
    let checked = check(&sample).and_then(|shown| {
        if let (Some(accepted), true) = (&shown.accepted, options.device) {
            runner.run(&sample, accepted)?;
        }
        Ok(shown.class)
    });
    let class = checked.unwrap_or_else(|how| {
        let kind = if options.signals { "--signals, " } else { "" };
        let what = format!("{kind}{} ranks, {} streams", sample.world, sample.streams);
        disagree(options, seed, &what, &how, &sample.text)
    });
    (class, sample.changes > 0)
}

/// The class of the kernels of one seed, and whether they are mutants.
fn section(options: &Options, seed: u64, runner: &mut Runner) -> (String, bool) {
    let pieces = if options.values {
        Pieces::Values
    } else {
        Pieces::Any
    };
    let Ok(sample) = section_support::sample::sample(seed, pieces, options.changes) else {
        return (UNREADABLE.to_owned(), true);
    };
    let checked = section_support::evidence::check(&sample).and_then(|shown| {
        if let (Some(outputs), true) = (&shown.outputs, options.device) {
            // Ranks join anew after a launch that fails.
            let beyond = shown
                .beyond
                .as_ref()
                .filter(|_| seed.is_multiple_of(BEYOND));
            section_support::device::run(runner, &sample, outputs, beyond)?;
        }
        let kind = if sample.reads_values { WITH_VALUES } else { "" };
        Ok(format!("{kind}{}", shown.class))
    });
    let class = checked.unwrap_or_else(|how| {
        let kind = if options.values { "values" } else { "sections" };
        let what = format!("--{kind}, {} ranks, {}", sample.world, sample.parameters);
        disagree(options, seed, &what, &how, &sample.text)
    });
    (class, sample.changes > 0)
}

/// Says what disagrees, for a program of a seed.
fn disagree(options: &Options, seed: u64, what: &str, how: &str, text: &str) -> String {
    let changes = options.changes;
    let said = format!("seed {seed} (--only {seed} --changes {changes}), {what}: {how}\n{text}");
    for line in said.lines() {
        println!("{WRONG}{line}");
    }
    DISAGREEMENT.to_owned()
}

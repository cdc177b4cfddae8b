//! Random programs and mutants, for as long as one asks: the verifier's word on each against what an
//! independent interpreter shows, and what the host device does with those that are accepted.
//!
//! ```sh
//! cargo run --release -p warplink --example random_programs -- --count 20000
//! cargo run --release -p warplink --example random_programs -- --seconds 600 --seed 1000000 --jobs 4
//! cargo run --release -p warplink --example random_programs -- --only 5449
//! ```
//!
//! Each program has a seed; seeds count up from `--seed`. A disagreement prints its seed and text, and
//! the exit status is 1 if there was one.

// It is a test.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

#[path = "../tests/program_support/mod.rs"]
mod program_support;

use program_support::device::Runner;
use program_support::evidence::check;
use program_support::sample::{Allowed, sample};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const HELP: &str = "\
Usage: random_programs [--count N | --seconds S] [--seed FIRST] [--jobs N] [--changes N] [--no-device]
       random_programs --only SEED [--changes N] [--no-device]";

/// How long a program may take on the device.
const LIMIT: Duration = Duration::from_secs(180);

/// How often the counts so far are printed.
const EVERY: Duration = Duration::from_secs(60);

struct Options {
    first: u64,
    count: u64,
    seconds: u64,
    jobs: usize,
    changes: usize,
    device: bool,
}

#[derive(Default)]
struct Counts {
    classes: BTreeMap<String, u64>,
    mutants: u64,
    disagreements: u64,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        first: 0,
        count: u64::MAX,
        seconds: u64::MAX,
        jobs: 2,
        changes: 3,
        device: true,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        if name == "--no-device" {
            options.device = false;
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
            "--jobs" => options.jobs = number.clamp(1, 64) as usize,
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
    let start = Instant::now();
    let next = AtomicU64::new(0);
    let over = AtomicBool::new(false);
    let counts = Mutex::new(Counts::default());
    std::thread::scope(|scope| {
        for job in 0..options.jobs {
            let (options, next, over, counts) = (&options, &next, &over, &counts);
            scope.spawn(move || {
                let mut runner = Runner::new(options.first + 1000 * job as u64, LIMIT);
                while !over.load(Ordering::Relaxed) {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= options.count || start.elapsed().as_secs() >= options.seconds {
                        break;
                    }
                    one(options, options.first + number, &mut runner, counts);
                }
                over.store(true, Ordering::Relaxed);
            });
        }
        let mut said = Instant::now();
        while !over.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(100));
            if said.elapsed() >= EVERY {
                said = Instant::now();
                println!("{}", line(&counts.lock().unwrap(), start));
            }
        }
    });
    let counts = counts.into_inner().unwrap();
    for (class, count) in &counts.classes {
        println!("{count:>9}  {class}");
    }
    println!("{}", line(&counts, start));
    ExitCode::from(u8::from(counts.disagreements > 0))
}

fn line(counts: &Counts, start: Instant) -> String {
    let all: u64 = counts.classes.values().sum();
    let seconds = start.elapsed().as_secs_f64();
    format!(
        "{all} programs, {} of them mutants, in {seconds:.0} s: {} disagreements",
        counts.mutants, counts.disagreements
    )
}

/// Checks the program of one seed.
fn one(options: &Options, seed: u64, runner: &mut Runner, counts: &Mutex<Counts>) {
    let allowed = Allowed {
        engine: true,
        changes: options.changes,
    };
    let (class, mutant) = match sample(seed, allowed) {
        Err(_) => ("refused by the parser".to_owned(), true),
        Ok(sample) => {
            let checked = check(&sample).and_then(|shown| {
                if let (Some(accepted), true) = (&shown.accepted, options.device) {
                    runner.run(&sample, accepted)?;
                }
                Ok(shown.class)
            });
            let class = checked.unwrap_or_else(|how| {
                println!(
                    "seed {seed} (--changes {}), {} ranks, {} streams: {how}\n{}",
                    options.changes, sample.world, sample.streams, sample.text
                );
                counts.lock().unwrap().disagreements += 1;
                "DISAGREEMENT".to_owned()
            });
            (class, sample.changes > 0)
        }
    };
    let mut counts = counts.lock().unwrap();
    counts.mutants += u64::from(mutant);
    *counts.classes.entry(class).or_default() += 1;
}

//! Mixed small collectives, as many as one asks for, each with fresh inputs and every result checked: all kinds,
//! types, operators and roots, 0 to 4096 elements at any offset, in place or not, on one or two streams, eager or
//! as graphs, of one or two communicators, beside matrix products. With `--replays`, first a graph of 100
//! collectives that is launched so many times.
//!
//! ```sh
//! cargo run --release -p warplink --example random_collectives -- --count 1000000
//! cargo run --release -p warplink --example random_collectives -- --ranks 2 --replays 10000 --count 0
//! ```
//!
//! `WARPLINK_TEST_CALLS` and `WARPLINK_TEST_REPLAYS` are counts for where these options are not given.
//!
//! The seed says everything about the calls. `WARPLINK_TEST_DEVICE=cuda` runs them on GPUs, where each kind, type
//! and operator is compiled when it comes first; `--types` and `--operators` choose some. A wrong result prints
//! the call, and the exit status is not 0.

// It is a test.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr
)]

#[path = "../tests/collectives/arithmetic.rs"]
mod arithmetic;
#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/collectives/endurance.rs"]
mod endurance;
// Tests use more of it.
#[allow(dead_code)]
#[path = "../tests/collectives/expected.rs"]
mod expected;

use endurance::{Endurance, Mix};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};
use warplink::Communicator;

const HELP: &str = "\
Usage: random_collectives --count N [--ranks 2,4,8] [--seed S] [--replays N]
                          [--types f32,bf16,...] [--operators sum,max,...]";

/// How often rank 0 tells how far it is; shown at the end where ranks are processes.
const EVERY: Duration = Duration::from_secs(30);

/// How long ranks that are processes may run, where `WARPLINK_TEST_LIMIT` does not say it.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Collectives of a graph that is replayed.
const GRAPH: usize = 100;

struct Options {
    count: usize,
    ranks: Vec<usize>,
    replays: usize,
    mix: Mix,
}

/// Values of a comma-separated list.
fn list<T: FromStr>(name: &str, text: &str) -> Result<Vec<T>, String> {
    let each = text.split(',').map(|one| {
        one.parse()
            .map_err(|_| format!("'{one}' is not valid; expected a list after {name}"))
    });
    each.collect()
}

fn options() -> Result<Options, String> {
    let count = |name| common::number_from_env(name).map(|count| count as usize);
    let mut options = Options {
        count: count("WARPLINK_TEST_CALLS").unwrap_or(usize::MAX),
        ranks: vec![2, 4, 8],
        replays: count("WARPLINK_TEST_REPLAYS").unwrap_or(0),
        mix: Mix::all(0),
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments
            .next()
            .ok_or_else(|| format!("{name} needs a value"))?;
        let number = || {
            let number = value.parse::<usize>();
            number.map_err(|_| format!("'{value}' is not a number; expected one after {name}"))
        };
        match &*name {
            "--count" => options.count = number()?,
            "--ranks" => options.ranks = list(&name, &value)?,
            "--seed" => options.mix.seed = number()? as u64,
            "--replays" => options.replays = number()?,
            "--types" => options.mix.types = list(&name, &value)?,
            "--operators" => options.mix.operators = list(&name, &value)?,
            _ => return Err(format!("unknown option {name}")),
        }
    }
    if options.count == usize::MAX {
        return Err("expected --count".to_owned());
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
    for &ranks in &options.ranks {
        let ranks = common::world(ranks);
        if common::is_rank() || common::share_gpus() {
            as_processes(&options, ranks);
        } else {
            common::threads_with(ranks, |_| {}, |comm| run(&options, comm));
        }
    }
    ExitCode::SUCCESS
}

/// Each rank in a process of its own, which gets the same options.
fn as_processes(options: &Options, world: usize) {
    let ranks = common::Ranks {
        world,
        limit: common::number_from_env("WARPLINK_TEST_LIMIT")
            .is_none()
            .then_some(LONGEST),
        own_arguments: true,
        ..common::Ranks::default()
    };
    let ended = ranks.start(|comm| {
        run(options, &comm);
        comm.close().unwrap();
    });
    common::assert_all_ended_well(ended.as_deref());
    ended
        .iter()
        .flatten()
        .for_each(|rank| print!("{}", rank.output));
}

/// All calls of a rank.
fn run(options: &Options, comm: &Communicator) {
    let start = Instant::now();
    let tells = comm.rank() == 0;
    let say = |calls: usize, of: &str| {
        let (ranks, took) = (comm.world(), start.elapsed().as_secs_f64());
        println!("{calls} calls of {ranks} ranks{of} in {took:.0} s, all right");
    };
    let mut endurance = Endurance::new(comm, options.mix.clone());
    if options.replays > 0 {
        let replayed = endurance.graph(0, GRAPH, options.replays);
        if tells {
            let of = format!(", a graph of {GRAPH} launched {} times,", options.replays);
            say(replayed, &of);
        }
    }
    let (mut calls, mut said) = (0, Instant::now());
    for batch in 0.. {
        if calls >= options.count {
            break;
        }
        calls += endurance.batch(batch);
        if tells && said.elapsed() >= EVERY {
            said = Instant::now();
            say(calls, "");
        }
    }
    if tells {
        say(calls, "");
    }
    endurance.close();
}

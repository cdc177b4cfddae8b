//! Random small programs, for tests that compare the verifier's word with execution.
//!
//! A sample is first written so that it is right (`writer`). Then some samples are changed, which may or
//! may not break them (`mutation`). Others are made of posts and waits without a plan (`signals`).

mod mutation;
mod signals;
mod writer;

pub(crate) use signals::signals;

use super::interpreter::Random;
use std::fmt::Write as _;
use warplink::program::{Diagnostic, Parameters, Program, RankProgram, Report, unroll, verify};

/// Programs that samples call.
const CALLED: &str = "\
program passed(n, distance) {
    input X: f32[n, n]
    output Y: f32[n, n]
    share {
        give = send X to (rank + distance) % world tag 1000 + distance via put
        take = receive Y from (rank - distance) % world tag 1000 + distance via put
    }
    post take
    post give
    wait take
    wait give
}

program blended(n, times) {
    input X: f32[n, n]
    input Y: f32[n, n]
    output Z: f32[n, n]
    allocate S: f32[n, n] = 0
    for i in 0..times {
        S += matmul(X, Y)
    }
    Z = max(S, X)
}

";

/// Appends lines of program text, indented by their blocks within `depth` ones.
pub(crate) fn write_lines(text: &mut String, mut depth: usize, lines: &[String]) {
    for line in lines {
        depth = depth.saturating_sub(usize::from(line.starts_with('}')));
        let _ = writeln!(text, "{:1$}{line}", "", depth * 4);
        depth += usize::from(line.ends_with('{'));
    }
}

/// A random program and what to run it with.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    /// Its text.
    pub(crate) text: String,
    /// The program.
    pub(crate) program: Program,
    /// For how many ranks.
    pub(crate) world: usize,
    /// How many streams the pool has.
    pub(crate) streams: usize,
    /// Values of its parameters.
    pub(crate) parameters: Parameters,
    /// How many mutations it has; where it has none, it is right.
    pub(crate) changes: usize,
}

impl Sample {
    /// The verifier's word on it.
    pub(crate) fn verdict(&self) -> Result<Report, Vec<Diagnostic>> {
        verify(&self.program, self.world, self.streams, &self.parameters)
    }

    /// The program of a rank.
    pub(crate) fn of_rank(&self, rank: usize) -> warplink::Result<RankProgram> {
        let (world, streams) = (self.world, self.streams);
        unroll(&self.program, rank, world, streams, &self.parameters)
    }
}

/// Features that samples may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowed {
    /// Transfers and collectives through the engine.
    pub(crate) engine: bool,
    /// Most mutations.
    pub(crate) changes: usize,
}

impl Default for Allowed {
    fn default() -> Self {
        Self {
            engine: true,
            changes: 2,
        }
    }
}

/// The sample of a seed.
///
/// # Errors
/// The parser's error, where a mutation makes a text that is no program.
pub(crate) fn sample(seed: u64, allowed: Allowed) -> warplink::Result<Sample> {
    let mut random = Random::new(seed);
    let world = 2 + random.below(3);
    let streams = 1 + random.below(3);
    let (mut lines, slots) = writer::Writer::new(&mut random, world, streams).write(allowed);
    let changes = if allowed.changes == 0 || random.chance(6) {
        0
    } else {
        mutation::mutate(&mut lines, &mut random, allowed, (world, streams, slots))
    };
    let calls = lines.iter().any(|line| line.contains("(n = n"));
    // Some do everything in a program that is called, with memory of the caller's.
    let called = random.chance(4);
    let tensors = "    input A: f32[n, n]\n    output C: f32[n, n]\n";
    let (name, scratch) = if called {
        ("body", "output")
    } else {
        ("sample", "allocate")
    };
    let mut text = String::from(if calls { CALLED } else { "" });
    let _ = writeln!(
        text,
        "program {name}(n) {{\n{tensors}    {scratch} W: f32[{slots}, n, n]"
    );
    // Stands for what is stored at other ranks.
    text += "    allocate P: f32[n, n]\n";
    write_lines(&mut text, 1, &lines);
    text += "}\n";
    if called {
        let _ = write!(
            text,
            "program sample(n) {{\n{tensors}    allocate V: f32[{slots}, n, n]\n    \
             body(n = n, A = A, C = C, W = V)\n}}\n"
        );
    }
    Ok(Sample {
        program: Program::parse(&text)?,
        text,
        world,
        streams,
        parameters: Parameters::from([("n".to_owned(), 2)]),
        changes,
    })
}

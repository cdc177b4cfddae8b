//! Random small programs of kernels.
//!
//! A sample is written from pieces of algorithms (`writer`), most of them right. Then some samples are changed
//! (`mutation`), which may or may not break them.

use super::{functions, mutation, writer};
use crate::program_support::interpreter::Random;
use crate::program_support::sample::write_lines;
use std::fmt::Write as _;
use warplink::device::ReduceOp;
use warplink::program::{Parameters, Program};
use warplink::{DType, Result};

/// Lengths: fewer elements than lanes have, one, tails, whole parts.
const LENGTHS: [i64; 8] = [1, 3, 7, 16, 17, 33, 40, 64];

/// How many of them are short.
const SHORT: usize = 5;

/// What a sample is drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pieces {
    /// All pieces; those that read values from memory are few.
    Any,
    /// At least one piece that reads values from memory, in a small program.
    Values,
}

/// A random program and what to run it with.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    /// The seed that it was drawn by.
    pub(crate) seed: u64,
    /// Its text.
    pub(crate) text: String,
    /// The program.
    pub(crate) program: Program,
    /// For how many ranks.
    pub(crate) world: usize,
    /// Values of its parameters.
    pub(crate) parameters: Parameters,
    /// How many mutations it has.
    pub(crate) changes: usize,
    /// Whether lanes read values from memory.
    pub(crate) reads_values: bool,
}

/// The sample of a seed, with at most so many mutations.
///
/// # Errors
/// The parser's error, where a mutation makes a text that is no program.
pub(crate) fn sample(seed: u64, pieces: Pieces, most_changes: usize) -> Result<Sample> {
    let mut random = Random::new(seed);
    let world = [1, 2, 2, 3, 3, 4][random.below(6)];
    let lanes = 1 + random.below(3);
    let lengths = match pieces {
        Pieces::Any => &LENGTHS[..],
        Pieces::Values => &LENGTHS[..SHORT],
    };
    let n = lengths[random.below(lengths.len())];
    let dtype = [DType::F32, DType::F32, DType::BF16, DType::I32, DType::U8][random.below(5)];
    let op = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min][random.below(3)];
    let mut written = writer::write(&mut random, lanes, pieces);
    let reads_values = written.reads_values();
    let changes = if most_changes == 0 || random.chance(4) {
        0
    } else {
        mutation::mutate(&mut written, &mut random, most_changes)
    };
    let mut text = String::from(
        "program sample(n, lanes, T = f32 | bf16 | i32 | u8, op = sum | max | min) {\n",
    );
    for line in functions::TEXTS
        .iter()
        .copied()
        .filter(|_| written.has_rows())
    {
        let _ = writeln!(text, "    {line}");
    }
    for line in &written.declarations {
        let _ = writeln!(text, "    {line}");
    }
    for lines in &written.kernels {
        text += "    kernel lane in 0..lanes threads 32 {\n";
        write_lines(&mut text, 2, lines);
        text += "    }\n";
    }
    text += "}\n";
    Ok(Sample {
        program: Program::parse(&text)?,
        text,
        world,
        parameters: Parameters::new()
            .with("n", n)
            .with("lanes", lanes as i64)
            .with("T", dtype)
            .with("op", op),
        changes,
        reads_values,
        seed,
    })
}

//! Running accepted kernels on the host device under random delays.

use super::beyond::Beyond;
use super::evidence::RUNS;
use super::sample::Sample;
use crate::program_support::device::{Order, Runner};
use crate::program_support::interpreter::SOME_VALUES;
use std::time::Duration;

/// How many runs are eager; the others are replays of a graph.
const EAGER: usize = RUNS / 2;

/// How long a rank waits for one whose launch fails.
const LIMIT: Duration = Duration::from_millis(200);

/// Runs an accepted program, whose outputs by run and rank are known, and if there is an integer that ends a launch, once
/// more with that.
///
/// # Errors
/// A hang, a failure, or a difference from the interpreter.
pub(crate) fn run(
    runner: &mut Runner,
    sample: &Sample,
    expected: &[Vec<f64>],
    beyond: Option<&Beyond>,
) -> Result<(), String> {
    let order = |(eager, captured), choice, limit| Order {
        program: sample.program.clone(),
        parameters: sample.parameters.clone(),
        streams: 1,
        eager,
        captured,
        inputs: RUNS,
        choice,
        limit,
    };
    let outputs = runner.perform(
        sample.world,
        order((EAGER, RUNS - EAGER), SOME_VALUES, None),
    )?;
    for (rank, runs) in outputs.iter().enumerate() {
        for (run, own) in runs.iter().enumerate() {
            let expected = &expected[run * sample.world + rank];
            // Small integers are exact in every type. What is not written is no number.
            let same = |(a, b): (&f64, &f64)| a == b || (a.is_nan() && b.is_nan());
            if own.len() != expected.len() || !own.iter().zip(expected).all(same) {
                return Err(format!(
                    "accepted, but on the device, rank {rank}, run {run} gives {own:?}; expected {expected:?}"
                ));
            }
        }
    }
    let Some(beyond) = beyond else {
        return Ok(());
    };
    let ended = runner.ended(sample.world, order((1, 0), beyond.choice, Some(LIMIT)))?;
    let ended = ended.into_iter().map(|ended| {
        let error = ended.error.map(|error| error.to_string());
        (error, ended.outputs.into_iter().next().unwrap_or_default())
    });
    let met = beyond.met(&ended.collect::<Vec<_>>());
    met.map_err(|how| format!("on the device, {how}"))
}

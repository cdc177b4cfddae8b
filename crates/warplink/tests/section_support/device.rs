//! Running accepted kernels on the host device under random delays.

use super::evidence::RUNS;
use super::sample::Sample;
use crate::program_support::device::{Order, Runner};

/// How many runs are eager; the others are replays of a graph.
const EAGER: usize = RUNS / 2;

/// Runs an accepted program, whose outputs by run and rank are known.
///
/// # Errors
/// A hang, a failure, or a difference from the interpreter.
pub(crate) fn run(
    runner: &mut Runner,
    sample: &Sample,
    expected: &[Vec<f64>],
) -> Result<(), String> {
    let order = Order {
        program: sample.program.clone(),
        parameters: sample.parameters.clone(),
        streams: 1,
        eager: EAGER,
        captured: RUNS - EAGER,
        inputs: RUNS,
    };
    let outputs = runner.perform(sample.world, order)?;
    for (rank, runs) in outputs.iter().enumerate() {
        for (run, own) in runs.iter().enumerate() {
            let expected = &expected[run * sample.world + rank];
            // Small integers are exact in every type.
            if own != expected {
                return Err(format!(
                    "accepted, but on the device, rank {rank}, run {run} gives {own:?}; expected {expected:?}"
                ));
            }
        }
    }
    Ok(())
}

//! Estimates the time of a program: one simulation of the programs of all ranks, with one hardware model.
//!
//! ```text
//!   programs of all ranks ──► schedule: steps of each stream, with their resources
//!   hardware model ─────────►      │
//!                                  ▼
//!                       simulation: streams in order, resources shared
//!                                  │
//!                                  ▼
//!                       Cost: seconds, what bounds them, busy resources, timeline
//! ```
//!
//! | module | subject |
//! |---|---|
//! | [`model`] | performance of a machine: rates, latencies, tables of measured times, as a JSON file |
//! | [`curve`], [`gemm`], [`collective`] | measured times by size, with interpolation |
//! | [`lanes`] | performance of lanes of kernel sections |
//! | [`find`] | selection of the model of a device |
//! | [`figures`], `derive`, `calibration` | derived model of an untuned machine; cached measured figures |
//! | `link`, `symmetry` | matching of transfers; detection of ranks that do the same |
//! | `build`, `operations`, `post` | from operations to steps of streams |
//! | `launch`, `class`, `outline`, `section` | kernel sections: representative lanes, and their steps |
//! | `schedule`, `step` | the steps, and the resources that they need |
//! | `simulate`, `resources` | the simulation, and resource sharing of concurrent work |
//! | [`report`], `bound` | the result, and its time per bottleneck |
//!
//! Every figure of a machine comes from its model. Units are seconds, bytes, and bytes per second.
//!
//! # Simulated behaviour
//! The host of each rank enqueues one operation after the other and never waits (eager), or launches one graph
//! (captured). Each stream runs its operations in order. Signals, waits and synchronized streams order them among
//! streams and ranks, each with its latency. Operations that move or compute are *work*: they take the time that the
//! model gives for them alone, or longer if they share a resource:
//!
//! | resource, of each rank | shared |
//! |---|---|
//! | multiprocessors | in order of arrival, high priority first; a matmul leaves idle ones to the next |
//! | link out, link in, both together | evenly |
//! | memory | evenly |
//!
//! The lanes of a launched kernel are streams of their own. Their moves are work, which takes as long as a block
//! alone needs, or longer if all lanes together exceed the bandwidth of a link or of memory; signals and packets have
//! the latencies of the model.
//!
//! If all ranks do the same in rotation, as in most programs, one of them is simulated and represents all; likewise
//! one lane represents all equivalent lanes.

mod bound;
mod build;
pub mod calibration;
mod class;
pub mod collective;
pub mod curve;
mod derive;
mod fields;
pub mod figures;
pub mod find;
pub mod gemm;
pub mod lanes;
mod launch;
mod launches;
mod link;
pub mod model;
mod operations;
mod outline;
mod post;
pub mod report;
mod resources;
mod schedule;
mod section;
mod simulate;
mod step;
mod symmetry;

pub use bound::{Bound, Path};
pub use figures::Figures;
pub use find::{DeviceDescription, Origin};
pub use model::HardwareModel;
pub use report::{Busy, Cost, Span};

use super::RankProgram;
use crate::error::Result;
use crate::named::named;

named! {
    /// Way in which a program is submitted to the device.
    #[derive(Default)]
    pub enum Submission: "submission" {
        /// Operation by operation: work starts no earlier than the host has enqueued it.
        #[default]
        Eager = "eager",
        /// As one graph: everything is enqueued at its launch.
        Captured = "captured",
    }
}

/// Options of a simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimulateOptions {
    /// Submission of the program to the device.
    pub submission: Submission,
    /// Whether to record the start and end of every operation in [`Cost::timeline`].
    pub timeline: bool,
}

/// Time of an eager run of `ranks`, the programs of all ranks in rank order, on a machine described by `model`.
///
/// Time starts when the hosts of all ranks begin to enqueue on idle streams, and ends when the
/// streams of the slowest rank are done.
///
/// # Errors
/// [`ErrorKind::Verification`](crate::ErrorKind::Verification) if the programs do not finish: a transfer without its
/// other end, or a deadlock. Programs that [`verify`](super::verify()) accepts finish.
pub fn simulate(ranks: &[RankProgram], model: &HardwareModel) -> Result<Cost> {
    simulate_with(ranks, model, SimulateOptions::default())
}

/// Like [`simulate`], with options.
///
/// # Errors
/// Those of [`simulate`].
pub fn simulate_with(
    ranks: &[RankProgram],
    model: &HardwareModel,
    options: SimulateOptions,
) -> Result<Cost> {
    let partners = link::partners(ranks)?;
    let simulate = |simulated, iterations| -> Result<Result<Cost>> {
        let world = ranks.len();
        let schedule =
            schedule::Schedule::new(simulated, world, &partners, model, options, iterations)?;
        let outcome = simulate::run(&schedule, options.timeline);
        Ok(outcome.map(|outcome| report::cost(&schedule, outcome, model)))
    };
    // A simulation with fewer iterations or ranks may deadlock although the full one does not: a lane may miss a
    // signal of a skipped iteration, and a representative rank the packets of ranks with longer parts. So fall back
    // to all.
    let one = ranks.get(..1).unwrap_or_default();
    let simulated = if symmetry::is_symmetric(ranks, &partners) {
        // The representative first: its simulation takes a fraction of the time, 1/world.
        vec![one, ranks]
    } else {
        vec![ranks]
    };
    let mut found = Err(simulate::endless());
    for ranks in simulated {
        for iterations in [launch::MAX_ITERATIONS, u64::MAX] {
            if found.is_err() {
                found = simulate(ranks, iterations)?;
            }
        }
    }
    found
}

#[cfg(test)]
#[path = "cost_tests.rs"]
mod tests;

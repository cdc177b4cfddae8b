//! How long a program takes: one simulation over the programs of all ranks, against one hardware
//! model.
//!
//! ```text
//!   programs of all ranks ──► schedule: what each stream does, step by step, and with what
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
//! | [`model`] | what a machine can do: rates, latencies, tables of measured times, as a JSON file |
//! | [`curve`], [`gemm`], [`collective`] | measured times by size, and what lies between |
//! | [`lanes`] | what lanes of kernel sections can do |
//! | [`find`] | which model describes a device |
//! | [`figures`], `derive`, `calibration` | the model of a machine that nobody tuned; figures that were measured there |
//! | `link`, `symmetry` | which transfers belong together; whether all ranks do the same |
//! | `build`, `operations`, `post` | from operations to steps of streams |
//! | `launch`, `class`, `outline`, `section` | kernel sections: which lanes stand for all, and their steps |
//! | `schedule`, `step` | the steps, and what they need |
//! | `simulate`, `resources` | the simulation, and how work that runs at one time shares resources |
//! | [`report`], `bound` | the result, and what time goes to |
//!
//! Every figure of a machine comes from its model. Units are seconds, bytes, and bytes per second.
//!
//! # What is simulated
//! The host of each rank enqueues one operation after the other and waits for nothing (eager), or
//! launches one graph (captured). Each stream does its operations in order. Signals, waits and
//! synchronized streams order them among streams and ranks, each with its latency. What moves or
//! computes is *work*: it takes the time that the model gives for it alone, or longer where it
//! shares a resource:
//!
//! | resource, of each rank | shared |
//! |---|---|
//! | multiprocessors | in order of arrival, streams of high priority first: a matmul that leaves some idle makes room for the next |
//! | link out, link in, both together | evenly |
//! | memory | evenly |
//!
//! The lanes of a launched kernel are streams of their own. What moves in them is work, which takes as long as
//! the model lets a block take, or longer where all lanes together need more of a link or of memory than there is;
//! signals and packets take the latencies that it gives for them.
//!
//! Where all ranks do the same in rotation, as most programs do, one of them is simulated and stands
//! for all; so does one of the lanes that do the same.

mod bound;
mod build;
pub(crate) mod calibration;
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
    /// How a program is given to the device.
    #[derive(Default)]
    pub enum Submission: "submission" {
        /// Operation by operation: work starts no earlier than the host has enqueued it.
        #[default]
        Eager = "eager",
        /// As one graph: everything is there when it is launched.
        Captured = "captured",
    }
}

/// What is simulated, and what is told about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimulateOptions {
    /// How the program is given to the device.
    pub submission: Submission,
    /// Whether the start and end of every operation are kept in [`Cost::timeline`].
    pub timeline: bool,
}

/// The time of an eager run of `ranks`, the programs of all ranks in rank order, on a machine that
/// `model` describes.
///
/// Time starts when the hosts of all ranks begin to enqueue on idle streams, and ends when the
/// streams of the slowest rank are done.
///
/// # Errors
/// [`ErrorKind::Verification`](crate::ErrorKind::Verification) where the programs do not finish: a
/// transfer without its other end, or streams that wait for one another. Programs that
/// [`verify`](super::verify()) accepts finish.
pub fn simulate(ranks: &[RankProgram], model: &HardwareModel) -> Result<Cost> {
    simulate_with(ranks, model, SimulateOptions::default())
}

/// As [`simulate`], with options.
///
/// # Errors
/// As [`simulate`].
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
    // Iterations that stand for others may leave a lane without what a whole loop would have told it, and one rank that
    // stands for all without what ranks with longer parts would have sent it.
    let one = ranks.get(..1).unwrap_or_default();
    let simulated = if symmetry::is_symmetric(ranks, &partners) {
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

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
//! | [`find`] | which model describes a device |
//! | `link`, `symmetry` | which transfers belong together; whether all ranks do the same |
//! | `build`, `operations`, `post` | from operations to steps of streams |
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
//! Where all ranks do the same in rotation, as most programs do, one of them is simulated and stands
//! for all.

mod bound;
mod build;
pub mod collective;
pub mod curve;
pub mod find;
pub mod gemm;
mod link;
pub mod model;
mod operations;
mod post;
pub mod report;
mod resources;
mod schedule;
mod simulate;
mod step;
mod symmetry;

pub use bound::{Bound, Path};
pub use find::DeviceDescription;
pub use model::HardwareModel;
pub use report::{Busy, Cost, Span};

use super::RankProgram;
use crate::error::Result;

/// How a program is given to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Submission {
    /// Operation by operation: work starts no earlier than the host has enqueued it.
    #[default]
    Eager,
    /// As one graph: everything is there when it is launched.
    Captured,
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
    let simulated = if symmetry::is_symmetric(ranks, &partners) {
        ranks.get(..1).unwrap_or_default()
    } else {
        ranks
    };
    let schedule = schedule::Schedule::new(simulated, ranks.len(), &partners, model, options);
    let outcome = simulate::run(&schedule, options.timeline)?;
    Ok(report::cost(&schedule, outcome, model))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::program::lower::{AllGatherMatmul, MatmulReduceScatter, Problem, lower};
    use crate::program::unroll;

    fn lowered(world: usize, (m, k, n): (usize, usize, usize)) -> Vec<Vec<RankProgram>> {
        let gather = AllGatherMatmul {
            transposed_b: false,
            m,
            k,
            n: vec![n],
            dtype: DType::BF16,
            bias: false,
            keep: false,
        };
        let scatter = MatmulReduceScatter {
            transposed_b: false,
            m,
            k,
            n,
            dtype: DType::BF16,
            bias: false,
        };
        let mut all = unrolled(&gather, world);
        all.extend(unrolled(&scatter, world));
        all
    }

    fn unrolled<P: Problem>(problem: &P, world: usize) -> Vec<Vec<RankProgram>> {
        let mut all = Vec::new();
        for lowering in P::lowerings().unwrap() {
            let lowered = lower(problem, &lowering, world, 2).unwrap();
            let rank =
                |rank| unroll(lowered.program(), rank, world, 2, &lowered.parameters).unwrap();
            all.push((0..world).map(rank).collect());
        }
        all
    }

    #[test]
    fn one_rank_stands_for_all_that_do_the_same() {
        for model in find::all_shipped() {
            for ranks in lowered(4, (4096, 512, 2048)) {
                let partners = link::partners(&ranks).unwrap();
                if !symmetry::is_symmetric(&ranks, &partners) {
                    continue;
                }
                let options = SimulateOptions::default();
                let seconds = |ranks| {
                    let schedule = schedule::Schedule::new(ranks, 4, &partners, model, options);
                    simulate::run(&schedule, false).unwrap().seconds
                };
                let (one, all) = (seconds(&ranks[..1]), seconds(&ranks));
                assert!(
                    (one / all - 1.0).abs() < 1e-6,
                    "{one} {all} on {}",
                    model.name
                );
            }
        }
    }

    #[test]
    fn every_lowering_is_simulated_on_every_shipped_model() {
        for model in find::all_shipped() {
            for shape in [(8, 8, 1), (32768, 16384, 1024)] {
                for ranks in lowered(8, shape) {
                    let cost = simulate(&ranks, model).unwrap();
                    assert!(cost.seconds > 0.0 && cost.seconds < 1e3);
                    assert!(
                        (cost.critical.seconds() / cost.seconds - 1.0).abs() < 1e-6,
                        "{cost}"
                    );
                }
            }
        }
    }
}

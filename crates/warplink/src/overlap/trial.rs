//! Trials: which of the lowerings that may be the fastest is so on the machine.

use super::Choice;
use super::operands::Bound;
use crate::error::{Error, ErrorKind, Result};
use crate::program::lower::Lowered;
use crate::program::{Bindings, Executor, Plan, PrepareOptions};

/// Seconds that the runs of a trial take together, as far as the fewest samples allow.
const TIME: f64 = 0.2;

/// The fewest and the most runs of each lowering as each submission.
const SAMPLES: (usize, usize) = (5, 25);

/// Decides `choice` among the lowerings that take at most `uncertainty` times as long as the fastest by
/// the cost model: each is bound to the inputs among `tensors` and to memory of its own for what it
/// writes, and timed. Every rank calls this at the same time, and all decide alike. One that cannot be
/// bound for want of memory, on any rank, is left out.
pub(super) fn decide(
    choice: &mut Choice,
    uncertainty: f64,
    executor: &Executor,
    prepare: PrepareOptions,
    (tensors, outer): (&[Bound], usize),
) -> Result<()> {
    let contenders: Vec<(String, Lowered, f64)> = choice
        .contenders(uncertainty)
        .map(|estimate| {
            let seconds = estimate.expected.seconds();
            (
                estimate.name().to_owned(),
                estimate.lowered.clone(),
                seconds,
            )
        })
        .collect();
    if contenders.len() < 2 {
        return Ok(());
    }
    let inputs = tensors
        .iter()
        .filter(|tensor| !tensor.is_written())
        .map(|tensor| Ok((tensor.name().to_owned(), tensor.part(0, outer)?)))
        .collect::<Result<Bindings>>()?;
    let (mut names, mut plans, mut expected) = (Vec::new(), Vec::new(), 0.0);
    for (name, lowered, seconds) in contenders {
        if let Some(plan) = bind(executor, &lowered, prepare, &inputs)? {
            names.push(name);
            plans.push(plan);
            expected += seconds;
        }
    }
    if plans.len() >= 2 {
        let samples = (TIME / 2.0 / expected) as usize;
        let times = executor.time_in_turn(plans, samples.clamp(SAMPLES.0, SAMPLES.1))?;
        let measured: Vec<_> = names.into_iter().zip(times).collect();
        choice.decide(&measured);
    }
    Ok(())
}

/// The plan of `lowered`; `None` where some rank has no memory for it.
fn bind(
    executor: &Executor,
    lowered: &Lowered,
    prepare: PrepareOptions,
    inputs: &Bindings,
) -> Result<Option<Plan>> {
    let plan = executor
        .prepare(lowered.program(), &lowered.parameters, prepare)
        .and_then(|prepared| prepared.bind(inputs));
    let outcome = match &plan {
        Ok(_) => Outcome::Bound,
        Err(error) => match error.kind() {
            ErrorKind::OutOfMemory | ErrorKind::PeerFailed => Outcome::LeftOut,
            _ => Outcome::Failed,
        },
    };
    if outcome == Outcome::Failed {
        // The error that says most is this rank's, whether or not the others hear of it.
        let _ = executor.all_gather(&[outcome as u8]);
        return plan.map(Some);
    }
    let outcomes = executor.all_gather(&[outcome as u8])?;
    let failed = outcomes
        .iter()
        .position(|one| *one == [Outcome::Failed as u8]);
    if let Some(rank) = failed {
        return Err(Error::new(
            ErrorKind::PeerFailed,
            format!(
                "rank {rank} could not make a plan of '{}'",
                lowered.lowering.name()
            ),
        )
        .with_operation("try lowerings")
        .with_peer(rank));
    }
    let all = outcomes.iter().all(|one| *one == [Outcome::Bound as u8]);
    Ok(plan.ok().filter(|_| all))
}

/// What became of a plan on a rank, as a byte for the others.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Outcome {
    Bound,
    LeftOut,
    Failed,
}

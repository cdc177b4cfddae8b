//! Trials: times candidate lowerings on the machine.

use super::Choice;
use super::operands::BoundOperands;
use crate::error::{Error, ErrorKind, Result};
use crate::program::lower::Lowered;
use crate::program::{Bindings, Executor, Plan, PrepareOptions};

/// Total seconds of a trial's runs, unless the minimum number of samples takes longer.
const TIME: f64 = 0.2;

/// Minimum and maximum runs of each lowering and submission method.
const SAMPLES: (usize, usize) = (5, 25);

/// Decides `choice` among the lowerings whose estimate is within `uncertainty` times the fastest: each is
/// bound to the inputs among `tensors` and to temporary outputs, and timed. Collective, and all ranks decide
/// alike. A lowering that cannot be bound for lack of memory on some rank is skipped.
pub(super) fn decide(
    choice: &mut Choice,
    uncertainty: f64,
    executor: &Executor,
    prepare: PrepareOptions,
    (tensors, outer): (&[BoundOperands], usize),
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
    // The same on every rank, since estimates come from the agreed model: none waits in a gather below.
    if contenders.len() < 2 {
        return Ok(());
    }
    let inputs = tensors
        .iter()
        // Outputs get memory of the library: a trial must not write the caller's.
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
        // Half of the time for each submission method, eager and captured.
        // By expected and not measured time, so that all ranks take as many.
        let samples = (TIME / 2.0 / expected) as usize;
        let times = executor.time_in_turn(plans, samples.clamp(SAMPLES.0, SAMPLES.1))?;
        let measured: Vec<_> = names.into_iter().zip(times).collect();
        choice.decide(&measured);
    }
    Ok(())
}

/// The plan of `lowered`; `None` if some rank lacks memory for it.
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
        Ok(_) => TrialOutcome::Bound,
        Err(error) => match error.kind() {
            // Memory ran out, here or on a peer, with several lowerings bound at once: exclude this one.
            ErrorKind::OutOfMemory | ErrorKind::PeerFailed => TrialOutcome::LeftOut,
            _ => TrialOutcome::Failed,
        },
    };
    if outcome == TrialOutcome::Failed {
        // This rank's own error is the most informative, whether or not the gather succeeds.
        let _ = executor.all_gather(&[outcome as u8]);
        return plan.map(Some);
    }
    let outcomes = executor.all_gather(&[outcome as u8])?;
    let failed = outcomes
        .iter()
        .position(|one| *one == [TrialOutcome::Failed as u8]);
    if let Some(rank) = failed {
        return Err(Error::new(
            ErrorKind::PeerFailed,
            format!(
                "rank {rank} could not create a plan for '{}'",
                lowered.lowering.name()
            ),
        )
        .with_operation("try lowerings")
        .with_peer(rank));
    }
    // A lowering that one rank lacks cannot run anywhere.
    let all = outcomes
        .iter()
        .all(|one| *one == [TrialOutcome::Bound as u8]);
    Ok(plan.ok().filter(|_| all))
}

/// Result of binding on a rank, encoded as a byte.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum TrialOutcome {
    Bound,
    LeftOut,
    Failed,
}

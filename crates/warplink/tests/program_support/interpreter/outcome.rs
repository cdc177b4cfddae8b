//! Outcomes of plays, and evidence from several of them.

use std::collections::BTreeSet;
use std::fmt::Debug;

/// An error of an access or a signal, whatever the values. Memory is a tensor, or scratch behind all tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// A rank's memory is read that nothing wrote in this run or, of scratch that persists, ever.
    UnwrittenRead { rank: usize, memory: usize },
    /// A rank's memory is accessed after it was deallocated.
    Deallocated { rank: usize, memory: usize },
    /// A rank's output has a part that nothing wrote.
    UnwrittenOutput { rank: usize, memory: usize },
    /// A rank's input is written.
    InputWritten { rank: usize, memory: usize },
    /// A signal to a rank overwrites a later one.
    SignalBackwards { rank: usize },
    /// A signal to a rank is waited for in another run than that in which it was sent.
    OutlivingSignal { rank: usize },
    /// A signal to a rank is never waited for.
    LostSignal { rank: usize },
    /// The caller's stream went on before another stream of the rank was done.
    LeftOver { rank: usize },
    /// A rank reads an integer that is out of its range, or with which its lane breaks a rule.
    OutOfRange { rank: usize, rule: &'static str },
    /// A rank finds other words than it expects.
    Disagreement { rank: usize },
}

/// How a play ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// Nobody could take a step, and not everybody was done.
    pub(crate) stuck: bool,
    /// The outputs of each run and rank.
    pub(crate) outputs: Vec<Vec<f64>>,
    /// All that was stored in each element of the outputs of each rank, in order, where that is kept.
    pub(crate) stored: Vec<Vec<Vec<f64>>>,
    /// Stands for the order of all accesses to the same cells.
    pub(crate) order: u64,
    /// Faults that occur for any values.
    pub(crate) faults: BTreeSet<Fault>,
}

/// The outputs of an accepted program by several schedules, which must not matter. `partly` allows some of an output to be
/// left unwritten.
///
/// # Errors
/// A fault that one of the schedules shows.
pub(crate) fn agreed<S: Debug>(
    plays: impl Iterator<Item = (S, Outcome)>,
    partly: bool,
) -> Result<Vec<Vec<f64>>, String> {
    let mut first: Option<Outcome> = None;
    for (schedule, outcome) in plays {
        let wrong = |what: &str| Err(format!("accepted, but {what}: {schedule:?}"));
        if outcome.stuck {
            return wrong("hangs");
        }
        let allowed = |fault: &&Fault| partly && matches!(fault, Fault::UnwrittenOutput { .. });
        if let Some(fault) = outcome.faults.iter().find(|fault| !allowed(fault)) {
            return wrong(&format!("{fault:?}"));
        }
        match &first {
            None => first = Some(outcome),
            Some(first) if !are_alike(&first.outputs, &outcome.outputs) => {
                return wrong("gives other values");
            }
            Some(first) if first.order != outcome.order => {
                return wrong("accesses memory in another order");
            }
            Some(_) => {}
        }
    }
    Ok(first.map(|first| first.outputs).unwrap_or_default())
}

/// Two plays that differ in their accesses to the same memory, or in their end. `garbage` says whether outputs that are
/// no numbers show a race as well.
///
/// # Errors
/// Where all of them are the same.
pub(crate) fn race(plays: impl Iterator<Item = Outcome>, garbage: bool) -> Result<String, String> {
    let mut first: Option<Outcome> = None;
    let mut shown = None;
    for (tried, outcome) in plays.enumerate() {
        let Some(first) = &first else {
            first = Some(outcome);
            continue;
        };
        if first.stuck != outcome.stuck {
            return Ok("race: hangs".to_owned());
        }
        let alike = are_alike(&first.outputs, &outcome.outputs);
        let mut values = outcome.outputs.iter().flatten();
        let spoilt = garbage && values.any(|value| value.is_nan());
        if !first.stuck && (!alike || spoilt) {
            return Ok("race: wrong values".to_owned());
        }
        if first.order != outcome.order {
            shown = Some("race: another order of accesses".to_owned());
        }
        if shown.is_some() && tried >= 24 {
            break;
        }
    }
    // What is always overwritten before it is read is waited for in every order.
    let hangs = first.is_some_and(|first| first.stuck);
    let shown = shown.or_else(|| hangs.then(|| "race: hangs".to_owned()));
    shown.ok_or_else(|| "every order gives the same".to_owned())
}

/// Whether outputs are the same; what is no number is like any other.
fn are_alike(a: &[Vec<f64>], b: &[Vec<f64>]) -> bool {
    let same = |(a, b): (&f64, &f64)| a == b || (a.is_nan() && b.is_nan());
    a.iter().flatten().zip(b.iter().flatten()).all(same)
}

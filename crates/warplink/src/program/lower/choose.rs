//! Selection of a lowering and its open parameters by predicted time.

use super::{Lowered, Lowering, Problem};
use crate::error::{Error, Result};
use crate::program::cost::{Bound, HardwareModel, SimulateOptions, Submission, simulate_with};
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::parameters::Parameters;
use crate::program::rank_program::RankProgram;
use crate::program::times::Times;
use crate::program::unroll::unroll_or_diagnose;
use std::fmt;

/// Fraction of the collective's time that another lowering must stay below. Smaller differences may be errors of the
/// model or of the measurement, and the collective needs no exchange.
const ADVANTAGE: f64 = 0.97;

/// Maximum operations of all ranks of a considered lowering. An overlapped one has a step for each pair of ranks, so
/// the time to estimate it grows with the square of the ranks: to seconds at this limit.
const MAX_OPERATIONS: usize = 1 << 18;

/// Predicted and measured cost of a lowering.
#[derive(Clone, Debug)]
pub struct Estimate {
    /// The lowering, and the values of its parameters.
    pub lowered: Lowered,
    /// Best values of its open parameters.
    pub chosen: Parameters,
    /// Predicted by the cost model.
    pub expected: Times,
    /// Measured on the machine, if it was tried.
    pub measured: Option<Times>,
    /// Resource that bounds the expected time.
    pub bound: Bound,
    /// Whether it needs the collective engine.
    pub needs_engine: bool,
}

impl Estimate {
    /// Name of the lowering.
    pub fn name(&self) -> &str {
        self.lowered.lowering.name()
    }
}

/// Basis of the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Only one lowering was allowed.
    Request,
    /// Fastest by the cost model.
    Model,
    /// Fastest on the machine, among those that the cost model predicts close to the fastest.
    Trial,
}

/// A lowering, and the reason for its selection.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The lowering, and the values of its parameters.
    pub lowered: Lowered,
    /// Basis of the decision.
    pub decision: Decision,
    /// Every lowering that fits the problem, in ascending order of predicted time.
    pub estimates: Vec<Estimate>,
    /// Description of the problem.
    pub subject: String,
}

impl Choice {
    /// Name of the lowering.
    pub fn name(&self) -> &str {
        self.lowered.lowering.name()
    }

    /// Whether no other is faster, by the times that decided.
    fn is_fastest(&self) -> bool {
        let times = self.estimates.iter().filter_map(|estimate| {
            let seconds = match self.decision {
                Decision::Trial => estimate.measured?.seconds(),
                _ => estimate.expected.seconds(),
            };
            Some((estimate, seconds))
        });
        let fastest = times.min_by(|a, b| a.1.total_cmp(&b.1));
        // By name, since estimates are one per lowering.
        fastest.is_none_or(|(estimate, _)| estimate.name() == self.name())
    }

    /// Whether the lowering needs the collective engine.
    pub fn needs_engine(&self) -> bool {
        self.estimates.iter().any(|estimate| {
            estimate.lowered.lowering == self.lowered.lowering && estimate.needs_engine
        })
    }

    /// The estimates of at most `uncertainty` times the shortest predicted time: any of them may be the fastest on
    /// the machine.
    pub(crate) fn contenders(&self, uncertainty: f64) -> impl Iterator<Item = &Estimate> {
        let shortest = self
            .estimates
            .first()
            .map_or(0.0, |first| first.expected.seconds());
        self.estimates
            .iter()
            // The list is sorted: its first is the shortest.
            .filter(move |estimate| estimate.expected.seconds() <= shortest * uncertainty)
    }

    /// Decides by times measured on the machine instead; times are by name of the lowering.
    pub(crate) fn decide(&mut self, measured: &[(String, Times)]) {
        for (name, times) in measured {
            let estimate = self
                .estimates
                .iter_mut()
                .find(|estimate| estimate.name() == name);
            if let Some(estimate) = estimate {
                estimate.measured = Some(*times);
            }
        }
        let tried = self.estimates.iter().filter_map(|estimate| {
            let seconds = estimate.measured?.seconds();
            Some((estimate, seconds))
        });
        if let Some(taken) = preferred(tried) {
            self.lowered = taken.lowered.clone();
            self.decision = Decision::Trial;
        }
    }
}

/// The fastest, or the one that needs the collective engine if that is almost as fast.
fn preferred<'a>(
    estimates: impl Iterator<Item = (&'a Estimate, f64)> + Clone,
) -> Option<&'a Estimate> {
    let fastest = estimates.clone().min_by(|a, b| a.1.total_cmp(&b.1))?;
    let close = |(estimate, seconds): &(&Estimate, f64)| {
        estimate.needs_engine && seconds * ADVANTAGE <= fastest.1
    };
    Some(estimates.clone().find(close).unwrap_or(fastest).0)
}

impl fmt::Display for Choice {
    /// Explanation: a line for the decision and one for each lowering.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The engine is preferred if it is almost as fast.
        let (rank, reason) = if self.is_fastest() {
            ("the fastest", "")
        } else {
            (
                "almost as fast as the fastest",
                ", and needs no exchange of handles",
            )
        };
        let why = match self.decision {
            Decision::Request => "as requested".to_owned(),
            Decision::Model => format!("{rank} by the cost model{reason}"),
            Decision::Trial => format!("{rank} when measured{reason}"),
        };
        writeln!(f, "{}: {}, {why}", self.subject, self.name())?;
        for estimate in &self.estimates {
            write!(
                f,
                "  {:12} {:10.1} us eager, {:10.1} us captured, bound by {}",
                estimate.name(),
                estimate.expected.eager * 1e6,
                estimate.expected.captured * 1e6,
                estimate.bound
            )?;
            if let Some(measured) = estimate.measured {
                let (eager, captured) = (measured.eager * 1e6, measured.captured * 1e6);
                write!(
                    f,
                    "; measured {eager:.1} us eager, {captured:.1} us captured"
                )?;
            }
            if estimate.chosen != Parameters::new() {
                write!(f, " ({})", estimate.chosen)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// Chooses among `lowerings`, for `world` ranks with `streams` streams in the pool.
///
/// Each is simulated with every combination of its open parameters. Of equally fast ones, the first is taken; one
/// that needs the collective engine is taken if nothing is faster by more than the model's error.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the problem does not suit the world, or no
/// lowering does; errors of [`simulate_with`].
pub fn choose(
    problem: &impl Problem,
    lowerings: &[Lowering],
    world: usize,
    streams: usize,
    model: &HardwareModel,
) -> Result<Choice> {
    let given = problem.parameters(world)?;
    let (mut estimates, mut refusal): (Vec<Estimate>, _) = (Vec::new(), None);
    for lowering in lowerings {
        let mut best: Option<Estimate> = None;
        let given = lowering.taken(&given);
        for chosen in lowering.combinations(&given)? {
            let parameters = given.clone().and(&chosen);
            let ranks = match unroll_all(lowering, world, streams, &parameters) {
                Ok(ranks) => ranks,
                // It does not fit these sizes.
                Err(diagnostic) if diagnostic.kind == DiagnosticKind::Requirement => {
                    // Kept as help, for the case that no combination fits.
                    refusal = Some(diagnostic);
                    continue;
                }
                Err(diagnostic) => return Err(diagnostic.into()),
            };
            // Both, since a caller may run the plan either way.
            let [eager, captured] = [Submission::Eager, Submission::Captured].map(|submission| {
                let options = SimulateOptions {
                    submission,
                    ..SimulateOptions::default()
                };
                simulate_with(&ranks, model, options)
            });
            let (eager, captured) = (eager?, captured?);
            let estimate = Estimate {
                lowered: Lowered {
                    lowering: lowering.clone(),
                    parameters,
                    streams,
                },
                chosen,
                expected: Times {
                    eager: eager.seconds,
                    captured: captured.seconds,
                },
                measured: None,
                bound: eager.bound,
                // On any rank: joining the engine is collective.
                needs_engine: ranks.iter().any(RankProgram::uses_engine),
            };
            if best
                .as_ref()
                // Strictly less: of equal ones the first stays, so that all ranks choose alike.
                .is_none_or(|best| estimate.expected.seconds() < best.expected.seconds())
            {
                best = Some(estimate);
            }
        }
        estimates.extend(best);
    }
    // Stable: equal times stay in the order of the lowerings, the same on every rank.
    estimates.sort_by(|a, b| a.expected.seconds().total_cmp(&b.expected.seconds()));
    let expected = estimates
        .iter()
        .map(|estimate| (estimate, estimate.expected.seconds()));
    let Some(taken) = preferred(expected) else {
        let error = Error::invalid(format!("no lowering fits {}", problem.subject()));
        return Err(match refusal {
            Some(diagnostic) => error.with_help(diagnostic.to_string()),
            None => error.with_help("allow at least one lowering"),
        });
    };
    Ok(Choice {
        lowered: taken.lowered.clone(),
        decision: if lowerings.len() == 1 {
            Decision::Request
        } else {
            Decision::Model
        },
        subject: format!(
            "{} on {world} ranks (model: {})",
            problem.subject(),
            model.name
        ),
        estimates,
    })
}

/// Fills in `lowering` for `problem`, with the first applicable alternatives of its open parameters.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the problem does not suit the world or the
/// lowering.
pub fn lower(
    problem: &impl Problem,
    lowering: &Lowering,
    world: usize,
    streams: usize,
) -> Result<Lowered> {
    let given = lowering.taken(&problem.parameters(world)?);
    let mut refusal = None;
    for chosen in lowering.combinations(&given)? {
        let parameters = given.clone().and(&chosen);
        match unroll_all(lowering, world, streams, &parameters) {
            Ok(_) => {
                return Ok(Lowered {
                    lowering: lowering.clone(),
                    parameters,
                    streams,
                });
            }
            Err(diagnostic) => refusal = Some(diagnostic),
        }
    }
    Err(refusal.map_or_else(|| Error::invalid("no alternative"), Error::from))
}

fn unroll_all(
    lowering: &Lowering,
    world: usize,
    streams: usize,
    parameters: &Parameters,
) -> Result<Vec<RankProgram>, Diagnostic> {
    let mut ranks = Vec::with_capacity(world);
    for rank in 0..world {
        let program = unroll_or_diagnose(lowering.program(), rank, world, streams, parameters)?;
        // Ranks have similar numbers of operations, so the first one is representative.
        let each = program.operations.len();
        if each.saturating_mul(world) > MAX_OPERATIONS {
            let message = format!(
                "'{}' has {each} operations on each of {world} ranks; expected at most {MAX_OPERATIONS} on all of them",
                lowering.name()
            );
            return Err(Diagnostic::new(
                // As a requirement, so that `choose` passes over the lowering instead of failing.
                DiagnosticKind::Requirement,
                message,
                Vec::new(),
            ));
        }
        ranks.push(program);
    }
    Ok(ranks)
}

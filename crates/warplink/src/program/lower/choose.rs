//! Which lowering is used: the one that the cost model finds fastest, with what it leaves open.

use super::{Lowered, Lowering, Problem};
use crate::error::{Error, Result};
use crate::program::cost::{Bound, HardwareModel, SimulateOptions, Submission, simulate_with};
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::parameters::{Parameters, Value};
use crate::program::rank_program::RankProgram;
use crate::program::unroll::unroll_or_diagnose;
use std::fmt;

/// How much faster than the engine's collective another lowering has to be in the model. What two
/// simulations differ by less may be the model's error, and the collective needs no exchange.
const ADVANTAGE: f64 = 0.98;

/// The most combinations of alternatives of one lowering that are simulated.
const MAX_COMBINATIONS: usize = 256;

/// What a lowering is expected to take.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// The lowering.
    pub lowering: Lowering,
    /// What it left open, and is best with.
    pub chosen: Parameters,
    /// Seconds from start to end of an eager run.
    pub eager: f64,
    /// Seconds from start to end of a launch as one graph.
    pub captured: f64,
    /// What most of that time is spent on.
    pub bound: Bound,
    /// Whether it needs the collective engine.
    pub needs_engine: bool,
}

impl Estimate {
    /// Seconds of the faster submission, which is what lowerings are compared by.
    pub fn seconds(&self) -> f64 {
        self.eager.min(self.captured)
    }
}

/// A lowering, and why.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The lowering, and the values of its parameters.
    pub lowered: Lowered,
    /// Whether it is the only one that was allowed.
    pub forced: bool,
    /// Every lowering that fits the problem, the fastest first.
    pub estimates: Vec<Estimate>,
    /// What is computed, and on what.
    pub subject: String,
}

impl Choice {
    /// The name of the lowering.
    pub fn name(&self) -> &str {
        self.lowered.lowering.name()
    }

    /// Whether the lowering needs the collective engine.
    pub fn needs_engine(&self) -> bool {
        self.estimates
            .iter()
            .any(|estimate| estimate.lowering == self.lowered.lowering && estimate.needs_engine)
    }
}

impl fmt::Display for Choice {
    /// The explanation: a line for the decision and one for each lowering.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = if self.forced {
            "as requested"
        } else {
            "the fastest in the cost model"
        };
        writeln!(f, "{}: {}, {why}", self.subject, self.name())?;
        for estimate in &self.estimates {
            write!(
                f,
                "  {:12} {:10.1} us eager, {:10.1} us captured, bound by {}",
                estimate.lowering.name(),
                estimate.eager * 1e6,
                estimate.captured * 1e6,
                estimate.bound
            )?;
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
/// Each is simulated with every combination of what it leaves open. Where they are equally fast, the
/// earlier one is taken; one that needs the collective engine is taken where nothing is faster by
/// more than the model's error.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the problem does not suit
/// the world, or no lowering does; what [`simulate_with`] says.
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
        for chosen in combinations(lowering, &given)? {
            let parameters = merged(&given, &chosen);
            let ranks = match unroll_all(lowering, world, streams, &parameters) {
                Ok(ranks) => ranks,
                // It does not fit these sizes.
                Err(diagnostic) if diagnostic.kind == DiagnosticKind::Requirement => {
                    refusal = Some(diagnostic);
                    continue;
                }
                Err(diagnostic) => return Err(diagnostic.into()),
            };
            let [eager, captured] = [Submission::Eager, Submission::Captured].map(|submission| {
                let options = SimulateOptions {
                    submission,
                    ..SimulateOptions::default()
                };
                simulate_with(&ranks, model, options)
            });
            let (eager, captured) = (eager?, captured?);
            let estimate = Estimate {
                lowering: lowering.clone(),
                chosen,
                eager: eager.seconds,
                captured: captured.seconds,
                bound: eager.bound,
                needs_engine: ranks.iter().any(RankProgram::needs_engine),
            };
            if best
                .as_ref()
                .is_none_or(|best| estimate.seconds() < best.seconds())
            {
                best = Some(estimate);
            }
        }
        estimates.extend(best);
    }
    estimates.sort_by(|a, b| a.seconds().total_cmp(&b.seconds()));
    let Some(fastest) = estimates.first() else {
        let error = Error::invalid(format!("no lowering fits {}", problem.subject()));
        return Err(match refusal {
            Some(diagnostic) => error.with_help(diagnostic.to_string()),
            None => error.with_help("allow at least one lowering"),
        });
    };
    let close = |estimate: &&Estimate| {
        estimate.needs_engine && estimate.seconds() * ADVANTAGE <= fastest.seconds()
    };
    let taken = estimates.iter().find(close).unwrap_or(fastest);
    Ok(Choice {
        lowered: Lowered {
            lowering: taken.lowering.clone(),
            parameters: merged(&given, &taken.chosen),
            streams,
        },
        forced: lowerings.len() == 1,
        subject: format!("{} on {world} ranks of {}", problem.subject(), model.name),
        estimates,
    })
}

/// `lowering` for `problem`, with the first alternatives that fit of what it leaves open.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the problem does not suit
/// the world or the lowering.
pub fn lower(
    problem: &impl Problem,
    lowering: &Lowering,
    world: usize,
    streams: usize,
) -> Result<Lowered> {
    let given = problem.parameters(world)?;
    let mut refusal = None;
    for chosen in combinations(lowering, &given)? {
        let parameters = merged(&given, &chosen);
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
    (0..world)
        .map(|rank| unroll_or_diagnose(lowering.program(), rank, world, streams, parameters))
        .collect()
}

/// Every combination of alternatives for the parameters that are not given.
fn combinations(lowering: &Lowering, given: &Parameters) -> Result<Vec<Parameters>> {
    let mut all = vec![Parameters::new()];
    for parameter in &lowering.program().parameters {
        if given.value(&parameter.name).is_some() {
            continue;
        }
        let alternatives = parameter.kind.alternatives();
        if all.len().saturating_mul(alternatives.len()) > MAX_COMBINATIONS {
            return Err(Error::invalid(format!(
                "lowering '{}' leaves more than {MAX_COMBINATIONS} combinations open",
                lowering.name()
            ))
            .with_help("list fewer alternatives"));
        }
        let with = |combination: &Parameters| {
            let combination = combination.clone();
            let name = parameter.name.clone();
            alternatives
                .iter()
                .map(move |value: &Value| combination.clone().with(name.clone(), value.clone()))
                .collect::<Vec<_>>()
        };
        all = all.iter().flat_map(with).collect();
    }
    Ok(all)
}

fn merged(given: &Parameters, chosen: &Parameters) -> Parameters {
    let mut merged = given.clone();
    for (name, value) in chosen.iter() {
        merged.insert(name, value.clone());
    }
    merged
}

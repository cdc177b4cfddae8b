//! Whether the verifier's word on kernels is what happens: of an accepted program, that every order gives the
//! same; of a refused one, that it hangs, that an order of accesses is left open, or that a rule is broken.

use super::play::{Hold, Schedule, StepId};
use super::sample::Sample;
use super::stage::Stage;
use crate::program_support::evidence::explained;
use crate::program_support::interpreter::{Fault, Random, SOME_VALUES, agreed, race};
use crate::program_support::meaning::Meaning;
use warplink::program::evaluate::Evaluator;
use warplink::program::{Diagnostic, DiagnosticKind, RankProgram, unroll, verify};

/// How many orders of an accepted program are played.
const ORDERS: u64 = 12;

/// How many random orders are tried where those that the diagnostic suggests show nothing.
const TRIES: u64 = 300;

/// How many choices of the integers that lanes read are tried where one shows nothing.
const OTHER_VALUES: u64 = 20;

/// How many runs of an accepted program are played.
pub(crate) const RUNS: usize = 6;

/// How many runs of a refused one: as many as are followed of a sample with the longest period, which is 12.
const RUNS_OF_REFUSED: usize = 26;

/// A verdict that is right.
#[derive(Clone, Debug)]
pub(crate) struct Shown {
    /// The verdict and what shows it, for counting.
    pub(crate) class: String,
    /// The outputs of an accepted program, by run and rank.
    pub(crate) outputs: Option<Vec<Vec<f64>>>,
}

/// Shows that the verdict on `sample` is right.
///
/// # Errors
/// How the verdict and what happens disagree.
pub(crate) fn check(sample: &Sample) -> Result<Shown, String> {
    let (program, world, parameters) = (&sample.program, sample.world, &sample.parameters);
    let verdict = verify(program, world, 1, parameters);
    let refused = |class: String| Shown {
        class,
        outputs: None,
    };
    let unrolled: Result<Vec<RankProgram>, _> = (0..world)
        .map(|rank| unroll(program, rank, world, 1, parameters))
        .collect();
    let ranks = match (unrolled, &verdict) {
        (Ok(ranks), _) => ranks,
        (Err(_), Err(diagnostics)) => {
            return Ok(refused(format!("refused, rule: {}", diagnostics[0].kind)));
        }
        (Err(error), Ok(_)) => return Err(format!("accepted, but not unrolled: {error}")),
    };
    let runs = match verdict {
        Ok(_) => RUNS,
        Err(_) => RUNS_OF_REFUSED,
    };
    let staged = |values: u64| Stage::new(&ranks, runs, values);
    let stage = match (staged(SOME_VALUES), &verdict) {
        (Ok(stage), _) => stage,
        (Err(diagnostic), Err(_)) => {
            return Ok(refused(format!("refused, rule: {}", diagnostic.kind)));
        }
        (Err(diagnostic), Ok(_)) => return Err(format!("accepted, but {diagnostic}")),
    };
    // Further values, where lanes read any.
    let others = (0..OTHER_VALUES).filter(|values| *values != SOME_VALUES && stage.reads_values);
    match verdict {
        Ok(_) => {
            let partly = stage.play(&Schedule::new(0)).faults.into_iter();
            let mut partly = partly.filter(|_| stage.reads_values);
            if partly.any(|fault| matches!(fault, Fault::UnwrittenOutput { .. })) {
                // What depends on values may leave the rest of an output as it is.
                return Ok(refused("accepted, partly written".to_owned()));
            }
            for values in others.take(3) {
                let stage = staged(values).map_err(|error| format!("accepted, but {error}"))?;
                Case::of(&ranks, &stage).runs()?;
            }
            let outputs = Case::of(&ranks, &stage).runs()?;
            let evaluator = Evaluator::new(program, world, 1, parameters)
                .map_err(|error| format!("accepted, but not evaluated: {error}"))?;
            Meaning::of(&evaluator, 1, &outputs)?;
            Ok(Shown {
                class: "accepted".to_owned(),
                outputs: Some(outputs),
            })
        }
        Err(diagnostics) => {
            let how = explained(&diagnostics, |diagnostic| {
                let first = Case::of(&ranks, &stage).shows(diagnostic);
                let shown = |values: u64| match staged(values) {
                    Ok(stage) => Case::of(&ranks, &stage).shows(diagnostic).ok(),
                    // A rule that lanes break where they read these values.
                    Err(rule) if rule.kind == diagnostic.kind => {
                        Some(format!("rule: {}", rule.kind))
                    }
                    Err(_) => None,
                };
                first.or_else(|how| others.clone().find_map(shown).ok_or(how))
            })?;
            Ok(refused(format!("refused, {how}")))
        }
    }
}

struct Case<'a> {
    ranks: &'a [RankProgram],
    stage: &'a Stage<'a>,
}

impl<'a> Case<'a> {
    const fn of(ranks: &'a [RankProgram], stage: &'a Stage<'a>) -> Self {
        Self { ranks, stage }
    }

    /// Plays an accepted program in several orders, which must not matter; its outputs.
    fn runs(&self) -> Result<Vec<Vec<f64>>, String> {
        agreed((0..ORDERS).map(|seed| {
            let schedule = Schedule::new(seed).holding(self.some_holds(seed));
            let outcome = self.stage.play(&schedule);
            (schedule, outcome)
        }))
    }

    /// Some steps, launches or ranks to hold back.
    fn some_holds(&self, seed: u64) -> Vec<Hold> {
        let mut random = Random::new(seed ^ 0x901d);
        let mut holds = Vec::new();
        for _ in 0..random.below(4) {
            let rank = random.below(self.ranks.len());
            let launch = random.below(self.stage.launches.len());
            let lanes = &self.stage.launches[launch][rank];
            let lane = random.below(lanes.len());
            let id = StepId {
                rank,
                launch,
                lane,
                step: random.below(lanes[lane].len()),
            };
            holds.push(match random.below(5) {
                0 => Hold::Launch(rank),
                1 => Hold::Rank(rank),
                2 => Hold::Step(id),
                _ => Hold::Stores(id),
            });
        }
        holds
    }

    /// Shows that a diagnostic is right; how.
    fn shows(&self, diagnostic: &Diagnostic) -> Result<String, String> {
        use DiagnosticKind as Kind;
        match diagnostic.kind {
            Kind::Deadlock => {
                let ends = (0..ORDERS).find(|seed| !self.stage.play(&Schedule::new(*seed)).stuck);
                match ends {
                    None => Ok("deadlock".to_owned()),
                    Some(seed) => Err(format!("order {seed} ends")),
                }
            }
            Kind::Race => match self.race(diagnostic) {
                // No order may show it where nobody reads them, or where both say the same.
                Err(_) if self.stage.stores_packets_twice() => {
                    Ok("rule: packets stored twice in a launch".to_owned())
                }
                Err(_) if self.stage.has_crossed_signals() => {
                    Ok("rule: two lanes signal one".to_owned())
                }
                shown => shown,
            },
            Kind::LostSignal => self.fault(diagnostic, |fault| {
                matches!(
                    fault,
                    Fault::OutlivingSignal { .. } | Fault::LostSignal { .. }
                )
            }),
            Kind::UnwrittenRead => self.fault(diagnostic, |fault| {
                matches!(fault, Fault::UnwrittenRead { .. })
            }),
            Kind::UnwrittenOutput => self.fault(diagnostic, |fault| {
                matches!(fault, Fault::UnwrittenOutput { .. })
            }),
            Kind::InputWritten => self.fault(diagnostic, |fault| {
                matches!(fault, Fault::InputWritten { .. })
            }),
            Kind::OutOfBounds => self.fault(diagnostic, |fault| {
                matches!(fault, Fault::OutOfRange { .. })
            }),
            Kind::Mismatch => self.fault(diagnostic, |fault| {
                matches!(fault, Fault::Disagreement { .. })
            }),
            Kind::Malformed if self.stage.is_unsteady() => {
                Ok("rule: accesses that depend on the epoch".to_owned())
            }
            kind => Err(format!("no rule of kernels is {kind}")),
        }
    }

    fn fault(
        &self,
        diagnostic: &Diagnostic,
        is: impl Fn(&Fault) -> bool,
    ) -> Result<String, String> {
        let mut orders = self.orders(diagnostic);
        let shows = orders.any(|schedule| self.stage.play(&schedule).faults.iter().any(&is));
        let shown = shows.then(|| diagnostic.kind.to_string());
        shown.ok_or_else(|| "no order shows it".to_owned())
    }

    /// Orders that are likely to show a diagnostic, and then random ones.
    fn orders(&self, diagnostic: &Diagnostic) -> impl Iterator<Item = Schedule> {
        let mut held: Vec<Vec<Hold>> = Vec::new();
        for place in &diagnostic.places {
            let launch = place.site.indices.iter().rev();
            let launch = launch.clone().find(|(name, _)| &**name == "launch");
            let launch = launch.map_or(0, |(_, launch)| *launch as usize);
            let steps: Vec<StepId> = self
                .stage
                .steps_at(launch, place.rank, &place.site)
                .into_iter()
                .map(|(lane, step)| StepId {
                    rank: place.rank,
                    launch,
                    lane,
                    step,
                })
                .collect();
            held.push(steps.iter().copied().map(Hold::Stores).collect());
            held.push(steps.iter().copied().map(Hold::Step).collect());
        }
        held.extend((0..self.ranks.len()).map(|rank| vec![Hold::Launch(rank)]));
        held.extend((0..self.ranks.len()).map(|rank| vec![Hold::Rank(rank)]));
        let directed = held.into_iter().flat_map(|holds| {
            (0..4).map(move |seed| Schedule::new(seed).holding(holds.iter().copied()))
        });
        let random = (0..TRIES).map(|seed| Schedule::new(seed).holding(self.some_holds(seed)));
        directed.chain(random)
    }

    /// Two orders that differ in their accesses to the same memory, or in their end.
    fn race(&self, diagnostic: &Diagnostic) -> Result<String, String> {
        let orders = self.orders(diagnostic);
        race(orders.map(|schedule| self.stage.play(&schedule)), false)
    }
}

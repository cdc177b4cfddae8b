//! Whether the verifier's word on kernels is what happens: of an accepted program, that every order gives the
//! same; of a refused one, that it hangs, that an order of accesses is left open, or that a rule is broken.

use super::beyond::{Beyond, beyond};
use super::play::{Hold, Schedule, StepId};
use super::sample::Sample;
use super::stage::Stage;
use crate::program_support::evidence::explained;
use crate::program_support::interpreter::{
    Choice, Fault, Outcome, Random, SOME_VALUES, agreed, mix, race,
};
use crate::program_support::meaning::Meaning;
use std::iter;
use std::ops::Range;
use warplink::program::evaluate::Evaluator;
use warplink::program::{Diagnostic, DiagnosticKind, RankProgram, unroll, verify};

/// How many orders of an accepted program are played.
const ORDERS: u64 = 12;

/// How many orders of an accepted program are played with each further choice of the integers that lanes read.
const ORDERS_OF_OTHERS: u64 = 3;

/// How many random orders are tried where those that the diagnostic suggests show nothing.
const TRIES: u64 = 300;

/// How many further choices of integers are played of an accepted program: at least, and if its turns are cheap.
const OTHERS: Range<usize> = 6..20;

/// At most how many of them while no choice has written every element of the outputs: those of all runs and ranks that fit
/// one another may be rare.
const MAX_OTHERS: usize = 1000;

/// How many turns of the interpreter an accepted program may take after the least choices.
const TURNS: u64 = 30_000;

/// How many turns a diagnostic may take until a choice of integers and an order show it.
const TURNS_OF_REFUSED: u64 = 3_000_000;

/// How many choices are tried with few orders, and once more, before random ones follow.
const USUAL: usize = 24;

/// How many runs of an accepted program are played.
pub(crate) const RUNS: usize = 6;

/// A verdict that is right.
#[derive(Clone, Debug)]
pub(crate) struct Shown {
    /// The verdict and what shows it, for counting.
    pub(crate) class: String,
    /// The outputs of an accepted program that the device runs with the same inputs, by run and rank; no numbers where
    /// nothing is written.
    pub(crate) outputs: Option<Vec<Vec<f64>>>,
    /// An integer that ends a launch of an accepted program.
    pub(crate) beyond: Option<Beyond>,
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
        beyond: None,
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
        // As many as the verifier follows, which has to show it there.
        Err(_) => 2 * Stage::period(&ranks) + 2,
    };
    let stage = match (Stage::new(&ranks, runs, SOME_VALUES), &verdict) {
        (Ok(stage), _) => stage,
        (Err(diagnostic), Err(_)) => {
            return Ok(refused(format!("refused, rule: {}", diagnostic.kind)));
        }
        (Err(diagnostic), Ok(_)) => return Err(format!("accepted, but {diagnostic}")),
    };
    // The library binds inputs that lanes read in copies alone to anything.
    let bounded = Some(&stage).filter(|stage| stage.reads_values);
    let bounded = bounded.and_then(Stage::bounded);
    let as_bound = bounded.is_none();
    let ranks = bounded.as_ref().unwrap_or(&ranks);
    let stage = Stage::new(ranks, runs, SOME_VALUES).map_err(|error| error.to_string())?;
    let wide = Some(&stage).filter(|stage| stage.reads_values);
    let wide = wide.and_then(Stage::widened);
    let wide = wide
        .as_deref()
        .map(|ranks| Stage::new(ranks, runs, SOME_VALUES));
    let wide = wide.transpose().map_err(|error| error.to_string())?;
    match verdict {
        Ok(_) => {
            let evaluator = Evaluator::new(program, world, 1, parameters)
                .map_err(|error| format!("accepted, but not evaluated: {error}"))?;
            let choice = fitting(&stage, sample.seed);
            let stage = stage.with(choice);
            let outputs = Case::of(ranks, &stage).runs(0..ORDERS)?;
            Meaning::of((&evaluator, ranks), 1, (choice, &outputs))?;
            let mut beyond_bounds = None;
            if stage.reads_values {
                let wide = wide.as_ref();
                others(&stage, wide, sample.seed, (&evaluator, &outputs))?;
                beyond_bounds = beyond(ranks, &evaluator, sample.seed)?;
            }
            Ok(Shown {
                class: "accepted".to_owned(),
                outputs: Some(outputs).filter(|_| as_bound && choice == SOME_VALUES),
                beyond: beyond_bounds,
            })
        }
        Err(diagnostics) => {
            let how = explained(&diagnostics, |diagnostic| {
                if stage.reads_values {
                    let stage = wide.as_ref().unwrap_or(&stage);
                    return shown_by_some_values(stage, sample.seed, diagnostic);
                }
                Case::of(ranks, &stage).shows(diagnostic, (4, TRIES))
            })?;
            Ok(refused(format!("refused, {how}")))
        }
    }
}

/// The first choice of integers that fit together: one may bound another.
fn fitting(stage: &Stage<'_>, seed: u64) -> Choice {
    let mut all = iter::once(SOME_VALUES).chain(Choice::all(seed)).take(USUAL);
    all.find(|choice| !stage.reads_values || stage.with(*choice).fits())
        .unwrap_or(SOME_VALUES)
}

/// Plays an accepted program with further choices of the integers that lanes read, each of which may leave some outputs
/// unwritten; within `wide` bounds, if they differ and the choice fits together.
fn others(
    stage: &Stage<'_>,
    wide: Option<&Stage<'_>>,
    seed: u64,
    (evaluator, outputs): (&Evaluator, &[Vec<f64>]),
) -> Result<(), String> {
    let world = stage.ranks.len();
    let mut unwritten: Vec<Vec<bool>> = vec![Vec::new(); world];
    let note = |unwritten: &mut Vec<Vec<bool>>, outputs: &[Vec<f64>]| {
        for (place, own) in outputs.iter().enumerate() {
            let all = &mut unwritten[place % world];
            all.resize(own.len(), true);
            all.iter_mut()
                .zip(own)
                .for_each(|(all, value)| *all &= value.is_nan());
        }
    };
    note(&mut unwritten, outputs);
    let least = stage.spent() + TURNS;
    for (number, choice) in Choice::all(seed).enumerate() {
        // Few choices may lead to a write.
        let all_written = || unwritten.iter().flatten().all(|unwritten| !unwritten);
        let few = number < OTHERS.start || (stage.spent() < least && number < OTHERS.end);
        if !few && (all_written() || number >= MAX_OTHERS) {
            break;
        }
        let first = seed % ORDERS + number as u64 * ORDERS_OF_OTHERS;
        let orders = first..first + ORDERS_OF_OTHERS;
        let with = |how: String| format!("{how}, with {choice:?}");
        let mut bounds = wide.into_iter().chain([stage]);
        let fitting = bounds.find_map(|stage| {
            let stage = stage.with(choice);
            (wide.is_none() || stage.fits()).then_some(stage)
        });
        let Some(stage) = fitting else {
            continue;
        };
        let outputs = Case::of(stage.ranks, &stage).runs(orders).map_err(with)?;
        Meaning::of((evaluator, stage.ranks), 1, (choice, &outputs)).map_err(with)?;
        note(&mut unwritten, &outputs);
    }
    let left = |(rank, own): (usize, &Vec<bool>)| {
        let at = own.iter().position(|unwritten| *unwritten)?;
        Some(format!(
            "accepted, but no integers lead to a write of element {at} of rank {rank}'s outputs"
        ))
    };
    let left = unwritten.iter().enumerate().find_map(left);
    left.map_or(Ok(()), Err)
}

/// Looks for integers and an order that show a diagnostic.
fn shown_by_some_values(
    stage: &Stage<'_>,
    seed: u64,
    diagnostic: &Diagnostic,
) -> Result<String, String> {
    use DiagnosticKind as Kind;
    // Lanes need not get that far.
    let of_text = matches!(
        diagnostic.kind,
        Kind::Malformed | Kind::OutOfBounds | Kind::Mismatch
    );
    if of_text && stage.breaks(diagnostic.kind) {
        return Ok(format!("rule: {}", diagnostic.kind));
    }
    let most = stage.spent() + TURNS_OF_REFUSED;
    let usual = || {
        [SOME_VALUES]
            .into_iter()
            .chain(Choice::all(seed))
            .take(USUAL)
    };
    let few = usual().map(|choice| (choice, (1, 2)));
    let more = usual().map(|choice| (choice, (2, 12)));
    let random = Choice::all(mix(seed)).skip(USUAL);
    let random = random.map(|choice| (choice, (1, 6)));
    let mut failed = String::new();
    for (choice, effort) in few.chain(more).chain(random) {
        let stage = stage.with(choice);
        match Case::of(stage.ranks, &stage).shows(diagnostic, effort) {
            Ok(how) => return Ok(how),
            Err(how) => failed = format!("{how}, with {choice:?}"),
        }
        if stage.spent() > most {
            break;
        }
    }
    Err(failed)
}

/// How many seeds are tried of each order that a diagnostic suggests, and how many random orders.
type Effort = (u64, u64);

struct Case<'a> {
    ranks: &'a [RankProgram],
    stage: &'a Stage<'a>,
}

impl<'a> Case<'a> {
    const fn of(ranks: &'a [RankProgram], stage: &'a Stage<'a>) -> Self {
        Self { ranks, stage }
    }

    /// Plays an accepted program in several orders, which must not matter; its outputs. What depends on values may leave
    /// some of an output as it is.
    fn runs(&self, orders: Range<u64>) -> Result<Vec<Vec<f64>>, String> {
        let plays = orders.map(|seed| {
            let schedule = Schedule::new(seed).holding(self.some_holds(seed));
            let outcome = self.stage.play(&schedule);
            (schedule, outcome)
        });
        agreed(plays, self.stage.reads_values)
    }

    /// Some steps, launches or ranks to hold back.
    fn some_holds(&self, seed: u64) -> Vec<Hold> {
        let mut random = Random::new(seed ^ 0x901d);
        let mut holds = Vec::new();
        for _ in 0..random.below(4) {
            let rank = random.below(self.ranks.len());
            let launch = random.below(self.stage.launches());
            let lane = random.below(self.stage.lanes(launch, rank));
            let steps = self.stage.steps((launch, rank, lane));
            let id = StepId {
                rank,
                launch,
                lane,
                step: random.below(steps.acts.len()),
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

    /// Shows that a diagnostic is right; how. `effort` is how many seeds are tried of each order that the diagnostic
    /// suggests, and how many random orders.
    fn shows(&self, diagnostic: &Diagnostic, effort: Effort) -> Result<String, String> {
        use DiagnosticKind as Kind;
        if self.stage.reads_values
            && let Some(shown) = self.rule_of_values(diagnostic.kind)
        {
            return shown;
        }
        match diagnostic.kind {
            Kind::Deadlock => {
                let orders = (0..ORDERS).map(|seed| Schedule::new(seed).waiting_together());
                let plays = orders.map(|order| self.stage.play(&order));
                let plays: Vec<Outcome> = plays.collect();
                // A lane that cannot go on has others wait.
                let is_failed = |fault: &Fault| matches!(fault, Fault::OutOfRange { .. });
                let hangs = |play: &Outcome| play.stuck && !play.faults.iter().any(is_failed);
                match plays.iter().position(|play| !play.stuck) {
                    None => Ok("deadlock".to_owned()),
                    // Ranks may run ahead of one that reads other values, and store packets over those that it waits for.
                    Some(_) if self.stage.reads_values && plays.iter().any(hangs) => {
                        Ok("deadlock in some orders".to_owned())
                    }
                    Some(seed) => Err(format!("order {seed} ends")),
                }
            }
            Kind::Race => match self.race(diagnostic, effort) {
                // No order may show it where nobody reads them, or where both say the same.
                Err(_) if self.stage.stores_packets_twice() => {
                    Ok("rule: packets stored twice in a launch".to_owned())
                }
                Err(_) if self.stage.has_crossed_signals() => {
                    Ok("rule: two lanes signal one".to_owned())
                }
                shown => shown,
            },
            Kind::LostSignal => self.fault(diagnostic, effort, |fault| {
                matches!(
                    fault,
                    Fault::OutlivingSignal { .. } | Fault::LostSignal { .. }
                )
            }),
            Kind::UnwrittenRead => self.fault(diagnostic, effort, |fault| {
                matches!(fault, Fault::UnwrittenRead { .. })
            }),
            Kind::UnwrittenOutput => self.fault(diagnostic, effort, |fault| {
                matches!(fault, Fault::UnwrittenOutput { .. })
            }),
            Kind::InputWritten => self.fault(diagnostic, effort, |fault| {
                matches!(fault, Fault::InputWritten { .. })
            }),
            Kind::Mismatch => self.fault(diagnostic, effort, |fault| {
                matches!(fault, Fault::Disagreement { .. })
            }),
            Kind::Malformed if self.stage.is_unsteady() => {
                Ok("rule: accesses that depend on the epoch".to_owned())
            }
            kind => Err(format!("no rule of kernels is {kind}")),
        }
    }

    /// Whether lanes cannot go on with what they read: that shows a rule and nothing else. A first play also finds the
    /// steps that follow from these integers.
    fn rule_of_values(&self, kind: DiagnosticKind) -> Option<Result<String, String>> {
        let Outcome { faults, .. } = self.stage.play(&Schedule::new(1));
        let mut ends = faults.iter().filter_map(|fault| match fault {
            Fault::OutOfRange { rule, .. } => Some(*rule),
            _ => None,
        });
        let first = ends.next()?;
        let shows = first == kind.name() || ends.any(|rule| rule == kind.name());
        Some(if shows {
            Ok(format!("rule: {kind}"))
        } else {
            Err(format!("lanes cannot go on: {first}"))
        })
    }

    fn fault(
        &self,
        diagnostic: &Diagnostic,
        effort: Effort,
        is: impl Fn(&Fault) -> bool,
    ) -> Result<String, String> {
        let mut orders = self.orders(diagnostic, effort);
        let shows = orders.any(|schedule| self.stage.play(&schedule).faults.iter().any(&is));
        let shown = shows.then(|| diagnostic.kind.to_string());
        shown.ok_or_else(|| "no order shows it".to_owned())
    }

    /// Orders that are likely to show a diagnostic, and then random ones.
    fn orders(
        &self,
        diagnostic: &Diagnostic,
        (seeds, tries): Effort,
    ) -> impl Iterator<Item = Schedule> {
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
        let directed = held.into_iter().flat_map(move |holds| {
            (0..seeds).map(move |seed| Schedule::new(seed).holding(holds.iter().copied()))
        });
        let random = (0..tries).map(|seed| Schedule::new(seed).holding(self.some_holds(seed)));
        directed.chain(random)
    }

    /// Two orders that differ in their accesses to the same memory, or in their end.
    fn race(&self, diagnostic: &Diagnostic, effort: Effort) -> Result<String, String> {
        let orders = self.orders(diagnostic, effort);
        race(orders.map(|schedule| self.stage.play(&schedule)), false)
    }
}

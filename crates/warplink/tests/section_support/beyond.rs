//! Integers out of their range: the launch that reads one fails and names the rank and the value, and its lane stores
//! nothing from there on.

use super::play::Schedule;
use super::stage::Stage;
use crate::program_support::interpreter::{Choice, Fault, Integer, Random, Way, mix};
use crate::program_support::meaning::Meaning;
use warplink::program::RankProgram;
use warplink::program::evaluate::Evaluator;

/// How many orders are played.
const ORDERS: u64 = 4;

/// How many words are tried of a program.
const WORDS: u64 = 2;

/// How an error goes on behind the value.
const EXPECTED: &str = "; expected 0 to ";

/// An integer out of its range, and what it leads to in the first run.
#[derive(Clone, Debug)]
pub(crate) struct Beyond {
    pub(crate) choice: Choice,
    value: i64,
    /// The ranks whose launches fail.
    ranks: Vec<usize>,
    /// All that is stored in each element of each rank's outputs.
    stored: Vec<Vec<Vec<f64>>>,
}

impl Beyond {
    /// Whether this error is of a launch that reads the integer.
    ///
    /// # Errors
    /// Another error is expected.
    fn check(&self, error: &str) -> Result<(), String> {
        let mut places = self.ranks.iter().map(|rank| format!("rank {rank}, line "));
        let value = format!(" is {}{EXPECTED}", self.value);
        if places.any(|place| error.contains(&place)) && error.contains(&value) {
            return Ok(());
        }
        let (ranks, choice) = (&self.ranks, self.choice);
        Err(format!(
            "the error names no rank of {ranks:?} and '{value}': {error}, with {choice:?}"
        ))
    }

    /// Whether the ranks' launches ended on the device as they have to: `ended` has the error of each rank, if there was
    /// one, and its outputs, with no numbers where nothing was written.
    ///
    /// # Errors
    /// How they ended otherwise.
    pub(crate) fn met(&self, ended: &[(Option<String>, Vec<f64>)]) -> Result<(), String> {
        // A tensor may be read before the step that reads it: then nobody gets the integer from that rank, and others wait.
        let errors = self
            .ranks
            .iter()
            .filter_map(|rank| ended[*rank].0.as_deref());
        let named: Vec<&str> = errors.filter(|error| error.contains(EXPECTED)).collect();
        if named.is_empty() {
            self.check("no rank names a value")?;
        }
        named.into_iter().try_for_each(|error| self.check(error))?;
        for (rank, ((_, own), stored)) in ended.iter().zip(&self.stored).enumerate() {
            let mut elements = own.iter().zip(stored).enumerate();
            let other = elements.find(|(_, (own, all))| !own.is_nan() && !all.contains(own));
            if let Some((at, (own, all))) = other {
                let choice = self.choice;
                return Err(format!(
                    "rank {rank} has {own} as element {at} of its outputs; expected one of {all:?} or nothing, with {choice:?}"
                ));
            }
        }
        Ok(())
    }
}

/// Plays an accepted program with integers out of their ranges, one at a time; the last one that is read, if any is.
///
/// # Errors
/// What happens otherwise than it has to, here or in the evaluator.
pub(super) fn beyond(
    ranks: &[RankProgram],
    evaluator: &Evaluator,
    seed: u64,
) -> Result<Option<Beyond>, String> {
    let mut last = None;
    for number in 0..WORDS {
        let mut random = Random::new(mix(seed ^ mix(number + 7)));
        let Some((word, most)) = some_word(ranks, &mut random) else {
            return Ok(None);
        };
        let values = [
            most + 1,
            most + 1 + random.below(1000) as i64,
            -1,
            i64::from(i32::MIN),
            i64::from(i32::MAX),
        ];
        let value = values[random.below(values.len())];
        let ways = [
            Way::Edge(1),
            Way::Mixed(random.next()),
            Way::Any(random.next()),
        ];
        let way = ways[random.below(ways.len())];
        // The other integers have to fit together.
        let stage = Stage::new(ranks, 1, Choice::within(way));
        let stage = stage.map_err(|error| format!("accepted, but {error}"))?;
        if !stage.fits() {
            continue;
        }
        let choice = Choice {
            way,
            beyond: Some((word, value)),
        };
        last = ended(ranks, evaluator, choice, value)?.or(last);
    }
    Ok(last)
}

/// A word that lanes may read, and its bound.
fn some_word(ranks: &[RankProgram], random: &mut Random) -> Option<(Integer, i64)> {
    let mut words = Vec::new();
    for (rank, program) in ranks.iter().enumerate() {
        for (tensor, instance) in program.tensors.iter().enumerate() {
            if let Some(most) = instance.value_bound {
                let elements = 0..instance.bytes / instance.dtype.size();
                words.extend(elements.map(|element| {
                    (
                        Integer {
                            rank,
                            tensor,
                            element,
                        },
                        most,
                    )
                }));
            }
        }
    }
    let at = random.below(words.len());
    words.get(at).copied()
}

fn ended(
    ranks: &[RankProgram],
    evaluator: &Evaluator,
    choice: Choice,
    value: i64,
) -> Result<Option<Beyond>, String> {
    let stage = Stage::new(ranks, 1, choice).map_err(|error| format!("accepted, but {error}"))?;
    let first = stage.play(&Schedule::new(0));
    for seed in 1..ORDERS {
        let schedule = Schedule::new(seed);
        let other = stage.play(&schedule);
        if first.faults != other.faults || first.stored != other.stored {
            return Err(format!(
                "accepted, but ends in several ways, with {choice:?}: {:?} and {:?}: {schedule:?}",
                first.faults, other.faults
            ));
        }
    }
    let mut of = Vec::new();
    for fault in &first.faults {
        match fault {
            Fault::OutOfRange { rank, .. } => of.push(*rank),
            Fault::UnwrittenOutput { .. } | Fault::LostSignal { .. } => {}
            fault => return Err(format!("accepted, but {fault:?}, with {choice:?}")),
        }
    }
    of.dedup();
    if of.is_empty() {
        if first.stuck {
            return Err(format!("accepted, but hangs, with {choice:?}"));
        }
        let with = |how: String| format!("{how}, with {choice:?}");
        return Meaning::of((evaluator, ranks), 1, (choice, &first.outputs))
            .map(|_| None)
            .map_err(with);
    }
    let beyond = Beyond {
        choice,
        value,
        ranks: of,
        stored: first.stored,
    };
    match Meaning::of((evaluator, ranks), 1, (choice, &[])) {
        Ok(_) => Err(format!(
            "evaluated though a value is out of its range, with {choice:?}"
        )),
        Err(error) => beyond.check(&error).map(|()| Some(beyond)),
    }
}

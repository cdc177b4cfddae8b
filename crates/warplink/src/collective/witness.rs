//! What ranks tell one another of their calls of the engine, beside the calls.
//!
//! The engine does not compare calls, nor tell for whom it waits. So each rank keeps a [`Record`], tells ranks that
//! follow it of its last calls now and then, and asks the others for theirs when a wait has timed out. Their reading
//! threads answer, whatever their programs do.

use super::call::Call;
use super::record::{Difference, MAX_STATED, Record, Statement};
use crate::bootstrap::{Group, Respondent};
use crate::deadline::Deadline;
use crate::device::Fault;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The shortest time in which a rank tells others of its calls again, and what each rank of the communicator adds to it, since
/// the store passes on those of all.
const INTERVAL: Duration = Duration::from_millis(100);
const INTERVAL_PER_RANK: Duration = Duration::from_millis(1);

/// The most ranks that a rank tells of its calls unasked, those that follow it.
const MAX_TOLD: usize = 8;

/// How many calls a rank asks with, and is told, unless calls before them differ.
const ASKED: u64 = 16;

/// How long answers are waited for.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// The most ranks that one asks, those that follow it, so that the store of a large job is not held up where all ranks
/// ask at once.
const MAX_ASKED: usize = 128;

/// The most ranks that an error lists.
const MAX_LISTED: usize = 8;

/// This rank's calls, and what others say of theirs.
pub(super) struct Witness {
    group: Arc<Group>,
    fault: Arc<Fault>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    record: Record,
    /// The last that each rank told.
    statements: BTreeMap<Rank, Statement>,
    /// When others were told last, and how many calls.
    told: Option<(Instant, u64)>,
}

/// What the other ranks answered.
pub(super) enum Answered {
    /// Calls differ.
    Mismatch(Error),
    /// Of these, each has made fewer calls, or does not answer.
    Missing { first: Rank, text: String },
    /// All have made the calls that this rank has.
    Nothing,
}

impl State {
    /// Keeps what `by` told, for when this rank has made as many calls.
    fn keep(&mut self, by: Rank, theirs: Statement) {
        if theirs.made > self.record.settled() {
            self.statements.insert(by, theirs);
        }
    }
}

impl Answered {
    /// The error of calls that differ.
    pub(super) fn mismatch(self) -> Option<Error> {
        match self {
            Self::Mismatch(error) => Some(error),
            _ => None,
        }
    }
}

impl Witness {
    pub(super) fn new(group: &Arc<Group>, fault: &Arc<Fault>) -> Arc<Self> {
        let own = Arc::new(Self {
            group: group.clone(),
            fault: fault.clone(),
            state: Mutex::default(),
        });
        let respondent: Arc<dyn Respondent> = own.clone();
        group.respond(Arc::downgrade(&respondent));
        own
    }

    /// Notes the call that `make` makes, or records. Calls come one after the other.
    pub(super) fn note(
        &self,
        call: &Call,
        is_recorded: bool,
        make: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        // Before, since making it may block until all ranks have.
        lock(&self.state).record.begin(call, is_recorded);
        let made = make();
        lock(&self.state).record.end(made.is_ok());
        made
    }

    /// Tells the next ranks of calls that they were not told of; how long to wait for that, where it is too early. Does not
    /// block.
    pub(super) fn tell(&self) -> Option<Duration> {
        let (rank, world) = (self.group.rank(), self.group.world());
        let statement = {
            let mut state = lock(&self.state);
            let made = state.record.settled();
            let (told_at, told) = state.told.unzip();
            let told = told.unwrap_or(0);
            if world < 2 || told >= made {
                return None;
            }
            let now = Instant::now();
            let interval = INTERVAL + INTERVAL_PER_RANK * world as u32;
            if let Some(next) = told_at.map(|told_at| told_at + interval)
                && now < next
            {
                return Some(next - now);
            }
            state.told = Some((now, made));
            state.record.statement(made, made - told)
        };
        let next = following(rank, world, MAX_TOLD);
        self.group.notify(&next, &statement.to_bytes());
        None
    }

    /// The error where another rank has told of a call that is not as this rank's of the same number. Does not block.
    pub(super) fn disagreement(&self) -> Option<Error> {
        let mut state = lock(&self.state);
        let State {
            record, statements, ..
        } = &mut *state;
        let mut told = statements.iter();
        let found = told.find_map(|(peer, told)| Some((*peer, record.difference(told)?)));
        // What this rank has made all of says nothing more.
        statements.retain(|_, told| told.made > record.settled());
        found.map(|(peer, difference)| self.mismatch(peer, &difference))
    }

    /// Asks the other ranks for their calls. Blocks until all that are there have answered, or `deadline`.
    pub(super) fn ask(&self, deadline: Deadline) -> Answered {
        let (rank, world) = (self.group.rank(), self.group.world());
        let own = {
            let state = lock(&self.state);
            state.record.statement(u64::MAX, ASKED)
        };
        if own.made == 0 {
            return Answered::Nothing;
        }
        let asked = following(rank, world, MAX_ASKED);
        let answers = self.group.query(&asked, &own.to_bytes(), deadline);
        let read = |(peer, words): &(Rank, Vec<u8>)| Some((*peer, Statement::from_bytes(words)?));
        let answers: BTreeMap<Rank, Statement> = answers.iter().filter_map(read).collect();
        let state = lock(&self.state);
        let differs =
            |(peer, told): (&Rank, &Statement)| Some((*peer, state.record.difference(told)?));
        let differences: Vec<(Rank, Difference)> = answers.iter().filter_map(differs).collect();
        let Some((peer, difference)) = differences.first() else {
            return missing(&state.record, &asked, &answers);
        };
        // So that these find it too, however long ago the call was.
        let peers: Vec<Rank> = differences.iter().map(|(peer, _)| *peer).collect();
        let own = state.record.statement(u64::MAX, MAX_STATED);
        drop(state);
        self.group.notify(&peers, &own.to_bytes());
        Answered::Mismatch(self.mismatch(*peer, difference))
    }

    /// The error of a call that is not as that of `peer`.
    fn mismatch(&self, peer: Rank, difference: &Difference) -> Error {
        let number = difference.number;
        let text = match &difference.calls {
            Some([own, theirs]) => format!(
                "in a collective of the vendor's library, the peer calls {theirs}; expected {own}, as this rank calls (call \
                 {number} of both)"
            ),
            None => format!(
                "before call {number} of the vendor's library, the peer has called something else; expected what this rank \
                 called"
            ),
        };
        Error::new(ErrorKind::Mismatch, text)
            .with_operation("synchronize")
            .with_rank(self.group.rank())
            .with_peer(peer)
            .with_help("make the same calls in the same order on every rank")
    }
}

impl Respondent for Witness {
    fn answer(&self, by: Rank, payload: &[u8]) -> Vec<u8> {
        let Some(theirs) = Statement::from_bytes(payload) else {
            return Vec::new();
        };
        let mut state = lock(&self.state);
        // The one that asks says it, when it has found which call differs.
        let count = match state.record.difference(&theirs) {
            Some(_) => MAX_STATED,
            None => ASKED,
        };
        let answer = state.record.statement(theirs.made, count);
        state.keep(by, theirs);
        answer.to_bytes()
    }

    fn notice(&self, by: Rank, payload: &[u8]) {
        let Some(theirs) = Statement::from_bytes(payload) else {
            return;
        };
        let found = {
            let mut state = lock(&self.state);
            let found = state.record.difference(&theirs);
            state.keep(by, theirs);
            found
        };
        if let Some(difference) = found {
            self.fault.fail(self.mismatch(by, &difference));
        }
    }
}

/// The ranks that follow `rank`, up to so many.
fn following(rank: Rank, world: usize, most: usize) -> Vec<Rank> {
    let steps = (1..world).take(most);
    steps.map(|step| (rank + step) % world).collect()
}

/// The ranks that have made fewest calls, where that is fewer than this rank has; else those that did not answer.
fn missing(record: &Record, asked: &[Rank], answers: &BTreeMap<Rank, Statement>) -> Answered {
    let behind = || answers.iter().filter(|(_, told)| record.is_ahead_of(told));
    let listed = |ranks: Vec<String>| {
        let more = ranks.len().saturating_sub(MAX_LISTED);
        let text = ranks[..ranks.len() - more].join(", ");
        match more {
            0 => text,
            _ => format!("{text} and {more} more"),
        }
    };
    if let Some(fewest) = behind().map(|(_, told)| told.made).min() {
        let absent = || behind().filter(|(_, told)| told.made == fewest);
        let number = fewest + 1;
        let call = record.describe(number);
        let call = call.map_or_else(String::new, |call| format!(", {call},"));
        let ranks = absent().map(|(rank, told)| match told.last_call() {
            Some(last) => format!("rank {rank} (whose last is {last})"),
            None if told.made > 0 => format!("rank {rank} (whose last is call {fewest})"),
            None => format!("rank {rank} (which has made none)"),
        });
        let text = format!(
            "call {number}{call} was not made by {}",
            listed(ranks.collect())
        );
        let first = absent().next().map_or(0, |(rank, _)| *rank);
        return Answered::Missing { first, text };
    }
    let silent = asked.iter().filter(|rank| !answers.contains_key(rank));
    let silent: Vec<Rank> = silent.copied().collect();
    let Some(first) = silent.first().copied() else {
        return Answered::Nothing;
    };
    let ranks = silent.iter().map(|rank| format!("rank {rank}")).collect();
    let text = format!("no answer came from {}", listed(ranks));
    Answered::Missing { first, text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::CollectiveKind;
    use crate::dtype::DType;

    fn record(calls: usize) -> Record {
        let mut record = Record::default();
        for count in 1..=calls {
            let call = Call {
                kind: CollectiveKind::AllGather,
                op: None,
                dtype: DType::U8,
                count,
                root: None,
            };
            record.begin(&call, false);
            record.end(true);
        }
        record
    }

    /// What a rank that has made 4 calls says of others that have made so many, or do not answer.
    fn told(made: &[Option<usize>]) -> Option<(Rank, String)> {
        let asked: Vec<Rank> = (1..=made.len()).collect();
        let answers = asked.iter().zip(made);
        let answers = answers.filter_map(|(rank, made)| Some((*rank, record((*made)?))));
        let answers = answers.map(|(rank, record)| (rank, record.statement(4, ASKED)));
        match missing(&record(4), &asked, &answers.collect()) {
            Answered::Missing { first, text } => Some((first, text)),
            _ => None,
        }
    }

    #[test]
    fn those_that_have_made_fewest_calls_are_missing() {
        assert_eq!(told(&[Some(4), Some(5)]), None);
        let (first, text) = told(&[Some(3), None, Some(2), Some(9), Some(2)]).unwrap();
        assert_eq!(first, 3);
        let last = "(whose last is all_gather of 2 bytes)";
        let says =
            format!("call 3, all_gather of 3 bytes, was not made by rank 3 {last}, rank 5 {last}");
        assert_eq!(text, says);
        let (first, text) = told(&[Some(0); 10]).unwrap();
        assert_eq!(first, 1);
        assert!(
            text.ends_with("rank 8 (which has made none) and 2 more"),
            "{text}"
        );
    }

    #[test]
    fn those_that_do_not_answer_are_named_where_nobody_is_behind() {
        let (first, text) = told(&[Some(4), None, None]).unwrap();
        assert_eq!(first, 2);
        assert_eq!(text, "no answer came from rank 2, rank 3");
    }

    #[test]
    fn each_rank_tells_and_asks_the_next_ones() {
        assert_eq!(following(2, 4, 8), [3, 0, 1]);
        assert_eq!(following(2, 4, 2), [3, 0]);
        assert!(following(0, 1, 8).is_empty());
    }
}

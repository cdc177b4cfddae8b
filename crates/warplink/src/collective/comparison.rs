//! Exchange of call statements between ranks, out of band.
//!
//! The engine neither compares calls nor reports whom it waits for. So each rank keeps a [`Record`],
//! periodically sends its last calls to neighbouring ranks, and queries others when a wait has timed out. The
//! ranks' store threads answer, since the application may be blocked.

use super::call::Call;
use super::record::{Difference, MAX_STATED, Record, Statement};
use crate::bootstrap::{Group, Respondent};
use crate::deadline::Deadline;
use crate::device::Fault;
use crate::error::{Error, Rank, Result};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Minimum interval between unsolicited statements, plus an amount for each rank, since the store relays
/// those of all ranks.
const INTERVAL: Duration = Duration::from_millis(100);
const INTERVAL_PER_RANK: Duration = Duration::from_millis(1);

/// Maximum ranks that receive unsolicited statements, to bound traffic.
const MAX_RECIPIENTS: usize = 8;

/// Calls in a query and its answer, unless earlier ones differ.
const ASKED: u64 = 16;

/// Time limit for answers.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// Maximum ranks queried, so that the store of a large job is not overloaded when all ranks query at once.
const MAX_ASKED: usize = 128;

/// Maximum ranks listed in an error.
const MAX_LISTED: usize = 8;

/// This rank's calls, and statements of other ranks.
pub(super) struct CallComparison {
    group: Arc<Group>,
    fault: Arc<Fault>,
    state: Mutex<Statements>,
}

#[derive(Default)]
struct Statements {
    record: Record,
    /// Latest statement of each rank.
    statements: BTreeMap<Rank, Statement>,
    /// Time and call count of the last unsolicited statement.
    sent: Option<(Instant, u64)>,
}

/// Result of a query.
pub(super) enum QueryResult {
    /// Calls differ.
    Mismatch(Error),
    /// These ranks have made fewer calls, or do not answer.
    Missing { first: Rank, text: String },
    /// All ranks have made the same calls.
    Nothing,
}

impl Statements {
    /// Keeps a statement of `by` until this rank has made as many calls.
    fn keep(&mut self, by: Rank, theirs: Statement) {
        // Otherwise it was compared on arrival, and has nothing further to show.
        if theirs.made > self.record.settled() {
            self.statements.insert(by, theirs);
        }
    }
}

impl QueryResult {
    /// The error of differing calls.
    pub(super) fn mismatch(self) -> Option<Error> {
        match self {
            Self::Mismatch(error) => Some(error),
            _ => None,
        }
    }
}

impl CallComparison {
    pub(super) fn new(group: &Arc<Group>, fault: &Arc<Fault>) -> Arc<Self> {
        let own = Arc::new(Self {
            group: group.clone(),
            fault: fault.clone(),
            state: Mutex::default(),
        });
        let respondent: Arc<dyn Respondent> = own.clone();
        // Answers come from the store's threads, even while the application is blocked.
        group.respond(Arc::downgrade(&respondent));
        own
    }

    /// Records the call that `make` makes or captures. Calls are serialized.
    pub(super) fn note(
        &self,
        call: &Call,
        is_recorded: bool,
        make: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        // Recorded first, since making the call may block until all ranks have made it.
        lock(&self.state).record.begin(call, is_recorded);
        let made = make();
        lock(&self.state).record.end(made.is_ok());
        made
    }

    /// Sends pending statements to neighbouring ranks; returns how long to wait if it is too early. Does not
    /// block.
    pub(super) fn send_statements(&self) -> Option<Duration> {
        let (rank, world) = (self.group.rank(), self.group.world());
        // The lock is released before anything is sent.
        let statement = {
            let mut state = lock(&self.state);
            let made = state.record.settled();
            let (sent_at, sent) = state.sent.unzip();
            let sent = sent.unwrap_or(0);
            // Nothing new since the last statement.
            if world < 2 || sent >= made {
                return None;
            }
            let now = Instant::now();
            let interval = INTERVAL + INTERVAL_PER_RANK * world as u32;
            // Rate limit: the store relays the statements of all ranks.
            if let Some(next) = sent_at.map(|sent_at| sent_at + interval)
                && now < next
            {
                return Some(next - now);
            }
            state.sent = Some((now, made));
            state.record.statement(made, made - sent)
        };
        let next = following(rank, world, MAX_RECIPIENTS);
        self.group.notify(&next, &statement.to_bytes());
        None
    }

    /// Error if another rank has stated a different call of the same number. Does not block.
    pub(super) fn disagreement(&self) -> Option<Error> {
        let mut state = lock(&self.state);
        let Statements {
            record, statements, ..
        } = &mut *state;
        let mut all = statements.iter();
        let found = all.find_map(|(peer, statement)| Some((*peer, record.difference(statement)?)));
        // Statements that this rank has caught up with carry no more information.
        statements.retain(|_, statement| statement.made > record.settled());
        found.map(|(peer, difference)| self.mismatch(peer, &difference))
    }

    /// Queries other ranks for their calls. Blocks until all live ones have answered, up to `deadline`.
    pub(super) fn ask(&self, deadline: Deadline) -> QueryResult {
        let (rank, world) = (self.group.rank(), self.group.world());
        let own = {
            let state = lock(&self.state);
            state.record.statement(u64::MAX, ASKED)
        };
        // A rank without calls has nothing to compare.
        if own.made == 0 {
            return QueryResult::Nothing;
        }
        let asked = following(rank, world, MAX_ASKED);
        // Unlocked: answering ranks may query this one at the same time.
        let answers = self.group.query(&asked, &own.to_bytes(), deadline);
        let read = |(peer, words): &(Rank, Vec<u8>)| Some((*peer, Statement::from_bytes(words)?));
        let answers: BTreeMap<Rank, Statement> = answers.iter().filter_map(read).collect();
        let state = lock(&self.state);
        let differs = |(peer, statement): (&Rank, &Statement)| {
            Some((*peer, state.record.difference(statement)?))
        };
        let differences: Vec<(Rank, Difference)> = answers.iter().filter_map(differs).collect();
        let Some((peer, difference)) = differences.first() else {
            return missing(&state.record, &asked, &answers);
        };
        // Notify these ranks, so that they detect it too, however long ago the call was.
        let peers: Vec<Rank> = differences.iter().map(|(peer, _)| *peer).collect();
        let own = state.record.statement(u64::MAX, MAX_STATED);
        // Not held while the statement is sent: the store's threads need it to answer queries.
        drop(state);
        self.group.notify(&peers, &own.to_bytes());
        QueryResult::Mismatch(self.mismatch(*peer, difference))
    }

    /// Error of a call that differs from that of `peer`.
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
        Error::mismatch(text)
            .with_operation("synchronize")
            .with_rank(self.group.rank())
            .with_peer(peer)
            .with_help("make the same calls in the same order on every rank")
    }
}

impl Respondent for CallComparison {
    fn answer(&self, by: Rank, payload: &[u8]) -> Vec<u8> {
        // A malformed statement is ignored, like no answer.
        let Some(theirs) = Statement::from_bytes(payload) else {
            return Vec::new();
        };
        let mut state = lock(&self.state);
        // The querying rank reports it once it has located the differing call.
        let count = match state.record.difference(&theirs) {
            Some(_) => MAX_STATED,
            None => ASKED,
        };
        let answer = state.record.statement(theirs.made, count);
        // Kept until this rank has made the same calls.
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
        // The peer has located the difference; fail this rank's communicator as well.
        if let Some(difference) = found {
            self.fault.fail(self.mismatch(by, &difference));
        }
    }
}

/// Up to `most` ranks that follow `rank`.
fn following(rank: Rank, world: usize, most: usize) -> Vec<Rank> {
    let steps = (1..world).take(most);
    steps.map(|step| (rank + step) % world).collect()
}

/// Ranks with the fewest calls, if fewer than this rank has made; else those that did not answer.
fn missing(record: &Record, asked: &[Rank], answers: &BTreeMap<Rank, Statement>) -> QueryResult {
    let behind = || {
        answers
            .iter()
            .filter(|(_, statement)| record.is_ahead_of(statement))
    };
    let listed = |ranks: Vec<String>| {
        let more = ranks.len().saturating_sub(MAX_LISTED);
        let text = ranks[..ranks.len() - more].join(", ");
        match more {
            0 => text,
            _ => format!("{text} and {more} more"),
        }
    };
    // Ranks that are behind explain a timeout better than ranks that do not answer.
    if let Some(fewest) = behind().map(|(_, statement)| statement.made).min() {
        let absent = || behind().filter(|(_, statement)| statement.made == fewest);
        let number = fewest + 1;
        let call = record.describe(number);
        let call = call.map_or_else(String::new, |call| format!(", {call},"));
        let ranks = absent().map(|(rank, statement)| match statement.last_call() {
            Some(last) => format!("rank {rank} (whose last is {last})"),
            None if statement.made > 0 => format!("rank {rank} (whose last is call {fewest})"),
            None => format!("rank {rank} (which has made no call)"),
        });
        let text = format!(
            "call {number}{call} is missing on {}",
            listed(ranks.collect())
        );
        let first = absent().next().map_or(0, |(rank, _)| *rank);
        return QueryResult::Missing { first, text };
    }
    // Silent ranks may be stopped, or busy in a call.
    let silent = asked.iter().filter(|rank| !answers.contains_key(rank));
    let silent: Vec<Rank> = silent.copied().collect();
    let Some(first) = silent.first().copied() else {
        return QueryResult::Nothing;
    };
    let ranks = silent.iter().map(|rank| format!("rank {rank}")).collect();
    let text = format!("no answer came from {}", listed(ranks));
    QueryResult::Missing { first, text }
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

    /// Result of a rank with 4 calls for peers with these numbers of calls, or without an answer.
    fn missing_of(made: &[Option<usize>]) -> Option<(Rank, String)> {
        let asked: Vec<Rank> = (1..=made.len()).collect();
        let answers = asked.iter().zip(made);
        let answers = answers.filter_map(|(rank, made)| Some((*rank, record((*made)?))));
        let answers = answers.map(|(rank, record)| (rank, record.statement(4, ASKED)));
        match missing(&record(4), &asked, &answers.collect()) {
            QueryResult::Missing { first, text } => Some((first, text)),
            _ => None,
        }
    }

    #[test]
    fn those_that_have_made_fewest_calls_are_missing() {
        assert_eq!(missing_of(&[Some(4), Some(5)]), None);
        let (first, text) = missing_of(&[Some(3), None, Some(2), Some(9), Some(2)]).unwrap();
        assert_eq!(first, 3);
        let last = "(whose last is all_gather of 2 bytes)";
        let expected =
            format!("call 3, all_gather of 3 bytes, is missing on rank 3 {last}, rank 5 {last}");
        assert_eq!(text, expected);
        let (first, text) = missing_of(&[Some(0); 10]).unwrap();
        assert_eq!(first, 1);
        assert!(
            text.ends_with("rank 8 (which has made no call) and 2 more"),
            "{text}"
        );
    }

    #[test]
    fn those_that_do_not_answer_are_named_where_nobody_is_behind() {
        let (first, text) = missing_of(&[Some(4), None, None]).unwrap();
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

//! Queries and notices between ranks, which their reading threads handle, whatever their programs do.
//!
//! Keys in the store could not replace them: only a live answer distinguishes a rank that has made fewer calls from
//! one that is stopped, and only a notice ends the wait of a rank that makes no calls.

use super::group_name::GroupName;
use super::message::Bytes;
use crate::deadline::Deadline;
use crate::error::Rank;
use crate::sync::{lock, wait_while};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Condvar, Mutex, Weak};

/// Handles queries and notices for this rank in a group. The methods run on the reading thread, so they must not block, nor
/// call the store, whose answer that thread would have to read.
pub(crate) trait Respondent: Send + Sync {
    /// The answer to a query of the member `by`.
    fn answer(&self, by: Rank, payload: &[u8]) -> Vec<u8>;

    /// Handles a notice of the member `by`, which needs no answer.
    fn notice(&self, by: Rank, payload: &[u8]);
}

/// The members of a group, by their ranks in the job, and its respondent.
type Responding = (Vec<Rank>, Weak<dyn Respondent>);

/// The respondents of this rank, and its own queries in flight.
#[derive(Default)]
pub(super) struct Queries {
    respondents: Mutex<HashMap<GroupName, Responding>>,
    in_flight: Mutex<InFlight>,
    /// Signalled when an answer arrives.
    answered: Condvar,
}

#[derive(Default)]
struct InFlight {
    /// The number of the last query.
    last: u64,
    queries: HashMap<u64, Query>,
}

#[derive(Default)]
struct Query {
    /// The ranks that have not answered.
    awaited: BTreeSet<u32>,
    answers: Vec<(Rank, Bytes)>,
}

impl Queries {
    /// Lets `respondent` handle queries of these members of `group` to this rank, for as long as it exists.
    pub(super) fn respond(
        &self,
        group: GroupName,
        members: &[Rank],
        respondent: Weak<dyn Respondent>,
    ) {
        let mut respondents = lock(&self.respondents);
        respondents.retain(|_, (_, respondent)| respondent.strong_count() > 0);
        respondents.insert(group, (members.to_vec(), respondent));
    }

    /// Handles a query of `by`, a rank of the job, and returns the answer; nothing for a notice, which has the number 0.
    /// Without a respondent, the answer is empty, so that the other rank does not wait until its deadline.
    pub(super) fn answer(
        &self,
        group: GroupName,
        number: u64,
        by: u32,
        payload: &[u8],
    ) -> Option<Vec<u8>> {
        let respondent = self.respondent(group, by as Rank);
        if number != 0 {
            let answer = respondent.map(|(respondent, member)| respondent.answer(member, payload));
            return Some(answer.unwrap_or_default());
        }
        if let Some((respondent, member)) = respondent {
            respondent.notice(member, payload);
        }
        None
    }

    /// The respondent to `by`, a rank of the job, and that rank's number in the group.
    fn respondent(&self, group: GroupName, by: Rank) -> Option<(Arc<dyn Respondent>, Rank)> {
        let respondents = lock(&self.respondents);
        let (members, respondent) = respondents.get(&group)?;
        let member = members.iter().position(|&member| member == by)?;
        // Only looked up under the lock: handlers run without it, and may register respondents themselves.
        Some((respondent.upgrade()?, member))
    }

    /// An answer arrived. One that comes too late, or from a rank that was not asked, is ignored.
    pub(super) fn replied(&self, number: u64, by: u32, payload: Bytes) {
        let mut in_flight = lock(&self.in_flight);
        if let Some(query) = in_flight.queries.get_mut(&number)
            && query.awaited.remove(&by)
        {
            query.answers.push((by as Rank, payload));
            self.answered.notify_all();
        }
    }

    /// Registers a query to `awaited`, and returns its number.
    pub(super) fn begin(&self, awaited: &[u32]) -> u64 {
        let mut in_flight = lock(&self.in_flight);
        // From 1 on, since 0 marks a notice.
        in_flight.last += 1;
        let number = in_flight.last;
        let query = Query {
            awaited: awaited.iter().copied().collect(),
            ..Query::default()
        };
        in_flight.queries.insert(number, query);
        number
    }

    /// Waits until all have answered, or the deadline, and returns the answers so far.
    pub(super) fn wait(&self, number: u64, deadline: Deadline) -> Vec<(Rank, Bytes)> {
        let is_awaited = |in_flight: &mut InFlight| {
            let query = in_flight.queries.get(&number);
            query.is_some_and(|query| !query.awaited.is_empty())
        };
        // Removed with the lock of the wait, so a later answer finds no query and is dropped.
        let (in_flight, limit) = (lock(&self.in_flight), deadline.remaining());
        let mut in_flight = wait_while(&self.answered, in_flight, limit, is_awaited);
        let query = in_flight.queries.remove(&number);
        query.unwrap_or_default().answers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn only_answers_that_are_awaited_count() {
        let queries = Queries::default();
        let soon = || Deadline::after(Duration::from_millis(10));
        let first = queries.begin(&[1, 2]);
        let second = queries.begin(&[1]);
        let reply = |number, by, payload: &[u8]| queries.replied(number, by, payload.into());
        reply(first, 3, b"a stranger");
        reply(second + 1, 1, b"no query");
        reply(second, 1, b"second");
        reply(first, 1, b"first");
        reply(first, 1, b"again");
        let answered = queries.wait(first, soon());
        assert_eq!(answered, [(1, b"first"[..].into())]);
        reply(first, 2, b"too late");
        let answered = queries.wait(second, soon());
        assert_eq!(answered, [(1, b"second"[..].into())]);
        assert!(lock(&queries.in_flight).queries.is_empty());
    }
}

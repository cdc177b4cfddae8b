//! Queries and notices between ranks, which their reading threads handle, whatever their programs do.
//!
//! Keys in the store could not replace them: only a live answer distinguishes a rank that has made fewer calls from
//! one that is stopped, and only a notice ends the wait of a rank that makes no calls.

use super::client::Client;
use super::group::Group;
use super::group_name::GroupName;
use super::message::{self, Bytes, Request, wire_ranks};
use crate::deadline::Deadline;
use crate::error::Rank;
use crate::sync::{lock, wait_while};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

/// Handles queries and notices for this rank in a group. The methods run on the reading thread, so they must not block, nor
/// call the store, whose answer that thread would have to read.
pub(crate) trait Respondent: Send + Sync {
    /// The answer to a query of the member `by`.
    fn answer(&self, by: Rank, payload: &[u8]) -> Vec<u8>;

    /// Handles a notice of the member `by`, which needs no answer.
    fn notice(&self, by: Rank, payload: &[u8]);
}

/// A group and its respondent.
type Responding = (Weak<Group>, Weak<dyn Respondent>);

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
    fn respondent(&self, group: GroupName) -> Option<(Arc<Group>, Arc<dyn Respondent>)> {
        let respondents = lock(&self.respondents);
        let (group, respondent) = respondents.get(&group)?;
        // Only looked up under the lock: handlers run without it, and may register respondents themselves.
        Some((group.upgrade()?, respondent.upgrade()?))
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
    fn begin(&self, awaited: &[u32]) -> u64 {
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
    fn wait(&self, number: u64, deadline: Deadline) -> Vec<(Rank, Bytes)> {
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

impl Client {
    /// Handles a query of `by`, or a notice if `number` is 0. Without a respondent, the answer is empty, so that the other
    /// rank does not wait until its deadline.
    pub(super) fn answer_query(&self, group: GroupName, number: u64, by: u32, payload: &[u8]) {
        let respondent = self.queries.respondent(group);
        let answer = respondent.and_then(|(group, respondent)| {
            let member = group.member(by as Rank)?;
            if number == 0 {
                respondent.notice(member, payload);
                return None;
            }
            Some(respondent.answer(member, payload))
        });
        if number != 0 {
            let payload = Bytes::from(&answer.unwrap_or_default()[..]);
            self.notify(&Request::QueryReply {
                number,
                to: by,
                payload,
            });
        }
    }

    /// Sends a request that the store does not answer. False if there is no store to send it to.
    fn notify(&self, request: &Request) -> bool {
        let link = lock(&self.state).open_link();
        let body = message::encode(request);
        match (link, body) {
            (Some(link), Ok(body)) => link.push(0, &body).is_ok(),
            _ => false,
        }
    }
}

impl Group {
    /// Lets `respondent` handle queries of members to this rank, for as long as it exists.
    pub(crate) fn respond(self: &Arc<Self>, respondent: Weak<dyn Respondent>) {
        let mut respondents = lock(&self.client.queries.respondents);
        respondents.retain(|_, (_, respondent)| respondent.strong_count() > 0);
        respondents.insert(self.name(), (Arc::downgrade(self), respondent));
    }

    /// Sends a query to `members` and returns the answers that arrive before the deadline, in any order; empty ones from
    /// members without a respondent. Blocks until all members that are neither lost nor have left have answered; their
    /// programs need not call anything.
    pub(crate) fn query(
        &self,
        members: &[Rank],
        payload: &[u8],
        deadline: Deadline,
    ) -> Vec<(Rank, Vec<u8>)> {
        let to = self.present(members);
        let number = self.client.queries.begin(&to);
        // If it cannot be sent, no answer will come.
        let until = if self.send(number, to, payload) {
            deadline
        } else {
            Deadline::after(Duration::ZERO)
        };
        let answers = self.client.queries.wait(number, until);
        let answers = answers.into_iter();
        let members = answers.map(|(by, payload)| Some((self.member(by)?, payload.0.to_vec())));
        members.flatten().collect()
    }

    /// Sends a notice to `members`. Does not block.
    pub(crate) fn notify(&self, members: &[Rank], payload: &[u8]) {
        self.send(0, self.present(members), payload);
    }

    /// The job ranks of those of `members` that are neither lost nor have left.
    fn present(&self, members: &[Rank]) -> Vec<u32> {
        let jobs = members.iter().filter_map(|&rank| self.job_rank(rank).ok());
        let health = self.client.health();
        let present: Vec<Rank> = jobs.filter(|&rank| health.is_there(rank)).collect();
        // Ranks of the job always fit.
        wire_ranks(&present).unwrap_or_default()
    }

    fn send(&self, number: u64, to: Vec<u32>, payload: &[u8]) -> bool {
        let (group, payload) = (self.name().to_bytes(), Bytes::from(payload));
        self.client.notify(&Request::Query {
            group,
            number,
            to,
            payload,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

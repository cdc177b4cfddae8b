//! What a rank asks others, and tells them, without their programs taking part: their reading threads answer.

use super::client::Client;
use super::group::Group;
use super::group_name::GroupName;
use super::message::{self, Bytes, Request};
use super::store::wire_ranks;
use crate::deadline::Deadline;
use crate::error::Rank;
use crate::sync::lock;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

/// What answers for this rank in a group.
pub(crate) trait Respondent: Send + Sync {
    /// The answer to what the member `by` asks. It must not block, nor call the store.
    fn asked(&self, by: Rank, words: &[u8]) -> Vec<u8>;

    /// The member `by` says something that needs no answer. It must not block, nor call the store.
    fn told(&self, by: Rank, words: &[u8]);
}

/// A group and what answers in it.
type Responding = (Weak<Group>, Weak<dyn Respondent>);

/// The questions that this rank has asked, and who answers those of others.
#[derive(Default)]
pub(super) struct Inquiries {
    respondents: Mutex<HashMap<GroupName, Responding>>,
    asked: Mutex<Questions>,
    /// Signalled when an answer comes.
    answered: Condvar,
}

#[derive(Default)]
struct Questions {
    /// The number of the last one.
    last: u64,
    open: HashMap<u64, Question>,
}

/// A question that somebody waits for the answers to.
#[derive(Default)]
struct Question {
    awaited: BTreeSet<u32>,
    answers: Vec<(Rank, Bytes)>,
}

impl Inquiries {
    fn respondent(&self, group: GroupName) -> Option<(Arc<Group>, Arc<dyn Respondent>)> {
        let respondents = lock(&self.respondents);
        let (group, respondent) = respondents.get(&group)?;
        Some((group.upgrade()?, respondent.upgrade()?))
    }

    /// `by` answers a question. What was not asked, or not of that rank, is left out.
    pub(super) fn said(&self, number: u64, by: u32, words: Bytes) {
        let mut asked = lock(&self.asked);
        if let Some(question) = asked.open.get_mut(&number)
            && question.awaited.remove(&by)
        {
            question.answers.push((by as Rank, words));
            self.answered.notify_all();
        }
    }

    /// Begins to wait for the answers of `awaited`; the question's number.
    fn begin(&self, awaited: &[u32]) -> u64 {
        let mut asked = lock(&self.asked);
        asked.last += 1;
        let number = asked.last;
        let question = Question {
            awaited: awaited.iter().copied().collect(),
            ..Question::default()
        };
        asked.open.insert(number, question);
        number
    }

    /// The answers that came until all had, or the deadline.
    fn wait(&self, number: u64, deadline: Deadline) -> Vec<(Rank, Bytes)> {
        let is_open = |asked: &mut Questions| {
            let question = asked.open.get(&number);
            question.is_some_and(|question| !question.awaited.is_empty())
        };
        let waited =
            self.answered
                .wait_timeout_while(lock(&self.asked), deadline.remaining(), is_open);
        let mut asked = waited.unwrap_or_else(PoisonError::into_inner).0;
        let question = asked.open.remove(&number);
        question.unwrap_or_default().answers
    }
}

impl Client {
    /// `by` asks, or only tells, what is of `group`. Without a respondent, the answer is empty, so that nobody waits.
    pub(super) fn asked(&self, group: GroupName, number: u64, by: u32, words: &[u8]) {
        let respondent = self.inquiries.respondent(group);
        let answer = respondent.and_then(|(group, respondent)| {
            let member = group.member(by as Rank)?;
            if number == 0 {
                respondent.told(member, words);
                return None;
            }
            Some(respondent.asked(member, words))
        });
        if number != 0 {
            let words = Bytes::from(&answer.unwrap_or_default()[..]);
            self.notify(&Request::Say {
                number,
                to: by,
                words,
            });
        }
    }

    /// Sends what is not answered; whether there is a store to send it to.
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
    /// Has `respondent` answer what members ask of this rank, for as long as it lives.
    pub(crate) fn respond(self: &Arc<Self>, respondent: Weak<dyn Respondent>) {
        let mut respondents = lock(&self.client.inquiries.respondents);
        respondents.retain(|_, (_, respondent)| respondent.strong_count() > 0);
        respondents.insert(self.name(), (Arc::downgrade(self), respondent));
    }

    /// What those of `members` say that answer until the deadline, in any order; nothing, where no respondent does.
    /// Blocks until all have that are there; none of them has to call anything.
    pub(crate) fn ask(
        &self,
        members: &[Rank],
        words: &[u8],
        deadline: Deadline,
    ) -> Vec<(Rank, Vec<u8>)> {
        let to = self.there(members);
        let number = self.client.inquiries.begin(&to);
        // Where it cannot be sent, nobody answers.
        let until = if self.send(number, to, words) {
            deadline
        } else {
            Deadline::after(Duration::ZERO)
        };
        let answers = self.client.inquiries.wait(number, until);
        let answers = answers.into_iter();
        let members = answers.map(|(by, words)| Some((self.member(by)?, words.0.to_vec())));
        members.flatten().collect()
    }

    /// Tells `members` something that they do not answer. Does not block.
    pub(crate) fn tell(&self, members: &[Rank], words: &[u8]) {
        self.send(0, self.there(members), words);
    }

    /// Those of `members` that are neither lost nor have left, as they go over the wire.
    fn there(&self, members: &[Rank]) -> Vec<u32> {
        let jobs = members.iter().filter_map(|&rank| self.job_rank(rank).ok());
        let health = self.client.health();
        let there: Vec<Rank> = jobs.filter(|&rank| health.is_there(rank)).collect();
        // Ranks of a group are ranks of the job, which all fit.
        wire_ranks(&there).unwrap_or_default()
    }

    fn send(&self, number: u64, to: Vec<u32>, words: &[u8]) -> bool {
        let (group, words) = (self.name().to_bytes(), Bytes::from(words));
        self.client.notify(&Request::Ask {
            group,
            number,
            to,
            words,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_count_that_were_asked_for() {
        let inquiries = Inquiries::default();
        let soon = || Deadline::after(Duration::from_millis(10));
        let first = inquiries.begin(&[1, 2]);
        let second = inquiries.begin(&[1]);
        let say = |number, by, words: &[u8]| inquiries.said(number, by, words.into());
        say(first, 3, b"a stranger");
        say(second + 1, 1, b"no question");
        say(second, 1, b"second");
        say(first, 1, b"first");
        say(first, 1, b"again");
        let answered = inquiries.wait(first, soon());
        assert_eq!(answered, [(1, b"first"[..].into())]);
        say(first, 2, b"too late");
        let answered = inquiries.wait(second, soon());
        assert_eq!(answered, [(1, b"second"[..].into())]);
        assert!(lock(&inquiries.asked).open.is_empty());
    }
}

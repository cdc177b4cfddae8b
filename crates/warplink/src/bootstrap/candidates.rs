//! Finding the lowest rank that answers, when several may be lost at the same time.
//!
//! A machine that is gone takes all of its ranks along, and none of them refuses a connection. So all have one
//! deadline together: they are asked at the same time, more and more of them, until one answers.

use super::client::Client;
use super::connection;
use super::handover::address_of;
use crate::deadline::Deadline;
use crate::error::{Rank, Result};
use crate::sync::lock;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// Of the time for an answer, how much passes until more ranks are asked. There is time to ask all of them.
const WAVES: u32 = 32;

/// The longest wait for an answer until the next look whether this rank has left.
const LOOK: Duration = Duration::from_millis(20);

/// The ranks that are asked.
struct Candidates<'a> {
    client: &'a Client,
    standby: &'a [Option<SocketAddr>],
    deadline: Deadline,
    /// Those that were not asked, in ascending order, and how many are asked next.
    left: VecDeque<Rank>,
    wave: usize,
    /// Those that were asked and are not known to be lost, and what came of it.
    asked: BTreeMap<Rank, Option<Result<()>>>,
    told: Sender<(Rank, Result<()>)>,
    answers: Receiver<(Rank, Result<()>)>,
}

impl Client {
    /// The lowest rank that answers, or this one where none below it does; those are lost then. None when
    /// this rank has left meanwhile.
    pub(super) fn find_candidate(&self, standby: &[Option<SocketAddr>]) -> Option<Rank> {
        let own = self.identity.rank;
        let (told, answers) = mpsc::channel();
        let limit = self.identity.heartbeat_limit / 2;
        let candidates = Candidates {
            client: self,
            standby,
            // A rank that runs answers at once.
            deadline: Deadline::after(limit),
            left: (0..own)
                .filter(|&rank| self.health.is_there(rank))
                .collect(),
            wave: 1,
            asked: BTreeMap::new(),
            told,
            answers,
        };
        candidates.find(limit / WAVES)
    }
}

impl Candidates<'_> {
    fn find(mut self, interval: Duration) -> Option<Rank> {
        let mut next = Instant::now();
        loop {
            if lock(&self.client.state).over.is_some() {
                return None;
            }
            while let Ok(answer) = self.answers.try_recv() {
                self.note(answer);
            }
            // Above one that has answered, nobody is needed.
            let has_answer = self
                .asked
                .values()
                .any(|answer| matches!(answer, Some(Ok(()))));
            let none_due = !self.asked.values().any(Option::is_none);
            if !has_answer && (none_due || next <= Instant::now()) {
                self.ask_more();
                next = Instant::now() + interval;
            }
            let Some(mut lowest) = self.asked.first_entry() else {
                return Some(self.client.identity.rank);
            };
            let rank = *lowest.key();
            match lowest.get_mut().take() {
                Some(Ok(())) => return Some(rank),
                Some(Err(error)) => {
                    lowest.remove();
                    self.client.pass_over(rank, &error);
                }
                None if self.deadline.passed() => {
                    lowest.remove();
                    let error = self.deadline.expired("an answer");
                    self.client.pass_over(rank, &error);
                }
                // Others have told of its loss.
                None if !self.client.health.is_there(rank) => drop(lowest.remove()),
                None => {
                    if let Ok(answer) = self.answers.recv_timeout(LOOK.min(interval)) {
                        self.note(answer);
                    }
                }
            }
        }
    }

    fn note(&mut self, (rank, answer): (Rank, Result<()>)) {
        if let Some(asked) = self.asked.get_mut(&rank) {
            *asked = Some(answer);
        }
    }

    /// Asks twice as many ranks as before.
    fn ask_more(&mut self) {
        let count = self.wave.min(self.left.len());
        self.wave *= 2;
        for rank in self.left.drain(..count).collect::<Vec<_>>() {
            let answer = self.ask(rank).err().map(Err);
            self.asked.insert(rank, answer);
        }
    }

    /// Asks a rank on a thread of its own, which ends at the deadline.
    fn ask(&self, rank: Rank) -> Result<()> {
        let address = address_of(self.standby, rank)?;
        let (identity, deadline) = (self.client.identity.clone(), self.deadline);
        let told = self.told.clone();
        let ask = move || {
            // Nobody listens where another rank was found.
            let _ = told.send((rank, connection::probe(address, &identity, deadline)));
        };
        let spawned = thread::Builder::new()
            .name("warplink-ask".into())
            .spawn(ask);
        if spawned.is_err() {
            // Connecting to it will tell.
            let _ = self.told.send((rank, Ok(())));
        }
        Ok(())
    }
}

//! Finding the lowest rank that answers, when several may be lost at the same time.
//!
//! The ranks of a machine that vanished do not refuse connections, they time out. Probing them one after another would
//! take a timeout each, so all share one deadline: ranks are probed concurrently, in waves that double, until one
//! answers. In the common case the first one does, and no other rank is bothered.

use super::client::Client;
use super::connection;
use super::handover::address_of;
use crate::deadline::Deadline;
use crate::error::{Rank, Result};
use crate::sync::lock;
use crate::threads;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// Into how many intervals the time for an answer is divided; a wave is sent in each. As waves double, 17 of them reach
/// all of `MAX_WORLD` ranks.
const WAVES: u32 = 32;

/// The longest wait for an answer before checking again whether this rank has left.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The state of one search.
struct Candidates<'a> {
    client: &'a Client,
    standby: &'a [Option<SocketAddr>],
    deadline: Deadline,
    /// Ranks not probed yet, in ascending order.
    remaining: VecDeque<Rank>,
    /// The size of the next wave.
    wave: usize,
    /// Ranks that were probed and not passed over, with the outcome where it is known.
    probed: BTreeMap<Rank, Option<Result<()>>>,
    outcomes: Sender<(Rank, Result<()>)>,
    answers: Receiver<(Rank, Result<()>)>,
}

impl Client {
    /// The lowest rank that answers, or this one if none below it does; ranks passed over are recorded as lost. None if
    /// this rank leaves meanwhile.
    pub(super) fn find_candidate(&self, standby: &[Option<SocketAddr>]) -> Option<Rank> {
        let own = self.identity.rank;
        let (outcomes, answers) = mpsc::channel();
        let limit = self.identity.heartbeat_limit / 2;
        let candidates = Candidates {
            client: self,
            standby,
            // A rank that runs answers at once.
            deadline: Deadline::after(limit),
            remaining: (0..own)
                .filter(|&rank| self.health.is_there(rank))
                .collect(),
            wave: 1,
            probed: BTreeMap::new(),
            outcomes,
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
            // Higher ranks are of no interest once one has answered.
            let has_answer = self
                .probed
                .values()
                .any(|answer| matches!(answer, Some(Ok(()))));
            let none_pending = !self.probed.values().any(Option::is_none);
            if !has_answer && (none_pending || next <= Instant::now()) {
                self.probe_more();
                next = Instant::now() + interval;
            }
            let Some(mut lowest) = self.probed.first_entry() else {
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
                // The loss was reported meanwhile.
                None if !self.client.health.is_there(rank) => drop(lowest.remove()),
                None => {
                    if let Ok(answer) = self.answers.recv_timeout(POLL_INTERVAL.min(interval)) {
                        self.note(answer);
                    }
                }
            }
        }
    }

    fn note(&mut self, (rank, answer): (Rank, Result<()>)) {
        if let Some(outcome) = self.probed.get_mut(&rank) {
            *outcome = Some(answer);
        }
    }

    /// Probes twice as many ranks as before.
    fn probe_more(&mut self) {
        let count = self.wave.min(self.remaining.len());
        self.wave *= 2;
        for rank in self.remaining.drain(..count).collect::<Vec<_>>() {
            let answer = self.probe(rank).err().map(Err);
            self.probed.insert(rank, answer);
        }
    }

    /// Probes a rank on a separate thread, which ends at the deadline.
    fn probe(&self, rank: Rank) -> Result<()> {
        let address = address_of(self.standby, rank)?;
        let (identity, deadline) = (self.client.identity.clone(), self.deadline);
        let outcomes = self.outcomes.clone();
        let probe = move || {
            // The search may have ended already.
            let _ = outcomes.send((rank, connection::probe(address, &identity, deadline)));
        };
        if threads::spawn("warplink-probe", "start a thread", probe).is_err() {
            // Assume that it runs: connecting to it finds out.
            let _ = self.outcomes.send((rank, Ok(())));
        }
        Ok(())
    }
}

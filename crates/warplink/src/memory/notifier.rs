//! Sends notices to peers from a background thread, so that destructors never wait for a peer.
//!
//! One thread waits for the answers of all peers concurrently. Notices to one peer are sent in order, one at
//! a time; an unresponsive (stopped) peer delays nobody else.
//!
//! Unconfirmed notices are retransmitted, since a lost notice leaks memory. Each carries a sequence number,
//! so handling is idempotent. A peer counts as gone only if nobody listens on its socket any more.

use super::message::Message;
use super::outbox::{Notice, Outbox, Queue};
use super::service_client::{self, Asked};
use super::shared::Shared;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::shortage::Throttle;
use crate::sync::lock;
use crate::threads;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long the thread continues to send after it was asked to stop.
const MAX_STOP: Duration = Duration::from_secs(2);
/// Retry interval after resource exhaustion, here or at the peer.
const PAUSE: Duration = Duration::from_millis(10);
/// Minimum interval between expirations of idle mappings.
const MIN_AGING_INTERVAL: Duration = Duration::from_millis(50);

/// The notifier thread.
#[derive(Debug)]
pub(super) struct Notifier {
    outbox: Outbox,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Notifier {
    /// Starts the thread, which ends when `shared` is dropped. It also closes mappings idle for
    /// `max_idle_age`.
    pub(super) fn start(
        outbox: Outbox,
        queue: Queue,
        shared: Weak<Shared>,
        max_idle_age: Duration,
    ) -> Result<Self> {
        let run = move || run(&queue, &shared, aging_interval(max_idle_age));
        let thread = threads::spawn("warplink-notifier", "start the notifier thread", run)?;
        Ok(Self {
            outbox,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Sends queued notices for up to two seconds, and ends the thread.
    pub(super) fn stop(&self) {
        let Some(thread) = lock(&self.thread).take() else {
            return;
        };
        self.outbox.send(Notice::Stop);
        threads::join(thread, "notifier");
    }
}

static CANNOT_WAIT: Throttle = Throttle::new();
static CANNOT_TELL: Throttle = Throttle::new();

/// Notices to one peer.
#[derive(Debug, Default)]
struct Line {
    /// Unconfirmed notices; only the first may have been sent.
    queued: VecDeque<Message>,
    /// Pending answer to the first.
    asked: Option<Asked>,
    /// When to retransmit the first.
    again: Option<Deadline>,
    /// Number of notices queued and completed.
    noticed: u64,
    done: u64,
    is_gone: bool,
}

impl Line {
    /// Sends the next notice, if the previous one is confirmed.
    fn advance(&mut self, peer: Rank, shared: &Shared) {
        // One notice at a time for each peer: the answer to it confirms all earlier ones.
        while self.asked.is_none()
            && let Some(&message) = self.queued.front()
        {
            if self.is_gone {
                self.first_is_done();
                // Not only at `forget`: the failed connection may be the first sign that the peer is gone.
                shared.forget_peer(peer);
                continue;
            }
            // Backoff: wait before retransmitting.
            if self.again.is_some_and(|again| !again.passed()) {
                return;
            }
            // The sequence number stays the same for a retransmission, so the peer can detect duplicates.
            match shared.begin_telling(peer, self.done + 1, message) {
                Ok(asked) => self.asked = Some(asked),
                Err(error) => self.failed(peer, &error),
            }
        }
    }

    /// Handles an answer, or its absence.
    fn answered(&mut self, peer: Rank) {
        let Some(asked) = self.asked.take() else {
            return;
        };
        match asked.finish() {
            Ok(_) => self.first_is_done(),
            Err(error) => self.failed(peer, &error),
        }
    }

    fn failed(&mut self, peer: Rank, error: &Error) {
        match error.kind() {
            // A process that does not listen any more maps nothing.
            ErrorKind::PeerLost => self.is_gone = true,
            kind if service_client::may_pass(kind) => {
                if self.again.is_none()
                    && let Some(omitted) = CANNOT_TELL.due()
                {
                    tracing::warn!(%error, peer, omitted, "a notice could not be sent; retrying");
                }
                self.again = Some(Deadline::after(PAUSE));
            }
            _ => {
                // Retrying would not help, so drop it rather than block later notices.
                tracing::warn!(%error, peer, "a notice could not be sent");
                self.first_is_done();
            }
        }
    }

    fn first_is_done(&mut self) {
        self.queued.pop_front();
        self.again = None;
        self.done += 1;
    }

    /// Time until the next retransmission, if one is due.
    fn pause(&self) -> Option<Duration> {
        // While an answer is pending, its arrival wakes the thread.
        self.again
            .filter(|_| self.asked.is_none())
            .map(|again| again.remaining())
    }
}

/// A flush in progress, with the notice counts to reach.
#[derive(Debug)]
struct Flush {
    done: mpsc::Sender<()>,
    noticed: Vec<(Rank, u64)>,
}

/// The thread's state.
#[derive(Debug)]
struct Lines {
    lines: BTreeMap<Rank, Line>,
    /// Waiting flushes.
    flushes: Vec<Flush>,
    /// Time limit for sending the rest.
    stopping: Option<Deadline>,
}

impl Lines {
    fn take(&mut self, notice: Notice) {
        match notice {
            Notice::Tell(peer, message) => {
                let line = self.lines.entry(peer).or_default();
                line.noticed += 1;
                line.queued.push_back(message);
            }
            Notice::Forget(peer) => {
                let line = self.lines.entry(peer).or_default();
                line.is_gone = true;
                // Closing the connection abandons the pending answer.
                line.asked = None;
            }
            Notice::Flush(done) => {
                let noticed = self.lines.iter().map(|(&peer, line)| (peer, line.noticed));
                // Only notices queued so far: later ones must not prolong the flush.
                let noticed = noticed.collect();
                self.flushes.push(Flush { done, noticed });
            }
            Notice::Stop => self.stopping = Some(Deadline::after(MAX_STOP)),
        }
    }

    fn advance(&mut self, shared: &Shared) {
        for (&peer, line) in &mut self.lines {
            line.advance(peer, shared);
        }
        let lines = &self.lines;
        self.flushes.retain(|Flush { done, noticed }| {
            let is_done = |(peer, count): &(Rank, u64)| {
                // `done` counts in order, so this covers every notice queued before the flush.
                lines.get(peer).is_none_or(|line| line.done >= *count)
            };
            let waits = !noticed.iter().all(is_done);
            if !waits {
                let _ = done.send(());
            }
            waits
        });
    }

    /// Whether the thread should end.
    fn has_ended(&self) -> bool {
        let idle = self.lines.values().all(|line| line.queued.is_empty());
        self.stopping.is_some_and(|until| idle || until.passed())
    }

    /// Waits up to `limit` for an answer, a retransmission or a command. Returns the peers that answered.
    fn wait(&self, wake: &OwnedFd, limit: Duration) -> Vec<Rank> {
        // Wake for the earliest of: the stop limit, a retransmission, the caller's limit.
        let limit = self
            .stopping
            .map_or(limit, |until| until.remaining().min(limit));
        let pauses = self.lines.values().filter_map(Line::pause);
        let limit = pauses.fold(limit, Duration::min);
        let mut peers = Vec::new();
        let mut polled = vec![PollFd::new(wake, PollFlags::IN)];
        for (&peer, line) in &self.lines {
            if let Some(asked) = &line.asked {
                peers.push(peer);
                polled.push(PollFd::new(asked, PollFlags::IN));
            }
        }
        let limit = Timespec {
            tv_sec: limit.as_secs().cast_signed(),
            tv_nsec: limit.subsec_nanos().into(),
        };
        match poll(&mut polled, Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                // The descriptor limit was lowered, or memory is short: may be transient.
                if let Some(omitted) = CANNOT_WAIT.due() {
                    tracing::warn!(%errno, omitted, "cannot wait for the answers of peers; trying again");
                }
                std::thread::sleep(PAUSE);
            }
        }
        let ready = polled.iter().skip(1).map(|fd| !fd.revents().is_empty());
        let answered = peers.iter().zip(ready);
        let answered = answered.filter_map(|(&peer, ready)| ready.then_some(peer));
        let answered: Vec<Rank> = answered.collect();
        // Reset before the queue is read, so that no command is missed.
        let _ = rustix::io::read(wake, &mut [0; 8]);
        answered
    }
}

/// A mapping is closed at the second expiration after its last use.
fn aging_interval(max_idle_age: Duration) -> Duration {
    (max_idle_age / 2).max(MIN_AGING_INTERVAL)
}

fn run(queue: &Queue, shared: &Weak<Shared>, aging_interval: Duration) {
    let mut aging = Deadline::after(aging_interval);
    let mut lines = Lines {
        lines: BTreeMap::new(),
        flushes: Vec::new(),
        stopping: None,
    };
    // Each iteration: drain commands, send what is due, then sleep until an event.
    loop {
        loop {
            match queue.notices.try_recv() {
                Ok(notice) => lines.take(notice),
                Err(mpsc::TryRecvError::Empty) => break,
                Err(mpsc::TryRecvError::Disconnected) => return,
            }
        }
        {
            // Upgraded only while needed, so that this thread does not keep the registry alive.
            let Some(shared) = shared.upgrade() else {
                return;
            };
            if aging.passed() {
                shared.mappings.age();
                aging = Deadline::after(aging_interval);
            }
            lines.advance(&shared);
        }
        if lines.has_ended() {
            return;
        }
        let answered = lines.wait(&queue.wake, aging.remaining());
        for peer in answered {
            if let Some(line) = lines.lines.get_mut(&peer) {
                line.answered(peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_that_may_not_grow_old_are_looked_at_with_pauses() {
        assert_eq!(aging_interval(Duration::ZERO), MIN_AGING_INTERVAL);
        let long = Duration::from_secs(60);
        assert_eq!(aging_interval(2 * long), long);
    }
}

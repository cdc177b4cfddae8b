//! Tells peers things from a thread of its own, so that dropping never waits for a peer.
//!
//! One thread waits for the answers of all peers at a time. A peer is told one thing after another, so
//! that the order holds; one that does not answer, as its process is stopped, holds up nobody else.
//!
//! What a peer has not confirmed is told again, since a notice that is lost leaks what it lets go of. A
//! notice carries its number, and the peer does not do again what it has done. Only where nobody
//! listens any more is the peer gone.

use super::message::Message;
use super::service_client::{self, Asked};
use super::shared::Shared;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::shortage::Throttle;
use crate::sync::lock;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// The longest wait for notices to be sent.
const MAX_FLUSH: Duration = Duration::from_secs(5);
/// The longest that the thread goes on to tell peers when it is to end.
const MAX_STOP: Duration = Duration::from_secs(2);
/// Between two attempts at what the system refuses for lack of something, or the peer drops for it.
const PAUSE: Duration = Duration::from_millis(10);
/// The shortest time between two looks at which mappings are old.
const MIN_AGING_INTERVAL: Duration = Duration::from_millis(50);

/// What the thread has to do.
#[derive(Debug)]
enum Notice {
    Tell(Rank, Message),
    // The peer is gone, and is told nothing any more.
    Forget(Rank),
    // Answers when every notice before it was sent.
    Flush(mpsc::Sender<()>),
    Stop,
}

/// The queue's sending side. Clones send to the same thread.
#[derive(Clone, Debug)]
pub(super) struct Outbox {
    notices: mpsc::Sender<Notice>,
    /// Readable when there are notices.
    wake: Arc<OwnedFd>,
}

/// The queue's receiving side, until the thread starts.
#[derive(Debug)]
pub(super) struct Queue {
    notices: mpsc::Receiver<Notice>,
    wake: Arc<OwnedFd>,
}

/// The thread that sends notices.
#[derive(Debug)]
pub(super) struct Notifier {
    outbox: Outbox,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A queue of notices.
pub(super) fn queue() -> Result<(Outbox, Queue)> {
    let (sender, receiver) = mpsc::channel();
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|errno| Error::io("make an event descriptor", &errno.into()))?;
    let wake = Arc::new(wake);
    let outbox = Outbox {
        notices: sender,
        wake: wake.clone(),
    };
    let notices = receiver;
    Ok((outbox, Queue { notices, wake }))
}

impl Outbox {
    /// Has `peer` told. Does not block.
    pub(super) fn tell(&self, peer: Rank, message: Message) {
        self.send(Notice::Tell(peer, message));
    }

    /// Has the thread forget what `peer` was to be told: it is gone. Does not block.
    pub(super) fn forget(&self, peer: Rank) {
        self.send(Notice::Forget(peer));
    }

    /// Waits until every notice so far was sent, or for as long as a peer may take.
    pub(super) fn flush(&self) {
        let (done, wait) = mpsc::channel();
        self.send(Notice::Flush(done));
        // A closed channel means that the thread has ended.
        let _ = wait.recv_timeout(MAX_FLUSH);
    }

    fn send(&self, notice: Notice) {
        // The thread is gone only when the communicator is closed; then peers know that anyway.
        let _ = self.notices.send(notice);
        // A full counter is readable too.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

impl Notifier {
    /// Starts the thread, which ends when `shared` is gone. It also closes mappings that were not used
    /// for `max_idle_age`.
    pub(super) fn start(
        outbox: Outbox,
        queue: Queue,
        shared: Weak<Shared>,
        max_idle_age: Duration,
    ) -> Result<Self> {
        let thread = std::thread::Builder::new()
            .name("warplink-notifier".to_owned())
            .spawn(move || run(&queue, &shared, aging_interval(max_idle_age)))
            .map_err(|error| Error::thread("start the notifier thread", &error))?;
        Ok(Self {
            outbox,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Sends what is queued, as far as peers answer within two seconds, and ends the thread.
    pub(super) fn stop(&self) {
        let Some(thread) = lock(&self.thread).take() else {
            return;
        };
        self.outbox.send(Notice::Stop);
        // The last owner may be dropped by this thread, which cannot wait for itself.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("the notifier thread panicked");
        }
    }
}

static CANNOT_WAIT: Throttle = Throttle::new();

/// What one peer is told.
#[derive(Debug, Default)]
struct Line {
    /// What it has not confirmed, the first of which it may have been told.
    queued: VecDeque<Message>,
    /// The answer to the first.
    asked: Option<Asked>,
    /// When the first is to be told again.
    again: Option<Deadline>,
    /// How many notices there were, and how many of them are done with.
    noticed: u64,
    done: u64,
    is_gone: bool,
}

impl Line {
    /// Tells the peer the next thing, if it has confirmed the one before.
    fn advance(&mut self, peer: Rank, shared: &Shared) {
        while self.asked.is_none()
            && let Some(&message) = self.queued.front()
        {
            if self.is_gone {
                self.first_is_done();
                shared.forget_peer(peer);
                continue;
            }
            if self.again.is_some_and(|again| !again.passed()) {
                return;
            }
            match shared.begin_telling(peer, self.done + 1, message) {
                Ok(asked) => self.asked = Some(asked),
                Err(error) => self.failed(peer, &error),
            }
        }
    }

    /// The answer is there, or will not come.
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
            // A peer that does not listen any more maps nothing any more.
            ErrorKind::PeerLost => self.is_gone = true,
            kind if service_client::may_pass(kind) => {
                if self.again.is_none() {
                    tracing::warn!(%error, peer, "a peer could not be told; trying again");
                }
                self.again = Some(Deadline::after(PAUSE));
            }
            _ => {
                tracing::warn!(%error, peer, "a peer could not be told");
                self.first_is_done();
            }
        }
    }

    fn first_is_done(&mut self) {
        self.queued.pop_front();
        self.again = None;
        self.done += 1;
    }

    /// How long the next attempt is to wait for, if there is to be one.
    fn pause(&self) -> Option<Duration> {
        self.again
            .filter(|_| self.asked.is_none())
            .map(|again| again.remaining())
    }
}

/// A wait for what every peer was to be told when it began: how many notices.
#[derive(Debug)]
struct Flush {
    done: mpsc::Sender<()>,
    noticed: Vec<(Rank, u64)>,
}

/// The thread's state.
#[derive(Debug)]
struct Lines {
    lines: BTreeMap<Rank, Line>,
    /// Who waits for which notices.
    flushes: Vec<Flush>,
    /// Until when the rest may be sent.
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
                line.asked = None;
            }
            Notice::Flush(done) => {
                let noticed = self.lines.iter().map(|(&peer, line)| (peer, line.noticed));
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
                lines.get(peer).is_none_or(|line| line.done >= *count)
            };
            let waits = !noticed.iter().all(is_done);
            if !waits {
                let _ = done.send(());
            }
            waits
        });
    }

    /// Whether the thread is to end.
    fn has_ended(&self) -> bool {
        let idle = self.lines.values().all(|line| line.queued.is_empty());
        self.stopping.is_some_and(|until| idle || until.passed())
    }

    /// Waits until a peer has answered, is to be told again, there are notices, or for `limit`; the
    /// peers that answered.
    fn wait(&self, wake: &OwnedFd, limit: Duration) -> Vec<Rank> {
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
                // The limit of descriptors was lowered, or memory is short, which may pass.
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
        // Before the notices are looked at, so that none is left lying.
        let _ = rustix::io::read(wake, &mut [0; 8]);
        answered
    }
}

/// A mapping is closed at the second look after its last use.
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
    loop {
        loop {
            match queue.notices.try_recv() {
                Ok(notice) => lines.take(notice),
                Err(mpsc::TryRecvError::Empty) => break,
                Err(mpsc::TryRecvError::Disconnected) => return,
            }
        }
        {
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

//! Tells peers things from a thread of its own, so that dropping never waits for a peer.

use super::Shared;
use super::message::Message;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use std::collections::HashSet;
use std::sync::{Mutex, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// The longest wait for notices to be sent. Each is bounded by the service's own limits.
const MAX_FLUSH: Duration = Duration::from_secs(30);

/// What the thread has to do.
#[derive(Debug)]
enum Notice {
    Tell(Rank, Message),
    // Answers when every notice before it was sent.
    Flush(mpsc::Sender<()>),
    Stop,
}

/// The queue's sending side. Clones send to the same thread.
#[derive(Clone, Debug)]
pub(super) struct Outbox(mpsc::Sender<Notice>);

/// The queue's receiving side, until the thread starts.
#[derive(Debug)]
pub(super) struct Queue(mpsc::Receiver<Notice>);

/// The thread that sends notices.
#[derive(Debug)]
pub(super) struct Notifier {
    outbox: Outbox,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A queue of notices.
pub(super) fn queue() -> (Outbox, Queue) {
    let (sender, receiver) = mpsc::channel();
    (Outbox(sender), Queue(receiver))
}

impl Outbox {
    /// Has `peer` told. Does not block.
    pub(super) fn tell(&self, peer: Rank, message: Message) {
        // The thread is gone only when the communicator is closed; then peers know that anyway.
        let _ = self.0.send(Notice::Tell(peer, message));
    }

    /// Waits until every notice so far was sent.
    pub(super) fn flush(&self) {
        let (done, wait) = mpsc::channel();
        if self.0.send(Notice::Flush(done)).is_ok() {
            // A closed channel means that the thread has ended.
            let _ = wait.recv_timeout(MAX_FLUSH);
        }
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
            .spawn(move || run(&queue, &shared, max_idle_age / 2))
            .map_err(|error| Error::io("start the notifier thread", &error))?;
        Ok(Self {
            outbox,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Sends what is queued and ends the thread. Returns whether it was running.
    pub(super) fn stop(&self) {
        let Some(thread) = lock(&self.thread).take() else {
            return;
        };
        let _ = self.outbox.0.send(Notice::Stop);
        // The last owner may be dropped by this thread, which cannot wait for itself.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("the notifier thread panicked");
        }
    }
}

fn run(queue: &Queue, shared: &Weak<Shared>, aging_interval: Duration) {
    let mut gone: HashSet<Rank> = HashSet::new();
    let mut aging = Deadline::after(aging_interval);
    loop {
        if aging.passed() {
            let Some(shared) = shared.upgrade() else {
                return;
            };
            shared.mappings.age();
            aging = Deadline::after(aging_interval);
        }
        let notice = match queue.0.recv_timeout(aging.remaining()) {
            Ok(notice) => notice,
            Err(mpsc::RecvTimeoutError::Timeout) => continue,
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        };
        match notice {
            Notice::Tell(peer, message) => {
                let Some(shared) = shared.upgrade() else {
                    return;
                };
                if gone.contains(&peer) {
                    shared.forget_peer(peer);
                    continue;
                }
                match shared.ask(peer, message) {
                    Ok(_) => {}
                    // A peer that does not listen any more maps nothing any more.
                    Err(error) if error.kind() == ErrorKind::PeerLost => {
                        gone.insert(peer);
                        shared.forget_peer(peer);
                    }
                    Err(error) => tracing::warn!(%error, ?message, "a peer could not be told"),
                }
            }
            Notice::Flush(done) => {
                let _ = done.send(());
            }
            Notice::Stop => return,
        }
    }
}

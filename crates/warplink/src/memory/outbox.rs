//! Queue of notices to peers, which the notifier's thread sends.

use super::message::Message;
use crate::error::{Error, Rank, Result};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Maximum wait of a flush.
const MAX_FLUSH: Duration = Duration::from_secs(5);

/// A command to the notifier.
#[derive(Debug)]
pub(super) enum Notice {
    Tell(Rank, Message),
    // The peer is gone; drop its notices.
    Forget(Rank),
    // Replies once every earlier notice was sent.
    Flush(mpsc::Sender<()>),
    Stop,
}

/// Sending side of the queue. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Outbox {
    notices: mpsc::Sender<Notice>,
    /// Eventfd, readable when there are commands.
    wake: Arc<OwnedFd>,
}

/// Receiving side of the queue, until the thread starts.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) notices: mpsc::Receiver<Notice>,
    pub(super) wake: Arc<OwnedFd>,
}

/// Creates the queue.
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
    /// Queues a notice to `peer`. Does not block.
    pub(super) fn notify(&self, peer: Rank, message: Message) {
        self.send(Notice::Tell(peer, message));
    }

    /// Drops queued notices to `peer`, which is gone. Does not block.
    pub(super) fn forget(&self, peer: Rank) {
        self.send(Notice::Forget(peer));
    }

    /// Waits until every queued notice was sent, up to [`MAX_FLUSH`].
    pub(super) fn flush(&self) {
        let (done, wait) = mpsc::channel();
        self.send(Notice::Flush(done));
        // A closed channel means that the thread has ended.
        let _ = wait.recv_timeout(MAX_FLUSH);
    }

    pub(super) fn send(&self, notice: Notice) {
        // The thread ends only when the job is closed, which peers notice by other means.
        let _ = self.notices.send(notice);
        // Fails only if the counter is full, and then the thread wakes anyway.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

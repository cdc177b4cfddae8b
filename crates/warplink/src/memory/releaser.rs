//! Releases borrowed memory on a thread that may block.
//!
//! Dropping an owner may run arbitrary code, such as an interpreter that needs a lock whose holder may be
//! waiting for a peer's answer. So threads that answer peers hand owners over to this thread.

use crate::sync::lock;
use crate::threads;
use std::any::Any;
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};

/// The thread, started on first use. Ends on drop.
#[derive(Debug, Default)]
pub(super) struct Releaser(Mutex<Option<Sender<Box<dyn Any + Send>>>>);

impl Releaser {
    /// Drops `item`: on the thread if it is `borrowed`, else here.
    pub(super) fn release(&self, borrowed: bool, item: impl Any + Send) {
        if !borrowed {
            return drop(item);
        }
        let mut sender = lock(&self.0);
        if sender.is_none() {
            *sender = start();
        }
        let unsent = match &*sender {
            Some(sender) => sender.send(Box::new(item)).err().map(|error| error.0),
            None => Some(Box::new(item) as Box<dyn Any + Send>),
        };
        // The thread failed to start: drop here, but outside the lock.
        drop(sender);
        drop(unsent);
    }
}

fn start() -> Option<Sender<Box<dyn Any + Send>>> {
    let (sender, queue) = channel();
    let run = move || queue.into_iter().for_each(drop);
    match threads::spawn("warplink-owners", "start a thread", run) {
        Ok(_) => Some(sender),
        Err(error) => {
            tracing::warn!(%error, "owners of borrowed memory are released on threads that answer peers");
            None
        }
    }
}

//! Letting go of memory that somebody else owns, on a thread that may wait.
//!
//! Dropping an owner may run any code: an interpreter's, which needs a lock that the thread holding
//! it may give up only when a peer has been answered. So threads that answer peers hand owners over.

use crate::sync::lock;
use std::any::Any;
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};

/// The thread, started when it is needed first. It ends when this is dropped.
#[derive(Debug, Default)]
pub(super) struct Releaser(Mutex<Option<Sender<Box<dyn Any + Send>>>>);

impl Releaser {
    /// Drops `item`, on the thread if it is `borrowed`, else here.
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
        // Here after all, but not under the lock.
        drop(sender);
        drop(unsent);
    }
}

fn start() -> Option<Sender<Box<dyn Any + Send>>> {
    let (sender, queue) = channel();
    let thread = std::thread::Builder::new()
        .name("warplink-owners".to_owned())
        .spawn(move || queue.into_iter().for_each(drop));
    match thread {
        Ok(_) => Some(sender),
        Err(error) => {
            tracing::warn!(%error, "owners of memory are let go of on threads that answer peers");
            None
        }
    }
}

//! Python objects that keep borrowed memory alive, and letting go of them.
//!
//! The library drops an owner on any of its threads, some of which answer peers or hold a lock. Dropping
//! a Python object needs the interpreter's lock and may run any code. So owners are handed to a thread
//! that does nothing else and may wait.

use pyo3::prelude::*;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

static RELEASER: Mutex<Option<Sender<Py<PyAny>>>> = Mutex::new(None);

/// A Python object that is held, and let go of on the releasing thread.
#[derive(Debug)]
pub(crate) struct Owner(Option<Py<PyAny>>);

impl Owner {
    /// Holds `object`.
    pub(crate) fn new(object: Py<PyAny>) -> Self {
        Self(Some(object))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else {
            return;
        };
        let mut sender = RELEASER.lock().unwrap_or_else(PoisonError::into_inner);
        if sender.is_none() {
            *sender = start();
        }
        let unsent = match &*sender {
            Some(sender) => sender.send(object).err().map(|error| error.0),
            None => Some(object),
        };
        drop(sender);
        // Without the thread, PyO3 lets go of it when the interpreter is entered next.
        drop(unsent);
    }
}

fn start() -> Option<Sender<Py<PyAny>>> {
    let (sender, queue) = channel::<Py<PyAny>>();
    let thread = std::thread::Builder::new().name("warplink-py-release".to_owned());
    let body = move || {
        for object in queue {
            // While the interpreter ends, nothing can be let go of any more.
            if Python::try_attach(|py| object.drop_ref(py)).is_none() {
                return;
            }
        }
    };
    thread.spawn(body).ok().map(|_| sender)
}

/// A value whose end may take time, such as a job that is not closed: it is dropped without the
/// interpreter's lock.
#[derive(Debug)]
pub(crate) struct Detached<T: Send>(Mutex<Option<T>>);

impl<T: Send> Detached<T> {
    /// Holds `value`.
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(Some(value)))
    }

    /// Takes the value out; nothing if it was taken before.
    pub(crate) fn take(&self) -> Option<T> {
        self.lock().take()
    }

    /// What `read` says of the value, if it is still there.
    pub(crate) fn with<R>(&self, read: impl FnOnce(&T) -> R) -> Option<R> {
        self.lock().as_ref().map(read)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        let Some(value) = self.take() else {
            return;
        };
        let mut value = Some(value);
        let detached = Python::try_attach(|py| py.detach(|| drop(value.take())));
        if detached.is_none() {
            drop(value);
        }
    }
}

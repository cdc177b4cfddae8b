//! Python objects that keep borrowed memory alive, and their release.
//!
//! The library drops an owner on any of its threads, some of which answer peers or hold a lock. Dropping a Python
//! object needs the interpreter's lock and may run arbitrary code. Owners are therefore released on a dedicated thread,
//! which may block.

use crate::errors::{closed, raise};
use pyo3::prelude::*;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use warplink::Error;

static RELEASER: Mutex<Option<Sender<Py<PyAny>>>> = Mutex::new(None);

/// A Python object that is held, and released on the releasing thread.
#[derive(Debug)]
pub(crate) struct Owner(Option<Py<PyAny>>);

impl Owner {
    /// Holds `object`.
    pub(crate) fn new(object: Py<PyAny>) -> Self {
        Self(Some(object))
    }

    /// The object; None once it was released.
    pub(crate) fn object<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        match &self.0 {
            Some(object) => object.bind(py).clone(),
            None => py.None().into_bound(py),
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else {
            return;
        };
        // Started on first use, so that a process that borrows nothing, or forks before, has no thread.
        let mut sender = RELEASER.lock().unwrap_or_else(PoisonError::into_inner);
        if sender.is_none() {
            *sender = start();
        }
        let unsent = match &*sender {
            // Never blocks: the queue is unbounded.
            Some(sender) => sender.send(object).err().map(|error| error.0),
            None => Some(object),
        };
        // Before `unsent` is dropped, which may run Python code that borrows and drops an owner itself.
        drop(sender);
        // If the thread is gone, PyO3 releases the object the next time the interpreter is entered.
        drop(unsent);
    }
}

fn start() -> Option<Sender<Py<PyAny>>> {
    let (sender, queue) = channel::<Py<PyAny>>();
    let thread = std::thread::Builder::new().name("warplink-py-release".to_owned());
    let body = move || {
        for object in queue {
            // While the interpreter is finalizing, objects cannot be released any more.
            if Python::try_attach(|py| object.drop_ref(py)).is_none() {
                return;
            }
        }
    };
    thread.spawn(body).ok().map(|_| sender)
}

/// A value whose drop may take long, such as a job that is not closed: it is dropped without the interpreter's lock,
/// and never in a forked process.
#[derive(Debug)]
pub(crate) struct Detached<T: Send> {
    value: Mutex<Option<T>>,
    /// The exception of later uses, if the value was taken.
    taken: fn() -> PyErr,
    process: u32,
}

/// A value that is usable only in the process that created it, and dropped only there: a forked process has its memory,
/// but not the threads that serve it, and shares its connections.
#[derive(Debug)]
pub(crate) struct OfProcess<T> {
    value: Option<T>,
    process: u32,
}

impl<T: Send> Detached<T> {
    /// Holds `value`; uses raise `taken` once it was taken.
    pub(crate) fn new(value: T, taken: fn() -> PyErr) -> Self {
        Self {
            value: Mutex::new(Some(value)),
            taken,
            process: std::process::id(),
        }
    }

    /// Takes the value out; `None` if it was taken before or belongs to another process.
    pub(crate) fn take(&self) -> Option<T> {
        // The lock is not touched either: a thread that did not survive the fork may have held it.
        if is_of_another_process(self.process) {
            return None;
        }
        self.lock().take()
    }

    /// Result of `read` on the value, if it still exists.
    pub(crate) fn with<R>(&self, read: impl FnOnce(&T) -> R) -> Option<R> {
        if is_of_another_process(self.process) {
            return None;
        }
        self.lock().as_ref().map(read)
    }

    /// The value, unless it was taken. Fails in a forked process.
    pub(crate) fn get(&self) -> PyResult<T>
    where
        T: Clone,
    {
        check_process(self.process)?;
        self.with(T::clone).ok_or_else(self.taken)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<T>> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send + Sync> Detached<Arc<T>> {
    /// Takes a plan out for exclusive use. Fails if it was taken, or if another thread uses it; in the latter case it
    /// stays in place.
    pub(crate) fn take_unused(&self) -> PyResult<T> {
        check_process(self.process)?;
        let unused = {
            let mut value = self.lock();
            // Put back under the same lock if another thread holds a clone, so that its next call still finds the
            // plan.
            value.take().map(|shared| {
                Arc::try_unwrap(shared).map_err(|shared| {
                    *value = Some(shared);
                })
            })
        };
        // Not under the lock: creating an exception may switch to other threads, which may need the value.
        match unused {
            Some(Ok(value)) => Ok(value),
            Some(Err(())) => Err(raise(Error::invalid(
                "the plan is in use by another thread; expected it to be idle",
            ))),
            None => Err((self.taken)()),
        }
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        if is_of_another_process(self.process) {
            let value = self.value.get_mut().unwrap_or_else(PoisonError::into_inner);
            // Dropping would join threads that the fork did not copy, and write to the parent's connections.
            return std::mem::forget(value.take());
        }
        let Some(value) = self.take() else {
            return;
        };
        let mut value = Some(value);
        // Python drops objects with its lock held; without the detach, a drop that waits for a peer in another thread
        // of this process would stall it. `try_attach` fails during finalization, where the drop runs as it is.
        let detached = Python::try_attach(|py| py.detach(|| drop(value.take())));
        if detached.is_none() {
            drop(value);
        }
    }
}

impl<T> OfProcess<T> {
    /// Holds `value`.
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: Some(value),
            process: std::process::id(),
        }
    }

    /// The value. Fails in a forked process.
    pub(crate) fn get(&self) -> PyResult<&T> {
        check_process(self.process)?;
        self.value.as_ref().ok_or_else(|| closed("object"))
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if is_of_another_process(self.process) {
            std::mem::forget(self.value.take());
        }
    }
}

fn is_of_another_process(process: u32) -> bool {
    process != std::process::id()
}

fn check_process(process: u32) -> PyResult<()> {
    if !is_of_another_process(process) {
        return Ok(());
    }
    let own = std::process::id();
    Err(raise(
        Error::unsupported(format!("the object was made in process {process}; expected no use of it in process {own}, a fork"),
        )
        .with_help("start ranks and workers with spawn, or join a job in the forked process"),
    ))
}

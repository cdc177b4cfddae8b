//! Order among kernels of one GPU that wait for other ranks.

use crate::collectives::Collectives;
use crate::errors::raise;
use crate::stream::{Stream, Turns};
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Users of one GPU whose kernels wait for other ranks: collectives of several groups, and plans with collectives in
/// turns. Each is enqueued behind the last work of the others: kernels of two groups that wait for one another's
/// multiprocessors would never end.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug, Default)]
pub(crate) struct Order(Mutex<Vec<Py<PyAny>>>);

#[pymethods]
impl Order {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Adds `user`, a Collectives or Turns, unless it is there.
    fn add(&self, user: &Bound<'_, PyAny>) {
        let mut users = self.lock();
        if !users.iter().any(|one| one.is(user)) {
            users.push(user.clone().unbind());
        }
    }

    /// Removes `user`, if it is there.
    fn remove(&self, user: &Bound<'_, PyAny>) {
        let mut users = self.lock();
        let place = users.iter().position(|one| one.is(user));
        let removed = place.map(|place| users.swap_remove(place));
        drop(users);
        // Outside the lock, since this may run Python code.
        drop(removed);
    }

    /// Makes `stream` wait for the work so far of all others than `user`, unless it records a graph: the application orders
    /// what it records. Does not block.
    pub(crate) fn follow(&self, user: &Bound<'_, PyAny>, stream: &Stream) -> PyResult<()> {
        let py = user.py();
        // Copied out: enqueueing below may release the interpreter's lock, and a thread that then takes this mutex
        // while holding the former would deadlock.
        let others: Vec<Py<PyAny>> = {
            let users = self.lock();
            let others = users.iter().filter(|one| !one.is(user));
            others.map(|one| one.clone_ref(py)).collect()
        };
        // Waiting for uncaptured work is not allowed inside a capture; the order is then that of the graph's
        // launches.
        if others.is_empty() || stream.is_capturing()? {
            return Ok(());
        }
        for other in others {
            let other = other.bind(py);
            if let Ok(collectives) = other.cast::<Collectives>() {
                // Of closed ones there is nothing to wait for.
                if let Ok(inner) = collectives.get().inner.get() {
                    inner.precede(stream.live()?).map_err(raise)?;
                }
            } else {
                other.cast::<Turns>()?.get().precede(stream)?;
            }
        }
        Ok(())
    }
}

impl Order {
    fn lock(&self) -> MutexGuard<'_, Vec<Py<PyAny>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

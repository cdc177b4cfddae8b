//! The one-way switch that turns a lost peer into errors instead of hangs.

use crate::error::{Error, Result};
use crate::sync::lock;
use std::fmt;
use std::sync::{Mutex, OnceLock};

type Hook = Box<dyn FnOnce() + Send>;

/// Raised at most once, by whoever learns that a peer is lost. From then on every wait in the
/// device's streams ends, and [`Fault::check`] gives the error that was raised first.
#[derive(Default)]
pub struct Fault {
    error: OnceLock<Error>,
    hooks: Mutex<Vec<Hook>>,
}

impl Fault {
    /// Raises it with `error`; a second error is dropped, since the first is the cause.
    pub fn raise(&self, error: Error) {
        if self.error.set(error).is_ok() {
            let hooks = std::mem::take(&mut *lock(&self.hooks));
            hooks.into_iter().for_each(|hook| hook());
        }
    }

    /// The error that was raised, if one was.
    pub fn error(&self) -> Option<&Error> {
        self.error.get()
    }

    /// Fails with the error that was raised, if one was.
    pub fn check(&self) -> Result<()> {
        match self.error.get() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Runs `hook` once when it is raised, or at once if it has been.
    pub(crate) fn when_raised(&self, hook: impl FnOnce() + Send + 'static) {
        let mut hooks = lock(&self.hooks);
        if self.error.get().is_none() {
            hooks.push(Box::new(hook));
            return;
        }
        drop(hooks);
        hook();
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Fault").field(&self.error.get()).finish()
    }
}

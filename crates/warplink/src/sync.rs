//! Atomics and locks: the standard library's, or loom's if the crate is built with `--cfg loom`, so that the
//! protocols under test are the real ones.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Arc, Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering, fence},
};
#[cfg(loom)]
pub(crate) use loom::thread::{Thread, current as this_thread};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, OnceLock,
    atomic::{AtomicBool, AtomicU64, Ordering, fence},
};
#[cfg(not(loom))]
pub(crate) use std::thread::{Thread, current as this_thread, park_timeout};
use std::time::Duration;

/// Ignores the timeout, so that loom detects a lost wakeup.
#[cfg(loom)]
pub(crate) fn park_timeout(_: Duration) {
    loom::thread::park();
}

/// The standard library's cell, which loom lacks, with its ordering declared to loom: a reader that sees the
/// value sees everything before it was set.
#[cfg(loom)]
#[derive(Debug)]
pub(crate) struct OnceLock<T> {
    is_set: AtomicBool,
    value: std::sync::OnceLock<T>,
}

#[cfg(loom)]
impl<T> Default for OnceLock<T> {
    fn default() -> Self {
        Self {
            is_set: AtomicBool::new(false),
            value: std::sync::OnceLock::new(),
        }
    }
}

#[cfg(loom)]
impl<T> OnceLock<T> {
    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        self.value.set(value)?;
        // Models the release store of `std::sync::OnceLock::set`.
        self.is_set.store(true, Ordering::Release);
        Ok(())
    }

    pub(crate) fn get(&self) -> Option<&T> {
        // Models the acquire load of `std::sync::OnceLock::get`.
        let is_set = self.is_set.load(Ordering::Acquire);
        self.value.get().filter(|_| is_set)
    }
}

/// Locks a mutex, ignoring poisoning: every holder keeps the guarded value consistent, and a library must not
/// answer one panic with another.
pub(crate) fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// As [`guard`], for standard-library locks in code that loom does not check.
pub(crate) fn lock<T: ?Sized>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits for a notification, up to `limit`, ignoring poisoning as [`lock`] does. Callers check their condition again,
/// whatever ended the wait.
pub(crate) fn wait_for<'a, T>(
    changed: &std::sync::Condvar,
    guard: std::sync::MutexGuard<'a, T>,
    limit: Duration,
) -> std::sync::MutexGuard<'a, T> {
    let waited = changed.wait_timeout(guard, limit);
    waited.unwrap_or_else(std::sync::PoisonError::into_inner).0
}

/// Waits while `condition` holds, up to `limit`, ignoring poisoning as [`lock`] does.
pub(crate) fn wait_while<'a, T>(
    changed: &std::sync::Condvar,
    guard: std::sync::MutexGuard<'a, T>,
    limit: Duration,
    condition: impl FnMut(&mut T) -> bool,
) -> std::sync::MutexGuard<'a, T> {
    let waited = changed.wait_timeout_while(guard, limit, condition);
    waited.unwrap_or_else(std::sync::PoisonError::into_inner).0
}

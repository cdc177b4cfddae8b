//! Atomics and locks: the standard library's, or loom's when the crate is built with `--cfg loom`,
//! so that the protocols checked by loom are the ones that run.

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

/// Without a limit, so that loom finds a thread that nobody wakes.
#[cfg(loom)]
pub(crate) fn park_timeout(_: std::time::Duration) {
    loom::thread::park();
}

/// The standard library's, which loom lacks, with its order told to loom: who sees the value sees what
/// was done before it was set.
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
        self.is_set.store(true, Ordering::Release);
        Ok(())
    }

    pub(crate) fn get(&self) -> Option<&T> {
        let is_set = self.is_set.load(Ordering::Acquire);
        self.value.get().filter(|_| is_set)
    }
}

/// The value behind a lock, also after a thread panicked while it held it: what the lock guards is
/// kept consistent by every holder, and a library must not answer one panic with another.
pub(crate) fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// As [`guard`], for the standard library's locks, which code that loom does not check uses.
pub(crate) fn lock<T: ?Sized>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

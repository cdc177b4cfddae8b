//! Starting threads, and waiting for their end.

use crate::error::{Error, Result};
use std::thread::{Builder, JoinHandle};

/// Starts the thread `name`. `operation` is that of the error if the system has no thread left, which names the limit.
pub(crate) fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    operation: &'static str,
    body: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    #[cfg(test)]
    if tests::NONE_LEFT.get() {
        return Err(Error::thread(operation, &rustix::io::Errno::AGAIN.into()));
    }
    let spawned = Builder::new().name(name.into()).spawn(body);
    spawned.map_err(|error| Error::thread(operation, &error))
}

/// Waits for a thread to end. The thread may be the caller, where it drops its last owner: it cannot join itself.
pub(crate) fn join(thread: JoinHandle<()>, name: &str) {
    if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
        tracing::error!("the {name} thread panicked");
    }
}

#[cfg(test)]
pub(crate) use tests::without_threads;

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    thread_local! {
        pub(super) static NONE_LEFT: Cell<bool> = const { Cell::new(false) };
    }

    /// Calls `body` as if the system had no thread left.
    pub(crate) fn without_threads<T>(body: impl FnOnce() -> T) -> T {
        NONE_LEFT.set(true);
        let done = body();
        NONE_LEFT.set(false);
        done
    }
}

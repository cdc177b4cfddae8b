//! Starting threads.

use crate::error::{Error, Result};
use std::thread::{Builder, JoinHandle};

/// Starts the thread `name`. `operation` is that of the error if the system has no thread left, which names the limit.
pub(crate) fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    operation: &'static str,
    body: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let spawned = Builder::new().name(name.into()).spawn(body);
    spawned.map_err(|error| Error::thread(operation, &error))
}

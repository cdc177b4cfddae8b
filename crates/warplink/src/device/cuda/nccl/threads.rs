//! Threads that call functions of NCCL that may block.
//!
//! To join, destroy or abort a communicator, NCCL waits for the other ranks of the machine: even an abort ends only
//! when their connections are closed, which a stopped process does not do. Callers therefore wait for a limited time,
//! and leave the thread behind after that.

use crate::device::exit::before_exit;
use crate::error::Result;
use crate::sync::{lock, wait_while};
use crate::threads;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// How long the exit of the process waits for these threads. Enough for an abort that only this rank delays.
const PATIENCE: Duration = Duration::from_secs(1);

/// Number of threads inside NCCL.
static INSIDE: Mutex<usize> = Mutex::new(0);
static LEFT: Condvar = Condvar::new();

/// A thread counted in `INSIDE`.
struct Inside;

impl Inside {
    fn enter() -> Self {
        *lock(&INSIDE) += 1;
        Self
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        *lock(&INSIDE) -= 1;
        LEFT.notify_all();
    }
}

/// Runs `body` on a thread named `warplink-nccl-` and `name`, after NCCL has been loaded. If the thread is left when
/// the process exits, the process ends without unloading NCCL.
pub(in crate::device::cuda) fn spawn(
    name: &'static str,
    body: impl FnOnce() + Send + 'static,
) -> Result<()> {
    static REGISTERED: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    let mut registered = lock(&REGISTERED);
    // Once for each name: NCCL loads libraries of its own while ranks join, and what is registered after them
    // precedes their destructors.
    if !registered.contains(&name) {
        registered.push(name);
        if let Err(error) = before_exit(are_left) {
            tracing::warn!(%error, "the process may crash if it exits while NCCL waits for other ranks");
        }
    }
    drop(registered);
    // Also dropped if the thread does not start, or panics.
    let inside = Inside::enter();
    let name = format!("warplink-nccl-{name}");
    threads::spawn(name, "start a thread that calls NCCL", move || {
        let _inside = inside;
        body();
    })
    .map(drop)
}

/// Whether threads are inside NCCL after a short wait.
fn are_left() -> bool {
    let left = *wait_while(&LEFT, lock(&INSIDE), PATIENCE, |left| *left > 0);
    if left > 0 {
        tracing::warn!("the process exits while NCCL waits for other ranks on {left} threads");
    }
    left > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn threads_are_counted_until_they_end() {
        let (go_on, told) = channel::<()>();
        spawn("waits", move || assert!(told.recv().is_ok())).unwrap();
        assert!(are_left());
        go_on.send(()).unwrap();
        assert!(!are_left());
        spawn("panics", || panic!("expected by this test")).unwrap();
        assert!(!are_left());
    }
}

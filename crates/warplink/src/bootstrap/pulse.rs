//! Liveness of a connection: when something last arrived from its other end.

use crate::error::Rank;
use crate::sync::lock;
use std::io::{self, Read};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// When something last arrived from the other end of a connection.
#[derive(Debug)]
pub(crate) struct Pulse(Mutex<Instant>);

impl Pulse {
    /// A pulse that begins now.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Instant::now())))
    }

    fn touch(&self) {
        *lock(&self.0) = Instant::now();
    }

    /// Whether something arrived after `since`.
    pub(crate) fn is_heard_since(&self, since: Instant) -> bool {
        *lock(&self.0) > since
    }

    /// For how long nothing has arrived, not counting time before `since`.
    pub(crate) fn silence(&self, since: Instant) -> Duration {
        (*lock(&self.0)).max(since).elapsed()
    }
}

/// Records that bytes arrive, so that a long message on a slow connection counts as a heartbeat too.
pub(crate) struct Heard<R> {
    reader: R,
    pulse: Arc<Pulse>,
}

impl<R: Read> Heard<R> {
    pub(crate) fn new(reader: R, pulse: Arc<Pulse>) -> Self {
        Self { reader, pulse }
    }
}

impl<R: Read> Read for Heard<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.reader.read(buffer)?;
        if count > 0 {
            self.pulse.touch();
        }
        Ok(count)
    }
}

/// The beginning of [`not_heard`].
const NOT_HEARD: &str = "it did not answer for ";

/// The reason for giving up a rank that was silent for `limit`.
pub(crate) fn not_heard(limit: Duration) -> String {
    format!("{NOT_HEARD}{limit:?}")
}

/// The help for the loss of a rank for `reason`.
pub(crate) fn help_after_loss(rank: Rank, reason: &str) -> String {
    if reason.starts_with(NOT_HEARD) {
        format!(
            "check why rank {rank} was stopped; if it was only delayed, set WARPLINK_HEARTBEAT_LIMIT to more seconds"
        )
    } else {
        format!("look at the output of rank {rank}")
    }
}

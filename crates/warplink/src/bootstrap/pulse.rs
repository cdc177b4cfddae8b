//! Signs of life: when the other end of a connection was last heard.

use crate::error::Rank;
use crate::sync::lock;
use std::io::{self, Read};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// When the other end of a connection was last heard.
#[derive(Debug)]
pub(crate) struct Pulse(Mutex<Instant>);

impl Pulse {
    /// As if it was heard now.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Instant::now())))
    }

    fn touch(&self) {
        *lock(&self.0) = Instant::now();
    }

    /// Whether it was heard after `since`.
    pub(crate) fn is_heard_since(&self, since: Instant) -> bool {
        *lock(&self.0) > since
    }

    /// For how long it was not heard, of the time after `since`: what came before does not count.
    pub(crate) fn silence(&self, since: Instant) -> Duration {
        (*lock(&self.0)).max(since).elapsed()
    }
}

/// Notes every byte that arrives, so that a long message on a slow connection is a sign of life too.
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

/// What [`not_heard`] begins with.
const NOT_HEARD: &str = "it did not answer for ";

/// Why a rank that was not heard for `limit` is given up.
pub(crate) fn not_heard(limit: Duration) -> String {
    format!("{NOT_HEARD}{limit:?}")
}

/// What to do about a rank that was lost for `reason`.
pub(crate) fn help_after_loss(rank: Rank, reason: &str) -> String {
    if reason.starts_with(NOT_HEARD) {
        format!(
            "look at what rank {rank} does; if it was only held up, set WARPLINK_HEARTBEAT_LIMIT to more seconds"
        )
    } else {
        format!("look at the output of rank {rank}")
    }
}

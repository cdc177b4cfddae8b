//! Deadlines of host waits.

use crate::error::{Error, ErrorKind};
use std::time::{Duration, Instant};

/// An instant at which a wait ends with [`ErrorKind::Timeout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    /// `limit` from now.
    pub fn after(limit: Duration) -> Self {
        // Longer limits could overflow the clock.
        let limit = limit.min(Duration::from_secs(365 * 24 * 3600));
        Self {
            at: Instant::now() + limit,
            limit,
        }
    }

    /// Time left; zero when it has passed.
    pub fn remaining(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Whether it has passed.
    pub fn passed(&self) -> bool {
        Instant::now() >= self.at
    }

    /// Limit that it was created with, for error messages.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Timeout error for a wait for `what`, a noun phrase.
    pub fn expired(&self, what: &str) -> Error {
        Error::new(
            ErrorKind::Timeout,
            format!("timed out after {:?} waiting for {what}", self.limit),
        )
    }
}

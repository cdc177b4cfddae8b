//! What time goes to.

use serde::Serialize;
use std::fmt;

/// What time goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Puts and gets.
    Link,
    /// Matrix multiplications.
    Matmul,
    /// Copies within a device's memory, and sums.
    Memory,
    /// The engine's collectives, sends and receives.
    Collective,
    /// Signals, events and starts of kernels.
    Latency,
    /// The host, which enqueues.
    Host,
}

impl Bound {
    /// Every bound.
    pub const ALL: [Self; 6] = [
        Self::Link,
        Self::Matmul,
        Self::Memory,
        Self::Collective,
        Self::Latency,
        Self::Host,
    ];

    /// A word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Link => "link",
            Self::Matmul => "matmul",
            Self::Memory => "memory",
            Self::Collective => "collective",
            Self::Latency => "latency",
            Self::Host => "host",
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Seconds for each [`Bound`] along a chain of operations, each of which waited for the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Path([f64; Bound::ALL.len()]);

impl Path {
    pub(super) fn of(bound: Bound, seconds: f64) -> Self {
        let mut path = Self::default();
        path.add(bound, seconds);
        path
    }

    pub(super) fn add(&mut self, bound: Bound, seconds: f64) {
        self.0[bound as usize] += seconds;
    }

    /// All of it.
    pub fn seconds(&self) -> f64 {
        self.0.iter().sum()
    }

    /// What went to `bound`.
    pub fn of_bound(&self, bound: Bound) -> f64 {
        self.0[bound as usize]
    }

    /// What most of it went to.
    pub fn most(&self) -> Bound {
        let by_time = |a: &Bound, b: &Bound| self.of_bound(*a).total_cmp(&self.of_bound(*b));
        Bound::ALL
            .into_iter()
            .max_by(by_time)
            .unwrap_or(Bound::Latency)
    }
}

//! What time goes to.

use crate::named::named;
use serde::{Serialize, Serializer};

named! {
    /// What time goes to.
    pub enum Bound: "bound" {
        /// Puts and gets, by kernels too.
        Link = "link",
        /// Matrix multiplications.
        Matmul = "matmul",
        /// Copies within a device's memory, and sums.
        Memory = "memory",
        /// What a lane of a kernel can move: more lanes, or threads, would be faster.
        Lanes = "lanes",
        /// The engine's collectives, sends and receives.
        Collective = "collective",
        /// Signals, events and starts of kernels.
        Latency = "latency",
        /// The host, which enqueues.
        Host = "host",
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

    /// What was added since `start`, `seconds` in all. Where the chain has come to be another one since then, what is
    /// less in it counts as nothing.
    pub(super) fn since(&self, start: &Self, seconds: f64) -> Self {
        let mut added = Self::default();
        for bound in Bound::ALL {
            added.add(
                bound,
                (self.of_bound(bound) - start.of_bound(bound)).max(0.0),
            );
        }
        let all = added.seconds();
        if all > 0.0 {
            added.0.iter_mut().for_each(|part| *part *= seconds / all);
        }
        added
    }

    /// The bounds that it went to, the largest first.
    pub fn parts(&self) -> Vec<(Bound, f64)> {
        let all = Bound::ALL.map(|bound| (bound, self.of_bound(bound)));
        let mut parts: Vec<_> = all
            .into_iter()
            .filter(|(_, seconds)| *seconds > 0.0)
            .collect();
        parts.sort_by(|a, b| b.1.total_cmp(&a.1));
        parts
    }

    /// What most of it went to.
    pub fn most(&self) -> Bound {
        let parts = self.parts();
        parts.first().map_or(Bound::Latency, |(bound, _)| *bound)
    }
}

impl Serialize for Path {
    /// As a map from the names of bounds to seconds.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(
            self.parts()
                .into_iter()
                .map(|(bound, seconds)| (bound.name(), seconds)),
        )
    }
}

//! Bottlenecks: the resource that bounds each part of a program's time.

use crate::named::named;
use serde::{Serialize, Serializer};

named! {
    /// Resource that bounds the time of an operation.
    pub enum Bound: "bound" {
        /// Puts and gets, including those by kernels.
        Link = "link",
        /// Matrix multiplications.
        Matmul = "matmul",
        /// Copies within a device's memory, and sums.
        Memory = "memory",
        /// Throughput of a kernel's lanes: more lanes, or more threads, would be faster.
        Lanes = "lanes",
        /// Collectives, sends and receives of the engine.
        Collective = "collective",
        /// Signals, events and kernel launches.
        Latency = "latency",
        /// Enqueueing by the host.
        Host = "host",
    }
}

/// Seconds per [`Bound`] along a chain of dependent operations.
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

    /// Total time.
    pub fn seconds(&self) -> f64 {
        self.0.iter().sum()
    }

    /// Time bounded by `bound`.
    pub fn of_bound(&self, bound: Bound) -> f64 {
        self.0[bound as usize]
    }

    /// Time added since `start`, `seconds` in total. If the critical chain has changed since then, a bound with less
    /// time than at `start` counts as 0.
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
            // Dropping negative differences changes the sum, so the rest is scaled to the span's actual time.
            added.0.iter_mut().for_each(|part| *part *= seconds / all);
        }
        added
    }

    /// Bounds with their times, the largest first.
    pub fn parts(&self) -> Vec<(Bound, f64)> {
        let all = Bound::ALL.map(|bound| (bound, self.of_bound(bound)));
        let mut parts: Vec<_> = all
            .into_iter()
            .filter(|(_, seconds)| *seconds > 0.0)
            .collect();
        parts.sort_by(|a, b| b.1.total_cmp(&a.1));
        parts
    }

    /// Bound with the largest share of the time.
    pub fn most(&self) -> Bound {
        let parts = self.parts();
        parts.first().map_or(Bound::Latency, |(bound, _)| *bound)
    }
}

impl Serialize for Path {
    /// Serializes as a map from names of bounds to seconds.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(
            self.parts()
                .into_iter()
                .map(|(bound, seconds)| (bound.name(), seconds)),
        )
    }
}

//! Steps of streams, and work that takes time and resources.

use super::bound::Bound;

/// Resources of a rank.
pub(super) const EGRESS: u32 = 0;
pub(super) const INGRESS: u32 = 1;
/// Outgoing and incoming traffic together, whose limit is below the sum of both.
pub(super) const PORT: u32 = 2;
pub(super) const MEMORY: u32 = 3;
pub(super) const PROCESSORS: u32 = 4;
/// Number of resources of a rank.
pub(super) const RESOURCES: u32 = 5;

/// A step of a stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Step {
    /// Continues no earlier than this time, when the host has enqueued the next operation.
    NotBefore(f64),
    /// Start of an operation.
    Begin(u32),
    /// End of an operation.
    End(u32),
    /// Waits until a counter reaches a value.
    Await(u32, f64),
    /// Adds an amount to a counter after a number of seconds; the stream continues at once.
    Add(u32, f64, f64),
    /// Delays the stream by this number of seconds.
    Delay(f64),
    /// Runs work, given by its index.
    Work(u32),
}

/// Class of work for interference between concurrent work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Matmul,
    Put,
    Get,
    /// A kernel that needs a small share of a multiprocessor.
    SmallKernel,
    Other,
}

/// An activity that takes time and resources.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// Seconds if it runs alone.
    pub(super) seconds: f64,
    /// Share of its rank's multiprocessors that it occupies.
    pub(super) occupancy: f64,
    /// Whether its stream has high priority.
    pub(super) high: bool,
    pub(super) class: Class,
    /// For work that uses links and memory in order of arrival, so that later work gets the remaining capacity: its
    /// rank among simultaneous arrivals. Work of equal rank shares evenly.
    pub(super) turn: Option<u32>,
    pub(super) bound: Bound,
    /// The simulated ranks that it runs on or accesses.
    pub(super) ranks: [u32; 2],
    /// Range of its demands in [`Schedule::demands`](super::schedule::Schedule::demands).
    pub(super) demands: (u32, u32),
}

impl Work {
    /// Work without demands.
    pub(super) fn new(seconds: f64, bound: Bound, ranks: [usize; 2]) -> Self {
        Self {
            seconds,
            occupancy: 0.0,
            high: false,
            class: Class::Other,
            turn: None,
            bound,
            ranks: ranks.map(|rank| rank as u32),
            demands: (0, 0),
        }
    }
}

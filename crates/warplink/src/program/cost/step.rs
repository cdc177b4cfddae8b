//! Steps of streams, and work that takes time and resources.

use super::bound::Bound;

/// Resources of a rank.
pub(super) const EGRESS: u32 = 0;
pub(super) const INGRESS: u32 = 1;
/// What leaves and arrives together, which is less than both apart.
pub(super) const PORT: u32 = 2;
pub(super) const MEMORY: u32 = 3;
pub(super) const PROCESSORS: u32 = 4;
/// How many resources a rank has.
pub(super) const RESOURCES: u32 = 5;

/// What a stream does next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Step {
    /// Nothing before this time: the host enqueues what follows then.
    NotBefore(f64),
    /// An operation starts here.
    Begin(u32),
    /// And is done here.
    End(u32),
    /// Waits until a counter has this value.
    Await(u32, f64),
    /// Adds so much to a counter after this number of seconds; the stream goes on at once.
    Add(u32, f64, f64),
    /// This number of seconds passes.
    Delay(f64),
    /// Work, by its index.
    Work(u32),
}

/// Which work slows which down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Matmul,
    Put,
    Get,
    /// A kernel that needs room on a multiprocessor, and little of it.
    SmallKernel,
    Other,
}

/// What takes time and resources.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// Time of it alone.
    pub(super) seconds: f64,
    /// The share of its rank's multiprocessors that it keeps busy.
    pub(super) occupancy: f64,
    /// Whether its stream is of high priority.
    pub(super) high: bool,
    pub(super) class: Class,
    /// For work that takes what it needs of links and memory in order of arrival, so that later such work gets what is
    /// left: its place among what arrives at once. Work of one place shares evenly.
    pub(super) turn: Option<u32>,
    pub(super) bound: Bound,
    /// The ranks, of those that are simulated, that it runs on or touches.
    pub(super) ranks: [u32; 2],
    /// Where its demands start and end in [`Schedule::demands`](super::schedule::Schedule::demands).
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

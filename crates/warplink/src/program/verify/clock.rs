//! Vector clocks: for each stream of each rank, how much of it has happened before.

/// A count of operations for each stream of all ranks.
#[derive(Clone, Debug)]
pub(super) struct Clock(Box<[u32]>);

impl Clock {
    pub(super) fn new(streams: usize) -> Self {
        Self(vec![0; streams].into())
    }

    /// Adds what `other` knows.
    pub(super) fn join(&mut self, other: &Self) {
        for (own, theirs) in self.0.iter_mut().zip(&other.0) {
            *own = (*own).max(*theirs);
        }
    }

    /// Whether `other` knows all that this does.
    pub(super) fn precedes(&self, other: &Self) -> bool {
        self.0
            .iter()
            .zip(&other.0)
            .all(|(own, theirs)| own <= theirs)
    }

    pub(super) fn get(&self, stream: usize) -> u32 {
        self.0[stream]
    }

    /// Counts one more operation of `stream` and returns its number.
    pub(super) fn tick(&mut self, stream: usize) -> u32 {
        self.0[stream] += 1;
        self.0[stream]
    }

    pub(super) fn set(&mut self, stream: usize, time: u32) {
        self.0[stream] = time;
    }
}

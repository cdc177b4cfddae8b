//! Who takes the next step.

use warplink::program::TransferId;

/// How the ranks run their programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Submission {
    /// Operation by operation; posts count.
    Eager,
    /// As a graph, launched for each run. What only signals waits, when it is posted again in a graph,
    /// until it is done the time before, and other streams' waits come behind its first post.
    Captured,
}

/// Behaviour of the collective engine, one of those allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// One operation after another; sends wait for their receives, and collectives for all ranks.
    OneByOne,
    /// As much at once as the data allows.
    AtOnce,
}

/// Step to do last: only where nobody else can take one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// An operation of a rank.
    Operation { rank: usize, index: usize },
    /// The accesses of an operation, which may tell its peers before.
    Accesses { rank: usize, index: usize },
    /// Signals of an operation about one of its transfers.
    Signals {
        rank: usize,
        index: usize,
        transfer: TransferId,
    },
    /// Steps of a rank's caller between runs.
    Boundary { rank: usize },
}

/// How the next of all others is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pick {
    /// Each is as likely as any other.
    Uniform,
    /// Some run as far as they can before others do.
    Priorities,
}

/// An order of steps.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    pub(crate) submission: Submission,
    pub(crate) engine: Engine,
    pub(crate) pick: Pick,
    pub(crate) held: Vec<Hold>,
    pub(crate) seed: u64,
}

impl Schedule {
    pub(crate) fn new(submission: Submission, seed: u64) -> Self {
        Self {
            submission,
            engine: if seed % 4 < 2 {
                Engine::OneByOne
            } else {
                Engine::AtOnce
            },
            pick: if seed.is_multiple_of(2) {
                Pick::Uniform
            } else {
                Pick::Priorities
            },
            held: Vec::new(),
            seed,
        }
    }

    pub(crate) fn with_engine(mut self, engine: Engine) -> Self {
        self.engine = engine;
        self
    }

    pub(crate) fn holding(mut self, held: impl IntoIterator<Item = Hold>) -> Self {
        self.held.extend(held);
        self
    }
}

/// Numbers that look random (splitmix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `limit`, which is small and not zero.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// True once in `of`.
    pub(crate) fn chance(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    pub(crate) fn shuffle<T>(&mut self, list: &mut [T]) {
        for done in 0..list.len() {
            let next = done + self.below(list.len() - done);
            list.swap(done, next);
        }
    }
}

/// Spreads a number over all bits.
pub(crate) const fn mix(value: u64) -> u64 {
    let mut z = value;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

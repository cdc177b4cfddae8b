//! Vector clocks: for each stream of each rank, the number of its operations that happened before.
//!
//! A clock is a tree of counts that shares branches with the clocks it was derived from, so its cost is proportional
//! to the changed nodes. That is small if streams know little of one another, or all the same.
//!
//! Instead of counts, a clock may have other entries that join: [`Recent`].
//!
//! Many clocks may start from one common clock: they keep it as a *base*, and their own trees hold only later joins.
//! A later base of an origin includes all earlier bases of that origin, so a clock keeps one base per origin.

use std::cell::Cell;
use std::rc::Rc;

/// Counts in a leaf, as a power of two.
// A leaf of 32 counts is 128 bytes, the size of an inner node of 16 pointers. Larger ones copy more for each tick,
// smaller ones make deeper trees.
const LEAF_BITS: usize = 5;

/// Branches of a node, as a power of two.
const BRANCH_BITS: usize = 4;

type Branch<T> = Option<Rc<Node<T>>>;

/// A stream's entry in a clock.
pub(super) trait PerStream: Copy + PartialEq {
    /// That of a stream of which nothing is known.
    const NOTHING: Self;
    fn joined(self, other: Self) -> Self;
}

impl PerStream for u32 {
    const NOTHING: Self = 0;

    fn joined(self, other: Self) -> Self {
        self.max(other)
    }
}

/// A few of a stream's operations, the latest ones that are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Recent {
    last: u32,
    /// Bit `n`: operation `last - n`. Those before are forgotten, so that joins take little time.
    mask: u64,
}

impl Recent {
    pub(super) const fn of(time: u32) -> Self {
        Self {
            last: time,
            mask: 1,
        }
    }

    pub(super) const fn contains(self, time: u32) -> bool {
        self.at(time) & self.mask != 0
    }

    /// The bit of an operation; none if it is forgotten, or later.
    const fn at(self, time: u32) -> u64 {
        match self.last.checked_sub(time) {
            Some(age) if age < u64::BITS => 1 << age,
            _ => 0,
        }
    }
}

impl PerStream for Recent {
    const NOTHING: Self = Self { last: 0, mask: 0 };

    fn joined(self, other: Self) -> Self {
        let (earlier, later) = if self.last < other.last {
            (self, other)
        } else {
            (other, self)
        };
        let age = later.last - earlier.last;
        Self {
            last: later.last,
            mask: later.mask | earlier.mask.checked_shl(age).unwrap_or(0),
        }
    }
}

/// Creates clocks, and counts the memory they use.
#[derive(Debug)]
pub(super) struct Clocks {
    /// Levels of nodes above the leaves.
    levels: usize,
    nodes: Rc<Cell<usize>>,
}

/// A count of operations for each stream of all ranks, or another entry.
#[derive(Clone, Debug)]
pub(super) struct Clock<T = u32> {
    root: Branch<T>,
    /// By origin.
    bases: Rc<Vec<Option<Base<T>>>>,
    levels: usize,
    /// Number of nodes of all clocks together.
    nodes: Rc<Cell<usize>>,
}

/// Immutable copy of a clock.
#[derive(Clone, Debug)]
struct Base<T> {
    /// Sequence number among the bases of its origin.
    number: usize,
    root: Branch<T>,
}

/// State of a stream's clock at one point.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    stream: usize,
    time: u32,
    clock: Clock,
}

impl Snapshot {
    /// Whether `clock` includes the snapshot. The own stream's time suffices: a clock that includes an operation
    /// includes everything that happened before it.
    pub(super) fn precedes(&self, clock: &Clock) -> bool {
        clock.get(self.stream) >= self.time
    }
}

#[derive(Debug)]
struct Node<T> {
    content: Content<T>,
    nodes: Rc<Cell<usize>>,
}

#[derive(Clone, Debug)]
enum Content<T> {
    Leaf([T; 1 << LEAF_BITS]),
    Inner([Branch<T>; 1 << BRANCH_BITS]),
}

impl Clocks {
    /// Factory for clocks of `streams` streams.
    pub(super) fn new(streams: usize) -> Self {
        let mut levels = 0;
        while streams > 1 << (LEAF_BITS + BRANCH_BITS * levels) {
            levels += 1;
        }
        Self {
            levels,
            nodes: Rc::default(),
        }
    }

    /// A clock without any operation.
    pub(super) fn clock<T>(&self) -> Clock<T> {
        Clock {
            root: None,
            bases: Rc::default(),
            levels: self.levels,
            nodes: self.nodes.clone(),
        }
    }

    /// Number of nodes of all clocks together.
    pub(super) fn nodes(&self) -> usize {
        self.nodes.get()
    }
}

impl Clock {
    /// Counts one more operation of `stream` and returns its number.
    pub(super) fn tick(&mut self, stream: usize) -> u32 {
        // Not the tree's own count: after `based`, the stream's earlier time is in a base alone.
        let time = self.get(stream) + 1;
        self.set(stream, time);
        time
    }

    /// Snapshot of this clock, which belongs to `stream`.
    pub(super) fn snapshot(&self, stream: usize) -> Snapshot {
        Snapshot {
            stream,
            time: self.get(stream),
            clock: self.clone(),
        }
    }

    /// Joins a snapshot.
    pub(super) fn learn(&mut self, snapshot: &Snapshot) {
        if !snapshot.precedes(self) {
            self.join(&snapshot.clock);
        }
    }
}

impl<T: PerStream> Clock<T> {
    /// A clock of the same streams without any operation.
    pub(super) fn empty(&self) -> Self {
        Self {
            root: None,
            bases: Rc::default(),
            levels: self.levels,
            nodes: self.nodes.clone(),
        }
    }

    /// Joins `other`.
    pub(super) fn join(&mut self, other: &Self) {
        join_trees(&mut self.root, &other.root);
        // Both shortcuts avoid a copy of the list, which lanes of one launch mostly share.
        if Rc::ptr_eq(&self.bases, &other.bases) || has_all(&self.bases, &other.bases) {
            return;
        }
        if has_all(&other.bases, &self.bases) {
            self.bases = other.bases.clone();
            return;
        }
        let bases = Rc::make_mut(&mut self.bases);
        bases.resize(bases.len().max(other.bases.len()), None);
        for (own, theirs) in bases.iter_mut().zip(&*other.bases) {
            // Sound, since bases of one origin are cumulative: the later one includes the earlier.
            if number(theirs) > number(own) {
                own.clone_from(theirs);
            }
        }
    }

    /// Merges the bases into the tree.
    pub(super) fn flatten(&mut self) {
        for base in std::mem::take(&mut self.bases).iter().flatten() {
            join_trees(&mut self.root, &base.root);
        }
    }

    /// An equal clock that keeps this one as base `number` of an origin. This clock must be flattened, and include
    /// all that the origin's bases with lower numbers do.
    pub(super) fn based(&self, origin: usize, number: usize) -> Self {
        debug_assert!(self.bases.is_empty());
        let mut bases = vec![None; origin + 1];
        bases[origin] = Some(Base {
            number,
            root: self.root.clone(),
        });
        Self {
            root: None,
            bases: Rc::new(bases),
            levels: self.levels,
            nodes: self.nodes.clone(),
        }
    }

    pub(super) fn get(&self, stream: usize) -> T {
        let own = self.get_of(&self.root, stream);
        let bases = self.bases.iter().flatten();
        // A stream may be in the tree and in several bases, each as old as the join that brought it; the latest
        // counts.
        bases.fold(own, |all, base| all.joined(self.get_of(&base.root, stream)))
    }

    fn get_of(&self, mut branch: &Branch<T>, stream: usize) -> T {
        for level in (0..=self.levels).rev() {
            match branch.as_ref().map(|node| &node.content) {
                None => return T::NOTHING,
                Some(Content::Leaf(counts)) => return counts[leaf_index(stream)],
                Some(Content::Inner(branches)) => branch = &branches[index(stream, level)],
            }
        }
        T::NOTHING
    }

    pub(super) fn set(&mut self, stream: usize, entry: T) {
        let mut branch = &mut self.root;
        for level in (0..=self.levels).rev() {
            let node = branch.get_or_insert_with(|| Rc::new(Node::new(level, &self.nodes)));
            match &mut Rc::make_mut(node).content {
                Content::Leaf(counts) => {
                    counts[leaf_index(stream)] = entry;
                    return;
                }
                Content::Inner(branches) => branch = &mut branches[index(stream, level)],
            }
        }
    }
}

impl<T: PerStream> Node<T> {
    fn new(level: usize, nodes: &Rc<Cell<usize>>) -> Self {
        let content = match level {
            0 => Content::Leaf([T::NOTHING; 1 << LEAF_BITS]),
            _ => Content::Inner(Default::default()),
        };
        Self::of(content, nodes)
    }
}

impl<T> Node<T> {
    fn of(content: Content<T>, nodes: &Rc<Cell<usize>>) -> Self {
        nodes.set(nodes.get() + 1);
        Self {
            content,
            nodes: nodes.clone(),
        }
    }
}

impl<T: Clone> Clone for Node<T> {
    fn clone(&self) -> Self {
        Self::of(self.content.clone(), &self.nodes)
    }
}

impl<T> Drop for Node<T> {
    fn drop(&mut self) {
        self.nodes.set(self.nodes.get() - 1);
    }
}

/// Number of a base, counted from 1; 0 for none.
fn number<T>(base: &Option<Base<T>>) -> usize {
    base.as_ref().map_or(0, |base| base.number + 1)
}

/// Whether `own` is at least as late as `others` for every origin.
fn has_all<T>(own: &[Option<Base<T>>], others: &[Option<Base<T>>]) -> bool {
    let owned = own.iter().chain(std::iter::repeat(&None));
    others
        .iter()
        .zip(owned)
        .all(|(other, own)| number(own) >= number(other))
}

fn join_trees<T: PerStream>(own: &mut Branch<T>, theirs: &Branch<T>) {
    match (&*own, theirs) {
        (_, None) => {}
        (None, Some(theirs)) => *own = Some(theirs.clone()),
        (Some(one), Some(theirs)) => *own = Some(joined(one, theirs)),
    }
}

const fn leaf_index(stream: usize) -> usize {
    stream & ((1 << LEAF_BITS) - 1)
}

/// Branch that leads to `stream` from a node with `level` levels below it.
const fn index(stream: usize, level: usize) -> usize {
    (stream >> (LEAF_BITS + BRANCH_BITS * (level - 1))) & ((1 << BRANCH_BITS) - 1)
}

/// Element-wise join; shares the node of either side if that includes the other.
fn joined<T: PerStream>(own: &Rc<Node<T>>, theirs: &Rc<Node<T>>) -> Rc<Node<T>> {
    if Rc::ptr_eq(own, theirs) {
        return own.clone();
    }
    let (mut is_own, mut is_theirs) = (true, true);
    let content = match (&own.content, &theirs.content) {
        (Content::Leaf(a), Content::Leaf(b)) => {
            let mut counts = *a;
            for ((count, a), b) in counts.iter_mut().zip(a).zip(b) {
                *count = a.joined(*b);
                is_own &= *count == *a;
                is_theirs &= *count == *b;
            }
            Content::Leaf(counts)
        }
        (Content::Inner(a), Content::Inner(b)) => {
            let mut branches: [Branch<T>; 1 << BRANCH_BITS] = Default::default();
            for ((branch, a), b) in branches.iter_mut().zip(a).zip(b) {
                match (a, b) {
                    (None, None) => {}
                    (Some(a), None) => {
                        *branch = Some(a.clone());
                        is_theirs = false;
                    }
                    (None, Some(b)) => {
                        *branch = Some(b.clone());
                        is_own = false;
                    }
                    (Some(a), Some(b)) => {
                        let both = joined(a, b);
                        is_own &= Rc::ptr_eq(&both, a);
                        is_theirs &= Rc::ptr_eq(&both, b);
                        *branch = Some(both);
                    }
                }
            }
            Content::Inner(branches)
        }
        // Trees of one simulation have equal depth.
        (own, _) => own.clone(),
    };
    match (is_theirs, is_own) {
        // Prefers theirs if both are equal, so that two clocks that have met share the node and later joins stop at
        // `ptr_eq`.
        (true, _) => theirs.clone(),
        (false, true) => own.clone(),
        (false, false) => Rc::new(Node::of(content, &own.nodes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn clock(clocks: &Clocks, counts: &[(usize, u32)]) -> Clock {
        let mut clock = clocks.clock();
        for &(stream, time) in counts {
            clock.set(stream, time);
        }
        clock
    }

    /// Lanes with equal numbers signal one another on all ranks: each learns of that few lanes, not of all.
    #[test]
    fn what_lanes_know_takes_memory_in_proportion_to_their_number() {
        let world = 16;
        let nodes = |width: usize| {
            let clocks = Clocks::new(world * (width + 1));
            let mut streams = vec![clocks.clock(); world];
            let mut lanes = vec![clocks.clock(); world * width];
            for launch in 0..3 {
                for (rank, stream) in streams.iter_mut().enumerate() {
                    stream.flatten();
                    stream.tick(width * world + rank);
                    for lane in 0..width {
                        lanes[lane * world + rank] = stream.based(rank, launch);
                    }
                }
                for lane in lanes.chunks_mut(world) {
                    let sent: Vec<Clock> = lane.to_vec();
                    lane.iter_mut()
                        .for_each(|own| sent.iter().for_each(|other| own.join(other)));
                }
                for (number, lane) in lanes.iter_mut().enumerate() {
                    lane.tick(number);
                    streams[number % world].join(lane);
                }
            }
            assert_eq!(lanes[0].get(world), 2);
            clocks.nodes()
        };
        let (few, many) = (nodes(64), nodes(1024));
        assert!(many < 24 * few, "{few} nodes, then {many}");
    }

    fn flat(clock: &Clock) -> Clock {
        let mut flat = clock.clone();
        flat.flatten();
        flat
    }

    fn counts() -> impl Strategy<Value = Vec<(usize, u32)>> {
        proptest::collection::vec((0_usize..1500, 1_u32..4), 0..40)
    }

    proptest! {
        /// Joined in any order, the operations of the last 64 are known, and no others.
        #[test]
        fn recent_operations_are_those_that_were_joined(
            times in proptest::collection::vec(1_u32..200, 1..30),
            seed in 0_usize..30,
        ) {
            let join = |times: &[u32]| {
                times.iter().fold(Recent::NOTHING, |all, time| all.joined(Recent::of(*time)))
            };
            let (some, others) = times.split_at(seed % times.len());
            let all = join(others).joined(join(some));
            let last = times.iter().max().unwrap();
            for time in 0..200 {
                let expected = times.contains(&time) && last - time < 64;
                prop_assert_eq!(all.contains(time), expected, "{}", time);
            }
        }
    }

    proptest! {
        #[test]
        fn clocks_join_and_compare_as_lists_of_counts_do(a in counts(), b in counts()) {
            let clocks = Clocks::new(1500);
            let (one, other) = (clock(&clocks, &a), clock(&clocks, &b));
            let list = |clock: &Clock| (0..1500).map(|s| clock.get(s)).collect::<Vec<_>>();
            // The same join through bases.
            for (based, other) in [
                (one.based(2, 0), other.clone()),
                (one.based(0, 3), other.based(5, 1)),
                (one.clone(), other.based(1, 0)),
            ] {
                let mut both = based;
                both.join(&other);
                let mut plain = one.clone();
                plain.join(&flat(&other));
                prop_assert_eq!(list(&both), list(&plain));
                let time = plain.tick(700);
                prop_assert_eq!(both.tick(700), time);
                // A later base of an origin includes every earlier one.
                let later = flat(&both).based(2, 9);
                both.join(&later);
                prop_assert_eq!(list(&both), list(&plain));
                prop_assert_eq!(list(&flat(&both)), list(&plain));
            }
            let (x, y) = (list(&one), list(&other));
            let mut both = one.clone();
            both.join(&other);
            let largest: Vec<u32> = x.iter().zip(&y).map(|(a, b)| *a.max(b)).collect();
            prop_assert_eq!(list(&both), largest);
            let before = list(&both);
            let mut next = both.clone();
            prop_assert_eq!(next.tick(7), before[7] + 1);
            prop_assert_eq!(list(&both), before);
            let mut knows = other.clone();
            knows.learn(&next.snapshot(7));
            prop_assert_eq!(list(&knows), list(&next));
            drop((one, other, both, next, knows));
            prop_assert_eq!(clocks.nodes(), 0);
        }
    }
}

//! Transfers that wait for their peers, reported in errors of waits that time out.

use super::protocol::{PostCounter, PostNumber};
use super::request::{Direction, TransferRequest};
use crate::device::{Device, Word};
use crate::error::Rank;
use crate::sync::lock;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::{Duration, Instant};

/// Origin of the times of posts.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Progress of one end outside of graphs.
#[derive(Debug)]
pub(super) struct TransferProgress {
    direction: Direction,
    peer: Rank,
    tag: u64,
    /// Word that counts the posts matched by the peer, and its increment for each.
    met: (Word, u64),
    posts: PostCounter,
    /// When the last post was enqueued, in nanoseconds since `START`.
    posted_at: AtomicU64,
}

impl TransferProgress {
    /// Numbers the next post.
    pub(super) fn post(&self) -> PostNumber {
        let since = u64::try_from(START.elapsed().as_nanos()).unwrap_or(u64::MAX);
        // Relaxed: only reported as an age in errors.
        self.posted_at.store(since, Ordering::Relaxed);
        self.posts.next()
    }

    /// The posts that a wait covers: all so far. `None` if there was none.
    pub(super) fn posts(&self) -> Option<PostNumber> {
        self.posts.so_far()
    }

    /// The posts that the peer has not matched yet, if any. Blocks to read device memory.
    fn waiting(&self, device: &dyn Device) -> Option<Waiting> {
        let Some(PostNumber::Eager(posts)) = self.posts.so_far() else {
            return None;
        };
        let mut met = [0; 8];
        let (word, each) = &self.met;
        // Only for a message: a device that cannot be read must not replace the error that is being explained.
        device.download(word.as_slice(), &mut met).ok()?;
        if u64::from_le_bytes(met) >= posts.saturating_mul(*each) {
            return None;
        }
        // Relaxed: only an age in an error.
        let posted = Duration::from_nanos(self.posted_at.load(Ordering::Relaxed));
        Some(Waiting {
            direction: self.direction,
            peer: self.peer,
            tag: self.tag,
            since: START.elapsed().saturating_sub(posted),
        })
    }
}

/// An end whose last post the peer has not matched.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) direction: Direction,
    pub(super) peer: Rank,
    pub(super) tag: u64,
    /// Time since that post.
    pub(super) since: Duration,
}

/// The live ends of one rank.
#[derive(Debug, Default)]
pub(super) struct ProgressList(Mutex<Vec<Weak<TransferProgress>>>);

impl ProgressList {
    /// Adds the end of `request`; `met` is the word that counts the posts matched by the peer, and its increment for
    /// each.
    pub(super) fn add(&self, request: &TransferRequest, met: (Word, u64)) -> Arc<TransferProgress> {
        let progress = Arc::new(TransferProgress {
            direction: request.direction,
            peer: request.peer,
            tag: request.tag,
            met,
            posts: PostCounter::default(),
            posted_at: AtomicU64::new(0),
        });
        let mut list = lock(&self.0);
        // Swept only when the list would grow, so that adding takes amortized constant time.
        if list.len() == list.capacity() {
            list.retain(|progress| progress.strong_count() > 0);
        }
        list.push(Arc::downgrade(&progress));
        progress
    }

    /// The ends that wait for their peers. Ends of the peer with most waiting ends come first: a peer that has
    /// matched some may itself be blocked by another rank. Of one peer, the longest waiting comes first.
    pub(super) fn waiting(&self, device: &dyn Device) -> Vec<Waiting> {
        let ends: Vec<Arc<TransferProgress>> =
            lock(&self.0).iter().filter_map(Weak::upgrade).collect();
        let mut waiting: Vec<Waiting> = ends.iter().filter_map(|end| end.waiting(device)).collect();
        let mut of_peer: BTreeMap<Rank, usize> = BTreeMap::new();
        for end in &waiting {
            *of_peer.entry(end.peer).or_default() += 1;
        }
        waiting.sort_by_key(|end| Reverse((of_peer.get(&end.peer).copied(), end.since)));
        waiting
    }
}

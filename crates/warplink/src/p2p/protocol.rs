//! The get and put protocols as data: which end of a transfer sets which word, waits for which word, and copies.
//!
//! A transfer has two ends. The *initiator* is the end whose stream copies: the receiver under [`Protocol::Get`], the
//! sender under [`Protocol::Put`]. The *target* is the other end: it signals that its buffer may be read (get) or
//! written (put), and waits for the completion signal.
//!
//! ```text
//!   target's stream                    initiator's stream
//!   post: set initiator.inbound  ───►  wait for inbound
//!                                      copy
//!   wait for inbound             ◄───  set target.inbound, set own completed
//! ```
//!
//! # Invariants
//! 1. *Counting.* Outside of graphs the n-th post of an end uses the value n, and waits are for "at least n": no
//!    signal is lost when an end runs ahead.
//! 2. *Counting in graphs.* A graph captures fixed values, so captured steps use separate words that restart with
//!    every launch. A target's first post of a launch resets its own word; the initiator sets it to the number of its
//!    post in the graph, and waits are for "at least" that number. In the opposite direction the word toggles: the
//!    initiator resets it when it has read it, and a target's next post of a launch waits until the previous one is
//!    done. Launches are ordered, and a graph waits for its last post, so no signal can arrive before the reset that
//!    has to precede it. Both ends must be captured with the same number of posts, and the graph has to order the
//!    posts of an end: two that wait at the same time may consume each other's signal.
//! 3. A rank waits only for words in its own memory.
//! 4. *Order.* Eager posts of an end set its words to increasing values, so a post begins only when all words of the
//!    previous one are set. At an initiator, *completed* indicates that, because it is set last, after the peer's
//!    inbound word. If it were set first, a post after a wait for it could overtake the signal to the peer. At a
//!    target, the inbound word indicates it. Signals of another transfer of the group indicate it for neither.

use crate::named::named;
use crate::signal::{SignalOp, SignalWord};
use crate::sync::{AtomicU64, Ordering};

named! {
    /// Which end of a transfer copies.
    #[derive(Default)]
    pub enum Protocol: "protocol" {
        /// The receiver reads the sender's memory after the sender's signal.
        Get = "get",
        /// The sender writes the receiver's memory after the receiver's signal.
        #[default]
        Put = "put",
    }
}

/// Role of an end in a transfer; see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Role {
    Target,
    Initiator,
}

/// Number of a post of an end: executed once, or recorded into a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum PostNumber {
    /// Executed once; numbered from 1.
    Eager(u64),
    /// Recorded, on separate words; numbered from 1 in its graph.
    Captured(u64),
}

/// Operations of an end: signals, then the copy if it is the initiator, then signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Steps {
    pub(super) before: [Option<SignalOp>; 2],
    pub(super) copy: bool,
    pub(super) after: [Option<SignalOp>; 2],
}

impl Steps {
    const NONE: Self = Self {
        before: [None; 2],
        copy: false,
        after: [None; 2],
    };

    /// Operations of a post at the end with `role`.
    pub(super) fn post(role: Role, post: PostNumber) -> Self {
        use SignalOp::{Reset, Set, Wait};
        use SignalWord::{Completed, Inbound, Outbound};
        match (role, post) {
            (Role::Target, PostNumber::Eager(number)) => Self {
                before: [Some(Set(Outbound, number)), None],
                ..Self::NONE
            },
            (Role::Target, PostNumber::Captured(number)) => Self {
                before: [
                    Some(match number {
                        0 | 1 => Reset(Inbound),
                        _ => Wait(Inbound, number - 1),
                    }),
                    Some(Set(Outbound, 1)),
                ],
                ..Self::NONE
            },
            (Role::Initiator, PostNumber::Eager(number)) => Self {
                before: [Some(Wait(Inbound, number)), None],
                copy: true,
                after: [Some(Set(Outbound, number)), Some(Set(Completed, number))],
            },
            (Role::Initiator, PostNumber::Captured(number)) => Self {
                before: [Some(Wait(Inbound, 1)), Some(Reset(Inbound))],
                copy: true,
                after: [Some(Set(Outbound, number)), None],
            },
        }
    }

    /// Operations of a wait at the end with `role`; `same_stream` if it is on the stream of the post. In a graph, any
    /// other stream is ordered after the post.
    pub(super) fn wait(role: Role, post: PostNumber, same_stream: bool) -> Self {
        let wait = match (role, post) {
            (Role::Target, PostNumber::Eager(number) | PostNumber::Captured(number)) => {
                Some(SignalOp::Wait(SignalWord::Inbound, number))
            }
            (Role::Initiator, PostNumber::Eager(number)) if !same_stream => {
                Some(SignalOp::Wait(SignalWord::Completed, number))
            }
            (Role::Initiator, _) => None,
        };
        Self {
            before: [wait, None],
            ..Self::NONE
        }
    }
}

/// Counts an end's posts outside of graphs.
#[derive(Debug, Default)]
pub(super) struct PostCounter(AtomicU64);

impl PostCounter {
    /// Numbers the next post.
    pub(super) fn next(&self) -> PostNumber {
        // Relaxed: numbers only have to be unique; the streams order the data.
        PostNumber::Eager(self.0.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// The posts that a wait covers: all so far. `None` if there was none.
    pub(super) fn so_far(&self) -> Option<PostNumber> {
        // Relaxed: a caller's own posts precede this in program order; others' are covered or not.
        let posts = self.0.load(Ordering::Relaxed);
        (posts > 0).then_some(PostNumber::Eager(posts))
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    //! Runs the steps above on loom threads in place of streams.

    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    #[derive(Default)]
    struct EndWords {
        inbound: AtomicU64,
        completed: AtomicU64,
    }

    struct Pair {
        target: EndWords,
        initiator: EndWords,
        // Source of the initiator's copy: written by the target's side under get.
        source: UnsafeCell<u64>,
        destination: UnsafeCell<u64>,
    }

    // SAFETY: loom checks every access to the cells; their order is the subject of the test.
    unsafe impl Sync for Pair {}
    // SAFETY: as above.
    unsafe impl Send for Pair {}

    impl Pair {
        fn word(&self, role: Role, name: SignalWord) -> &AtomicU64 {
            let (own, other) = match role {
                Role::Target => (&self.target, &self.initiator),
                Role::Initiator => (&self.initiator, &self.target),
            };
            match name {
                SignalWord::Inbound => &own.inbound,
                SignalWord::Outbound => &other.inbound,
                SignalWord::Completed => &own.completed,
            }
        }

        fn run(&self, role: Role, steps: Steps) {
            let signal = |signal: SignalOp| match signal {
                SignalOp::Set(name, value) => self.word(role, name).store(value, Ordering::Release),
                // Relaxed: later sets order it by their release.
                SignalOp::Reset(name) => self.word(role, name).store(0, Ordering::Relaxed),
                SignalOp::Wait(name, value) => {
                    while (self
                        .word(role, name)
                        .load(Ordering::Acquire)
                        .wrapping_sub(value) as i64)
                        < 0
                    {
                        thread::yield_now();
                    }
                }
            };
            steps.before.into_iter().flatten().for_each(signal);
            if steps.copy {
                // SAFETY: loom fails the test where an access is not ordered.
                let value = self.source.with(|source| unsafe { *source });
                // SAFETY: as above.
                self.destination.with_mut(|bytes| unsafe { *bytes = value });
            }
            steps.after.into_iter().flatten().for_each(signal);
        }
    }

    fn pair() -> Arc<Pair> {
        Arc::new(Pair {
            target: EndWords::default(),
            initiator: EndWords::default(),
            source: UnsafeCell::new(0),
            destination: UnsafeCell::new(0),
        })
    }

    /// Get: the target changes its buffer only after its wait, and the initiator reads the announced value; for eager
    /// counting and captured toggling alike.
    fn rounds(posts: [PostNumber; 2]) {
        loom::model(move || {
            let pair = pair();
            let sender = pair.clone();
            let target = thread::spawn(move || {
                for (round, post) in posts.into_iter().enumerate() {
                    // SAFETY: loom fails the test where the initiator may still read.
                    sender
                        .source
                        .with_mut(|source| unsafe { *source = round as u64 + 1 });
                    sender.run(Role::Target, Steps::post(Role::Target, post));
                    sender.run(Role::Target, Steps::wait(Role::Target, post, true));
                }
            });
            for (round, post) in posts.into_iter().enumerate() {
                pair.run(Role::Initiator, Steps::post(Role::Initiator, post));
                pair.run(Role::Initiator, Steps::wait(Role::Initiator, post, true));
                // SAFETY: the destination is this thread's alone.
                let got = pair.destination.with(|bytes| unsafe { *bytes });
                assert_eq!(got, round as u64 + 1, "a stale or torn value");
            }
            target.join().unwrap();
        });
    }

    #[test]
    fn loom_counted_rounds() {
        rounds([PostNumber::Eager(1), PostNumber::Eager(2)]);
    }

    /// Two in one graph, and one graph launched twice.
    #[test]
    fn loom_captured_rounds() {
        rounds([PostNumber::Captured(1), PostNumber::Captured(2)]);
        rounds([PostNumber::Captured(1), PostNumber::Captured(1)]);
    }

    /// Put: the target is the receiver, and reads the destination after its wait.
    fn put_rounds(posts: [PostNumber; 2]) {
        loom::model(move || {
            let pair = pair();
            let receiver = pair.clone();
            let target = thread::spawn(move || {
                for (round, post) in posts.into_iter().enumerate() {
                    receiver.run(Role::Target, Steps::post(Role::Target, post));
                    receiver.run(Role::Target, Steps::wait(Role::Target, post, true));
                    // SAFETY: loom fails the test where the initiator may still write.
                    let got = receiver.destination.with(|bytes| unsafe { *bytes });
                    assert_eq!(got, round as u64 + 1, "a stale or torn value");
                }
            });
            for (round, post) in posts.into_iter().enumerate() {
                // SAFETY: the source is this thread's alone.
                pair.source
                    .with_mut(|source| unsafe { *source = round as u64 + 1 });
                pair.run(Role::Initiator, Steps::post(Role::Initiator, post));
            }
            target.join().unwrap();
        });
    }

    #[test]
    fn loom_put_counted_rounds() {
        put_rounds([PostNumber::Eager(1), PostNumber::Eager(2)]);
    }

    #[test]
    fn loom_put_captured_rounds() {
        put_rounds([PostNumber::Captured(1), PostNumber::Captured(2)]);
        put_rounds([PostNumber::Captured(1), PostNumber::Captured(1)]);
    }

    /// No signal is lost if a target posts twice before it waits.
    #[test]
    fn loom_running_ahead_loses_no_signal() {
        loom::model(|| {
            let pair = pair();
            let sender = pair.clone();
            let target = thread::spawn(move || {
                sender.run(
                    Role::Target,
                    Steps::post(Role::Target, PostNumber::Eager(1)),
                );
                sender.run(
                    Role::Target,
                    Steps::post(Role::Target, PostNumber::Eager(2)),
                );
                sender.run(
                    Role::Target,
                    Steps::wait(Role::Target, PostNumber::Eager(2), true),
                );
            });
            pair.run(
                Role::Initiator,
                Steps::post(Role::Initiator, PostNumber::Eager(1)),
            );
            pair.run(
                Role::Initiator,
                Steps::post(Role::Initiator, PostNumber::Eager(2)),
            );
            target.join().unwrap();
        });
    }

    /// A group of a send and a receive on each of two ranks: both signal the peer first, so the group completes
    /// regardless of the order of its members.
    fn groups(post: PostNumber) {
        loom::model(move || {
            let (here, there) = (pair(), pair());
            let group = move |own: Arc<Pair>, others: Arc<Pair>, value: u64| {
                // SAFETY: the source is the initiator's alone.
                own.source.with_mut(|source| unsafe { *source = value });
                others.run(Role::Target, Steps::post(Role::Target, post));
                own.run(Role::Initiator, Steps::post(Role::Initiator, post));
                others.run(Role::Target, Steps::wait(Role::Target, post, true));
                // SAFETY: loom fails the test where the initiator may still write.
                others.destination.with(|bytes| unsafe { *bytes })
            };
            let (own, others) = (there.clone(), here.clone());
            let peer = thread::spawn(move || group(own, others, 2));
            assert_eq!(group(here, there, 1), 2);
            assert_eq!(peer.join().unwrap(), 1);
        });
    }

    #[test]
    fn loom_groups_of_both_directions() {
        groups(PostNumber::Eager(1));
        groups(PostNumber::Captured(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn posts_are_counted_and_a_wait_is_for_all_of_them() {
        let posts = PostCounter::default();
        assert_eq!(posts.so_far(), None);
        assert_eq!(posts.next(), PostNumber::Eager(1));
        assert_eq!(posts.next(), PostNumber::Eager(2));
        assert_eq!(posts.so_far(), Some(PostNumber::Eager(2)));
    }
}

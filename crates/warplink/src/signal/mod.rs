//! Words that one rank sets and another waits for, and the steps by which two ranks hand a buffer
//! over with them.
//!
//! A transfer has two ends. The *mover* is the end whose stream copies: the receiver under
//! [`Protocol::Get`], the sender under [`Protocol::Put`]. The *announcer* is the other end: it says
//! that its buffer may be read (get) or written (put), and learns when that is done. Each end has a
//! slot of words in its own memory, on which alone it waits:
//!
//! ```text
//!   announcer's stream                 mover's stream
//!   announce: set mover.inbound  ───►  wait for inbound
//!                                      copy
//!   wait for inbound             ◄───  set announcer.inbound, set own completed
//! ```
//!
//! # Invariants
//! 1. *Counting.* Outside of graphs the n-th post of an end uses the value n, and waits are for "at
//!    least n": whoever runs ahead loses no signal.
//! 2. *Counting in graphs.* What a graph captures has its values fixed, so captured steps use words
//!    of their own, which start anew with every launch. An announcer's first post of a launch resets
//!    its own word; the mover sets it to the number of its post in the graph, and waits are for "at
//!    least" that. The other way the word toggles: the mover resets it as it reads it, and an
//!    announcer's next post of a launch waits until the one before is done. A launch follows the one
//!    before, and the last post in a graph is waited for in it, so no signal meets a reset that it
//!    should have followed. Both ends must be captured with as many posts.
//! 3. A wait is always for a word in the waiter's own memory.

mod slots;

pub(crate) use slots::{RemoteSlot, Slot, SlotPool};

use crate::error::{Error, ErrorKind, Result};
use crate::sync::{AtomicU64, Ordering};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Which end of a transfer moves the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Protocol {
    /// The receiver reads the sender's memory once the sender has said that it may.
    Get,
    /// The sender writes the receiver's memory once the receiver has said that it may.
    #[default]
    Put,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Get => "get",
            Self::Put => "put",
        })
    }
}

impl FromStr for Protocol {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "get" => Ok(Self::Get),
            "put" => Ok(Self::Put),
            _ => Err(
                Error::new(ErrorKind::Parse, format!("'{text}' is no protocol"))
                    .help("use get or put"),
            ),
        }
    }
}

/// Which end of a transfer this is; see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum End {
    Announcer,
    Mover,
}

/// A word of a transfer, from one end's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum WordName {
    /// In the own slot: set by the other end.
    Inbound,
    /// In the other end's slot: its inbound word.
    Outbound,
    /// In the own slot: set by the own stream when it has moved the bytes, for other streams here.
    /// Not in graphs.
    Completed,
}

/// Whether a step is enqueued to be done once or recorded into a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mode {
    /// Done once; the number of the post, from 1.
    Eager(u64),
    /// Recorded, on words of their own; the number of the post in its graph, from 1.
    Captured(u64),
}

/// An operation on a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    Set(WordName, u64),
    Reset(WordName),
    Await(WordName, u64),
}

/// What an end enqueues: signals, then the copy if it is the mover, then signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Steps {
    pub(crate) before: [Option<Signal>; 2],
    pub(crate) copy: bool,
    pub(crate) after: [Option<Signal>; 2],
}

impl Steps {
    const NONE: Self = Self {
        before: [None; 2],
        copy: false,
        after: [None; 2],
    };

    /// What posting enqueues at `end`.
    pub(crate) fn post(end: End, mode: Mode) -> Self {
        use Signal::{Await, Reset, Set};
        use WordName::{Completed, Inbound, Outbound};
        match (end, mode) {
            (End::Announcer, Mode::Eager(number)) => Self {
                before: [Some(Set(Outbound, number)), None],
                ..Self::NONE
            },
            (End::Announcer, Mode::Captured(number)) => Self {
                before: [
                    Some(match number {
                        0 | 1 => Reset(Inbound),
                        _ => Await(Inbound, number - 1),
                    }),
                    Some(Set(Outbound, 1)),
                ],
                ..Self::NONE
            },
            (End::Mover, Mode::Eager(number)) => Self {
                before: [Some(Await(Inbound, number)), None],
                copy: true,
                after: [Some(Set(Outbound, number)), Some(Set(Completed, number))],
            },
            (End::Mover, Mode::Captured(number)) => Self {
                before: [Some(Await(Inbound, 1)), Some(Reset(Inbound))],
                copy: true,
                after: [Some(Set(Outbound, number)), None],
            },
        }
    }

    /// What waiting enqueues at `end`; `same_stream` when that is the stream of the post. In a graph,
    /// a stream that is not comes behind the post.
    pub(crate) fn wait(end: End, mode: Mode, same_stream: bool) -> Self {
        let wait = match (end, mode) {
            (End::Announcer, Mode::Eager(number) | Mode::Captured(number)) => {
                Some(Signal::Await(WordName::Inbound, number))
            }
            (End::Mover, Mode::Eager(number)) if !same_stream => {
                Some(Signal::Await(WordName::Completed, number))
            }
            (End::Mover, _) => None,
        };
        Self {
            before: [wait, None],
            ..Self::NONE
        }
    }
}

/// Counts an end's posts outside of graphs.
#[derive(Debug, Default)]
pub(crate) struct Posts(AtomicU64);

impl Posts {
    /// Numbers the next post.
    pub(crate) fn next(&self) -> Mode {
        Mode::Eager(self.0.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// What a wait is for: every post so far. `None` where there was none.
    pub(crate) fn so_far(&self) -> Option<Mode> {
        let posts = self.0.load(Ordering::Relaxed);
        (posts > 0).then_some(Mode::Eager(posts))
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    //! The steps above, run by loom's threads in the place of streams.

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
        announcer: EndWords,
        mover: EndWords,
        // What the mover copies: written by the announcer's side under get.
        source: UnsafeCell<u64>,
        target: UnsafeCell<u64>,
    }

    // SAFETY: loom checks every access to the cells; that they are ordered is what is tested.
    unsafe impl Sync for Pair {}
    // SAFETY: as above.
    unsafe impl Send for Pair {}

    impl Pair {
        fn word(&self, end: End, name: WordName) -> &AtomicU64 {
            let (own, other) = match end {
                End::Announcer => (&self.announcer, &self.mover),
                End::Mover => (&self.mover, &self.announcer),
            };
            match name {
                WordName::Inbound => &own.inbound,
                WordName::Outbound => &other.inbound,
                WordName::Completed => &own.completed,
            }
        }

        fn run(&self, end: End, steps: Steps) {
            let signal = |signal: Signal| match signal {
                Signal::Set(name, value) => self.word(end, name).store(value, Ordering::Release),
                // Ordered before later sets by their release, and by nothing else.
                Signal::Reset(name) => self.word(end, name).store(0, Ordering::Relaxed),
                Signal::Await(name, value) => {
                    while (self
                        .word(end, name)
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
                self.target.with_mut(|target| unsafe { *target = value });
            }
            steps.after.into_iter().flatten().for_each(signal);
        }
    }

    fn pair() -> Arc<Pair> {
        Arc::new(Pair {
            announcer: EndWords::default(),
            mover: EndWords::default(),
            source: UnsafeCell::new(0),
            target: UnsafeCell::new(0),
        })
    }

    /// Get: the announcer changes its buffer only after its wait, and the mover reads what was
    /// announced; eager counting and captured toggling alike.
    fn rounds(modes: [Mode; 2]) {
        loom::model(move || {
            let pair = pair();
            let sender = pair.clone();
            let announcer = thread::spawn(move || {
                for (round, mode) in modes.into_iter().enumerate() {
                    // SAFETY: loom fails the test where the mover may still read.
                    sender
                        .source
                        .with_mut(|source| unsafe { *source = round as u64 + 1 });
                    sender.run(End::Announcer, Steps::post(End::Announcer, mode));
                    sender.run(End::Announcer, Steps::wait(End::Announcer, mode, true));
                }
            });
            for (round, mode) in modes.into_iter().enumerate() {
                pair.run(End::Mover, Steps::post(End::Mover, mode));
                pair.run(End::Mover, Steps::wait(End::Mover, mode, true));
                // SAFETY: the target is this thread's alone.
                let got = pair.target.with(|target| unsafe { *target });
                assert_eq!(got, round as u64 + 1, "a stale or torn value");
            }
            announcer.join().unwrap();
        });
    }

    #[test]
    fn loom_counted_rounds() {
        rounds([Mode::Eager(1), Mode::Eager(2)]);
    }

    /// Two in one graph, and one graph launched twice.
    #[test]
    fn loom_captured_rounds() {
        rounds([Mode::Captured(1), Mode::Captured(2)]);
        rounds([Mode::Captured(1), Mode::Captured(1)]);
    }

    /// Put: the announcer is the receiver, and reads the target after its wait.
    fn put_rounds(modes: [Mode; 2]) {
        loom::model(move || {
            let pair = pair();
            let receiver = pair.clone();
            let announcer = thread::spawn(move || {
                for (round, mode) in modes.into_iter().enumerate() {
                    receiver.run(End::Announcer, Steps::post(End::Announcer, mode));
                    receiver.run(End::Announcer, Steps::wait(End::Announcer, mode, true));
                    // SAFETY: loom fails the test where the mover may still write.
                    let got = receiver.target.with(|target| unsafe { *target });
                    assert_eq!(got, round as u64 + 1, "a stale or torn value");
                }
            });
            for (round, mode) in modes.into_iter().enumerate() {
                // SAFETY: the source is this thread's alone.
                pair.source
                    .with_mut(|source| unsafe { *source = round as u64 + 1 });
                pair.run(End::Mover, Steps::post(End::Mover, mode));
            }
            announcer.join().unwrap();
        });
    }

    #[test]
    fn loom_put_counted_rounds() {
        put_rounds([Mode::Eager(1), Mode::Eager(2)]);
    }

    #[test]
    fn loom_put_captured_rounds() {
        put_rounds([Mode::Captured(1), Mode::Captured(2)]);
        put_rounds([Mode::Captured(1), Mode::Captured(1)]);
    }

    /// An announcer that posts twice before it waits loses nothing.
    #[test]
    fn loom_running_ahead_loses_no_signal() {
        loom::model(|| {
            let pair = pair();
            let sender = pair.clone();
            let announcer = thread::spawn(move || {
                sender.run(End::Announcer, Steps::post(End::Announcer, Mode::Eager(1)));
                sender.run(End::Announcer, Steps::post(End::Announcer, Mode::Eager(2)));
                sender.run(
                    End::Announcer,
                    Steps::wait(End::Announcer, Mode::Eager(2), true),
                );
            });
            pair.run(End::Mover, Steps::post(End::Mover, Mode::Eager(1)));
            pair.run(End::Mover, Steps::post(End::Mover, Mode::Eager(2)));
            announcer.join().unwrap();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn posts_are_counted_and_a_wait_is_for_all_of_them() {
        let posts = Posts::default();
        assert_eq!(posts.so_far(), None);
        assert_eq!(posts.next(), Mode::Eager(1));
        assert_eq!(posts.next(), Mode::Eager(2));
        assert_eq!(posts.so_far(), Some(Mode::Eager(2)));
    }
}

//! State of a transfer in a graph that is being captured.
//!
//! Words used by a graph restart with every launch (`p2p/protocol.rs`), so a wait must not read one before the
//! launch's first post has reset it. On the stream of that post stream order guarantees that; any other stream is
//! ordered after the post by an event. The initiator has no word to wait for: other streams are ordered after its
//! post.

use super::protocol::{PostNumber, Role};
use crate::device::{Device, Event, Stream};
use crate::error::{Error, Result};
use crate::sync::{Mutex, guard};
use std::sync::{Arc, OnceLock};

/// The first number of a launch. Devices number captures below it, so the ranges do not overlap.
const FIRST_LAUNCH: u64 = 1 << 63;

/// Returns an id for work that is enqueued like the launch of a graph: it uses the words of graphs, which restart, so
/// that another rank may launch a graph of the same work, and this rank may do so the next time. Such work follows
/// the previous launch, and contains the wait for each of its posts.
pub(crate) fn next_launch() -> u64 {
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(FIRST_LAUNCH);
    // Relaxed: ids only have to be unique.
    COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// State of one end of a transfer in the most recently captured graph.
#[derive(Debug, Default)]
pub(super) struct TransferRecording {
    posted: Mutex<Option<Posted>>,
}

/// Posts in a graph.
#[derive(Clone, Copy, Debug)]
struct Posted {
    capture: u64,
    count: u64,
    /// Stream of the post that the event marks: a target's first, an initiator's last.
    marked_on: u64,
    /// Whether the last post was waited for.
    waited: bool,
}

/// A wait in a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) post: PostNumber,
    /// Whether the stream has to follow the event first.
    pub(super) follows: bool,
}

impl TransferRecording {
    /// Fails if another post in the graph `capture` is not allowed: a target's previous post was not waited for.
    /// `waited` is the state after posts and waits that are checked but not recorded yet, if there are any.
    pub(super) fn check(&self, role: Role, capture: u64, waited: Option<bool>) -> Result<()> {
        let noted = guard(&self.posted).filter(|before| before.capture == capture);
        let waited = waited.or(noted.map(|before| before.waited));
        if role == Role::Target && waited == Some(false) {
            return Err(Error::invalid(
                "the transfer is posted twice in one graph without a wait between",
            )
            .with_operation("post a transfer")
            .with_help("wait for it first, or exchange a second transfer"));
        }
        Ok(())
    }

    /// Whether the last post was not waited for.
    pub(super) fn is_open(&self) -> bool {
        guard(&self.posted).is_some_and(|posted| !posted.waited)
    }

    /// Records a post on `stream` in the graph `capture`; returns its number there, and whether it has to be
    /// [marked](GraphMark::record).
    pub(super) fn post(&self, role: Role, capture: u64, stream: u64) -> (PostNumber, bool) {
        let mut posted = guard(&self.posted);
        let before = posted.filter(|before| before.capture == capture);
        let count = before.map_or(0, |before| before.count) + 1;
        let (marked_on, marks) = match (before, role) {
            // The first post stays marked: it resets the word, which is all that other streams must not overtake.
            (Some(before), Role::Target) => (before.marked_on, false),
            (None, Role::Target) | (_, Role::Initiator) => (stream, true),
        };
        *posted = Some(Posted {
            capture,
            count,
            marked_on,
            waited: false,
        });
        (PostNumber::Captured(count), marks)
    }

    /// Records a wait on `stream` in the graph `capture`; `None` if there was no post.
    ///
    /// # Errors
    /// If the post to wait for is in another graph.
    pub(super) fn wait(&self, role: Role, capture: u64, stream: u64) -> Result<Option<Waiting>> {
        match &mut *guard(&self.posted) {
            Some(posted) if posted.capture == capture => {
                posted.waited = true;
                Ok(Some(Waiting {
                    post: PostNumber::Captured(posted.count),
                    follows: posted.marked_on != stream,
                }))
            }
            Some(posted) if role == Role::Target && !posted.waited => {
                // Reported once only: the capture of that graph may have been abandoned.
                posted.waited = true;
                Err(Error::invalid("the transfer was posted in another graph")
                    .with_operation("wait for a transfer")
                    .with_help("record its wait in the graph of its post"))
            }
            _ => Ok(None),
        }
    }
}

/// Position of a post in a graph, for ordering other streams after it.
#[derive(Debug)]
pub(super) struct GraphMark {
    device: Arc<dyn Device>,
    /// Created for the first graph.
    event: OnceLock<Event>,
}

impl GraphMark {
    pub(super) fn new(device: &Arc<dyn Device>) -> Self {
        Self {
            device: device.clone(),
            event: OnceLock::new(),
        }
    }

    /// Moves the mark to the current position of `stream`.
    pub(super) fn record(&self, stream: &Stream) -> Result<()> {
        let event = match self.event.get() {
            Some(event) => event,
            None => {
                let event = self.device.create_event(false)?;
                // Two threads may create one at the same time; the loser's is dropped unused.
                self.event.get_or_init(|| event)
            }
        };
        stream.record(event)
    }

    /// Orders later work of `stream` after the mark.
    pub(super) fn wait(&self, stream: &Stream) -> Result<()> {
        match self.event.get() {
            Some(event) => stream.wait_event(event),
            None => Err(Error::internal("a post in a graph is not marked")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    fn waiting(count: u64, follows: bool) -> Option<Waiting> {
        Some(Waiting {
            post: PostNumber::Captured(count),
            follows,
        })
    }

    #[test]
    fn a_targets_waits_follow_its_first_post() {
        let (recording, role) = (TransferRecording::default(), Role::Target);
        assert_eq!(recording.wait(role, 7, 1).unwrap(), None);
        assert_eq!(recording.post(role, 7, 1), (PostNumber::Captured(1), true));
        assert_eq!(
            recording.check(role, 7, None).unwrap_err().kind(),
            ErrorKind::InvalidArgument
        );
        assert_eq!(recording.wait(role, 7, 2).unwrap(), waiting(1, true));
        assert_eq!(recording.wait(role, 7, 1).unwrap(), waiting(1, false));
        recording.check(role, 7, None).unwrap();
        assert_eq!(recording.post(role, 7, 3), (PostNumber::Captured(2), false));
        assert_eq!(recording.wait(role, 7, 3).unwrap(), waiting(2, true));
        assert_eq!(recording.wait(role, 7, 1).unwrap(), waiting(2, false));
    }

    #[test]
    fn an_initiators_waits_follow_its_last_post() {
        let (recording, role) = (TransferRecording::default(), Role::Initiator);
        assert_eq!(recording.post(role, 7, 1), (PostNumber::Captured(1), true));
        recording.check(role, 7, None).unwrap();
        assert_eq!(recording.post(role, 7, 2), (PostNumber::Captured(2), true));
        assert_eq!(recording.wait(role, 7, 2).unwrap(), waiting(2, false));
        assert_eq!(recording.wait(role, 7, 1).unwrap(), waiting(2, true));
    }

    #[test]
    fn another_graph_starts_anew() {
        let (recording, role) = (TransferRecording::default(), Role::Target);
        recording.post(role, 7, 1);
        // A post without a wait cannot be waited for in another graph.
        assert_eq!(
            recording.wait(role, 8, 1).unwrap_err().kind(),
            ErrorKind::InvalidArgument
        );
        // Unless the capture of that graph was abandoned.
        assert_eq!(recording.wait(role, 8, 1).unwrap(), None);
        recording.check(role, 8, None).unwrap();
        assert_eq!(recording.post(role, 8, 1), (PostNumber::Captured(1), true));
        assert_eq!(recording.wait(role, 8, 1).unwrap(), waiting(1, false));
        assert_eq!(recording.wait(role, 9, 1).unwrap(), None);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    //! Threads record one transfer into one graph, each on its own stream.

    use super::*;
    use loom::sync::Arc as Shared;
    use loom::thread;

    #[test]
    fn loom_recorded_posts_are_numbered_apart() {
        for (role, marked) in [(Role::Target, 1), (Role::Initiator, 2)] {
            loom::model(move || {
                let recording = Shared::new(TransferRecording::default());
                let other = recording.clone();
                let thread = thread::spawn(move || other.post(role, 7, 2));
                let posts = [recording.post(role, 7, 1), thread.join().unwrap()];
                let marks = posts.iter().filter(|(_, marks)| *marks).count();
                // A target's first post marks the position at which its words restart, an initiator's every post its
                // position.
                assert_eq!(marks, marked);
                let mut numbers = posts.map(|(number, _)| match number {
                    PostNumber::Captured(number) | PostNumber::Eager(number) => number,
                });
                numbers.sort_unstable();
                assert_eq!(numbers, [1, 2]);
                let waiting = recording.wait(role, 7, 1).unwrap().unwrap();
                assert_eq!(waiting.post, PostNumber::Captured(2));
            });
        }
    }

    /// A wait concurrent with a post covers that post and follows its mark, or covers nothing.
    #[test]
    fn loom_recorded_wait_covers_posts() {
        loom::model(|| {
            let recording = Shared::new(TransferRecording::default());
            let other = recording.clone();
            let thread = thread::spawn(move || other.post(Role::Target, 7, 1));
            let waiting = recording.wait(Role::Target, 7, 2).unwrap();
            thread.join().unwrap();
            match waiting {
                Some(waiting) => {
                    assert_eq!(waiting.post, PostNumber::Captured(1));
                    assert!(waiting.follows && !recording.is_open());
                    recording.check(Role::Target, 7, None).unwrap();
                }
                // The post came later and still needs a wait.
                None => {
                    assert!(recording.is_open());
                    assert!(recording.check(Role::Target, 7, None).is_err());
                }
            }
        });
    }
}

//! What a graph that is being recorded has of a transfer.
//!
//! The words of a graph start anew with every launch ([`signal`]), so a wait must not look at one
//! before the launch's first post has reset it. On the stream of that post it does not; on any other
//! the graph orders it behind the post, by an event. The end that moves the bytes has no word to wait
//! for: other streams are ordered behind its post.
//!
//! [`signal`]: crate::signal

use crate::device::{Device, Event, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::signal::{End, Mode};
use crate::sync::lock;
use std::sync::{Arc, Mutex, OnceLock};

/// What the graph recorded last has of one end of a transfer.
#[derive(Debug, Default)]
pub(super) struct Recording {
    posted: Mutex<Option<Posted>>,
}

/// Posts in a graph.
#[derive(Clone, Copy, Debug)]
struct Posted {
    capture: u64,
    count: u64,
    /// The stream of the post that an event marks: an announcer's first, a mover's last.
    marked_on: u64,
    /// Whether the last post was waited for.
    waited: bool,
}

/// A wait in a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) mode: Mode,
    /// Whether the stream has to follow the event first.
    pub(super) follows: bool,
}

impl Recording {
    /// Fails where a post in the graph `capture` cannot be: where an announcer's before was not waited
    /// for. `waited` says so of what is still to be noted, if anything is.
    pub(super) fn check(&self, end: End, capture: u64, waited: Option<bool>) -> Result<()> {
        let noted = lock(&self.posted).filter(|before| before.capture == capture);
        let waited = waited.or(noted.map(|before| before.waited));
        match end == End::Announcer && waited == Some(false) {
            true => Err(Error::invalid(
                "a transfer is posted twice in one graph without a wait between",
            )
            .during("post a transfer")
            .help("wait for it first, or exchange a second transfer")),
            false => Ok(()),
        }
    }

    /// Whether the last post was not waited for.
    pub(super) fn is_open(&self) -> bool {
        lock(&self.posted).is_some_and(|posted| !posted.waited)
    }

    /// Notes a post on `stream` in the graph `capture`; its number there, and whether its place is to
    /// be [marked](Place::mark).
    pub(super) fn post(&self, end: End, capture: u64, stream: u64) -> (Mode, bool) {
        let mut posted = lock(&self.posted);
        let before = posted.filter(|before| before.capture == capture);
        let count = before.map_or(0, |before| before.count) + 1;
        let (marked_on, marks) = match (before, end) {
            (Some(before), End::Announcer) => (before.marked_on, false),
            (None, End::Announcer) | (_, End::Mover) => (stream, true),
        };
        *posted = Some(Posted {
            capture,
            count,
            marked_on,
            waited: false,
        });
        (Mode::Captured(count), marks)
    }

    /// Notes a wait on `stream` in the graph `capture`; none if there was no post.
    ///
    /// # Errors
    /// Where what it would be for is in another graph.
    pub(super) fn wait(&self, end: End, capture: u64, stream: u64) -> Result<Option<Waiting>> {
        match &mut *lock(&self.posted) {
            Some(posted) if posted.capture == capture => {
                posted.waited = true;
                Ok(Some(Waiting {
                    mode: Mode::Captured(posted.count),
                    follows: posted.marked_on != stream,
                }))
            }
            Some(posted) if end == End::Announcer && !posted.waited => {
                // Told once: the recording of that graph may have been given up.
                posted.waited = true;
                Err(
                    Error::invalid("a transfer that was posted in another graph")
                        .during("wait for a transfer")
                        .help("record its wait in the graph of its post"),
                )
            }
            _ => Ok(None),
        }
    }
}

/// The place of a post in a graph.
#[derive(Debug)]
pub(super) struct Place {
    device: Arc<dyn Device>,
    /// Made for the first graph.
    event: OnceLock<Event>,
}

impl Place {
    pub(super) fn new(device: &Arc<dyn Device>) -> Self {
        Self {
            device: device.clone(),
            event: OnceLock::new(),
        }
    }

    /// Marks the place where `stream` is.
    pub(super) fn mark(&self, stream: &Stream) -> Result<()> {
        let event = match self.event.get() {
            Some(event) => event,
            None => {
                let event = self.device.create_event(false)?;
                self.event.get_or_init(|| event)
            }
        };
        stream.record(event)
    }

    /// Orders what `stream` gets from now on behind the place that was marked last.
    pub(super) fn follow(&self, stream: &Stream) -> Result<()> {
        match self.event.get() {
            Some(event) => stream.wait_event(event),
            None => Err(Error::new(
                ErrorKind::Internal,
                "a post in a graph is not marked",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(count: u64, follows: bool) -> Option<Waiting> {
        Some(Waiting {
            mode: Mode::Captured(count),
            follows,
        })
    }

    #[test]
    fn an_announcers_waits_follow_its_first_post() {
        let (recording, end) = (Recording::default(), End::Announcer);
        assert_eq!(recording.wait(end, 7, 1).unwrap(), None);
        assert_eq!(recording.post(end, 7, 1), (Mode::Captured(1), true));
        assert_eq!(
            recording.check(end, 7, None).unwrap_err().kind(),
            ErrorKind::InvalidArgument
        );
        assert_eq!(recording.wait(end, 7, 2).unwrap(), waiting(1, true));
        assert_eq!(recording.wait(end, 7, 1).unwrap(), waiting(1, false));
        recording.check(end, 7, None).unwrap();
        assert_eq!(recording.post(end, 7, 3), (Mode::Captured(2), false));
        assert_eq!(recording.wait(end, 7, 3).unwrap(), waiting(2, true));
        assert_eq!(recording.wait(end, 7, 1).unwrap(), waiting(2, false));
    }

    #[test]
    fn a_movers_waits_follow_its_last_post() {
        let (recording, end) = (Recording::default(), End::Mover);
        assert_eq!(recording.post(end, 7, 1), (Mode::Captured(1), true));
        recording.check(end, 7, None).unwrap();
        assert_eq!(recording.post(end, 7, 2), (Mode::Captured(2), true));
        assert_eq!(recording.wait(end, 7, 2).unwrap(), waiting(2, false));
        assert_eq!(recording.wait(end, 7, 1).unwrap(), waiting(2, true));
    }

    #[test]
    fn another_graph_starts_anew() {
        let (recording, end) = (Recording::default(), End::Announcer);
        recording.post(end, 7, 1);
        // What was not waited for cannot be in another graph.
        assert_eq!(
            recording.wait(end, 8, 1).unwrap_err().kind(),
            ErrorKind::InvalidArgument
        );
        // Or the recording of that graph was given up.
        assert_eq!(recording.wait(end, 8, 1).unwrap(), None);
        recording.check(end, 8, None).unwrap();
        assert_eq!(recording.post(end, 8, 1), (Mode::Captured(1), true));
        assert_eq!(recording.wait(end, 8, 1).unwrap(), waiting(1, false));
        assert_eq!(recording.wait(end, 9, 1).unwrap(), None);
    }
}

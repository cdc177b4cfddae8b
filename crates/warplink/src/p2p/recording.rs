//! What a graph that is being recorded has of a transfer.
//!
//! Values in a graph are fixed, so its words toggle, and each is consumed by one wait ([`signal`]).
//! That wait, or the post of an end that moves the bytes itself, settles the transfer; an event marks
//! the place. Every other wait, and the next post, is ordered after the event by the graph, whatever
//! streams they are on.
//!
//! [`signal`]: crate::signal

use crate::device::{Device, Event, Stream};
use crate::error::{Error, Result};
use crate::signal::End;
use crate::sync::lock;
use std::sync::{Arc, Mutex, OnceLock};

/// What the graph recorded last has of one end of a transfer.
#[derive(Debug, Default)]
pub(super) struct Recording {
    posted: Mutex<Option<Posted>>,
}

/// A post in a graph.
#[derive(Clone, Copy, Debug)]
struct Posted {
    capture: u64,
    /// The stream on which it is settled, once it is.
    settled_on: Option<u64>,
}

/// What a wait in a graph comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiting {
    /// Nothing: there was no post in this graph, or the stream is past it.
    Nothing,
    /// The wait settles the post: it consumes the peer's signal.
    Settles,
    /// The post was settled on another stream.
    ForEvent,
}

impl Recording {
    /// Notes a post on `stream` in the graph `capture`. Whether it has to follow the event.
    ///
    /// # Errors
    /// Where a post of an announcer before it in the same graph was not waited for.
    pub(super) fn post(&self, end: End, capture: u64, stream: u64) -> Result<bool> {
        let mut posted = lock(&self.posted);
        let before = posted.filter(|posted| posted.capture == capture);
        let settled_on = match before {
            Some(Posted {
                settled_on: None, ..
            }) => {
                return Err(Error::invalid(
                    "a transfer is posted twice in one graph without a wait between",
                )
                .during("post a transfer")
                .help("wait for it first, or exchange a second transfer"));
            }
            Some(before) => before.settled_on,
            None => None,
        };
        *posted = Some(Posted {
            capture,
            settled_on: (end == End::Mover).then_some(stream),
        });
        Ok(settled_on.is_some_and(|on| on != stream))
    }

    /// Notes a wait on `stream` in the graph `capture`.
    pub(super) fn wait(&self, capture: u64, stream: u64) -> Waiting {
        match &mut *lock(&self.posted) {
            Some(posted) if posted.capture == capture => match posted.settled_on {
                Some(on) if on == stream => Waiting::Nothing,
                Some(_) => Waiting::ForEvent,
                None => {
                    posted.settled_on = Some(stream);
                    Waiting::Settles
                }
            },
            _ => Waiting::Nothing,
        }
    }
}

/// The place in a graph where a transfer is settled.
#[derive(Debug)]
pub(super) struct Settled {
    device: Arc<dyn Device>,
    /// Made for the first graph.
    event: OnceLock<Arc<dyn Event>>,
}

impl Settled {
    pub(super) fn new(device: &Arc<dyn Device>) -> Self {
        Self {
            device: device.clone(),
            event: OnceLock::new(),
        }
    }

    /// Marks the place on `stream`, behind what settles the transfer.
    pub(super) fn mark(&self, stream: &dyn Stream) -> Result<()> {
        let event = match self.event.get() {
            Some(event) => event,
            None => {
                let event = self.device.create_event(false)?;
                self.event.get_or_init(|| event)
            }
        };
        stream.record(&**event)
    }

    /// Holds `stream` until the place that was marked last.
    pub(super) fn follow(&self, stream: &dyn Stream) -> Result<()> {
        match self.event.get() {
            Some(event) => stream.wait_event(&**event),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn an_announcers_post_is_settled_by_the_first_wait() {
        let recording = Recording::default();
        assert_eq!(recording.wait(7, 1), Waiting::Nothing);
        assert!(!recording.post(End::Announcer, 7, 1).unwrap());
        assert_eq!(
            recording.post(End::Announcer, 7, 1).unwrap_err().kind(),
            ErrorKind::InvalidArgument
        );
        assert_eq!(recording.wait(7, 2), Waiting::Settles);
        assert_eq!(recording.wait(7, 2), Waiting::Nothing);
        assert_eq!(recording.wait(7, 3), Waiting::ForEvent);
        // On the stream of the wait, stream order does; on another, the event.
        assert!(recording.post(End::Announcer, 7, 1).unwrap());
        assert_eq!(recording.wait(7, 1), Waiting::Settles);
        assert!(!recording.post(End::Announcer, 7, 1).unwrap());
    }

    #[test]
    fn a_movers_post_settles_itself() {
        let recording = Recording::default();
        assert!(!recording.post(End::Mover, 7, 1).unwrap());
        assert_eq!(recording.wait(7, 1), Waiting::Nothing);
        assert_eq!(recording.wait(7, 2), Waiting::ForEvent);
        assert_eq!(recording.wait(7, 3), Waiting::ForEvent);
        assert!(!recording.post(End::Mover, 7, 1).unwrap());
        assert!(recording.post(End::Mover, 7, 2).unwrap());
    }

    #[test]
    fn another_graph_starts_anew() {
        let recording = Recording::default();
        // Given up before its wait was recorded.
        recording.post(End::Announcer, 7, 1).unwrap();
        assert_eq!(recording.wait(8, 1), Waiting::Nothing);
        assert!(!recording.post(End::Announcer, 8, 1).unwrap());
        assert_eq!(recording.wait(8, 1), Waiting::Settles);
    }
}

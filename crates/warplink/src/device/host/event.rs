//! Events of the host device.

use super::capture::CapturedMark;
use super::mark::EventState;
use crate::device::{Event, EventBackend, FaultSet};
use crate::error::{Error, Result};
use crate::sync::lock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// An event. Records are numbered in order; waiting for the event means waiting for a number.
#[derive(Debug)]
pub(super) struct HostEvent {
    timing: bool,
    pub(super) state: Arc<EventState>,
    pub(super) recorded: Mutex<Recorded>,
    /// Number of the last record in a stream. Records in captures have none.
    last_mark: AtomicU64,
    /// Faults of the stream that recorded it last.
    pub(super) faults: FaultSet,
}

/// Where the event was recorded last.
#[derive(Clone, Debug, Default)]
pub(super) enum Recorded {
    #[default]
    Never,
    InStream(u64),
    InGraph(CapturedMark),
}

impl HostEvent {
    pub(super) fn new(timing: bool) -> Self {
        Self {
            timing,
            state: Arc::default(),
            recorded: Mutex::default(),
            last_mark: AtomicU64::new(0),
            faults: FaultSet::default(),
        }
    }

    /// Assigns the next number.
    pub(super) fn next_mark(&self) -> u64 {
        let mut recorded = lock(&self.recorded);
        // Relaxed: the number is published by the lock around the recorded state.
        let mark = self.last_mark.fetch_add(1, Ordering::Relaxed) + 1;
        *recorded = Recorded::InStream(mark);
        mark
    }

    fn reached_at(&self) -> Result<Instant> {
        let marked = match &*lock(&self.recorded) {
            Recorded::InStream(mark) => *mark,
            _ => {
                return Err(Error::invalid("the event was not recorded in a stream")
                    .with_operation("measure time")
                    .with_help("record it first, outside of a capture"));
            }
        };
        let reached = self.state.reached();
        reached
            .at
            .filter(|_| self.timing && reached.mark >= marked)
            .ok_or_else(|| {
                Error::invalid(if self.timing {
                    "the stream has not reached the event"
                } else {
                    "the event was created without timing"
                })
                .with_operation("measure time")
                .with_help("create both events with timing, and synchronize first")
            })
    }
}

impl EventBackend for HostEvent {
    fn elapsed_since(&self, earlier: &Event) -> Result<f32> {
        let earlier = from_dyn(earlier)?.reached_at()?;
        let later = self.reached_at()?;
        let seconds = match later.checked_duration_since(earlier) {
            Some(duration) => duration.as_secs_f64(),
            None => -earlier.duration_since(later).as_secs_f64(),
        };
        Ok((seconds * 1e3) as f32)
    }

    fn is_reached(&self) -> Result<bool> {
        Ok(match &*lock(&self.recorded) {
            Recorded::InStream(mark) => self.state.reached().mark >= *mark,
            Recorded::Never => true,
            Recorded::InGraph(_) => false,
        })
    }
}

pub(super) fn from_dyn(event: &Event) -> Result<&HostEvent> {
    event.backend().ok_or_else(|| {
        Error::invalid("the event belongs to another device; expected one of the host device")
            .with_help("use an event of the same device")
    })
}

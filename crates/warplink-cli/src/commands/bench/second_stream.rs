//! A stream beside the one that is timed.

use anyhow::Result;
use std::sync::Arc;
use warplink::Communicator;
use warplink::device::{Event, Priority, Stream};

/// A second stream, on which every other transfer of many runs: handing one over takes a few
/// microseconds in which its stream moves nothing.
pub(super) struct SecondStream {
    stream: Arc<dyn Stream>,
    begin: Arc<dyn Event>,
    end: Arc<dyn Event>,
}

impl SecondStream {
    pub(super) fn new(comm: &Communicator) -> Result<Self> {
        let event = || comm.device().create_event(false);
        Ok(Self {
            stream: comm.create_stream(Priority::High)?,
            begin: event()?,
            end: event()?,
        })
    }

    /// Starts the second stream where `first` is.
    pub(super) fn fork(&self, first: &dyn Stream) -> Result<()> {
        first.record(&*self.begin)?;
        Ok(self.stream.wait_event(&*self.begin)?)
    }

    /// The stream for `turn`.
    pub(super) fn lane<'s>(&'s self, turn: usize, first: &'s dyn Stream) -> &'s dyn Stream {
        if turn.is_multiple_of(2) {
            first
        } else {
            &*self.stream
        }
    }

    /// Holds `first` until the second stream is done.
    pub(super) fn join(&self, first: &dyn Stream) -> Result<()> {
        self.stream.record(&*self.end)?;
        Ok(first.wait_event(&*self.end)?)
    }
}

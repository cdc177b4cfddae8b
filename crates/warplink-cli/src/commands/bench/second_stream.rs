//! A stream beside the one that is timed.

use anyhow::Result;
use warplink::Communicator;
use warplink::device::{Event, Priority, Stream};

/// A second stream that runs every other transfer: starting one takes a few microseconds in which its
/// stream moves nothing.
pub(crate) struct SecondStream {
    stream: Stream,
    begin: Event,
    end: Event,
}

impl SecondStream {
    pub(crate) fn new(comm: &Communicator) -> Result<Self> {
        let event = || comm.device().create_event(false);
        Ok(Self {
            stream: comm.create_stream(Priority::High)?,
            begin: event()?,
            end: event()?,
        })
    }

    /// Starts the second stream where `first` is.
    pub(crate) fn fork(&self, first: &Stream) -> Result<()> {
        first.record(&self.begin)?;
        Ok(self.stream.wait_event(&self.begin)?)
    }

    /// The stream for `turn`.
    pub(crate) fn stream_for<'s>(&'s self, turn: usize, first: &'s Stream) -> &'s Stream {
        if turn.is_multiple_of(2) {
            first
        } else {
            &self.stream
        }
    }

    /// Holds `first` until the second stream is done.
    pub(crate) fn join(&self, first: &Stream) -> Result<()> {
        self.stream.record(&self.end)?;
        Ok(first.wait_event(&self.end)?)
    }
}

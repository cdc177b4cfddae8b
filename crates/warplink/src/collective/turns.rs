//! Streams that use one workspace, one after the other.

use crate::device::{Device, Event, Stream};
use crate::error::Result;
use crate::sync::lock;
use std::sync::{Arc, Mutex};

/// Orders launches on several streams as they are enqueued.
#[derive(Debug)]
pub(super) struct Turns {
    device: Arc<dyn Device>,
    last: Mutex<Option<Last>>,
}

/// The last launch outside of graphs.
#[derive(Debug)]
struct Last {
    /// Held, so that no other stream gets its handle.
    stream: Stream,
    /// Behind the launch, and before what its stream was given later.
    done: Event,
}

impl Last {
    /// Has `stream` wait for the launch.
    fn precede(&self, stream: &Stream) -> Result<()> {
        if self.stream.raw() == stream.raw() {
            return Ok(());
        }
        stream.wait_event(&self.done)
    }
}

impl Turns {
    pub(super) fn new(device: &Arc<dyn Device>) -> Self {
        Self {
            device: device.clone(),
            last: Mutex::default(),
        }
    }

    /// Calls `enqueue`, which gives `stream` work, after the last such work of another stream. Calls of several
    /// threads do so one after the other, also where one fails that has given the stream some work. What is recorded
    /// into a graph is for the caller to order.
    pub(super) fn take(&self, stream: &Stream, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut last = lock(&self.last);
        if stream.is_capturing()? {
            return enqueue();
        }
        if let Some(last) = &*last {
            last.precede(stream)?;
        }
        let enqueued = enqueue();
        enqueued.and(self.record(&mut last, stream))
    }

    /// Notes that what `stream` was given so far was the last.
    fn record(&self, last: &mut Option<Last>, stream: &Stream) -> Result<()> {
        // Now, and on this thread: later the stream may have to wait for what comes after this launch elsewhere, may
        // be recording, or may be another thread's.
        let done = match last.take() {
            Some(last) => last.done,
            None => self.device.create_event(false)?,
        };
        stream.record(&done)?;
        *last = Some(Last {
            stream: stream.clone(),
            done,
        });
        Ok(())
    }

    /// Has `stream` wait for the last launch outside of graphs.
    pub(super) fn precede(&self, stream: &Stream) -> Result<()> {
        match &*lock(&self.last) {
            Some(last) => last.precede(stream),
            None => Ok(()),
        }
    }
}

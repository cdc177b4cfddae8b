//! Serializes the use of a shared resource, such as a workspace, by several streams.

use super::{Device, Event, Stream};
use crate::error::Result;
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// Maximum number of concurrent captures whose work is ordered.
const MAX_RECORDINGS: usize = 16;

/// Orders work on several streams in the order in which it is enqueued: work enqueued on one stream completes
/// before work enqueued later on another starts. Work captured into one graph is ordered among itself.
#[derive(Debug)]
pub struct Turns {
    device: Arc<dyn Device>,
    last: Mutex<LastWork>,
}

#[derive(Debug, Default)]
struct LastWork {
    /// Outside of graphs.
    eager: Option<Last>,
    /// For each graph under capture, by capture id; ids increase.
    recorded: BTreeMap<u64, Last>,
}

/// The most recent work.
#[derive(Debug)]
struct Last {
    /// Kept, so that no other stream reuses its handle.
    stream: Stream,
    /// After the work, and before later work of its stream.
    done: Event,
}

impl Last {
    /// Makes `stream` wait for the work.
    fn precede(&self, stream: &Stream) -> Result<()> {
        // A stream is ordered with itself.
        if self.stream.raw() == stream.raw() {
            return Ok(());
        }
        stream.wait_event(&self.done)
    }
}

impl Turns {
    /// Order among streams of `device`.
    pub fn new(device: &Arc<dyn Device>) -> Self {
        Self {
            device: device.clone(),
            last: Mutex::default(),
        }
    }

    /// Calls `enqueue`, which enqueues work on `stream`, ordered after the last such work of another stream.
    /// Concurrent calls are serialized, even if one fails after enqueuing some work. Does not wait for device
    /// work.
    pub fn take(&self, stream: &Stream, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        self.take_with(stream, |_| enqueue())
    }

    /// As [`take`](Self::take); `enqueue` receives whether the work is being captured.
    pub fn take_with(
        &self,
        stream: &Stream,
        enqueue: impl FnOnce(bool) -> Result<()>,
    ) -> Result<()> {
        // Held over `enqueue`: the order of the calls is that of the lock, and the event must follow exactly this work.
        let mut last = lock(&self.last);
        let capture = stream.capture_id()?;
        last.begin(capture, stream)?;
        let enqueued = enqueue(capture.is_some());
        // Recorded even after a failure, which may have enqueued part of the work.
        enqueued.and(self.end_turn(&mut last, capture, stream))
    }

    /// First half of [`take`](Self::take), for callers with their own lock: work enqueued on `stream` from
    /// now on follows the last work of another stream. Call [`end`](Self::end) afterwards, even after a
    /// failure.
    pub fn begin(&self, stream: &Stream) -> Result<()> {
        lock(&self.last).begin(stream.capture_id()?, stream)
    }

    /// Second half: work enqueued on `stream` so far was the last.
    pub fn end(&self, stream: &Stream) -> Result<()> {
        self.end_turn(&mut lock(&self.last), stream.capture_id()?, stream)
    }

    /// `capture` is the capture of `stream`, if any; likewise below.
    fn end_turn(
        &self,
        last: &mut MutexGuard<'_, LastWork>,
        capture: Option<u64>,
        stream: &Stream,
    ) -> Result<()> {
        let earlier = match capture {
            None => last.eager.take(),
            Some(capture) => last.recorded.remove(&capture),
        };
        // Record the event now, on this thread: later the stream may have to wait for work that follows this
        // elsewhere, may be capturing, or may belong to another thread.
        let done = match earlier {
            // Reused: streams that wait for its earlier record have that wait enqueued, and a new record does not
            // affect it.
            Some(earlier) => earlier.done,
            None => self.device.create_event(false)?,
        };
        stream.record(&done)?;
        let stream = stream.clone();
        let work = Last { stream, done };
        match capture {
            None => last.eager = Some(work),
            Some(capture) => {
                last.recorded.insert(capture, work);
                // Nothing reports the end of a capture, so drop the oldest.
                while last.recorded.len() > MAX_RECORDINGS {
                    last.recorded.pop_first();
                }
            }
        }
        Ok(())
    }

    /// Makes `stream`, which is not capturing, wait for the last work outside of graphs. Does not block.
    pub fn precede(&self, stream: &Stream) -> Result<()> {
        match &lock(&self.last).eager {
            Some(last) => last.precede(stream),
            None => Ok(()),
        }
    }
}

impl LastWork {
    fn begin(&self, capture: Option<u64>, stream: &Stream) -> Result<()> {
        let last = match capture {
            None => self.eager.as_ref(),
            Some(capture) => self.recorded.get(&capture),
        };
        match last {
            Some(last) => last.precede(stream),
            None => Ok(()),
        }
    }
}

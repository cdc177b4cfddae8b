//! Streams that use one thing, such as a workspace, one after the other.

use super::{Device, Event, Stream};
use crate::error::Result;
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// The most graphs that are recorded at the same time and have their work ordered.
const MAX_RECORDINGS: usize = 16;

/// Orders work that several streams are given, as it is enqueued: what is given to one stream is done before what
/// another one is given later. Work that is recorded into a graph is ordered among itself.
#[derive(Debug)]
pub struct Turns {
    device: Arc<dyn Device>,
    last: Mutex<LastWork>,
}

#[derive(Debug, Default)]
struct LastWork {
    /// Outside of graphs.
    eager: Option<Last>,
    /// In each graph that is recorded, by the number of its capture, which grows.
    recorded: BTreeMap<u64, Last>,
}

/// The last work that a stream was given.
#[derive(Debug)]
struct Last {
    /// Held, so that no other stream gets its handle.
    stream: Stream,
    /// Behind the work, and before what its stream was given later.
    done: Event,
}

impl Last {
    /// Has `stream` wait for the work.
    fn precede(&self, stream: &Stream) -> Result<()> {
        if self.stream.raw() == stream.raw() {
            return Ok(());
        }
        stream.wait_event(&self.done)
    }
}

impl Turns {
    /// Turns of streams of `device`.
    pub fn new(device: &Arc<dyn Device>) -> Self {
        Self {
            device: device.clone(),
            last: Mutex::default(),
        }
    }

    /// Calls `enqueue`, which gives `stream` work, after the last such work of another stream. Calls of several
    /// threads do so one after the other, also where one fails that has given the stream some work. Does not block
    /// for work of the device.
    pub fn take(&self, stream: &Stream, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        self.take_with(stream, |_| enqueue())
    }

    /// As [`take`](Self::take), for an `enqueue` that is told whether a graph records what it gives.
    pub fn take_with(
        &self,
        stream: &Stream,
        enqueue: impl FnOnce(bool) -> Result<()>,
    ) -> Result<()> {
        let mut last = lock(&self.last);
        let capture = stream.capture_id()?;
        last.begin(capture, stream)?;
        let enqueued = enqueue(capture.is_some());
        enqueued.and(self.end_turn(&mut last, capture, stream))
    }

    /// The first half of [`take`](Self::take), for callers with a lock of their own: what `stream` is given from now
    /// on is done after the last work of another stream. Call [`end`](Self::end) behind it, also where that failed.
    pub fn begin(&self, stream: &Stream) -> Result<()> {
        lock(&self.last).begin(stream.capture_id()?, stream)
    }

    /// The second half: what `stream` was given so far was the last.
    pub fn end(&self, stream: &Stream) -> Result<()> {
        self.end_turn(&mut lock(&self.last), stream.capture_id()?, stream)
    }

    /// `capture` is that which records `stream`, if one does; so below.
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
        // Now, and on this thread: later the stream may have to wait for what comes after this work elsewhere, may
        // be recording, or may be another thread's.
        let done = match earlier {
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
                // Nobody tells when a graph is complete.
                while last.recorded.len() > MAX_RECORDINGS {
                    last.recorded.pop_first();
                }
            }
        }
        Ok(())
    }

    /// Has `stream`, which is not recording, wait for the last work outside of graphs. Does not block.
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

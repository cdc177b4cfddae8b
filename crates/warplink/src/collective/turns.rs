//! Streams that use one workspace, one after the other.

use crate::device::{Device, Event, Stream};
use crate::error::Result;
use crate::sync::lock;
use std::sync::{Arc, Mutex};

/// Orders launches on several streams as they are enqueued.
#[derive(Debug)]
pub(super) struct Turns {
    device: Arc<dyn Device>,
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    stream: Option<Stream>,
    event: Option<Event>,
}

impl Turns {
    pub(super) fn new(device: &Arc<dyn Device>) -> Self {
        Self {
            device: device.clone(),
            last: Mutex::default(),
        }
    }

    /// Calls `enqueue`, which gives `stream` work, after what the last stream was given for it. Calls of several
    /// threads do so one after the other. What is recorded into a graph is for the caller to order.
    pub(super) fn take(&self, stream: &Stream, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut last = lock(&self.last);
        let other = last.stream.as_ref();
        let other = other.filter(|other| other.raw() != stream.raw()).cloned();
        if let Some(other) = other
            && !stream.is_capturing()?
            && !other.is_capturing()?
        {
            let event = match last.event.take() {
                Some(event) => event,
                None => self.device.create_event(false)?,
            };
            other.record(&event)?;
            stream.wait_event(&event)?;
            last.event = Some(event);
        }
        let same = last
            .stream
            .as_ref()
            .is_some_and(|one| one.raw() == stream.raw());
        if !same {
            last.stream = Some(stream.clone());
        }
        enqueue()
    }
}

//! Copies that a stream has the proxy do, and waits for.

use crate::channel::answers::{Answer, Answers};
use crate::device::channel::trigger::Movement;
use crate::device::{At, DeviceSlice, Event, Stream};
use crate::error::Result;
use std::sync::Arc;

/// A copy to a peer's memory or from it, over a network.
#[derive(Debug)]
pub(crate) struct StreamCopy {
    /// Who waits for it, and the mark in it that has to be reached first.
    pub(crate) stream: Stream,
    pub(crate) after: Event,
    pub(crate) movement: Movement,
    pub(crate) own: DeviceSlice,
    pub(crate) peers: At,
    pub(crate) answer: Answer,
    pub(crate) answers: Arc<Answers>,
}

impl StreamCopy {
    /// Whether it is its turn.
    ///
    /// # Errors
    /// What the stream failed with: then nobody waits for it.
    pub(super) fn is_due(&self) -> Result<bool> {
        self.stream.check()?;
        self.after.is_reached()
    }
}

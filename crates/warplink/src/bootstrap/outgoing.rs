//! Messages for the server to send.

use super::message;
use std::sync::Arc;

/// A frame to send. Frames of one gather share their body.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    pub(crate) to: u32,
    /// The request that it answers, or 0 for an event.
    pub(crate) id: u64,
    pub(crate) body: Arc<[u8]>,
}

impl Outgoing {
    pub(crate) const fn new(to: u32, id: u64, body: Arc<[u8]>) -> Self {
        Self { to, id, body }
    }
}

/// Encodes a message. Encoding to memory cannot fail; if it did, the receiver would refuse the empty body as malformed.
pub(crate) fn body(message: &impl serde::Serialize) -> Arc<[u8]> {
    match message::encode(message) {
        Ok(body) => body.into(),
        Err(error) => {
            tracing::error!(%error, "could not encode a message");
            Arc::default()
        }
    }
}

//! Frames that the store has to send.

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

/// An encoded message. Encoding to memory cannot fail; were it to, the empty body that results is
/// refused by the receiver as malformed.
pub(crate) fn body(message: &impl serde::Serialize) -> Arc<[u8]> {
    match message::encode(message) {
        Ok(body) => body.into(),
        Err(error) => {
            tracing::error!(%error, "could not encode a message");
            Arc::default()
        }
    }
}

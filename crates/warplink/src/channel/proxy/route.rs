//! What a proxy does for one connection.

use crate::device::channel::trigger::{Movement, Trigger};
use crate::device::channel::{Side, Windows};
use crate::device::{Fault, Word};
use crate::error::{Rank, Result};
use crate::transport::CopyEngine;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One connection, as the proxy has it.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) peer: Rank,
    pub(crate) windows: Arc<Windows>,
    /// The peer's inbound word.
    pub(crate) outbound: Word,
    /// This rank's word for flushes.
    pub(crate) completed: Word,
    /// Raised when the peer is lost.
    pub(crate) fault: Arc<Fault>,
    pub(crate) engine: CopyEngine,
    /// How often the peer was signalled.
    pub(crate) signals: AtomicU64,
}

impl Route {
    /// Enqueues what the trigger at `position` of the FIFO asks for.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where it passes the end of a
    /// region; those of the copy engine.
    pub(super) fn serve(&self, position: u64, trigger: &Trigger) -> Result<()> {
        if let Some(movement) = trigger.movement {
            let own = self.windows.range(Side::Own, trigger.own, trigger.bytes)?;
            let peers = self
                .windows
                .range(Side::Peers, trigger.peers, trigger.bytes)?;
            match movement {
                Movement::Put => self.engine.copy(&peers, &own)?,
                Movement::Get => self.engine.copy(&own, &peers)?,
            }
        }
        let mut words = Vec::with_capacity(2);
        if trigger.signal {
            let count = self.signals.fetch_add(1, Ordering::Relaxed) + 1;
            words.push((&self.outbound, count));
        }
        if trigger.flush {
            words.push((&self.completed, position + 1));
        }
        if words.is_empty() {
            return Ok(());
        }
        self.engine.set(&words)
    }
}

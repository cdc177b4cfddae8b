//! The proxy's state of one connection.

use super::StreamCopy;
use crate::device::Fault;
use crate::device::channel::trigger::Trigger;
use crate::device::channel::{Side, Windows};
use crate::error::{Rank, Result};
use crate::sync::lock;
use crate::transport::Carrier;
use std::sync::{Arc, Mutex};

/// One connection, as seen by the proxy.
///
/// Words are not written per trigger: consecutive signals are coalesced into one write of the last value, and so are
/// flushes. The write happens before the connection's next data movement, and when the proxy has nothing else to do.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) peer: Rank,
    /// Raised when the peer is lost, or a request fails.
    pub(crate) fault: Arc<Fault>,
    pub(crate) carrier: Box<dyn Carrier>,
    windows: Arc<Windows>,
    words: Mutex<RouteWords>,
}

/// Current and pending values of its words.
#[derive(Debug, Default)]
struct RouteWords {
    /// Signals requested, and how many of them have been written to the peer.
    signals: u64,
    signalled: u64,
    completed: Option<u64>,
    /// Triggers whose words are still to be written.
    triggers: u64,
}

/// A copy and its connection.
#[derive(Debug)]
pub(super) struct Requested {
    pub(super) route: Arc<Route>,
    pub(super) copy: StreamCopy,
}

impl Route {
    pub(crate) fn new(
        peer: Rank,
        fault: &Arc<Fault>,
        windows: &Arc<Windows>,
        carrier: Box<dyn Carrier>,
    ) -> Self {
        Self {
            peer,
            fault: fault.clone(),
            carrier,
            windows: windows.clone(),
            words: Mutex::default(),
        }
    }

    /// Starts the operation requested by the trigger at `position` of the FIFO, and notes the words to write after
    /// it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if it exceeds a region; errors of the
    /// carrier.
    pub(super) fn serve(&self, position: u64, trigger: &Trigger) -> Result<()> {
        if let Some(movement) = trigger.movement {
            // Pending signals belong to earlier requests and do not wait for this one.
            self.set_words()?;
            let own = self.windows.range(Side::Own, trigger.own, trigger.bytes)?;
            self.carrier.start(movement, &own, trigger.peers)?;
        }
        let mut words = lock(&self.words);
        if trigger.signal {
            words.signals += 1;
        }
        if trigger.flush {
            // One more than the position: kernels wait for "at least", and 0 is the initial value.
            words.completed = Some(position + 1);
        }
        words.triggers += u64::from(trigger.signal || trigger.flush);
        Ok(())
    }

    /// Starts a copy for a stream, which continues when the copy is done.
    pub(super) fn copy(&self, copy: &StreamCopy) -> Result<()> {
        self.set_words()?;
        self.carrier.start(copy.movement, &copy.own, copy.peers)?;
        self.carrier.answer(&copy.answer.word, copy.answer.value)?;
        // Free as soon as the write is enqueued, since later writes to the word are ordered after it.
        copy.answers.give_back(copy.answer.clone());
        Ok(())
    }

    /// Whether words are pending.
    pub(super) fn has_words(&self) -> bool {
        lock(&self.words).triggers > 0
    }

    /// Writes the pending words.
    pub(super) fn set_words(&self) -> Result<()> {
        let mut words = lock(&self.words);
        if words.triggers == 0 {
            return Ok(());
        }
        let signals = (words.signals > words.signalled).then_some(words.signals);
        self.carrier.set(signals, words.completed)?;
        // Only after the carrier accepted them, so that a failed write is not taken for a sent signal.
        words.signalled = words.signals;
        words.completed = None;
        words.triggers = 0;
        Ok(())
    }

    /// Drops the pending words; returns the number of their triggers.
    pub(super) fn forget_words(&self) -> u64 {
        std::mem::take(&mut lock(&self.words).triggers)
    }
}

//! A proxy's state of one connection.

use super::StreamCopy;
use crate::device::Fault;
use crate::device::channel::trigger::Trigger;
use crate::device::channel::{Side, Windows};
use crate::error::{Rank, Result};
use crate::sync::lock;
use crate::transport::Carrier;
use std::sync::{Arc, Mutex};

/// One connection, as the proxy has it.
///
/// Words are not set with each trigger: signals that follow one another are one write of the last value, and
/// so are flushes. They are set before the next movement of the connection, and when the proxy finds nothing
/// else to do.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) peer: Rank,
    /// Raised when the peer is lost, or what was asked for is not done.
    pub(crate) fault: Arc<Fault>,
    pub(crate) carrier: Box<dyn Carrier>,
    windows: Arc<Windows>,
    words: Mutex<RouteWords>,
}

/// The values that its words have, or are to have.
#[derive(Debug, Default)]
struct RouteWords {
    /// How often the peer was signalled, and how often of that it knows.
    signals: u64,
    signalled: u64,
    completed: Option<u64>,
    /// Triggers whose words are to be set yet.
    triggers: u64,
}

/// A copy with the connection that it is for.
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

    /// Starts what the trigger at `position` of the FIFO asks for, and notes the words to be set after it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where it passes the end of a
    /// region; those of the carrier.
    pub(super) fn serve(&self, position: u64, trigger: &Trigger) -> Result<()> {
        if let Some(movement) = trigger.movement {
            // Signals are for what preceded them, and do not wait for this.
            self.set_words()?;
            let own = self.windows.range(Side::Own, trigger.own, trigger.bytes)?;
            self.carrier.start(movement, &own, trigger.peers)?;
        }
        let mut words = lock(&self.words);
        if trigger.signal {
            words.signals += 1;
        }
        if trigger.flush {
            words.completed = Some(position + 1);
        }
        words.triggers += u64::from(trigger.signal || trigger.flush);
        Ok(())
    }

    /// Starts a copy that a stream waits for, and has the stream go on when it is done.
    pub(super) fn copy(&self, copy: &StreamCopy) -> Result<()> {
        self.set_words()?;
        self.carrier.start(copy.movement, &copy.own, copy.peers)?;
        self.carrier.answer(&copy.answer.word, copy.answer.value)?;
        copy.answers.give_back(copy.answer.clone());
        Ok(())
    }

    /// Whether words are to be set.
    pub(super) fn has_words(&self) -> bool {
        lock(&self.words).triggers > 0
    }

    /// Sets the words that are to be set.
    pub(super) fn set_words(&self) -> Result<()> {
        let mut words = lock(&self.words);
        if words.triggers == 0 {
            return Ok(());
        }
        let signals = (words.signals > words.signalled).then_some(words.signals);
        self.carrier.set(signals, words.completed)?;
        words.signalled = words.signals;
        words.completed = None;
        words.triggers = 0;
        Ok(())
    }

    /// Forgets the words that are to be set; of how many triggers they are.
    pub(super) fn forget_words(&self) -> u64 {
        std::mem::take(&mut lock(&self.words).triggers)
    }
}

//! Carrier that uses the network, for peers whose memory cannot be mapped.

use super::{Carrier, NetworkLink};
use crate::deadline::Deadline;
use crate::debug::debug_text;
use crate::device::channel::trigger::Movement;
use crate::device::channel::{Side, Windows};
use crate::device::{At, Device, DeviceSlice, Fault, MemoryOp, Priority, Stream, Word};
use crate::error::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum bytes of one operation, so that progress is visible even on slow networks and the connection's
/// timeout does not fire.
const PART: u64 = 16 << 20;

/// Maximum parts in flight, and number of parts for each completion callback.
const MAX_UNDER_WAY: u64 = 4096;
const PARTS_PER_MARK: u64 = 32;

/// Moves bytes between this process's and a peer's memory.
pub(crate) struct NetworkCarrier {
    link: Arc<NetworkLink>,
    windows: Arc<Windows>,
    /// Sets this rank's flush word.
    stream: Stream,
    completed: Word,
    /// Parts in flight, and those not yet covered by a completion callback.
    under_way: Arc<AtomicU64>,
    unmarked: AtomicU64,
}

impl NetworkCarrier {
    /// `fault` is raised when the connection fails.
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        link: &Arc<NetworkLink>,
        windows: &Arc<Windows>,
        completed: &Word,
        fault: &Arc<Fault>,
    ) -> Result<Self> {
        link.fail_when_broken(fault)?;
        // A stream of its own, so that the flush word is not delayed by other work.
        Ok(Self {
            link: link.clone(),
            windows: windows.clone(),
            stream: device.create_stream(Priority::High)?,
            completed: completed.clone(),
            under_way: Arc::default(),
            unmarked: AtomicU64::new(0),
        })
    }

    fn count(&self) -> Result<()> {
        // Relaxed: bounds parts in flight; only the completion callback orders data.
        self.under_way.fetch_add(1, Ordering::Relaxed);
        if self.unmarked.fetch_add(1, Ordering::Relaxed) + 1 >= PARTS_PER_MARK {
            self.mark()?;
        }
        Ok(())
    }

    /// Registers a completion callback for the parts so far.
    fn mark(&self) -> Result<()> {
        let (parts, under_way) = (
            // Relaxed: the swap alone decides which caller registers the callback.
            self.unmarked.swap(0, Ordering::Relaxed),
            self.under_way.clone(),
        );
        if parts == 0 {
            return Ok(());
        }
        self.link.connection().when_done(Box::new(move |_| {
            // Release: pairs with the acquire loads below, so that "idle" implies that the parts have
            // completed.
            under_way.fetch_sub(parts, Ordering::Release);
        }))
    }
}

impl Carrier for NetworkCarrier {
    fn has_room(&self) -> Result<bool> {
        // Acquire: pairs with the release of completed parts.
        Ok(self.under_way.load(Ordering::Acquire) < MAX_UNDER_WAY)
    }

    fn start(&self, movement: Movement, own: &DeviceSlice, peers: At) -> Result<()> {
        let bytes = own.bytes() as u64;
        // The trigger comes from a kernel, so its range is not trusted.
        self.windows.check(Side::Peers, peers, bytes)?;
        let remote = self.link.region(peers.region)?;
        let connection = self.link.connection();
        for start in (0..bytes).step_by(PART as usize) {
            let end = bytes.min(start + PART);
            let part = own.slice(start as usize..end as usize)?;
            let offset = (peers.offset + start) as usize;
            match movement {
                Movement::Put => connection.put(&part, &remote, offset)?,
                Movement::Get => connection.get(&part, &remote, offset)?,
            }
            self.count()?;
        }
        Ok(())
    }

    fn set(&self, inbound: Option<u64>, completed: Option<u64>) -> Result<()> {
        if let Some(value) = inbound {
            let (words, offset) = self.link.inbound();
            self.link.connection().signal(words, offset, value)?;
            self.count()?;
        }
        completed.map_or(Ok(()), |value| self.answer(&self.completed, value))
    }

    fn answer(&self, word: &Word, value: u64) -> Result<()> {
        // Set by a stream rather than by the host: the word is in device memory, which the host may not be able to
        // write.
        let (stream, word) = (self.stream.clone(), word.clone());
        self.link.connection().when_done(Box::new(move |done| {
            let write = MemoryOp::write(&word, value);
            // A broken connection raises the fault, which aborts the waiter; without that the word must stay unset.
            if let Err(error) = done.and_then(|()| stream.memory_ops(&[write])) {
                tracing::debug!(%error, "a waiter for the network could not be notified");
            }
        }))
    }

    fn is_idle(&self) -> Result<bool> {
        // Cover the remaining parts, or they would never be counted as complete.
        self.mark()?;
        Ok(self.under_way.load(Ordering::Acquire) == 0 && self.stream.is_idle()?)
    }

    fn drain(&self, deadline: Deadline) -> Result<()> {
        self.link.connection().flush(deadline)?;
        self.stream.synchronize(deadline)
    }
}

debug_text!(NetworkCarrier, |it| "NetworkCarrier({:?})", it.link);

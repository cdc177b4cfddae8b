//! Blocking copies between host and device, through pinned memory and a private stream, so that they never
//! wait behind a stream that waits for a peer.

use crate::deadline::Deadline;
use crate::device::Fault;
use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::poll::poll;
use crate::device::cuda::driver::raw::{Pinned, RawEvent, RawStream};
use crate::error::{Error, Result};
use crate::sync::lock;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Half of the pinned buffer: the GPU copies one half while the host fills the other.
const HALF: usize = 4 << 20;

/// Time limit for one half. A copy takes less than a millisecond, so exceeding it means that the copy engine
/// is blocked.
const LIMIT: Duration = Duration::from_secs(60);

/// How long after a fault a copy may still complete.
const GRACE: Duration = Duration::from_secs(2);

/// Pinned buffer and stream for a device's blocking copies.
#[derive(Debug)]
pub(crate) struct Staging {
    context: Arc<Context>,
    fault: Arc<Fault>,
    inner: Mutex<StagingState>,
}

#[derive(Debug)]
struct StagingState {
    stream: RawStream,
    done: [RawEvent; 2],
    /// `None` once closed.
    buffer: Option<Pinned>,
    /// Whether a call timed out while the GPU could still access the buffer.
    abandoned: bool,
}

impl Staging {
    pub(crate) fn create(context: &Arc<Context>, fault: &Arc<Fault>) -> Result<Self> {
        let event = || RawEvent::create(context, false);
        let inner = StagingState {
            stream: RawStream::create(context, true)?,
            done: [event()?, event()?],
            buffer: Some(Pinned::allocate(context, 2 * HALF)?),
            abandoned: false,
        };
        Ok(Self {
            context: context.clone(),
            fault: fault.clone(),
            inner: Mutex::new(inner),
        })
    }

    /// Closes it, and returns the buffer to be freed on the reaper's thread.
    pub(crate) fn close(&self) -> Option<Pinned> {
        let mut inner = lock(&self.inner);
        let buffer = inner.buffer.take();
        if inner.abandoned && !inner.stream.is_idle().unwrap_or(false) {
            // The GPU may still access the buffer, and waiting for it could hang, so leak it.
            std::mem::forget(buffer);
            tracing::warn!(
                "a pinned buffer is leaked, since a copy that timed out may still use it"
            );
            return None;
        }
        buffer
    }

    /// Copies `bytes` to the device.
    ///
    /// # Safety
    /// `target` must be device memory of as many bytes.
    pub(crate) unsafe fn upload(&self, target: u64, bytes: &[u8]) -> Result<()> {
        self.with(|inner, buffer, wait| {
            for (part, chunk) in bytes.chunks(HALF).enumerate() {
                let half = part % 2;
                if part >= 2 {
                    wait(&inner.done[half])?;
                }
                // SAFETY: the half's last copy is done: awaited above or by the previous call.
                // Nothing changes the half before its event is reached, and the caller vouches for
                // the target.
                unsafe {
                    buffer.write(half * HALF, chunk);
                    buffer.copy_to(
                        half * HALF,
                        target + (part * HALF) as u64,
                        chunk.len(),
                        inner.stream.raw,
                    )?;
                    inner.done[half].record(inner.stream.raw)?;
                }
            }
            inner.done.iter().try_for_each(wait)
        })
    }

    /// Copies from the device to `bytes`.
    ///
    /// # Safety
    /// `source` must be device memory of as many bytes.
    pub(crate) unsafe fn download(&self, source: u64, bytes: &mut [u8]) -> Result<()> {
        self.with(|inner, buffer, wait| {
            let total = bytes.len();
            let enqueue = |buffer: &Pinned, part: usize| -> Result<()> {
                let start = part * HALF;
                if start >= total {
                    return Ok(());
                }
                let (half, length) = (part % 2, HALF.min(total - start));
                // SAFETY: the half was read out before a further copy into it is enqueued, and is
                // read again only when its event is reached; the caller vouches for the source.
                unsafe {
                    buffer.copy_from(
                        half * HALF,
                        source + start as u64,
                        length,
                        inner.stream.raw,
                    )?;
                    inner.done[half].record(inner.stream.raw)
                }
            };
            enqueue(buffer, 0)?;
            enqueue(buffer, 1)?;
            for (part, chunk) in bytes.chunks_mut(HALF).enumerate() {
                let half = part % 2;
                wait(&inner.done[half])?;
                // SAFETY: the copy into this half is done, and no further one is enqueued yet.
                unsafe { buffer.read(half * HALF, chunk) };
                enqueue(buffer, part + 2)?;
            }
            Ok(())
        })
    }

    /// Zeroes `bytes` of memory at `target`.
    ///
    /// # Safety
    /// `target` must be device memory of as many bytes.
    pub(crate) unsafe fn zero(&self, target: u64, bytes: usize) -> Result<()> {
        self.with(|inner, _, wait| {
            // SAFETY: the caller vouches for the range; stream and context are ours.
            let code = unsafe {
                (self.context.driver.cuMemsetD8Async)(target, 0, bytes, inner.stream.raw)
            };
            self.context
                .driver
                .check(code, "set device memory to zero")?;
            // SAFETY: stream and event are of this context, which is current.
            unsafe { inner.done[0].record(inner.stream.raw)? };
            wait(&inner.done[0])
        })
    }

    /// Runs `work` exclusively, with the context current and the buffer idle.
    fn with(
        &self,
        work: impl FnOnce(&StagingState, &mut Pinned, &dyn Fn(&RawEvent) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let mut inner = lock(&self.inner);
        let _entered = self.context.enter_relaxed()?;
        let wait = |event: &RawEvent| self.wait(|| event.is_reached());
        if inner.abandoned {
            self.wait(|| inner.stream.is_idle())?;
        }
        let Some(mut buffer) = inner.buffer.take() else {
            return Err(Error::internal(
                "the pinned buffer was lost when a copy panicked",
            ));
        };
        let result = work(&inner, &mut buffer, &wait);
        inner.buffer = Some(buffer);
        inner.abandoned = result.is_err();
        result
    }

    fn wait(&self, ready: impl FnMut() -> Result<bool>) -> Result<()> {
        let deadline = Deadline::after(LIMIT);
        let mut faulted_at = None;
        poll(ready, || {
            if self.fault.error().is_some()
                && faulted_at.get_or_insert_with(Instant::now).elapsed() > GRACE
            {
                return self.fault.check();
            }
            if deadline.passed() {
                Err(deadline.expired("a copy between host and device"))
            } else {
                Ok(())
            }
        })
    }
}

//! GPU events.

use crate::device::cuda::driver::raw::RawEvent;
use crate::device::cuda::gpu::Gpu;
use crate::device::{Event, EventBackend, FaultSet};
use crate::error::{Error, Result};
use std::sync::Arc;

/// An event.
#[derive(Debug)]
pub(crate) struct CudaEvent {
    gpu: Arc<Gpu>,
    pub(crate) raw: Arc<RawEvent>,
    timing: bool,
    /// Whether it can be queried after the device's fault.
    after_fault: bool,
    /// Faults of the stream that recorded it last.
    pub(crate) faults: FaultSet,
}

impl CudaEvent {
    pub(crate) fn create(gpu: &Arc<Gpu>, timing: bool) -> Result<Self> {
        let raw = Arc::new(RawEvent::create(&gpu.context, timing)?);
        Ok(Self {
            gpu: gpu.clone(),
            raw,
            timing,
            after_fault: false,
            faults: FaultSet::default(),
        })
    }

    /// A recorded event that can still be queried after the device's fault.
    pub(crate) fn recorded_for_release(gpu: &Arc<Gpu>, raw: Arc<RawEvent>) -> Self {
        Self {
            gpu: gpu.clone(),
            raw,
            timing: false,
            after_fault: true,
            faults: FaultSet::default(),
        }
    }

    /// Downcasts the event.
    pub(crate) fn of(event: &Event) -> Result<&Self> {
        event.backend().ok_or_else(|| {
            Error::invalid("the event belongs to another device; expected one of a GPU")
                .with_help("use an event of the same device")
        })
    }
}

impl EventBackend for CudaEvent {
    fn elapsed_since(&self, earlier: &Event) -> Result<f32> {
        self.gpu.fault.check()?;
        let earlier = Self::of(earlier)?;
        if !self.timing || !earlier.timing {
            return Err(Error::invalid(
                "an event was created without timing; expected two with it",
            )
            .with_operation("measure time")
            .with_help("create the events with timing"));
        }
        let _relaxed = self.gpu.context.relax_capture();
        self.raw.elapsed_since(&earlier.raw)
    }

    fn is_reached(&self) -> Result<bool> {
        if !self.after_fault {
            self.gpu.fault.check()?;
        }
        let _relaxed = self.gpu.context.relax_capture();
        self.raw.is_reached()
    }
}

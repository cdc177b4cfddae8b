//! Streams of a GPU: copies, fills, words, events, capture.

pub(super) mod event;
pub(super) mod graph;
mod sequence;
mod transfer;

use self::event::CudaEvent;
use self::graph::CudaGraph;
use crate::deadline::Deadline;
use crate::debug::debug_text;
use crate::device::cuda::driver::capture::{Capture, is_capturing};
use crate::device::cuda::driver::context::Entered;
use crate::device::cuda::driver::memory_ops;
use crate::device::cuda::driver::poll::poll;
use crate::device::cuda::driver::raw::{RawEvent, RawStream};
use crate::device::cuda::driver::{Driver, status};
use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::gpu::live::{Enqueuing, Keep, LiveStream};
use crate::device::cuda::memory::CudaBacking;
use crate::device::cuda::nccl::watch;
use crate::device::{
    DeviceKind, DeviceSlice, Event, Fault, FaultSet, Graph, KernelCopy, MemoryOp, Noted,
    PacketPart, Stream, StreamBackend, StreamOp,
};
use crate::error::{Error, Result};
use cudarc::driver::sys::*;
use std::any::Any;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// From this many word operations on, a kernel launch is faster than the stream's own memory operations.
const WORTH_A_KERNEL: usize = 4;

/// A stream, our own or borrowed.
pub(super) struct CudaStream {
    gpu: Arc<Gpu>,
    raw: CUstream,
    /// Faults that fail it, besides the device's fault.
    faults: Arc<FaultSet>,
    live: Arc<LiveStream>,
    /// Whether its priority equals the default priority of graphs.
    has_default_priority: bool,
    /// Whether graphs that it captures share its scratch memory.
    shares_scratch: AtomicBool,
}

// SAFETY: the raw pointer is a handle that the driver accepts on every thread, and it is kept valid.
unsafe impl Send for CudaStream {}
// SAFETY: as above; the driver serializes what threads enqueue.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub(super) fn create(gpu: &Arc<Gpu>, high: bool) -> Result<Arc<Self>> {
        let stream = RawStream::create(&gpu.context, high)?;
        let raw = stream.raw;
        // SAFETY: the stream was created above, and is kept.
        let live = unsafe { LiveStream::new(&gpu.context, raw, Keep::Own { _stream: stream }) };
        Ok(Arc::new(Self::with_live(gpu, live)))
    }

    /// Borrows a stream that other code created. A per-thread default stream can be used on the calling
    /// thread only.
    ///
    /// # Safety
    /// `raw` must be a valid stream of this GPU's primary context for as long as `owner` is held.
    pub(super) unsafe fn borrow(
        gpu: &Arc<Gpu>,
        raw: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<Self>> {
        let _entered = gpu.context.enter()?;
        let raw = raw as usize as CUstream;
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is an output parameter for one context; the caller vouches for the
        // stream.
        let code = unsafe { (gpu.context.driver.cuStreamGetCtx)(raw, &mut context) };
        gpu.context
            .driver
            .check(code, "ask for a stream's context")?;
        if context != gpu.context.raw {
            return Err(Error::invalid(
                "the stream belongs to another context; expected the GPU's primary one",
            )
            .with_operation("borrow a stream")
            .with_device(gpu.name())
            .with_help("borrow the stream on the device that it was created on"));
        }
        // SAFETY: the stream is of the context, and its owner is kept.
        let live = unsafe { LiveStream::new(&gpu.context, raw, Keep::Foreign { _owner: owner }) };
        Ok(Arc::new(Self::with_live(gpu, live)))
    }

    fn with_live(gpu: &Arc<Gpu>, live: Arc<LiveStream>) -> Self {
        let mut priority = c_int::MIN;
        if let Some(ask) = gpu.context.driver.cuStreamGetPriority {
            // SAFETY: `priority` points to a writable integer; the stream is kept valid by `live`. Where the
            // driver refuses to tell, the value stays.
            let _refused = unsafe { ask(live.raw, &mut priority) };
        }
        Self {
            gpu: gpu.clone(),
            raw: live.raw,
            faults: Arc::default(),
            live,
            has_default_priority: priority == 0,
            shares_scratch: AtomicBool::new(false),
        }
    }

    /// Downcasts the stream, which must be of `gpu`'s context.
    pub(super) fn of<'a>(stream: &'a Stream, gpu: &Gpu) -> Result<&'a Self> {
        let stream: &Self = stream.backend().ok_or_else(|| {
            Error::invalid("the stream belongs to another device; expected one of a GPU")
                .with_help("use a stream of the same device")
        })?;
        if stream.gpu.context.raw != gpu.context.raw {
            return Err(Error::invalid(format!(
                "the stream belongs to {}; expected one of this GPU",
                stream.gpu.name()
            ))
            .with_device(gpu.name())
            .with_help("use a stream of the same device"));
        }
        Ok(stream)
    }

    /// Driver handle, for calls while `self` is alive.
    pub(super) fn raw_stream(&self) -> CUstream {
        self.raw
    }

    /// Whether its priority equals the default priority of graphs.
    pub(super) fn has_default_priority(&self) -> bool {
        self.has_default_priority
    }

    /// Its capture, if it is capturing a graph that has scratch memory of its own.
    pub(super) fn capture_apart(&self) -> Result<Option<Capture>> {
        // Relaxed: set right after the stream was created, before other threads have it.
        if self.shares_scratch.load(Ordering::Relaxed) {
            return Ok(None);
        }
        self.capture()
    }

    /// Its capture, if it is capturing.
    pub(super) fn capture(&self) -> Result<Option<Capture>> {
        let (driver, _entered) = self.enter()?;
        if !is_capturing(driver, self.raw)? {
            return Ok(None);
        }
        Capture::of(driver, self.raw).map_err(|error| error.with_device(self.gpu.name()))
    }

    /// Shared state, which may outlive `self`.
    pub(super) fn live(&self) -> &Arc<LiveStream> {
        &self.live
    }

    /// Guard to hold while enqueuing work that uses `slices`.
    #[inline]
    pub(super) fn enqueue<'a>(
        &self,
        slices: impl IntoIterator<Item = &'a DeviceSlice>,
    ) -> Enqueuing<'_> {
        for slice in slices {
            if let Ok(backing) = CudaBacking::of(slice) {
                backing.uses().note(&self.live);
            }
        }
        self.live.enqueue()
    }

    /// As [`enqueue`](Self::enqueue), for word operations.
    #[inline]
    fn enqueue_ops<'a>(&self, ops: impl IntoIterator<Item = &'a MemoryOp<'a>>) -> Enqueuing<'_> {
        self.enqueue(ops.into_iter().map(|op| match op {
            MemoryOp::Write { word, .. }
            | MemoryOp::Reset { word }
            | MemoryOp::Wait { word, .. } => word.as_slice(),
        }))
    }

    /// Makes the context current. Fails if a relevant fault was raised, and for a per-thread default stream
    /// on another thread.
    #[inline]
    pub(super) fn enter(&self) -> Result<(&'static Driver, Entered<'_>)> {
        self.faults.check()?;
        self.live.check_usable()?;
        self.enter_failed()
    }

    /// As [`enter`](Self::enter), but succeeds if only the stream has failed, to record and query events.
    #[inline]
    fn enter_failed(&self) -> Result<(&'static Driver, Entered<'_>)> {
        self.gpu.fault.check()?;
        Ok((self.gpu.context.driver, self.gpu.context.enter()?))
    }

    /// Records an event at the end of a borrowed stream, which must not be queried itself. Fails during a
    /// capture.
    fn mark_of_foreign(&self) -> Result<Option<Arc<RawEvent>>> {
        if self.live.is_foreign() {
            return self.live.record().map(Some);
        }
        if is_capturing(self.gpu.context.driver, self.raw)? {
            return Err(Error::invalid("the stream is recording a graph")
                .with_operation("query a stream")
                .with_help("end the capture first"));
        }
        Ok(None)
    }

    /// Whether all work in one of our own streams is complete.
    fn query(&self, driver: &Driver, operation: &'static str) -> Result<bool> {
        // As in `RawStream::is_idle`.
        let _relaxed = self.gpu.context.relax_capture();
        // SAFETY: the stream is valid as long as `self`.
        match unsafe { (driver.cuStreamQuery)(self.raw) } {
            status::NOT_READY => Ok(false),
            code => driver.check(code, operation).map(|()| true),
        }
    }

    /// Faults that fail it, besides the device's fault.
    pub(super) fn faults(&self) -> &Arc<FaultSet> {
        &self.faults
    }

    /// Makes the stream fail when a fault that aborts a wait of `ops` is raised. Hold the guard until they
    /// are enqueued.
    #[inline]
    fn depend_on<'a>(&self, ops: impl IntoIterator<Item = &'a MemoryOp<'a>>) -> Noted<'_> {
        self.faults.add(ops.into_iter().filter_map(|op| match op {
            MemoryOp::Wait { word, .. } => word.fault(),
            MemoryOp::Write { .. } | MemoryOp::Reset { .. } => None,
        }))
    }
}

#[inline]
fn check_copy(target: &DeviceSlice, source: &DeviceSlice) -> Result<()> {
    target.check_source(source)?;
    check_kind(target)?;
    check_kind(source)
}

#[inline]
fn check_kind(slice: &DeviceSlice) -> Result<()> {
    match slice.kind() {
        DeviceKind::Cuda => Ok(()),
        kind => Err(Error::invalid(format!(
            "the memory belongs to device {kind}; expected a GPU's"
        ))
        .with_help("use memory of the stream's device")),
    }
}

impl StreamBackend for CudaStream {
    fn copy(&self, target: &DeviceSlice, source: &DeviceSlice) -> Result<()> {
        check_copy(target, source)?;
        let (driver, _entered) = self.enter()?;
        if target.bytes() == 0 {
            return Ok(());
        }
        let _enqueuing = self.enqueue([target, source]);
        let [to, from] = [target, source].map(DeviceSlice::address);
        let is_host = |slice: &DeviceSlice| slice.backing().is_host_memory();
        let bytes = target.bytes();
        // SAFETY: both slices are live memory of as many bytes, of the device or pinned memory of the host, which has
        // the same address there; that they stay so until the copy is done is the caller's to see to (rule 4 of
        // the device module).
        let code = unsafe {
            match [is_host(target), is_host(source)] {
                [true, false] => {
                    let to = std::ptr::with_exposed_provenance_mut(to as usize);
                    (driver.cuMemcpyDtoHAsync_v2)(to, from, bytes, self.raw)
                }
                [false, true] => {
                    let from = std::ptr::with_exposed_provenance(from as usize);
                    (driver.cuMemcpyHtoDAsync_v2)(to, from, bytes, self.raw)
                }
                _ => (driver.cuMemcpyDtoDAsync_v2)(to, from, bytes, self.raw),
            }
        };
        driver.check(code, "enqueue a copy")
    }

    fn fill(&self, target: &DeviceSlice, byte: u8) -> Result<()> {
        check_kind(target)?;
        let (driver, _entered) = self.enter()?;
        if target.bytes() == 0 {
            return Ok(());
        }
        let _enqueuing = self.enqueue([target]);
        // SAFETY: the slice is live device memory of as many bytes.
        let code =
            unsafe { (driver.cuMemsetD8Async)(target.address(), byte, target.bytes(), self.raw) };
        driver.check(code, "enqueue a fill")
    }

    fn memory_ops(&self, ops: &[MemoryOp<'_>]) -> Result<()> {
        let _noted = self.depend_on(ops);
        let (driver, _entered) = self.enter()?;
        let _enqueuing = self.enqueue_ops(ops);
        if !self.gpu.captures_memory_ops() && is_capturing(driver, self.raw)? {
            return memory_ops::add_to_capture(&self.gpu.context, self.raw, ops);
        }
        memory_ops::enqueue(driver, self.raw, ops)
    }

    fn memory_ops_in_kernel(&self, ops: &[MemoryOp<'_>]) -> Result<()> {
        match self.kernels().filter(|_| ops.len() >= WORTH_A_KERNEL) {
            Some(kernels) => self.enqueue_words_in_kernel(kernels, ops),
            None => self.memory_ops(ops),
        }
    }

    fn sequence(&self, ops: &[StreamOp<'_>]) -> Result<()> {
        self.enqueue_sequence(ops)
    }

    fn kernel_copy(&self, copy: &KernelCopy<'_>) -> Result<()> {
        self.enqueue_kernel_copy(&[], copy, &[])
    }

    fn packets(&self, part: &PacketPart<'_>) -> Result<()> {
        self.enqueue_packets(&[*part])
    }

    fn note_work(&self, fault: &Arc<Fault>) {
        self.faults.add_work(fault);
    }

    fn record(&self, event: &Event) -> Result<()> {
        let event = CudaEvent::of(event)?;
        self.live.check_usable()?;
        let (_, _entered) = self.enter_failed()?;
        if event.raw.context.raw != self.gpu.context.raw {
            return Err(Error::invalid(
                "the event belongs to another GPU; expected one of the stream's",
            )
            .with_operation("record an event")
            .with_device(self.gpu.name())
            .with_help("create the event on the stream's device"));
        }
        // Before the mark is there to be followed.
        event.faults.replace(&self.faults);
        // SAFETY: the stream is valid, and of the event's context, which is current.
        unsafe { event.raw.record(self.raw) }
    }

    fn record_end(&self) -> Result<Event> {
        // Not by `enter`, which fails after a fault.
        let event = CudaEvent::recorded_for_release(&self.gpu, self.live.record()?);
        Ok(Event::new(Arc::new(event)))
    }

    fn wait_event(&self, event: &Event) -> Result<()> {
        let event = CudaEvent::of(event)?;
        let _noted = self.faults.follow(&event.faults);
        let (driver, _entered) = self.enter()?;
        let _enqueuing = self.enqueue([]);
        // SAFETY: event and stream are live; an event of another GPU is allowed here.
        let code = unsafe { (driver.cuStreamWaitEvent)(self.raw, event.raw.raw, 0) };
        driver.check(code, "enqueue a wait for an event")
    }

    fn synchronize(&self, deadline: Deadline) -> Result<()> {
        self.faults.check()?;
        let place = self.faults.place();
        let (driver, _entered) = self.enter_failed()?;
        let mark = self.mark_of_foreign()?;
        let _relaxed = self.gpu.context.relax_capture();
        let ready = || match &mark {
            Some(mark) => mark.is_reached(),
            None => self.query(driver, "wait for a stream"),
        };
        let mut looked = Instant::now();
        poll(ready, || {
            if looked.elapsed() > watch::INTERVAL {
                self.gpu.collectives.look();
                looked = Instant::now();
            }
            self.gpu.fault.check()?;
            self.faults.check()?;
            if deadline.passed() {
                return Err(deadline
                    .expired("the end of a stream's work")
                    .with_device(self.gpu.name()));
            }
            Ok(())
        })?;
        // A fault aborts waits without their signal: the work after them ran on stale data.
        self.gpu.fault.check()?;
        self.faults.check()?;
        self.faults.done(place);
        Ok(())
    }

    fn check(&self) -> Result<()> {
        self.gpu.fault.check()?;
        self.faults.check()
    }

    fn is_idle(&self) -> Result<bool> {
        self.faults.check()?;
        let place = self.faults.place();
        let (driver, _entered) = self.enter_failed()?;
        let is_idle = match self.mark_of_foreign()? {
            Some(mark) => mark.is_reached()?,
            None => {
                let _relaxed = self.gpu.context.relax_capture();
                self.query(driver, "query a stream")?
            }
        };
        if is_idle {
            // A fault that was raised meanwhile may be why it is.
            self.check()?;
            self.faults.done(place);
        }
        Ok(is_idle)
    }

    fn begin_capture(&self) -> Result<()> {
        let (driver, _entered) = self.enter()?;
        // It cannot be marked while it records, and may be dropped then.
        self.live.progress();
        // What this thread does meanwhile must not be something that a capture breaks on; other
        // threads go on undisturbed.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is valid; one that records already is refused.
        let code = unsafe { (driver.cuStreamBeginCapture_v2)(self.raw, mode) };
        driver.check(code, "begin recording")
    }

    fn end_capture(&self) -> Result<Graph> {
        // Without `enter`, so that a fault leaves no stream recording for ever.
        let driver = self.gpu.context.driver;
        self.live.check_usable()?;
        let _entered = self.gpu.context.enter()?;
        if !is_capturing(driver, self.raw)? {
            return Err(Error::invalid("the stream is not recording a graph")
                .with_operation("end a capture")
                .with_help("begin a capture first"));
        }
        let mut graph = std::ptr::null_mut();
        // SAFETY: `graph` is an output parameter for one graph, and the stream is valid.
        let code = unsafe { (driver.cuStreamEndCapture)(self.raw, &mut graph) };
        // SAFETY: the graph, where there is one, was created above and is transferred. Also when
        // recording failed it is, to be destroyed.
        let graph = unsafe { CudaGraph::instantiate(&self.gpu, graph, self.raw) };
        driver.check(code, "end recording")?;
        self.gpu.fault.check()?;
        let graph = graph?;
        graph.depend_on(&self.faults);
        Ok(Graph::new(Arc::new(graph)))
    }

    fn share_scratch(&self) {
        // Relaxed, as in `capture_apart`.
        self.shares_scratch.store(true, Ordering::Relaxed);
    }

    fn capture_id(&self) -> Result<Option<u64>> {
        Ok(self.capture()?.map(|capture| capture.id))
    }

    fn give_back(&self) -> Result<()> {
        self.live.give_back().map_err(|error| {
            error
                .with_operation("give a stream back")
                .with_device(self.gpu.name())
        })
    }

    fn is_capturing(&self) -> Result<bool> {
        if !self.live.is_given_back() {
            self.gpu.fault.check()?;
        }
        self.live.is_capturing()
    }

    fn raw(&self) -> u64 {
        self.live.key()
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // Before the driver gives the handle to another stream, which must not find them in use.
        if !self.live.is_foreign() {
            let workspaces = self.gpu.workspaces.take_of_stream(self.live.key());
            self.gpu.free_workspaces(workspaces);
        }
    }
}

debug_text!(CudaStream, |it| "CudaStream({:?}, {:p})", it.gpu, it.raw);

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn descriptions_of_virtual_memory_have_the_drivers_layout() {
        assert_eq!(size_of::<CUmemAllocationProp>(), 32);
        assert_eq!(offset_of!(CUmemAllocationProp, location), 8);
        assert_eq!(offset_of!(CUmemAllocationProp, win32HandleMetaData), 16);
        assert_eq!(offset_of!(CUmemAllocationProp, allocFlags), 24);
        assert_eq!(size_of::<CUmemAccessDesc>(), 12);
        assert_eq!((size_of::<CUipcMemHandle>(), size_of::<CUuuid>()), (64, 16));
    }
}

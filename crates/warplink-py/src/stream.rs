//! Streams, events and graphs.

use crate::array::Array;
use crate::errors::{closed, detached, raise};
use crate::owner::{Detached, OfProcess};
use crate::place::Place;
use crate::region::seconds;
use crate::wait::{SIGNAL_INTERVAL, interruptible};
use crate::watch::Watched;
use pyo3::prelude::*;
use std::sync::Arc;
use warplink::{Deadline, DeviceKind, ErrorKind};

/// An ordered queue of device work. Methods only enqueue unless documented otherwise.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Stream {
    stream: OfProcess<warplink::device::Stream>,
    raw: u64,
    communicator: Detached<warplink::Communicator>,
    place: Place,
}

/// A marker in a stream.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Event(OfProcess<warplink::device::Event>);

/// Work captured once and launched any number of times. The caller keeps captured resources alive.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Graph(OfProcess<warplink::device::Graph>);

/// Orders work of several streams on shared resources: `begin(stream)`, the work, `end(stream)`. Work enqueued on one
/// stream in a turn completes before work of a later turn on another stream; captured work is ordered among itself. The
/// caller ensures that only one thread at a time is between the two calls.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Turns {
    pub(crate) inner: OfProcess<Arc<warplink::device::Turns>>,
    pub(crate) place: Place,
    pub(crate) watched: Watched,
}

impl Turns {
    pub(crate) fn new(place: &Place) -> Self {
        let inner = warplink::device::Turns::new(&place.device);
        Self {
            inner: OfProcess::new(Arc::new(inner)),
            place: place.clone(),
            watched: Watched::default(),
        }
    }

    /// Calls `enqueue`, which enqueues work on `stream`, in a turn. The caller ensures that only one thread at a time
    /// does this.
    pub(crate) fn take(
        &self,
        py: Python<'_>,
        stream: &warplink::device::Stream,
        enqueue: impl FnOnce() -> warplink::Result<()> + Send,
    ) -> PyResult<()> {
        let inner = self.inner.get()?;
        // The turn's mutex is held over the enqueue; other Python threads must be able to run while this one waits
        // for it.
        let taken = py.detach(|| inner.take(stream, enqueue));
        // After a failure too, which may have enqueued part of the work.
        self.watched.made();
        taken.map_err(raise)
    }

    /// Makes `stream` wait for the last turn of another stream.
    pub(crate) fn precede(&self, stream: &Stream) -> PyResult<()> {
        self.inner.get()?.precede(stream.live()?).map_err(raise)
    }
}

#[pymethods]
impl Turns {
    /// Makes `stream` wait for the last turn of another stream. Does not block.
    fn begin(&self, stream: &Stream) -> PyResult<()> {
        self.inner.get()?.begin(stream.live()?).map_err(raise)
    }

    /// Records the work enqueued on `stream` so far as the last turn, even if some of it failed. Does not block.
    fn end(&self, stream: &Stream) -> PyResult<()> {
        let ended = self.inner.get()?.end(stream.live()?);
        self.watched.made();
        ended.map_err(raise)
    }
}

impl Event {
    pub(crate) fn new(event: warplink::device::Event) -> Self {
        Self(OfProcess::new(event))
    }
}

impl Stream {
    pub(crate) fn new(
        stream: warplink::device::Stream,
        communicator: warplink::Communicator,
        place: &Place,
    ) -> Self {
        Self {
            raw: stream.raw(),
            stream: OfProcess::new(stream),
            communicator: Detached::new(communicator, || closed("communicator")),
            place: place.clone(),
        }
    }

    /// Blocks until all work is complete on the host device, where PyTorch has no streams.
    pub(crate) fn settle(&self, py: Python<'_>) -> PyResult<()> {
        if self.place.device.kind() == DeviceKind::Host {
            self.synchronize(py, None)?;
        }
        Ok(())
    }

    /// Whether a graph is being captured on it.
    pub(crate) fn is_capturing(&self) -> PyResult<bool> {
        self.live()?.is_capturing().map_err(raise)
    }

    /// The stream. Fails in a forked process.
    pub(crate) fn live(&self) -> PyResult<&warplink::device::Stream> {
        self.stream.get()
    }
}

#[pymethods]
impl Stream {
    /// Number that is unique among streams of one device; on a GPU the driver's handle (cudaStream_t).
    #[getter]
    pub(crate) fn raw(&self) -> u64 {
        self.raw
    }

    /// Copies `source` to `target`: arrays, regions or memory of the same length in bytes. Both are kept alive until
    /// the copy is done. Raises InvalidArgumentError for different lengths, and for a target that is read-only.
    fn copy(&self, target: &Bound<'_, PyAny>, source: &Bound<'_, PyAny>) -> PyResult<()> {
        let into = Array::resolve_target(target, &self.place, Some(self.raw))?;
        let from = Array::resolve(source, &self.place, Some(self.raw))?;
        let stream = self.live()?;
        detached(target.py(), || stream.copy(&into.slice, &from.slice))
    }

    /// Sets every byte of `target` to `byte`. Raises InvalidArgumentError for a target that is read-only.
    fn fill(&self, target: &Bound<'_, PyAny>, byte: u8) -> PyResult<()> {
        let into = Array::resolve_target(target, &self.place, Some(self.raw))?;
        let stream = self.live()?;
        detached(target.py(), || stream.fill(&into.slice, byte))
    }

    /// Records `event` at this point of the stream, replacing an earlier record.
    fn record(&self, py: Python<'_>, event: &Event) -> PyResult<()> {
        let (stream, event) = (self.live()?, event.0.get()?);
        detached(py, || stream.record(event))
    }

    /// Makes the stream wait for the point last recorded in `event` at the time of this call.
    fn wait_event(&self, py: Python<'_>, event: &Event) -> PyResult<()> {
        let (stream, event) = (self.live()?, event.0.get()?);
        detached(py, || stream.wait_event(event))
    }

    /// Makes the stream wait for all work enqueued on `other` so far.
    pub(crate) fn follow(&self, py: Python<'_>, other: &Self) -> PyResult<()> {
        let (stream, other) = (self.live()?, other.live()?);
        detached(py, || {
            let reached = self.place.device.create_event(false)?;
            other.record(&reached)?;
            stream.wait_event(&reached)
        })
    }

    /// A new event, recorded at this point of the stream.
    pub(crate) fn mark(&self, py: Python<'_>) -> PyResult<Event> {
        let stream = self.live()?;
        let marked = detached(py, || {
            let event = self.place.device.create_event(false)?;
            stream.record(&event)?;
            Ok(event)
        });
        marked.map(Event::new)
    }

    /// Blocks until all work enqueued so far is complete, at most `timeout` seconds (the job's if None). Raises
    /// PeerLostError, which contains the rank, if one is lost, and TimeoutError, which contains the peer and tag of a
    /// pending wait.
    #[pyo3(signature = (timeout=None))]
    pub(crate) fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = timeout.map(seconds).transpose()?;
        let communicator = self.communicator.with(Clone::clone);
        let stream = self.live()?;
        let limit = limit.map(Deadline::after);
        let limit = match (limit, &communicator) {
            (Some(limit), _) => limit,
            (None, Some(communicator)) => communicator.deadline(),
            (None, None) => return Ok(()),
        };
        // Most waits are short: probe first, to avoid starting a thread.
        // A probe as long as the interval for signals delays Ctrl-C no more than the thread would.
        let probe = Deadline::after(SIGNAL_INTERVAL.min(limit.remaining()));
        let takes_long = py
            .detach(|| stream.synchronize(probe))
            .is_err_and(|error| error.kind() == ErrorKind::Timeout);
        let stream = stream.clone();
        let wait = move || match communicator {
            // Instead of the stream alone: this also reports failures of kernels and of peers.
            Some(communicator) => communicator.synchronize_until(&stream, limit),
            None => stream.synchronize(limit),
        };
        if takes_long && !limit.passed() {
            interruptible(py, wait)
        } else {
            detached(py, wait)
        }
    }

    /// Whether all work enqueued so far is complete. Does not block.
    fn is_idle(&self) -> PyResult<bool> {
        self.live()?.is_idle().map_err(raise)
    }

    /// Starts capturing enqueued work into a graph instead of executing it.
    fn begin_capture(&self) -> PyResult<()> {
        self.live()?.begin_capture().map_err(raise)
    }

    /// Ends the capture and makes the graph ready to launch. Blocks while it is prepared.
    fn end_capture(&self, py: Python<'_>) -> PyResult<Graph> {
        let stream = self.live()?;
        let graph = detached(py, || stream.end_capture())?;
        Ok(Graph(OfProcess::new(graph)))
    }

    fn __repr__(&self) -> String {
        format!("Stream(raw={:#x})", self.raw)
    }
}

#[pymethods]
impl Event {
    /// Whether the recorded point has been reached.
    fn is_reached(&self) -> PyResult<bool> {
        self.0.get()?.is_reached().map_err(raise)
    }

    /// Milliseconds from `earlier` to this event, both created with timing, recorded and reached. Raises
    /// InvalidArgumentError if one was not recorded, or created without timing, and DriverError if one is not reached.
    fn elapsed_since(&self, earlier: &Self) -> PyResult<f32> {
        self.0.get()?.elapsed_since(earlier.0.get()?).map_err(raise)
    }
}

#[pymethods]
impl Graph {
    /// Enqueues the graph on `stream`.
    fn launch(&self, py: Python<'_>, stream: &Stream) -> PyResult<()> {
        let (graph, stream) = (self.0.get()?, stream.live()?);
        detached(py, || graph.launch(stream))
    }

    /// The number of operations in the graph.
    #[getter]
    fn operations(&self) -> PyResult<usize> {
        Ok(self.0.get()?.operations())
    }
}

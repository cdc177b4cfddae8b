//! The device's own collectives.

use crate::array::{Array, Place};
use crate::errors::{invalid, raise};
use crate::stream::Stream;
use pyo3::prelude::*;
use std::sync::Arc;
use warplink::DType;
use warplink::device::{Collective, CollectiveEngine, CollectiveRequest, DeviceSlice, ReduceOp};

/// The collectives of a communicator: NCCL on GPUs, shared memory on the host device.
///
/// Every rank enqueues the same ones in the same order. Arrays are anything that Communicator.borrow
/// takes; targets are written, sources are read, and both are kept until the stream is past them.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Collectives {
    engine: Arc<dyn CollectiveEngine>,
    place: Place,
    world: usize,
}

impl Collectives {
    pub(crate) fn new(engine: Arc<dyn CollectiveEngine>, place: &Place, world: usize) -> Self {
        Self {
            engine,
            place: place.clone(),
            world,
        }
    }

    fn enqueue(
        &self,
        stream: &Stream,
        collective: Collective,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let raw = Some(stream.raw_handle());
        let target = Array::resolve(target, &self.place, raw)?;
        let source = Array::resolve(source, &self.place, raw)?;
        let reduces = matches!(
            collective,
            Collective::AllReduce(_) | Collective::ReduceScatter(_) | Collective::Reduce(..)
        );
        let dtype = if reduces {
            source.element("the source")?.dtype()?
        } else {
            DType::U8
        };
        let request = CollectiveRequest::Collective {
            collective,
            dtype,
            target: target.slice,
            source: source.slice,
        };
        self.engine.enqueue(stream.live()?, &request).map_err(raise)
    }

    fn pairs(
        &self,
        arrays: Vec<(usize, Bound<'_, PyAny>)>,
        raw: Option<u64>,
    ) -> PyResult<Vec<(usize, DeviceSlice)>> {
        let each = arrays
            .into_iter()
            .map(|(peer, array)| Ok((peer, Array::resolve(&array, &self.place, raw)?.slice)));
        each.collect()
    }
}

#[pymethods]
impl Collectives {
    /// Name and version of the engine.
    #[getter]
    fn name(&self) -> String {
        self.engine.name()
    }

    /// How many ranks there are.
    #[getter]
    fn size(&self) -> usize {
        self.world
    }

    /// `target`, of `size` times the bytes of `source`, becomes every rank's source in rank order.
    fn all_gather(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.enqueue(stream, Collective::AllGather, target, source)
    }

    /// `target` becomes the reduction of every rank's source; `op` is "sum", "max" or "min".
    #[pyo3(signature = (stream, target, source, op="sum"))]
    fn all_reduce(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        op: &str,
    ) -> PyResult<()> {
        let op = reduction(op)?;
        self.enqueue(stream, Collective::AllReduce(op), target, source)
    }

    /// `target` becomes this rank's part of the reduction of every rank's source, which has `size` times
    /// its bytes.
    #[pyo3(signature = (stream, target, source, op="sum"))]
    fn reduce_scatter(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        op: &str,
    ) -> PyResult<()> {
        let op = reduction(op)?;
        self.enqueue(stream, Collective::ReduceScatter(op), target, source)
    }

    /// `target` becomes the source of rank `root`.
    fn broadcast(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
    ) -> PyResult<()> {
        self.enqueue(stream, Collective::Broadcast(root), target, source)
    }

    /// On rank `root`, `target` becomes the reduction of every rank's source.
    #[pyo3(signature = (stream, target, source, root, op="sum"))]
    fn reduce(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
        op: &str,
    ) -> PyResult<()> {
        let op = reduction(op)?;
        self.enqueue(stream, Collective::Reduce(op, root), target, source)
    }

    /// Part p of `target` becomes this rank's part of rank p's source.
    fn all_to_all(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.enqueue(stream, Collective::AllToAll, target, source)
    }

    /// Sends and receives, `(peer, array)` each, all at once: none waits for another of the same call.
    /// Lengths may differ from pair to pair; a send and its receive have the same.
    #[pyo3(signature = (stream, sends=Vec::new(), receives=Vec::new()))]
    fn exchange(
        &self,
        stream: &Stream,
        sends: Vec<(usize, Bound<'_, PyAny>)>,
        receives: Vec<(usize, Bound<'_, PyAny>)>,
    ) -> PyResult<()> {
        let raw = Some(stream.raw_handle());
        let request = CollectiveRequest::Exchange {
            sends: self.pairs(sends, raw)?,
            receives: self.pairs(receives, raw)?,
        };
        self.engine.enqueue(stream.live()?, &request).map_err(raise)
    }

    /// Ends what is under way: streams that do it fail, and later calls raise ClosedError.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| self.engine.abort());
    }

    fn __repr__(&self) -> String {
        format!("Collectives('{}', size={})", self.engine.name(), self.world)
    }
}

fn reduction(name: &str) -> PyResult<ReduceOp> {
    match name {
        "sum" => Ok(ReduceOp::Sum),
        "max" => Ok(ReduceOp::Max),
        "min" => Ok(ReduceOp::Min),
        _ => Err(invalid(format!(
            "unknown reduction '{name}'; expected sum, max or min"
        ))),
    }
}

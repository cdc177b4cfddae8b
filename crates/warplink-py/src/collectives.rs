//! Collectives.

use crate::array::{Array, Place};
use crate::errors::{invalid, raise};
use crate::owner::Detached;
use crate::stream::Stream;
use pyo3::prelude::*;
use warplink::collective::{Call, CollectiveKind, CollectiveOptions, CollectivePath};
use warplink::device::ReduceOp;
use warplink::{DType, Rank};

/// The collectives of a communicator, on any memory.
///
/// Every rank enqueues the same ones in the same order. Nothing blocks, and the stream may be recording a graph.
/// Arrays are anything that Communicator.borrow takes; targets are written, sources are read, and both are kept
/// until the stream is past them. The target may be the source; of all_gather and gather, the source may be this
/// rank's part of the target; of reduce_scatter and scatter, the target its part of the source. `op` is "sum",
/// "product", "max", "min" or "average".
///
/// Lengths that do not fit raise InvalidArgumentError. That ranks call something else raises MismatchError in
/// Stream.synchronize.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Collectives {
    inner: Detached<warplink::Collectives>,
    place: Place,
    world: usize,
}

impl Collectives {
    pub(crate) fn new(inner: warplink::Collectives, place: &Place, world: usize) -> Self {
        Self {
            inner: Detached::new(inner),
            place: place.clone(),
            world,
        }
    }

    fn inner(&self) -> PyResult<warplink::Collectives> {
        self.inner.get("collectives")
    }

    fn enqueue(
        &self,
        stream: &Stream,
        kind: CollectiveKind,
        [target, source]: [&Bound<'_, PyAny>; 2],
        op: Option<&str>,
        root: Option<Rank>,
    ) -> PyResult<()> {
        let inner = self.inner()?;
        let stream_live = stream.live()?;
        let raw = Some(stream.raw_handle());
        let target = Array::resolve(target, &self.place, raw)?;
        let source = Array::resolve(source, &self.place, raw)?;
        let op = op.map(str::parse::<ReduceOp>).transpose();
        let op = op.map_err(raise)?;
        let dtype = if op.is_some() {
            source.element("the source")?.dtype()?
        } else {
            DType::U8
        };
        // What the caller passed on every rank; what does not divide is found by the check of lengths.
        let (input_rows, _) = kind.rows(self.world);
        let bytes = match kind {
            CollectiveKind::Broadcast | CollectiveKind::Scatter => target.slice.bytes(),
            _ => source.slice.bytes() / input_rows.max(1),
        };
        if !bytes.is_multiple_of(dtype.size()) {
            return Err(invalid(format!(
                "{kind} of {bytes} bytes; expected whole elements of {dtype}"
            )));
        }
        let call = Call {
            kind,
            op,
            dtype,
            count: bytes / dtype.size(),
            root,
        };
        inner
            .enqueue(&call, &target.slice, &source.slice, stream_live)
            .map_err(raise)
    }
}

#[pymethods]
impl Collectives {
    /// What does the calls: "direct", kernels that access the peers' memory, or "engine", the vendor's library.
    #[getter]
    fn path(&self) -> PyResult<&'static str> {
        Ok(match self.inner()?.path() {
            CollectivePath::Direct => "direct",
            CollectivePath::Engine => "engine",
        })
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
        let kind = CollectiveKind::AllGather;
        self.enqueue(stream, kind, [target, source], None, None)
    }

    /// `target` becomes the reduction of every rank's source.
    #[pyo3(signature = (stream, target, source, op="sum"))]
    fn all_reduce(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        op: &str,
    ) -> PyResult<()> {
        let kind = CollectiveKind::AllReduce;
        self.enqueue(stream, kind, [target, source], Some(op), None)
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
        let kind = CollectiveKind::ReduceScatter;
        self.enqueue(stream, kind, [target, source], Some(op), None)
    }

    /// Part p of `target` becomes this rank's part of rank p's source.
    fn all_to_all(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let kind = CollectiveKind::AllToAll;
        self.enqueue(stream, kind, [target, source], None, None)
    }

    /// `target` becomes the source of rank `root`; those of other ranks are not read.
    fn broadcast(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
    ) -> PyResult<()> {
        let kind = CollectiveKind::Broadcast;
        self.enqueue(stream, kind, [target, source], None, Some(root))
    }

    /// On rank `root`, `target` becomes the reduction of every rank's source; those of other ranks are left alone.
    #[pyo3(signature = (stream, target, source, root, op="sum"))]
    fn reduce(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
        op: &str,
    ) -> PyResult<()> {
        let kind = CollectiveKind::Reduce;
        self.enqueue(stream, kind, [target, source], Some(op), Some(root))
    }

    /// On rank `root`, `target` becomes every rank's source in rank order; those of other ranks are left alone.
    fn gather(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
    ) -> PyResult<()> {
        let kind = CollectiveKind::Gather;
        self.enqueue(stream, kind, [target, source], None, Some(root))
    }

    /// `target` becomes this rank's part of the source of rank `root`; those of other ranks are not read.
    fn scatter(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
    ) -> PyResult<()> {
        let kind = CollectiveKind::Scatter;
        self.enqueue(stream, kind, [target, source], None, Some(root))
    }

    /// What follows in the stream waits until every rank's stream has come to it.
    fn barrier(&self, stream: &Stream) -> PyResult<()> {
        let inner = self.inner()?;
        inner.barrier(stream.live()?).map_err(raise)
    }

    fn __repr__(&self) -> PyResult<String> {
        let (path, size) = (self.path()?, self.world);
        Ok(format!("Collectives(path='{path}', size={size})"))
    }
}

/// The options of `Communicator.collectives`.
pub(crate) fn options(
    path: Option<&str>,
    algorithm: Option<&str>,
    workspace_bytes: Option<usize>,
) -> PyResult<CollectiveOptions> {
    let path = match path {
        None => None,
        Some("direct") => Some(CollectivePath::Direct),
        Some("engine") => Some(CollectivePath::Engine),
        Some(other) => {
            return Err(invalid(format!(
                "unknown path '{other}'; expected direct or engine"
            )));
        }
    };
    let algorithm = algorithm.map(str::parse).transpose().map_err(raise)?;
    let default = CollectiveOptions::default();
    Ok(CollectiveOptions {
        workspace_bytes: workspace_bytes.unwrap_or(default.workspace_bytes),
        algorithm,
        path,
        ..default
    })
}

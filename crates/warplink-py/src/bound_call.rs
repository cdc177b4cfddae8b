//! Collectives that are bound to their memory.

use crate::collective_options::told;
use crate::errors::raise;
use crate::owner::Detached;
use crate::stream::Stream;
use crate::watch::Watched;
use pyo3::prelude::*;
use std::sync::Arc;
use warplink::collective;

/// A collective that is bound to its memory, to be made as often as one likes.
///
/// Collectives.bind makes it. It keeps its arrays, which are read and written anew by each call; a graph that a call was
/// recorded into keeps neither. What writes to the source and reads the target is for the caller to order, by the stream.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct BoundCall {
    inner: Detached<collective::BoundCall>,
    /// Who is told of calls.
    watched: Arc<Watched>,
}

impl BoundCall {
    pub(crate) fn new(inner: collective::BoundCall, watched: &Arc<Watched>) -> Self {
        Self {
            inner: Detached::new(inner),
            watched: watched.clone(),
        }
    }

    fn inner(&self) -> PyResult<collective::BoundCall> {
        self.inner.get("bound call")
    }
}

#[pymethods]
impl BoundCall {
    /// How it is done: a Choice, whose algorithm is "copy-engine" where the copy engine does it; None where the vendor's
    /// library does.
    #[getter]
    fn choice<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let choice = self.inner()?.choice();
        choice.map(|choice| told(py, choice)).transpose()
    }

    /// Enqueues the call once. It counts as a call of its Collectives, which all ranks make in the same order. Does not block.
    ///
    /// Raises PeerLostError where a rank was lost before.
    fn enqueue(&self, py: Python<'_>, stream: &Stream) -> PyResult<()> {
        let (inner, live) = (self.inner()?, stream.live()?);
        py.detach(|| inner.enqueue(live)).map_err(raise)?;
        self.watched.made();
        Ok(())
    }

    fn __repr__(&self) -> PyResult<String> {
        let inner = self.inner()?;
        let by = inner
            .choice()
            .map_or("engine", |choice| choice.algorithm.name());
        Ok(format!("BoundCall('{}', by='{by}')", inner.call()))
    }
}

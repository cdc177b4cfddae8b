//! Collectives bound to fixed memory.

use crate::collective_call::choice_to_python;
use crate::errors::{closed, detached};
use crate::owner::Detached;
use crate::stream::Stream;
use crate::watch::Watched;
use pyo3::prelude::*;
use std::sync::Arc;
use warplink::collective;

/// A collective bound to its memory, for any number of calls.
///
/// Created by Collectives.bind. It keeps its arrays alive, which each call reads and writes anew; a graph that a call
/// was captured into keeps neither. The caller orders other accesses to source and target through the stream.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct BoundCall {
    inner: Detached<collective::BoundCall>,
    /// Notified of each call.
    watched: Arc<Watched>,
}

impl BoundCall {
    pub(crate) fn new(inner: collective::BoundCall, watched: &Arc<Watched>) -> Self {
        Self {
            inner: Detached::new(inner, || closed("bound call")),
            watched: watched.clone(),
        }
    }
}

#[pymethods]
impl BoundCall {
    /// How the call is performed: a Choice, whose algorithm is "copy-engine" if the copy engine performs it; None if
    /// the vendor's library does.
    #[getter]
    fn choice<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let choice = self.inner.get()?.choice();
        choice
            .map(|choice| choice_to_python(py, choice))
            .transpose()
    }

    /// Enqueues the call once. It counts as a call of its Collectives, whose calls all ranks make in the same order.
    /// Does not block.
    ///
    /// Raises PeerLostError if a rank was lost before.
    fn enqueue(&self, py: Python<'_>, stream: &Stream) -> PyResult<()> {
        let (inner, live) = (self.inner.get()?, stream.live()?);
        detached(py, || inner.enqueue(live))?;
        self.watched.made();
        Ok(())
    }

    fn __repr__(&self) -> PyResult<String> {
        let inner = self.inner.get()?;
        let by = inner
            .choice()
            .map_or("engine", |choice| choice.algorithm.name());
        Ok(format!("BoundCall('{}', by='{by}')", inner.call()))
    }
}

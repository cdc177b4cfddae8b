//! The vendor's library for collectives.

use crate::array::Reader;
use crate::errors::raise;
use crate::place::Place;
use crate::stream::Stream;
use pyo3::prelude::*;
use std::sync::Arc;
use warplink::device::{self, CollectiveRequest};

/// The vendor's library of a communicator: NCCL on GPUs, a substitute over shared memory on the host device.
///
/// Arrays are anything that Communicator.borrow takes; those that are received are written, those that are sent are
/// read, and both are kept until the stream is past them.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct CollectiveEngine {
    engine: Arc<dyn device::CollectiveEngine>,
    place: Place,
    world: usize,
}

impl CollectiveEngine {
    pub(crate) fn new(
        engine: Arc<dyn device::CollectiveEngine>,
        place: &Place,
        world: usize,
    ) -> Self {
        Self {
            engine,
            place: place.clone(),
            world,
        }
    }
}

#[pymethods]
impl CollectiveEngine {
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

    /// Sends and receives, `(peer, array)` each, all at once: none waits for another of the same call.
    /// Lengths may differ from pair to pair; a send and its receive have the same.
    #[pyo3(signature = (stream, sends=Vec::new(), receives=Vec::new()))]
    fn exchange(
        &self,
        py: Python<'_>,
        stream: &Stream,
        sends: Vec<(usize, Bound<'_, PyAny>)>,
        receives: Vec<(usize, Bound<'_, PyAny>)>,
    ) -> PyResult<()> {
        let reader = Reader::new(&self.place, Some(stream.raw_handle()));
        let request = CollectiveRequest::Exchange {
            sends: reader.ends("sends", &sends)?,
            receives: reader.for_targets().ends("receives", &receives)?,
        };
        let stream = stream.live()?;
        py.detach(|| self.engine.enqueue(stream, &request))
            .map_err(raise)
    }

    /// Ends what is under way: streams that do it fail, and later calls raise ClosedError.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| self.engine.abort());
    }

    fn __repr__(&self) -> String {
        let name = self.engine.name();
        format!("CollectiveEngine('{name}', size={})", self.world)
    }
}

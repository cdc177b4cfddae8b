//! The vendor's library for collectives.

use crate::array::Reader;
use crate::errors::{detached, raise};
use crate::place::Place;
use crate::region::seconds;
use crate::stream::Stream;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use std::sync::Arc;
use warplink::Deadline;
use warplink::device::{self, CallHeader, CollectiveRequest, DeviceSlice, RankCall, Reduction};

/// A peer, and the address and length of data sent to it or received from it.
type Piece = (usize, u64, usize);

/// The vendor's library for a communicator: NCCL on GPUs, a substitute over shared memory on the host device.
///
/// Arrays are anything that Communicator.borrow accepts; receives write them, sends read them, and both are kept alive
/// until the stream has passed the call.
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

    /// The number of ranks.
    #[getter]
    fn size(&self) -> usize {
        self.world
    }

    /// Sends and receives, `(peer, array)` each, all concurrent: no message waits for another of the same call. Lengths
    /// may differ between pairs; a send and its receive have the same length.
    #[pyo3(signature = (stream, sends=Vec::new(), receives=Vec::new()))]
    fn exchange(
        &self,
        py: Python<'_>,
        stream: &Stream,
        sends: Vec<(usize, Bound<'_, PyAny>)>,
        receives: Vec<(usize, Bound<'_, PyAny>)>,
    ) -> PyResult<()> {
        let reader = Reader::new(&self.place, Some(stream.raw()));
        let request = CollectiveRequest::Exchange {
            sends: reader.ends("sends", &sends)?,
            receives: reader.for_targets().ends("receives", &receives)?,
        };
        let stream = stream.live()?;
        detached(py, || self.engine.enqueue(stream, &request))
    }

    /// Exchanges a description of the call with each peer, `(peer, sent description, expected description)`, and then
    /// sends and receives, `(peer, address, bytes)`, on this thread; with a reduction, `(operator, element type, own,
    /// target)`, received data is combined, and `own` and `target` are addresses. The caller keeps all memory allocated
    /// until this returns: None, or a peer whose description differs from the expected one, and that description. For
    /// warplink.torch.
    #[pyo3(signature = (said, sends, receives, timeout, reduction=None))]
    fn _call(
        &self,
        py: Python<'_>,
        said: Vec<(usize, PyBackedBytes, PyBackedBytes)>,
        sends: Vec<Piece>,
        receives: Vec<Piece>,
        timeout: f64,
        reduction: Option<(&str, &str, u64, u64)>,
    ) -> PyResult<Option<(usize, Py<PyBytes>)>> {
        let pieces = |pieces: &[Piece]| -> PyResult<Vec<(usize, DeviceSlice)>> {
            let slices = pieces.iter().map(|(peer, address, bytes)| {
                Ok((*peer, self.place.borrow_unowned(*address, *bytes)?))
            });
            slices.collect()
        };
        let said = said.into_iter().map(|(peer, told, expected)| CallHeader {
            peer,
            sent: told.to_vec(),
            expected: expected.to_vec(),
        });
        let reduction = reduction.map(|(op, dtype, own, target)| {
            // All parts of a reduction have one length, which own and target share.
            let bytes = receives.first().map_or(0, |(_, _, bytes)| *bytes);
            PyResult::Ok(Reduction {
                op: op.parse().map_err(raise)?,
                dtype: dtype.parse().map_err(raise)?,
                own: self.place.borrow_unowned(own, bytes)?,
                target: self.place.borrow_unowned(target, bytes)?,
            })
        });
        let call = RankCall {
            headers: said.collect(),
            sends: pieces(&sends)?,
            receives: pieces(&receives)?,
            reduction: reduction.transpose()?,
        };
        let deadline = Deadline::after(seconds(timeout)?);
        let other = detached(py, || self.engine.call(&call, deadline))?;
        Ok(other.map(|(peer, said)| (peer, PyBytes::new(py, &said).unbind())))
    }

    /// Aborts operations in flight: streams that run them fail, and later calls raise ClosedError.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| self.engine.abort());
    }

    fn __repr__(&self) -> String {
        let name = self.engine.name();
        format!("CollectiveEngine('{name}', size={})", self.world)
    }
}

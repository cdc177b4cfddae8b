//! Sends and receives that are exchanged once and posted any number of times.

use crate::errors::{closed, detached, raise};
use crate::number::whole;
use crate::owner::Detached;
use crate::region::Region;
use crate::stream::Stream;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use warplink::p2p::{Batch, Direction, TransferRequest};

/// Request for a send: all of `region` to `peer`, a rank of the communicator. `tag` distinguishes transfers between the
/// same two ranks. `protocol` is "get" or "put", the same on both ranks, and `path` is "copy-engine",
/// "multiprocessors", "fastest" or "one-block"; None selects the job's default for either.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Send(TransferRequest);

/// Request for a receive: into all of `region` from `peer`; see `Send`.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Receive(TransferRequest);

/// One rank's end of a transfer. It may be dropped at any time: resources that streams still use are kept.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Transfer(Detached<std::sync::Arc<warplink::p2p::Transfer>>);

/// A barrier of streams: work enqueued after it on any rank is ordered after work that every rank has enqueued before
/// it.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct StreamBarrier(pub(crate) warplink::p2p::StreamBarrier);

fn chosen(
    mut request: TransferRequest,
    protocol: Option<&str>,
    path: Option<&str>,
) -> PyResult<TransferRequest> {
    if let Some(protocol) = protocol {
        request = request.with_protocol(protocol.parse().map_err(raise)?);
    }
    if let Some(path) = path {
        request = request.with_path(path.parse().map_err(raise)?);
    }
    Ok(request)
}

#[pymethods]
impl Send {
    #[new]
    #[pyo3(signature = (region, peer, tag=0, protocol=None, path=None))]
    fn new(
        region: &Region,
        #[pyo3(from_py_with = whole)] peer: usize,
        #[pyo3(from_py_with = whole)] tag: u64,
        protocol: Option<&str>,
        path: Option<&str>,
    ) -> PyResult<Self> {
        let request = TransferRequest::send(&region.registered()?, peer, tag);
        Ok(Self(chosen(request, protocol, path)?))
    }
}

#[pymethods]
impl Receive {
    #[new]
    #[pyo3(signature = (region, peer, tag=0, protocol=None, path=None))]
    fn new(
        region: &Region,
        #[pyo3(from_py_with = whole)] peer: usize,
        #[pyo3(from_py_with = whole)] tag: u64,
        protocol: Option<&str>,
        path: Option<&str>,
    ) -> PyResult<Self> {
        let request = TransferRequest::receive(&region.registered()?, peer, tag);
        Ok(Self(chosen(request, protocol, path)?))
    }
}

impl Transfer {
    pub(crate) fn new(transfer: warplink::p2p::Transfer) -> Self {
        Self(Detached::new(std::sync::Arc::new(transfer), || {
            closed("transfer")
        }))
    }
}

#[pymethods]
impl Transfer {
    /// Enqueues this end's part on `stream`. Does not block. Raises InvalidArgumentError if captured twice without a
    /// wait in between, and the error that ended the device's work, such as PeerLostError, if there is one.
    fn post(&self, py: Python<'_>, stream: &Stream) -> PyResult<()> {
        let (transfer, stream) = (self.0.get()?, stream.live()?);
        detached(py, || transfer.post(stream))
    }

    /// Enqueues the wait for every post so far on `stream`. Does not block. Raises the error that ended the device's
    /// work, such as PeerLostError, if there is one.
    fn wait(&self, py: Python<'_>, stream: &Stream) -> PyResult<()> {
        let (transfer, stream) = (self.0.get()?, stream.live()?);
        detached(py, || transfer.wait(stream))
    }

    /// The other rank, in the communicator.
    #[getter]
    fn peer(&self) -> PyResult<usize> {
        Ok(self.0.get()?.peer())
    }

    /// The tag of the transfer.
    #[getter]
    fn tag(&self) -> PyResult<u64> {
        Ok(self.0.get()?.tag())
    }

    /// Bytes that each post transfers.
    #[getter]
    fn nbytes(&self) -> PyResult<usize> {
        Ok(self.0.get()?.bytes())
    }

    /// Whether this end sends.
    #[getter]
    fn sends(&self) -> PyResult<bool> {
        Ok(self.0.get()?.direction() == Direction::Send)
    }

    /// "get" or "put".
    #[getter]
    fn protocol(&self) -> PyResult<String> {
        Ok(self.0.get()?.protocol().to_string())
    }

    fn __repr__(&self) -> String {
        let shown = self.0.with(|transfer| {
            let (direction, peer) = (transfer.direction(), transfer.peer());
            format!("Transfer({direction}, peer={peer}, tag={})", transfer.tag())
        });
        shown.unwrap_or_else(|| "Transfer(dropped)".to_owned())
    }
}

#[pymethods]
impl StreamBarrier {
    /// Enqueues the barrier on `stream`. Does not block. Raises the error that ended the device's work, such as
    /// PeerLostError, if there is one.
    fn enqueue(&self, py: Python<'_>, stream: &Stream) -> PyResult<()> {
        let stream = stream.live()?;
        detached(py, || self.0.enqueue(stream))
    }
}

/// Posts `transfers` on `stream` as one group, whose members complete in any order. Does not block. Raises the errors
/// of `Transfer.post`.
#[pyfunction]
pub(crate) fn post_all(
    py: Python<'_>,
    transfers: Vec<Bound<'_, Transfer>>,
    stream: &Stream,
) -> PyResult<()> {
    let (transfers, stream) = (all(&transfers)?, stream.live()?);
    detached(py, || {
        // One batch: its members complete in whatever order ranks list them, and small ones share a kernel.
        let posts = transfers.iter().map(|transfer| &**transfer);
        Batch::new().post(posts).enqueue(stream)
    })
}

/// Waits on `stream` for every post so far of `transfers`. Does not block. Raises the errors of `Transfer.wait`.
#[pyfunction]
pub(crate) fn wait_all(
    py: Python<'_>,
    transfers: Vec<Bound<'_, Transfer>>,
    stream: &Stream,
) -> PyResult<()> {
    let (transfers, stream) = (all(&transfers)?, stream.live()?);
    detached(py, || {
        let waits = transfers.iter().map(|transfer| &**transfer);
        Batch::new().wait(waits).enqueue(stream)
    })
}

fn all(
    transfers: &[Bound<'_, Transfer>],
) -> PyResult<Vec<std::sync::Arc<warplink::p2p::Transfer>>> {
    let each = transfers.iter().map(|transfer| transfer.get().0.get());
    each.collect()
}

/// Converts `objects` to requests.
pub(crate) fn requests(objects: &[Bound<'_, PyAny>]) -> PyResult<Vec<TransferRequest>> {
    let each = objects.iter().map(|object| {
        if let Ok(send) = object.cast::<Send>() {
            return Ok(send.get().0.clone());
        }
        match object.cast::<Receive>() {
            Ok(receive) => Ok(receive.get().0.clone()),
            Err(_) => Err(PyTypeError::new_err(format!(
                "{} is not a transfer; expected Send or Receive",
                object.get_type().qualname()?
            ))),
        }
    });
    each.collect()
}

//! Connections, whose channels are passed to kernels.

use crate::array::Array;
use crate::errors::{closed, detached, invalid, raise};
use crate::number::whole;
use crate::owner::Detached;
use crate::place::Place;
use crate::region::Region;
use crate::stream::Stream;
use pyo3::prelude::*;
use warplink::channel::{self, ConnectionRequest, Transport};
use warplink::device::{Argument, At};

/// Request for one end of a connection: to `peer`, a rank of the communicator, with `tag`, between `region` here and
/// the region that the peer passes, which may have another length. `transport` is "direct", "proxied" or "network", the
/// same on both ranks; None selects "direct" on one machine and "network" otherwise.
/// `network_devices` uses the network, by these devices of this rank only: names of the network library, separated by
/// commas, such as "mlx5_0:1" or "eth0". Raises InvalidArgumentError with another transport.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Connect(ConnectionRequest);

/// One rank's end of a connection. As a kernel argument it is a `warplink::Channel` in CUDA C++. It keeps its region
/// registered. It may be dropped at any time: resources that launched kernels still use are kept.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Connection {
    inner: Detached<channel::Connection>,
    place: Place,
}

/// Connections created by one call. As a kernel argument it is a `const warplink::Channel *` in CUDA C++, with the
/// channels in the order in which they were requested.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Connections {
    inner: Detached<channel::Connections>,
    place: Place,
}

#[pymethods]
impl Connect {
    #[new]
    #[pyo3(signature = (region, peer, tag=0, transport=None, network_devices=None))]
    fn new(
        region: &Region,
        #[pyo3(from_py_with = whole)] peer: usize,
        #[pyo3(from_py_with = whole)] tag: u64,
        transport: Option<&str>,
        network_devices: Option<&str>,
    ) -> PyResult<Self> {
        let request = ConnectionRequest::new(peer, tag, &region.registered()?);
        let transport = transport.map(str::parse::<Transport>).transpose();
        Ok(Self(match (transport.map_err(raise)?, network_devices) {
            (None, None) => request,
            (Some(transport), None) => request.with_transport(transport),
            (None | Some(Transport::Network), Some(devices)) => {
                request.with_network_devices(devices)
            }
            (Some(transport), Some(_)) => {
                return Err(invalid(format!(
                    "network_devices is set for the {transport} transport; expected network"
                )));
            }
        }))
    }
}

impl Connection {
    fn new(inner: channel::Connection, place: &Place) -> Self {
        Self {
            inner: Detached::new(inner, || closed("connection")),
            place: place.clone(),
        }
    }

    /// Its channel, for the arguments of a kernel.
    pub(crate) fn channel(&self) -> PyResult<Argument> {
        Ok(self.inner.get()?.channel())
    }
}

#[pymethods]
impl Connection {
    /// The other rank, in the communicator.
    #[getter]
    fn peer(&self) -> PyResult<usize> {
        Ok(self.inner.get()?.peer())
    }

    /// The tag of the connection.
    #[getter]
    fn tag(&self) -> PyResult<u64> {
        Ok(self.inner.get()?.tag())
    }

    /// "direct", "proxied" or "network".
    #[getter]
    fn transport(&self) -> PyResult<String> {
        Ok(self.inner.get()?.transport().to_string())
    }

    /// Length of the peer's region in bytes.
    #[getter]
    fn peer_nbytes(&self) -> PyResult<usize> {
        let inner = self.inner.get()?;
        let bytes = inner.peer_bytes(0);
        bytes.ok_or_else(|| invalid("the peer has no region"))
    }

    /// Enqueues a copy of `source`, an array, to the peer's region from byte `offset` on. It is not ordered with
    /// operations of kernels, except by a signal of a later kernel on `stream`. Raises InvalidArgumentError if it
    /// passes the end of the peer's region.
    #[pyo3(signature = (stream, source, offset=0))]
    fn write(
        &self,
        stream: &Stream,
        source: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = whole)] offset: u64,
    ) -> PyResult<()> {
        let from = Array::resolve(source, &self.place, Some(stream.raw()))?;
        let (inner, stream) = (self.inner.get()?, stream.live()?);
        detached(source.py(), || inner.write(stream, offset, from.slice))
    }

    /// Enqueues a copy from byte `offset` of the peer's region to `target`, an array; see `write`.
    #[pyo3(signature = (stream, target, offset=0))]
    fn read(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = whole)] offset: u64,
    ) -> PyResult<()> {
        let into = Array::resolve_target(target, &self.place, Some(stream.raw()))?;
        let (inner, stream) = (self.inner.get()?, stream.live()?);
        detached(target.py(), || inner.read(stream, into.slice, offset))
    }

    fn __repr__(&self) -> String {
        let shown = self.inner.with(|inner| {
            let (peer, tag) = (inner.peer(), inner.tag());
            format!("Connection(peer={peer}, tag={tag})")
        });
        shown.unwrap_or_else(|| "Connection(of another process)".to_owned())
    }
}

impl Connections {
    pub(crate) fn new(inner: channel::Connections, place: &Place) -> Self {
        Self {
            inner: Detached::new(inner, || closed("list of connections")),
            place: place.clone(),
        }
    }

    /// Their channels, for the arguments of a kernel.
    pub(crate) fn channels(&self, py: Python<'_>) -> PyResult<Argument> {
        let inner = self.inner.get()?;
        detached(py, || inner.channels())
    }

    fn all(&self) -> PyResult<Vec<Connection>> {
        let inner = self.inner.get()?;
        let all = inner.all().iter();
        Ok(all
            .map(|one| Connection::new(one.clone(), &self.place))
            .collect())
    }
}

#[pymethods]
impl Connections {
    /// The connection to `peer` with `tag`. Raises InvalidArgumentError if there is none.
    #[pyo3(signature = (peer, tag=0))]
    fn find(
        &self,
        #[pyo3(from_py_with = whole)] peer: usize,
        #[pyo3(from_py_with = whole)] tag: u64,
    ) -> PyResult<Connection> {
        let inner = self.inner.get()?;
        let found = inner.find(peer, tag).map_err(raise)?;
        Ok(Connection::new(found.clone(), &self.place))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.inner.get()?.all().len())
    }

    fn __getitem__(&self, index: &Bound<'_, PyAny>) -> PyResult<Connection> {
        let index: usize = whole(index)?;
        let mut all = self.all()?;
        if index >= all.len() {
            // Python ends an iteration over a sequence by this exception.
            return Err(pyo3::exceptions::PyIndexError::new_err(format!(
                "there are {} connections; expected an index below that",
                all.len()
            )));
        }
        Ok(all.swap_remove(index))
    }
}

/// The requests among `objects`.
pub(crate) fn requests(objects: &[Bound<'_, Connect>]) -> Vec<ConnectionRequest> {
    objects.iter().map(|one| one.get().0.clone()).collect()
}

/// A position in a region: an offset in bytes, or the region's number and an offset.
#[derive(FromPyObject)]
pub(crate) enum PlaceInRegion {
    Offset(u64),
    Region((u32, u64)),
}

impl From<PlaceInRegion> for At {
    fn from(place: PlaceInRegion) -> Self {
        match place {
            PlaceInRegion::Offset(offset) => Self::from(offset),
            PlaceInRegion::Region(both) => Self::from(both),
        }
    }
}

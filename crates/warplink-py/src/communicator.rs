//! A group of the ranks of a job.

use crate::array::Array;
use crate::channel::{self, Connect, Connections};
use crate::collectives::Collectives;
use crate::element::type_name;
use crate::engine::CollectiveEngine;
use crate::errors::{closed, detached, invalid, raise};
use crate::executor::Executor;
use crate::kernel::Module;
use crate::memory::{Memory, View};
use crate::number::whole;
use crate::owner::{Detached, Owner};
use crate::place::Place;
use crate::region::{Region, RemoteRegion, seconds};
use crate::stream::{Event, Stream, Turns};
use crate::transfer::{self, StreamBarrier, Transfer};
use crate::wait::interruptible;
use crate::watch::{Limits, Watch};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::ffi::c_void;
use std::sync::Arc;
use warplink::collective::CollectiveOptions;
use warplink::device::{ModuleSource, Priority, VendorCommunicator};
use warplink::{Deadline, Error};

/// An ordered group of the ranks of a job, numbered from 0.
///
/// Methods that involve other ranks document whether they block; they do so without the interpreter's lock. Waits end
/// at the job's timeout with TimeoutError, and with PeerLostError, which contains the rank, when a rank is lost.
/// Objects may be used from several threads.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Communicator {
    pub(crate) inner: Detached<warplink::Communicator>,
    place: Place,
}

/// The object for `communicator`, on the GPU `ordinal` if it is on one.
pub(crate) fn joined(communicator: warplink::Communicator, ordinal: i32) -> Communicator {
    let device = communicator.device().clone();
    Communicator {
        inner: Detached::new(communicator, || closed("communicator")),
        place: Place { device, ordinal },
    }
}

impl Communicator {
    fn another(&self, communicator: warplink::Communicator) -> Self {
        joined(communicator, self.place.ordinal)
    }
}

/// Objects whose calls can be watched.
#[derive(FromPyObject)]
enum Watchable<'py> {
    Collectives(Bound<'py, Collectives>),
    Turns(Bound<'py, Turns>),
}

#[pymethods]
impl Communicator {
    /// This rank's number in the communicator.
    #[getter]
    fn rank(&self) -> PyResult<usize> {
        Ok(self.inner.get()?.rank())
    }

    /// The number of ranks in the communicator.
    #[getter]
    fn size(&self) -> PyResult<usize> {
        Ok(self.inner.get()?.world())
    }

    /// The ranks in the job of the communicator's ranks, in its order.
    #[getter]
    fn job_ranks(&self) -> PyResult<Vec<usize>> {
        Ok(self.inner.get()?.job_ranks().to_vec())
    }

    /// The device, "host" or "cuda".
    #[getter]
    fn device(&self) -> String {
        self.place.device.kind().to_string()
    }

    /// The device's human-readable name.
    #[getter]
    fn device_name(&self) -> String {
        self.place.device.name()
    }

    /// The communicator of `ranks` of this one, this rank among them, in their order. Ranks that are not listed need
    /// not call anything. Does not block. Raises InvalidArgumentError if a rank is out of range or listed twice, or
    /// this one is not listed.
    fn subgroup(&self, ranks: Vec<usize>) -> PyResult<Self> {
        let made = self.inner.get()?.subgroup(&ranks).map_err(raise)?;
        Ok(self.another(made))
    }

    /// The communicator of the ranks that pass the same `color` (at least 0), ordered by `key`, then by rank.
    /// Collective: blocks until every rank has called it. Raises the errors of `barrier`.
    #[pyo3(signature = (color, key=0))]
    fn split(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = whole)] color: u64,
        key: i64,
    ) -> PyResult<Self> {
        let inner = self.inner.get()?;
        let made = interruptible(py, move || inner.split(color, key))?;
        Ok(self.another(made))
    }

    /// The communicator of the remaining ranks, all of which call this after a PeerLostError. Blocks until all have.
    /// Raises GivenUpError if the others continue without this rank, and TimeoutError after the job's timeout.
    fn survivors(&self, py: Python<'_>) -> PyResult<Self> {
        let inner = self.inner.get()?;
        let made = interruptible(py, move || inner.survivors())?;
        Ok(self.another(made))
    }

    /// Blocks until every rank has called it. It orders hosts, not streams. Raises PeerLostError or PeerLeftError,
    /// which contain the rank, if one is gone, and TimeoutError, which contains one that did not call it.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner.get()?;
        interruptible(py, move || inner.barrier())
    }

    /// Every rank's bytes, in rank order. Blocks until every rank has called it. For small data: it is transferred
    /// through the store.
    fn all_gather_bytes<'py>(
        &self,
        py: Python<'py>,
        data: &[u8],
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let (inner, data) = (self.inner.get()?, data.to_vec());
        let all = interruptible(py, move || inner.all_gather_bytes(&data))?;
        Ok(all.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// Allocates `nbytes` of device memory (more than 0) and registers it for peers. The content is
    /// undefined. Raises OutOfMemoryError.
    fn alloc(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = whole)] nbytes: usize,
    ) -> PyResult<Region> {
        let inner = self.inner.get()?;
        let region = detached(py, || inner.alloc(nbytes))?;
        Ok(Region::new(region, &self.place))
    }

    /// Registers an array's memory for peers, without a copy; the array is kept alive as long as the region or a peer's
    /// mapping. On a GPU, `stream` waits for the producer's pending work on the array. Raises UnsupportedError if the
    /// memory cannot be shared: on the host device that is all memory except that of `alloc` and views of it. Raises
    /// InvalidArgumentError for a read-only array.
    #[pyo3(signature = (array, stream=None))]
    fn register(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        stream: Option<&Stream>,
    ) -> PyResult<Region> {
        let inner = self.inner.get()?;
        // A region may be written by any peer, so that a read-only array cannot become one.
        let array = Array::resolve_target(array, &self.place, stream.map(Stream::raw))?;
        let region = detached(py, || inner.register(&array.slice))?;
        Ok(Region::new(region, &self.place))
    }

    /// An array's memory in place, for local use: copies, inputs of programs, collectives. Memory of a read-only array
    /// is never their target. On a GPU without `stream`, blocks until a JAX array is computed.
    #[pyo3(signature = (array, stream=None))]
    fn borrow(&self, array: &Bound<'_, PyAny>, stream: Option<&Stream>) -> PyResult<Memory> {
        let array = Array::resolve(array, &self.place, stream.map(Stream::raw))?;
        Ok(Memory {
            slice: array.slice,
            place: self.place.clone(),
            read_only: array.read_only,
        })
    }

    /// Contiguous device memory at `address` as an array of `shape` and `dtype`, kept allocated by the caller as long
    /// as it is used: for calls too frequent to create an owning object each time, such as for the tensors of a run.
    /// Raises InvalidArgumentError if it is not memory of the device.
    fn view_at(
        &self,
        address: u64,
        shape: Vec<usize>,
        #[pyo3(from_py_with = type_name)] dtype: String,
    ) -> PyResult<View> {
        let bytes = View::bytes_of(&shape, &dtype)?;
        let slice = self.place.borrow_unowned(address, bytes)?;
        View::new(&slice, &self.place, shape, &dtype)
    }

    /// A handle of `region` for `peer` to pass to `open_handle`; the application transfers it by any means. It is valid
    /// for one opening, and keeps the memory allocated until that mapping ends.
    fn export_handle<'py>(
        &self,
        py: Python<'py>,
        region: &Region,
        peer: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (inner, region) = (self.inner.get()?, region.registered()?);
        let handle = detached(py, || inner.export_handle(&region, peer))?;
        Ok(PyBytes::new(py, &handle))
    }

    /// Maps the region that `peer` exported for this rank. Raises InvalidHandleError if the handle is truncated,
    /// altered or not `peer`'s, or its region is gone.
    fn open_handle(&self, py: Python<'_>, peer: usize, handle: &[u8]) -> PyResult<RemoteRegion> {
        // Copied, since the bytes object is not accessible without the interpreter's lock.
        let (inner, handle) = (self.inner.get()?, handle.to_vec());
        let region = detached(py, || inner.open_handle(peer, &handle))?;
        Ok(RemoteRegion {
            region,
            place: self.place.clone(),
        })
    }

    /// Maps the region that every other rank shares by the same call: a list by rank, with None for this one. Blocks
    /// until all ranks have called it. If a rank cannot share its region or map those of the others, it raises an error
    /// on all ranks: PeerFailedError on those that succeeded.
    fn share(&self, py: Python<'_>, region: &Region) -> PyResult<Vec<Option<RemoteRegion>>> {
        let (inner, region) = (self.inner.get()?, region.registered()?);
        let shared = detached(py, || inner.share(&region))?;
        let place = &self.place;
        let shared = shared.into_iter().map(|region| {
            region.map(|region| RemoteRegion {
                region,
                place: place.clone(),
            })
        });
        Ok(shared.collect())
    }

    /// Creates a stream; work of a stream with `high_priority` precedes other work of the device.
    #[pyo3(signature = (high_priority=false))]
    fn create_stream(&self, py: Python<'_>, high_priority: bool) -> PyResult<Stream> {
        let inner = self.inner.get()?;
        let priority = if high_priority {
            Priority::High
        } else {
            Priority::Normal
        };
        let stream = detached(py, || inner.create_stream(priority))?;
        Ok(Stream::new(stream, inner, &self.place))
    }

    /// Wraps a stream created elsewhere, such as `torch.cuda.current_stream()`: `raw` is its handle (`.cuda_stream`), a
    /// valid stream of the job's GPU as long as `owner` exists, which is held. Raises UnsupportedError on the host
    /// device, whose streams have no raw form.
    #[pyo3(signature = (raw, owner=None))]
    fn borrow_stream(
        &self,
        py: Python<'_>,
        raw: u64,
        owner: Option<Py<PyAny>>,
    ) -> PyResult<Stream> {
        let inner = self.inner.get()?;
        // Keeps PyTorch's stream object alive: its pool may otherwise destroy the stream while work is enqueued.
        let owner = Arc::new(Owner::new(owner.unwrap_or_else(|| py.None())));
        // SAFETY: the caller guarantees, as documented, that `raw` is a valid stream of this device as long as `owner`
        // is held; the driver rejects unknown handles.
        let stream = unsafe { self.place.device.borrow_stream(raw, owner) };
        Ok(Stream::new(stream.map_err(raise)?, inner, &self.place))
    }

    /// Connects with peers, for channels in kernels: `requests` are `Connect` objects, in any order. Blocks until the
    /// peers have requested their ends. Raises MismatchError if transports differ.
    fn connect(&self, py: Python<'_>, requests: Vec<Bound<'_, Connect>>) -> PyResult<Connections> {
        let (inner, requests) = (self.inner.get()?, channel::requests(&requests));
        let made = detached(py, || inner.connect(&requests))?;
        Ok(Connections::new(made, &self.place))
    }

    /// Loads user code: `cuda` is CUDA C++ with extern "C" kernels, which may include `<warplink/device.cuh>`; `image`
    /// is alternatively a cubin, a fat binary or PTX; `options` are compiler options. `host` are functions for the host
    /// device, by the kernel's name: each is called with a `Block`, for every block of a launch, on a thread of the
    /// device. `name` is for error messages.
    ///
    /// Blocks, on a GPU possibly until running kernels finish: load modules before anything waits for a peer. Kernels
    /// must only access memory that their arguments refer to. Raises UnsupportedError if there is no code for the
    /// device, InvalidArgumentError for a malformed or truncated image, DriverError with the compiler's messages.
    #[pyo3(signature = (name, *, cuda=None, image=None, options=Vec::new(), host=None))]
    fn load_module(
        &self,
        py: Python<'_>,
        name: &str,
        cuda: Option<&str>,
        image: Option<Vec<u8>>,
        options: Vec<String>,
        host: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Module> {
        // Loading needs only the device, but a closed communicator should be an error as for other methods.
        self.inner.get()?;
        let mut source = ModuleSource::new(name);
        if let Some(text) = cuda {
            source = source.with_cuda(text);
        }
        if let Some(image) = image {
            source = source.with_cubin(image);
        }
        source = options.into_iter().fold(source, ModuleSource::with_option);
        Module::load(py, &self.place, source, host)
    }

    /// Creates an event; only an event with `timing` can measure time.
    #[pyo3(signature = (timing=false))]
    fn create_event(&self, timing: bool) -> PyResult<Event> {
        let event = self.place.device.create_event(timing).map_err(raise)?;
        Ok(Event::new(event))
    }

    /// Creates turns, which order streams that use the same memory.
    fn turns(&self) -> Turns {
        Turns::new(&self.place)
    }

    /// Matches transfers (`Send` and `Receive`) with their other ends, once; the results can be posted and waited for
    /// any number of times. Blocks until the peers have exchanged theirs, at most `timeout` seconds (the job's if
    /// None). Raises MismatchError if lengths or protocols of the two ends differ.
    #[pyo3(signature = (requests, timeout=None))]
    fn exchange(
        &self,
        py: Python<'_>,
        requests: Vec<Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<Transfer>> {
        let inner = self.inner.get()?;
        let requests = transfer::requests(&requests)?;
        let deadline = match timeout {
            Some(timeout) => Deadline::after(seconds(timeout)?),
            None => inner.deadline(),
        };
        let made = detached(py, || inner.exchange_until(&requests, deadline))?;
        Ok(made.into_iter().map(Transfer::new).collect())
    }

    /// Sends `region` once to `peer`: exchanges, posts and waits on `stream`. Blocks until the peer has called
    /// `receive`, not until the bytes have moved. Raises MismatchError if lengths of the two ends differ, TimeoutError
    /// after the job's timeout, and PeerLostError if the peer is lost.
    #[pyo3(signature = (region, peer, stream, tag=0))]
    fn send(
        &self,
        py: Python<'_>,
        region: &Region,
        peer: usize,
        stream: &Stream,
        tag: u64,
    ) -> PyResult<()> {
        let (inner, region, stream) = (self.inner.get()?, region.registered()?, stream.live()?);
        detached(py, || inner.send(&region, peer, tag, stream))
    }

    /// Receives into `region` once from `peer`; see `send`. Raises the same.
    #[pyo3(signature = (region, peer, stream, tag=0))]
    fn receive(
        &self,
        py: Python<'_>,
        region: &Region,
        peer: usize,
        stream: &Stream,
        tag: u64,
    ) -> PyResult<()> {
        let (inner, region, stream) = (self.inner.get()?, region.registered()?, stream.live()?);
        detached(py, || inner.receive(&region, peer, tag, stream))
    }

    /// Performs every transfer (`Send` and `Receive`) once, as one group, in any order; see `send`. Raises the same.
    fn once(
        &self,
        py: Python<'_>,
        requests: Vec<Bound<'_, PyAny>>,
        stream: &Stream,
    ) -> PyResult<()> {
        let (inner, stream) = (self.inner.get()?, stream.live()?);
        let requests = transfer::requests(&requests)?;
        detached(py, || inner.once(&requests, stream))
    }

    /// A barrier of streams, which can be enqueued any number of times. Collective: blocks until every rank has called
    /// it. Raises TimeoutError after the job's timeout, and PeerLostError if a rank is lost.
    fn stream_barrier(&self, py: Python<'_>) -> PyResult<StreamBarrier> {
        let inner = self.inner.get()?;
        let barrier = detached(py, || inner.stream_barrier())?;
        Ok(StreamBarrier(barrier))
    }

    /// Creates collectives. Collective: all ranks call it with the same options, and it blocks until all have.
    ///
    /// `path` is the only path allowed: "direct", kernels that access the peers' memory, or "engine", the vendor's
    /// library; None selects the direct one if all ranks can map one another's memory and are not too many.
    /// `algorithm`, such as "one-shot", is the only one allowed on the direct path, and `workspace_bytes` the direct
    /// path's memory on each rank. A call uses at most `multiprocessors`, at least 2, by default the smallest number
    /// that reaches full speed. Without options, later calls return the same collectives again immediately.
    /// `communicator` is the address of an existing communicator of the vendor's library (`ncclComm_t` on GPUs), of the
    /// same ranks in the same order: calls routed to the library use it instead of one created here. The application
    /// keeps ownership, and must not destroy it before nothing refers to these collectives and their streams are
    /// synchronized; if a rank is lost, the application aborts it once a call has raised the loss, or calls in the
    /// library never end. It must belong to the library that is loaded here, its calls must block, and no other thread
    /// may use it meanwhile; any other number crashes the process. Raises MismatchError if the options of the ranks
    /// differ, or the communicator has other ranks.
    #[pyo3(signature = (*, path=None, algorithm=None, workspace_bytes=None, communicator=None, multiprocessors=None))]
    fn collectives(
        &self,
        py: Python<'_>,
        path: Option<&str>,
        algorithm: Option<&str>,
        workspace_bytes: Option<usize>,
        communicator: Option<usize>,
        multiprocessors: Option<usize>,
    ) -> PyResult<Collectives> {
        let inner = self.inner.get()?;
        if communicator == Some(0) {
            return Err(invalid(
                "the communicator is 0; expected the address of one of the vendor's library",
            ));
        }
        // SAFETY: the caller guarantees, as documented above, that this is a communicator and remains one as long as
        // the adopting object exists.
        let adopt = |address| unsafe { VendorCommunicator::from_raw(address as *mut c_void) };
        let default = CollectiveOptions::default();
        let options = CollectiveOptions {
            path: path.map(str::parse).transpose().map_err(raise)?,
            algorithm: algorithm.map(str::parse).transpose().map_err(raise)?,
            workspace_bytes: workspace_bytes.unwrap_or(default.workspace_bytes),
            communicator: communicator.map(adopt),
            multiprocessors,
            ..default
        };
        detached(py, || {
            // The default ones are created once per communicator and shared; others have their own workspace.
            let joined = if options == CollectiveOptions::default() {
                inner.collectives()?
            } else {
                inner.collectives_with(&options)?
            };
            Collectives::new(joined, &self.place, (inner.rank(), inner.world()))
        })
    }

    /// Starts a thread that waits for the calls made through this object `calls`, for applications in which no host
    /// thread waits for their streams: collectives (calls of experts are not waited for) or turns, of this
    /// communicator. A call that takes longer than `timeout` seconds aborts this rank, so that waits on the device end.
    /// With `grace`, the process is terminated by SIGABRT if no exception has reported a failure for that many seconds
    /// after a call has failed, unless the watch was closed meanwhile. Does not communicate.
    #[pyo3(signature = (calls, timeout, grace=None))]
    fn watch(
        &self,
        py: Python<'_>,
        calls: Watchable<'_>,
        timeout: f64,
        grace: Option<f64>,
    ) -> PyResult<Watch> {
        let inner = self.inner.get()?;
        let limits = Limits {
            timeout: seconds(timeout)?,
            grace: grace.map(seconds).transpose()?,
        };
        // The watch's thread has a reference of its own, since it outlives the object by up to one wait.
        match calls {
            Watchable::Collectives(calls) => {
                let (calls, of) = (calls.get(), calls.get().inner.get()?);
                let precede = move |stream: &_| of.precede(stream);
                calls
                    .watched
                    .watch(py, inner, precede, (&calls.place, limits))
            }
            Watchable::Turns(calls) => {
                let (calls, of) = (calls.get(), calls.get().inner.get()?.clone());
                let precede = move |stream: &_| of.precede(stream);
                calls
                    .watched
                    .watch(py, inner, precede, (&calls.place, limits))
            }
        }
    }

    /// The vendor's library: NCCL on GPUs, a substitute on the host device. The first call is collective, and blocks
    /// until all ranks have made it. Raises LibraryMissingError without the library.
    fn collective_engine(&self, py: Python<'_>) -> PyResult<CollectiveEngine> {
        let inner = self.inner.get()?;
        let engine = detached(py, || inner.collective_engine())?;
        Ok(CollectiveEngine::new(engine, &self.place, inner.world()))
    }

    /// An executor of programs and overlapped matmuls, with its own pools. Reuse it as long as plans are created.
    fn executor(&self) -> PyResult<Executor> {
        let inner = self.inner.get()?;
        Ok(Executor::new(inner.executor(), &self.place))
    }

    /// The number of allocations registered here (or still mapped by a peer), and the number of peers' allocations
    /// mapped here.
    fn registrations_and_mappings(&self) -> PyResult<(usize, usize)> {
        Ok(self.inner.get()?.registrations_and_mappings())
    }

    /// Unmaps memory that no transfer uses, and notifies its owners. Blocks until they were notified.
    fn release_idle(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner.get()?;
        detached(py, || inner.release_idle())
    }

    /// Closes the communicator: blocks until every rank of it has. Closing the communicator of all ranks leaves the
    /// job. A second call does nothing. Raises TimeoutError if streams still wait for peers, or a rank does not close,
    /// and PeerLostError if one is lost; it is closed in any case.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        match self.inner.take() {
            Some(inner) => detached(py, || inner.close()),
            None => Ok(()),
        }
    }

    /// Leaves the job with a failure: the peers' waits end with PeerLostError, which contains `reason`. Later calls of
    /// this rank raise ClosedError.
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let inner = self.inner.get()?;
        py.detach(|| inner.abort(reason));
        Ok(())
    }

    /// Raises the error that ended the device's work, if there is one.
    fn check(&self) -> Result<(), PyErr> {
        let fault: Result<(), Error> = self.place.device.fault().check();
        fault.map_err(raise)
    }

    fn __repr__(&self) -> String {
        let shown = self.inner.with(|inner| {
            let (rank, size) = (inner.rank(), inner.world());
            format!("Communicator(rank={rank}, size={size})")
        });
        shown.unwrap_or_else(|| "Communicator(closed)".to_owned())
    }
}

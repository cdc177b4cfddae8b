//! Collective engine over NCCL.

use super::gpu::Gpu;
use super::memory::CudaBacking;
use super::nccl::operator::{BYTES, data_type, with_operator};
use super::nccl::{Nccl, NcclComm, NcclHandle, UNIQUE_ID, Window, threads};
use super::stream::CudaStream;
use crate::deadline::Deadline;
use crate::device::{
    AllGatherBytes, Collective, CollectiveEngine, CollectiveRequest, DeviceSlice, Fault, Stream,
    VendorCommunicator, check_adopted,
};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

/// `NCCL_WIN_COLL_SYMMETRIC`: all ranks register memory of the same kind and length.
const SYMMETRIC: c_int = 1;

/// First byte of a rank's join message: it can join.
const READY: u8 = 1;

/// Length of the GPU identity in the join message.
const IDENTITY: usize = 16;

/// NCCL as a collective engine.
#[derive(Debug)]
pub(crate) struct NcclEngine {
    gpu: Arc<Gpu>,
    fault: Arc<Fault>,
    /// Shared, so that a fault can abort it while a call is in progress.
    comm: Arc<NcclComm>,
    world: usize,
    name: String,
    registered: Mutex<Vec<Registered>>,
}

/// Memory registered with NCCL, kept alive until it is deregistered.
#[derive(Debug)]
struct Registered {
    window: Window,
    _memory: DeviceSlice,
}

// SAFETY: the pointer is a handle that NCCL accepts on every thread, one at a time.
unsafe impl Send for Registered {}

impl NcclEngine {
    /// Joins the other ranks, by the deadline.
    pub(crate) fn join(
        gpu: &Arc<Gpu>,
        (rank, world): (usize, usize),
        fault: &Arc<Fault>,
        deadline: Deadline,
        all_gather: AllGatherBytes<'_>,
    ) -> Result<Self> {
        let number = |value: usize| {
            c_int::try_from(value).map_err(|_| {
                Error::invalid(format!(
                    "{value} is too large for NCCL; expected at most {}",
                    c_int::MAX
                ))
            })
        };
        if rank >= world {
            return Err(Error::invalid(format!(
                "rank {rank} is out of range; expected a rank below {world}"
            )));
        }
        let ranks = (number(rank)?, number(world)?);
        // A rank that cannot join reports that, since the others would wait for it.
        let nccl = Nccl::get();
        let id = match &nccl {
            Ok(nccl) if rank == 0 => nccl.unique_id().map(|id| id.to_vec()),
            Ok(_) => Ok(Vec::new()),
            Err(error) => Err(error.clone()),
        };
        let mut mine = vec![u8::from(id.is_ok())];
        mine.extend(gpu.capabilities.identity.0);
        mine.extend(id.as_deref().unwrap_or_default());
        let answers = all_gather(mine)?;
        let nccl = nccl?;
        id?;
        if let Some(peer) = answers
            .iter()
            .position(|answer| answer.first() != Some(&READY))
        {
            return Err(
                Error::mismatch("a peer could not load NCCL; expected it on every rank")
                    .with_operation("join NCCL")
                    .with_peer(peer)
                    .with_help("run `warplink doctor` on the machine of that rank"),
            );
        }
        if let Some((first, second)) = on_one_gpu(&answers) {
            return Err(Error::unsupported(format!(
                "ranks {first} and {second} share a GPU; NCCL expects a GPU for each rank"
            ))
            .with_operation("join NCCL")
            .with_peer(if rank == first { second } else { first })
            .with_help(
                "give each rank a GPU of its own, or use lowerings without the collective engine",
            ));
        }
        let id: [u8; UNIQUE_ID] = answers
            .first()
            .and_then(|answer| answer.get(1 + IDENTITY..))
            .and_then(|id| id.try_into().ok())
            .ok_or_else(|| {
                Error::protocol("rank 0 sent an invalid id; expected 128 bytes")
                    .with_operation("join NCCL")
                    .with_peer(0)
            })?;
        let comm = NcclComm::join(nccl, &gpu.context, id, ranks.0, ranks.1, deadline, || {
            gpu.fault.check()?;
            fault.check()
        })?;
        Ok(Self::of(gpu, fault, comm, world, nccl.name()))
    }

    /// Wraps a communicator that the application created.
    pub(crate) fn adopt(
        gpu: &Arc<Gpu>,
        communicator: VendorCommunicator,
        (rank, world): (usize, usize),
        fault: &Arc<Fault>,
    ) -> Result<Self> {
        let nccl = Nccl::get()?;
        let (comm, place) = NcclComm::adopt(nccl, &gpu.context, communicator)?;
        check_adopted((place.rank, place.world), (rank, world))?;
        let ordinal = gpu.context.ordinal;
        if place.ordinal != ordinal {
            return Err(Error::mismatch(format!(
                "the communicator is of GPU {}; expected GPU {ordinal}",
                place.ordinal
            ))
            .with_operation("adopt a communicator")
            .with_help("pass one of the GPU that this rank uses"));
        }
        Ok(Self::of(gpu, fault, comm, world, nccl.name()))
    }

    fn of(gpu: &Arc<Gpu>, fault: &Arc<Fault>, comm: NcclComm, world: usize, name: String) -> Self {
        let comm = Arc::new(comm);
        gpu.collectives.add(&comm, fault);
        for fault in [&gpu.fault, fault] {
            fault.when_raised(&comm, |weak| {
                let end = move || {
                    if let Some(comm) = weak.upgrade() {
                        comm.abort();
                    }
                };
                // NCCL must not block the thread that raises a fault.
                if let Err(error) = threads::spawn("abort", end) {
                    tracing::warn!(%error, "NCCL was not shut down");
                }
            });
        }
        Self {
            gpu: gpu.clone(),
            fault: fault.clone(),
            comm,
            world,
            name,
            registered: Mutex::default(),
        }
    }
}

impl Drop for NcclEngine {
    fn drop(&mut self) {
        for registered in lock(&self.registered).drain(..) {
            let forgotten = self.comm.call("forget memory", |nccl, comm| {
                match nccl.ncclCommWindowDeregister {
                    // SAFETY: registered once with this communicator, and forgotten once.
                    Some(deregister) => unsafe { deregister(comm, registered.window) },
                    None => 0,
                }
            });
            if let Err(error) = forgotten
                && error.kind() != ErrorKind::Closed
            {
                tracing::warn!(%error, "NCCL did not deregister memory");
            }
        }
    }
}

/// Device memory as an NCCL pointer.
fn pointer(slice: &DeviceSlice) -> *mut c_void {
    slice.address() as usize as *mut c_void
}

impl CollectiveEngine for NcclEngine {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn enqueue(&self, stream: &Stream, request: &CollectiveRequest) -> Result<()> {
        request.check(self.world)?;
        for slice in request.slices() {
            CudaBacking::of(slice)?;
        }
        let stream = CudaStream::of(stream, &self.gpu)?;
        let _noted = stream.faults().add([&self.fault]);
        let (_, _entered) = stream.enter()?;
        let _relaxed = self.gpu.context.relax_capture();
        let _enqueuing = stream.enqueue(request.slices());
        self.comm
            .call(request.name(), |nccl, comm| {
                // SAFETY: the slices are live device memory of fitting lengths, and ranks are below
                // the world, as was checked; stream and communicator are of the current context.
                unsafe { issue(nccl, comm, stream.raw_stream().cast(), request, self.world) }
            })
            // Report the fault rather than its consequence.
            .map_err(|error| {
                let raised = self.gpu.fault.check().and_then(|()| self.fault.check());
                raised.err().unwrap_or(error)
            })
    }

    fn register(&self, slice: &DeviceSlice) -> Result<()> {
        CudaBacking::of(slice)?;
        let unsupported = |text: String| {
            Err(Error::unsupported(text)
                .with_operation("register memory with NCCL")
                .with_help("use NCCL 2.27 or later and virtual memory"))
        };
        let _entered = self.gpu.context.enter_relaxed()?;
        let mut window: Window = std::ptr::null_mut();
        let mut known = true;
        self.comm.call("register memory with NCCL", |nccl, comm| {
            let Some(register) = nccl.ncclCommWindowRegister else {
                known = false;
                return 0;
            };
            let (data, bytes) = (pointer(slice), slice.bytes());
            // SAFETY: the slice is live device memory of that many bytes, which is kept until NCCL has forgotten
            // it; `window` is an output parameter for one handle; the GPU's context is current.
            unsafe { register(comm, data, bytes, &mut window, SYMMETRIC) }
        })?;
        if !known {
            return unsupported(format!("{} cannot register memory", self.name));
        }
        // NCCL returns a null window for memory that it cannot use.
        if window.is_null() {
            return unsupported(format!("{} does not take {slice:?}", self.name));
        }
        lock(&self.registered).push(Registered {
            window,
            _memory: slice.clone(),
        });
        Ok(())
    }

    fn raw_communicator(&self) -> *mut c_void {
        self.comm.raw()
    }

    fn abort(&self) {
        self.comm.abort();
    }
}

/// Issues the NCCL calls for `request` and returns the status.
///
/// # Safety
/// `request` must have passed its check for `world` ranks and name live device memory; `comm` must
/// be a communicator of `world` ranks, and `stream` a stream, of the current context.
unsafe fn issue(
    nccl: &Nccl,
    comm: NcclHandle,
    stream: *mut c_void,
    request: &CollectiveRequest,
    world: usize,
) -> c_int {
    let (collective, dtype, target, source) = match request {
        CollectiveRequest::Exchange { sends, receives } => {
            return group(nccl, || {
                let sent = sends.iter().map(|(rank, slice)| {
                    let (data, bytes, rank) = (pointer(slice), slice.bytes(), *rank as c_int);
                    // SAFETY: the caller vouches for memory, rank, communicator and stream.
                    unsafe { (nccl.ncclSend)(data, bytes, BYTES, rank, comm, stream) }
                });
                let received = receives.iter().map(|(rank, slice)| {
                    let (data, bytes, rank) = (pointer(slice), slice.bytes(), *rank as c_int);
                    // SAFETY: as above.
                    unsafe { (nccl.ncclRecv)(data, bytes, BYTES, rank, comm, stream) }
                });
                sent.chain(received).find(|code| *code != 0).unwrap_or(0)
            });
        }
        CollectiveRequest::Collective {
            collective,
            dtype,
            target,
            source,
        } => (*collective, *dtype, target, source),
    };
    let (from, to, bytes) = (pointer(source), pointer(target), source.bytes());
    let (elements, data_type) = (bytes / dtype.size(), data_type(dtype));
    match collective {
        // SAFETY: the caller vouches for memory of fitting lengths, communicator and stream.
        Collective::AllGather => unsafe {
            (nccl.ncclAllGather)(from, to, bytes, BYTES, comm, stream)
        },
        Collective::AllReduce(op) => {
            // SAFETY: as above.
            let reduce = |op| unsafe {
                (nccl.ncclAllReduce)(from, to, elements, data_type, op, comm, stream)
            };
            // SAFETY: the caller vouches for the communicator.
            unsafe { with_operator(nccl, comm, (op, dtype), reduce) }
        }
        Collective::ReduceScatter(op) => {
            let elements = target.bytes() / dtype.size();
            // SAFETY: as above.
            let reduce = |op| unsafe {
                (nccl.ncclReduceScatter)(from, to, elements, data_type, op, comm, stream)
            };
            // SAFETY: the caller vouches for the communicator.
            unsafe { with_operator(nccl, comm, (op, dtype), reduce) }
        }
        // SAFETY: as above, and for the root.
        Collective::Broadcast(root) => unsafe {
            (nccl.ncclBroadcast)(from, to, bytes, BYTES, root as c_int, comm, stream)
        },
        Collective::Reduce(op, root) => {
            let root = root as c_int;
            // SAFETY: as above, and for the root.
            let reduce = |op| unsafe {
                (nccl.ncclReduce)(from, to, elements, data_type, op, root, comm, stream)
            };
            // SAFETY: the caller vouches for the communicator.
            unsafe { with_operator(nccl, comm, (op, dtype), reduce) }
        }
        Collective::AllToAll => group(nccl, || {
            let part = bytes / world;
            let mut codes = (0..world).map(|peer| {
                let from = from.wrapping_byte_add(peer * part);
                let to = to.wrapping_byte_add(peer * part);
                let peer = peer as c_int;
                // SAFETY: part `peer` of both slices; otherwise as above.
                let sent = unsafe { (nccl.ncclSend)(from, part, BYTES, peer, comm, stream) };
                // SAFETY: as above.
                let received = unsafe { (nccl.ncclRecv)(to, part, BYTES, peer, comm, stream) };
                if sent != 0 { sent } else { received }
            });
            codes.find(|code| *code != 0).unwrap_or(0)
        }),
    }
}

/// Runs several calls as one NCCL group.
fn group(nccl: &Nccl, calls: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: the function has no arguments; the group is ended below on this thread.
    let started = unsafe { (nccl.ncclGroupStart)() };
    if started != 0 {
        return started;
    }
    let called = calls();
    // SAFETY: started above on this thread.
    let ended = unsafe { (nccl.ncclGroupEnd)() };
    if called != 0 { called } else { ended }
}

/// The first two ranks whose messages name the same GPU.
fn on_one_gpu(answers: &[Vec<u8>]) -> Option<(usize, usize)> {
    let gpu = |rank: usize| answers.get(rank)?.get(1..1 + IDENTITY);
    (0..answers.len()).find_map(|second| {
        let found = (0..second).find(|&first| gpu(first).is_some() && gpu(first) == gpu(second));
        found.map(|first| (first, second))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_on_one_gpu_are_found() {
        let answer = |gpu: u8| [&[READY][..], &[gpu; IDENTITY]].concat();
        assert_eq!(on_one_gpu(&[answer(0), answer(1), answer(2)]), None);
        assert_eq!(on_one_gpu(&[answer(0), answer(1), answer(0)]), Some((0, 2)));
        // Empty messages are rejected elsewhere.
        assert_eq!(on_one_gpu(&[Vec::new(), Vec::new()]), None);
    }
}

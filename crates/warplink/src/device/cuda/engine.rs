//! The vendor's collectives, over NCCL.

use super::gpu::Gpu;
use super::memory::CudaBacking;
use super::nccl::{Handle, Nccl, NcclComm, UNIQUE_ID};
use super::quiet;
use super::stream::CudaStream;
use crate::device::{CollectiveEngine, DeviceSlice, ReduceOp, Stream, UniqueBytesExchange};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Rank, Result};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// `ncclUint8`, for what is only moved.
const BYTES: c_int = 1;

/// What a rank says first: whether it can join.
const READY: u8 = 1;

/// Collectives of all ranks.
#[derive(Debug)]
pub(super) struct NcclEngine {
    gpu: Arc<Gpu>,
    /// Held apart, so that a fault ends it also while a call holds this.
    comm: Arc<NcclComm>,
    world: usize,
    name: String,
}

impl NcclEngine {
    /// Joins the other ranks.
    pub(super) fn join(
        gpu: &Arc<Gpu>,
        rank: usize,
        world: usize,
        exchange: UniqueBytesExchange<'_>,
    ) -> Result<Self> {
        let number = |value: usize| {
            c_int::try_from(value)
                .map_err(|_| Error::invalid(format!("{value} is too large for NCCL")))
        };
        if rank >= world {
            return Err(Error::invalid(format!(
                "rank {rank} is not in a world of {world}"
            )));
        }
        let ranks = (number(rank)?, number(world)?);
        // A rank that cannot join says so, since the others would wait for it.
        let nccl = Nccl::get();
        let id = match &nccl {
            Ok(nccl) if rank == 0 => nccl.unique_id().map(|id| id.to_vec()),
            Ok(_) => Ok(Vec::new()),
            Err(error) => Err(error.clone()),
        };
        let mut mine = vec![u8::from(id.is_ok())];
        mine.extend(id.as_deref().unwrap_or_default());
        let everybodys = exchange(mine)?;
        let nccl = nccl?;
        id?;
        if let Some(peer) = everybodys
            .iter()
            .position(|said| said.first() != Some(&READY))
        {
            return Err(Error::new(ErrorKind::Mismatch, "a rank has no NCCL")
                .during("join NCCL")
                .peer(peer));
        }
        let id: [u8; UNIQUE_ID] = everybodys
            .first()
            .and_then(|said| said.get(1..))
            .and_then(|id| id.try_into().ok())
            .ok_or_else(|| {
                Error::new(ErrorKind::Protocol, "rank 0 gave no id")
                    .during("join NCCL")
                    .peer(0)
            })?;
        let comm = NcclComm::join(nccl, &gpu.context, id, ranks.0, ranks.1, || {
            gpu.fault.check()
        })?;
        let comm = Arc::new(comm);
        let weak = Arc::downgrade(&comm);
        gpu.fault.when_raised(move || {
            let end = move || {
                if let Some(comm) = weak.upgrade() {
                    comm.abort();
                }
            };
            // Whoever raises a fault must not be held up by NCCL.
            if let Err(error) = std::thread::Builder::new()
                .name("warplink-nccl-abort".to_owned())
                .spawn(end)
            {
                tracing::warn!(%error, "NCCL is not ended");
            }
        });
        Ok(Self {
            gpu: gpu.clone(),
            comm,
            world,
            name: nccl.describe(),
        })
    }

    /// Runs one call with the GPU's context current.
    fn call(
        &self,
        operation: &'static str,
        stream: &Stream,
        slices: &[&DeviceSlice],
        call: impl FnOnce(&Nccl, Handle, *mut c_void) -> c_int,
    ) -> Result<()> {
        slices
            .iter()
            .try_for_each(|slice| CudaBacking::of(slice).map(drop))?;
        let stream = CudaStream::of(stream, &self.gpu)?;
        let (_, _entered) = stream.enter()?;
        let _relaxed = self.gpu.context.relax_capture();
        let _enqueuing = quiet::enqueuing();
        // What failed because of a fault is that fault.
        self.comm
            .call(operation, |nccl, comm| {
                call(nccl, comm, stream.handle().cast())
            })
            .map_err(|error| self.gpu.fault.check().err().unwrap_or(error))
    }

    /// Runs several calls as one.
    fn group(
        &self,
        operation: &'static str,
        stream: &Stream,
        slices: &[&DeviceSlice],
        calls: impl FnOnce(&Nccl, Handle, *mut c_void) -> c_int,
    ) -> Result<()> {
        self.call(operation, stream, slices, |nccl, comm, stream| {
            // SAFETY: the function takes nothing; the group is ended below on this thread.
            let started = unsafe { (nccl.ncclGroupStart)() };
            if started != 0 {
                return started;
            }
            let called = calls(nccl, comm, stream);
            // SAFETY: started just above on this thread.
            let ended = unsafe { (nccl.ncclGroupEnd)() };
            if called != 0 { called } else { ended }
        })
    }

    fn check_rank(&self, rank: Rank) -> Result<c_int> {
        if rank >= self.world {
            return Err(
                Error::invalid(format!("rank {rank} is not in a world of {}", self.world))
                    .peer(rank),
            );
        }
        c_int::try_from(rank)
            .map_err(|_| Error::invalid(format!("rank {rank} is too large for NCCL")))
    }
}

/// Device memory as NCCL takes it.
fn pointer(slice: &DeviceSlice) -> *mut c_void {
    slice.address() as usize as *mut c_void
}

fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => BYTES,
        DType::I32 => 2,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
    }
}

fn operator(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
    }
}

/// Fails unless `whole` is `times` as long as `part`.
fn check_lengths(
    operation: &'static str,
    whole: &DeviceSlice,
    times: usize,
    part: &DeviceSlice,
) -> Result<()> {
    if part.bytes().checked_mul(times) == Some(whole.bytes()) {
        return Ok(());
    }
    let text = format!(
        "{} bytes on one side and {} on the other, {times} of which should make it",
        whole.bytes(),
        part.bytes()
    );
    Err(Error::invalid(text).during(operation))
}

/// Elements of a slice.
fn elements(operation: &'static str, slice: &DeviceSlice, dtype: DType) -> Result<usize> {
    if slice.bytes().is_multiple_of(dtype.size()) {
        return Ok(slice.bytes() / dtype.size());
    }
    Err(Error::invalid(format!(
        "{} bytes are no whole number of {dtype} elements",
        slice.bytes()
    ))
    .during(operation))
}

impl CollectiveEngine for NcclEngine {
    fn describe(&self) -> String {
        self.name.clone()
    }

    fn all_gather(
        &self,
        stream: &Stream,
        target: &DeviceSlice,
        source: &DeviceSlice,
    ) -> Result<()> {
        check_lengths("all-gather", target, self.world, source)?;
        self.call(
            "all-gather",
            stream,
            &[target, source],
            |nccl, comm, stream| {
                // SAFETY: the slices are live device memory of fitting lengths, as was checked; stream
                // and communicator are of the current context.
                unsafe {
                    (nccl.ncclAllGather)(
                        pointer(source),
                        pointer(target),
                        source.bytes(),
                        BYTES,
                        comm,
                        stream,
                    )
                }
            },
        )
    }

    fn all_reduce(
        &self,
        stream: &Stream,
        dtype: DType,
        op: ReduceOp,
        target: &DeviceSlice,
        source: &DeviceSlice,
    ) -> Result<()> {
        check_lengths("all-reduce", target, 1, source)?;
        let count = elements("all-reduce", source, dtype)?;
        let (dtype, op) = (data_type(dtype), operator(op));
        self.call(
            "all-reduce",
            stream,
            &[target, source],
            |nccl, comm, stream| {
                // SAFETY: as for all-gather.
                unsafe {
                    (nccl.ncclAllReduce)(
                        pointer(source),
                        pointer(target),
                        count,
                        dtype,
                        op,
                        comm,
                        stream,
                    )
                }
            },
        )
    }

    fn reduce_scatter(
        &self,
        stream: &Stream,
        dtype: DType,
        op: ReduceOp,
        target: &DeviceSlice,
        source: &DeviceSlice,
    ) -> Result<()> {
        check_lengths("reduce-scatter", source, self.world, target)?;
        let count = elements("reduce-scatter", target, dtype)?;
        let (dtype, op) = (data_type(dtype), operator(op));
        self.call(
            "reduce-scatter",
            stream,
            &[target, source],
            |nccl, comm, stream| {
                // SAFETY: as for all-gather.
                unsafe {
                    (nccl.ncclReduceScatter)(
                        pointer(source),
                        pointer(target),
                        count,
                        dtype,
                        op,
                        comm,
                        stream,
                    )
                }
            },
        )
    }

    fn broadcast(
        &self,
        stream: &Stream,
        root: Rank,
        target: &DeviceSlice,
        source: &DeviceSlice,
    ) -> Result<()> {
        check_lengths("broadcast", target, 1, source)?;
        let root = self.check_rank(root)?;
        self.call(
            "broadcast",
            stream,
            &[target, source],
            |nccl, comm, stream| {
                // SAFETY: as for all-gather.
                unsafe {
                    (nccl.ncclBroadcast)(
                        pointer(source),
                        pointer(target),
                        source.bytes(),
                        BYTES,
                        root,
                        comm,
                        stream,
                    )
                }
            },
        )
    }

    fn reduce(
        &self,
        stream: &Stream,
        dtype: DType,
        op: ReduceOp,
        root: Rank,
        target: &DeviceSlice,
        source: &DeviceSlice,
    ) -> Result<()> {
        check_lengths("reduce", target, 1, source)?;
        let count = elements("reduce", source, dtype)?;
        let (dtype, op, root) = (data_type(dtype), operator(op), self.check_rank(root)?);
        self.call("reduce", stream, &[target, source], |nccl, comm, stream| {
            // SAFETY: as for all-gather.
            unsafe {
                (nccl.ncclReduce)(
                    pointer(source),
                    pointer(target),
                    count,
                    dtype,
                    op,
                    root,
                    comm,
                    stream,
                )
            }
        })
    }

    fn all_to_all(
        &self,
        stream: &Stream,
        target: &DeviceSlice,
        source: &DeviceSlice,
    ) -> Result<()> {
        check_lengths("all-to-all", target, 1, source)?;
        if !source.bytes().is_multiple_of(self.world) {
            let text = format!(
                "{} bytes do not divide among {} ranks",
                source.bytes(),
                self.world
            );
            return Err(Error::invalid(text).during("all-to-all"));
        }
        let part = source.bytes() / self.world;
        self.group(
            "all-to-all",
            stream,
            &[target, source],
            |nccl, comm, stream| {
                (0..self.world)
                    .map(|peer| {
                        let (from, to) = (
                            pointer(source).wrapping_byte_add(peer * part),
                            pointer(target).wrapping_byte_add(peer * part),
                        );
                        let peer = peer as c_int;
                        // SAFETY: part `peer` of both slices; otherwise as for all-gather.
                        let sent =
                            unsafe { (nccl.ncclSend)(from, part, BYTES, peer, comm, stream) };
                        // SAFETY: as above.
                        let received =
                            unsafe { (nccl.ncclRecv)(to, part, BYTES, peer, comm, stream) };
                        if sent != 0 { sent } else { received }
                    })
                    .find(|code| *code != 0)
                    .unwrap_or(0)
            },
        )
    }

    fn exchange(
        &self,
        stream: &Stream,
        sends: &[(Rank, DeviceSlice)],
        receives: &[(Rank, DeviceSlice)],
    ) -> Result<()> {
        for (rank, slice) in sends.iter().chain(receives) {
            self.check_rank(*rank)?;
            CudaBacking::of(slice)?;
        }
        self.group("exchange", stream, &[], |nccl, comm, stream| {
            let sent = sends.iter().map(|(rank, slice)| {
                // SAFETY: the slice is live device memory; stream and communicator are of the
                // current context.
                unsafe {
                    (nccl.ncclSend)(
                        pointer(slice),
                        slice.bytes(),
                        BYTES,
                        *rank as c_int,
                        comm,
                        stream,
                    )
                }
            });
            let received = receives.iter().map(|(rank, slice)| {
                // SAFETY: as above.
                unsafe {
                    (nccl.ncclRecv)(
                        pointer(slice),
                        slice.bytes(),
                        BYTES,
                        *rank as c_int,
                        comm,
                        stream,
                    )
                }
            });
            sent.chain(received).find(|code| *code != 0).unwrap_or(0)
        })
    }

    fn abort(&self) {
        self.comm.abort();
    }
}

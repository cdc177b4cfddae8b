//! Engine path: the vendor's library, for ranks that cannot map one another's memory.

use super::MAX_DIRECT_RANKS;
use super::call::{Call, CollectiveKind, Overlap, moved_parts};
use super::comparison::CallComparison;
use crate::debug::debug_text;
use crate::device::{
    AllocationKind, Collective, CollectiveEngine, CollectiveRequest, Device, DeviceSlice, Priority,
    ReduceOp, Stream, VendorCommunicator,
};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::execute::RankContext;
use crate::sync::lock;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// Bytes that each rank contributes to a barrier, which is an all-gather.
const BARRIER_BYTES: usize = 16;

/// The engine, and staging memory for collectives that it lacks.
pub(super) struct EngineCollectives {
    rank: Rank,
    world: usize,
    device: Arc<dyn Device>,
    engine: Arc<dyn CollectiveEngine>,
    barrier: DeviceSlice,
    /// Comparison of calls between ranks.
    pub(super) comparison: Arc<CallComparison>,
    /// Staging for inputs that their outputs overwrite, by increasing length. Shorter ones are kept for
    /// graphs that use them.
    staging: Mutex<Vec<DeviceSlice>>,
}

impl EngineCollectives {
    /// Joins the engine, or adopts the application's communicator. Collective; blocks until all ranks have
    /// joined.
    pub(super) fn join(context: &RankContext, adopted: Option<VendorCommunicator>) -> Result<Self> {
        let (rank, world) = (context.rank(), context.world());
        let engine = match adopted {
            Some(communicator) => {
                let (device, fault) = (&context.device, &context.fault);
                let adopted = device.adopt_collective_engine(communicator, rank, world, fault);
                context.agree_on(adopted)
            }
            None => context.engines.of_all(),
        };
        let engine = engine.map_err(|error| with_reason(error, world))?;
        let zeros = || {
            // An input of one element and an output of `world`: an all-gather serves as barrier.
            let bytes = BARRIER_BYTES * (world + 1);
            let barrier = context.device.allocate(bytes, AllocationKind::Plain)?;
            let stream = context.device.create_stream(Priority::Normal)?;
            stream.fill(&barrier, 0)?;
            stream.synchronize(context.deadline())?;
            Ok(barrier)
        };
        // Registered before other ranks can send statements.
        let comparison = CallComparison::new(&context.group, &context.fault);
        // Collective: fails on all ranks if one fails.
        let barrier = context.agree_on(zeros())?;
        Ok(Self {
            device: context.device.clone(),
            rank,
            world,
            engine,
            barrier,
            comparison,
            staging: Mutex::default(),
        })
    }

    /// A staging buffer of at least `bytes`. Calls are serialized, so all may use it.
    fn staging(&self, bytes: usize) -> Result<DeviceSlice> {
        let mut all = lock(&self.staging);
        let last = all.last().filter(|last| last.bytes() >= bytes);
        if let Some(last) = last {
            return last.slice(0..bytes);
        }
        // Doubling bounds the total at twice the longest.
        let most = all.last().map_or(0, DeviceSlice::bytes);
        let memory = self
            .device
            .allocate(bytes.max(2 * most), AllocationKind::Plain)
            // Short of memory, only what is needed.
            .or_else(|_| self.device.allocate(bytes, AllocationKind::Plain))?;
        all.push(memory.clone());
        memory.slice(0..bytes)
    }

    /// The library's communicator.
    pub(super) fn communicator(&self) -> *mut c_void {
        self.engine.raw_communicator()
    }

    /// Enqueues or captures a call. Calls are serialized.
    pub(super) fn enqueue(
        &self,
        call: &Call,
        tensors: &[&DeviceSlice],
        overlap: Overlap,
        (stream, is_recorded): (&Stream, bool),
    ) -> Result<()> {
        // The library does not compare calls between ranks, so record them.
        self.comparison.note(call, is_recorded, || {
            self.enqueue_noted(call, tensors, overlap, stream)
        })
    }

    fn enqueue_noted(
        &self,
        call: &Call,
        tensors: &[&DeviceSlice],
        overlap: Overlap,
        stream: &Stream,
    ) -> Result<()> {
        let root = call.root.unwrap_or(0);
        // Defaults for kinds that have neither; `checked` has refused a call that lacks what it needs.
        let op = call.op.unwrap_or(ReduceOp::Sum);
        let (source, target) = match tensors {
            // The library has no in-place all-to-all.
            [source, target]
                if (call.kind, overlap) == (CollectiveKind::AllToAll, Overlap::Shared) =>
            {
                let staged = self.staging(source.bytes())?;
                stream.copy(&staged, source)?;
                (staged, (*target).clone())
            }
            [source, target] => ((*source).clone(), (*target).clone()),
            _ => (
                self.barrier.slice(0..BARRIER_BYTES)?,
                self.barrier.slice(BARRIER_BYTES..self.barrier.bytes())?,
            ),
        };
        let collective = match call.kind {
            // A barrier if there is no data.
            _ if tensors.is_empty() => Collective::AllGather,
            CollectiveKind::AllReduce => Collective::AllReduce(op),
            CollectiveKind::AllGather | CollectiveKind::Barrier => Collective::AllGather,
            CollectiveKind::ReduceScatter => Collective::ReduceScatter(op),
            CollectiveKind::AllToAll => Collective::AllToAll,
            CollectiveKind::Broadcast => Collective::Broadcast(root),
            CollectiveKind::Reduce => Collective::Reduce(op, root),
            CollectiveKind::Gather | CollectiveKind::Scatter => {
                return self.exchange(call, (&source, &target), stream);
            }
        };
        let request = CollectiveRequest::Collective {
            collective,
            dtype: call.dtype,
            target,
            source,
        };
        self.engine.enqueue(stream, &request)
    }

    /// Enqueues a prepared request.
    pub(super) fn request(&self, request: &CollectiveRequest, stream: &Stream) -> Result<()> {
        self.engine.enqueue(stream, request)
    }

    /// A gather or scatter: the root copies its own part and exchanges the others.
    fn exchange(
        &self,
        call: &Call,
        (source, target): (&DeviceSlice, &DeviceSlice),
        stream: &Stream,
    ) -> Result<()> {
        let [mut sends, mut receives] =
            moved_parts(call, (self.rank, self.world), (target, source))?;
        let take_own = |parts: &mut Vec<(Rank, DeviceSlice)>| {
            parts.extract_if(.., |(peer, _)| *peer == self.rank).next()
        };
        // In place, the root's own part is already there.
        if let (Some((_, from)), Some((_, to))) = (take_own(&mut sends), take_own(&mut receives))
            && from.address() != to.address()
        {
            stream.copy(&to, &from)?;
        }
        let request = CollectiveRequest::Exchange { sends, receives };
        self.engine.enqueue(stream, &request)
    }
}

/// Error for asking for the algorithm of a call that the vendor's library executes.
pub(super) fn no_choice(call: &Call) -> Error {
    Error::unsupported(format!(
        "the vendor's library does {call}; expected the direct path to do it"
    ))
    .with_operation(call.kind.name())
    .with_help("ask path_of which path does a call")
}

/// Adds to a missing-library error why the library is needed.
fn with_reason(error: Error, world: usize) -> Error {
    if error.kind() != ErrorKind::LibraryMissing {
        return error;
    }
    if world > MAX_DIRECT_RANKS {
        return error.with_operation(format!(
            "join the collectives of {world} ranks, more than the {MAX_DIRECT_RANKS} of the direct path"
        ));
    }
    error.with_operation("join the collectives of ranks that cannot map one another's memory")
}

debug_text!(EngineCollectives, |it| "EngineCollectives({:?})", it.engine);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_library_error_names_its_purpose() {
        let message = |kind, world| {
            let error = Error::new(kind, "NCCL was not found").with_help("install NCCL");
            with_reason(error, world).to_string()
        };
        let nine = message(ErrorKind::LibraryMissing, MAX_DIRECT_RANKS + 1);
        let expected = "join the collectives of 9 ranks, more than the 8 of the direct path: NCCL was not found";
        assert!(
            nine.contains(expected) && nine.contains("install NCCL"),
            "{nine}"
        );
        let eight = message(ErrorKind::LibraryMissing, MAX_DIRECT_RANKS);
        assert!(
            eight.contains("of ranks that cannot map one another's memory: NCCL"),
            "{eight}"
        );
        assert!(!message(ErrorKind::Unsupported, 9).contains("join the collectives"));
    }
}

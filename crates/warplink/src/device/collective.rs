//! The vendor's collectives, as a peer to compare with and to hand over to.

use super::reduce_op::ReduceOp;
use super::slice::DeviceSlice;
use super::stream::Stream;
use crate::deadline::Deadline;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Rank, Result};
use std::ffi::c_void;
use std::fmt;

/// Gathers one byte string from every rank, in rank order; what an engine joins with.
pub type AllGatherBytes<'a> = &'a mut dyn FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>>;

/// Which collective. `Root` is a rank, or an expression for one in the text of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective<Root = Rank> {
    /// The target is every rank's source, in rank order.
    AllGather,
    /// The target is the reduction of every rank's source.
    AllReduce(ReduceOp),
    /// The target is this rank's part of the reduction of every rank's source.
    ReduceScatter(ReduceOp),
    /// The target is the root's source.
    Broadcast(Root),
    /// On the root, the target is the reduction of every rank's source.
    Reduce(ReduceOp, Root),
    /// Part p of the target is this rank's part of rank p's source.
    AllToAll,
}

impl<Root> Collective<Root> {
    /// Its name in program text and in errors.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::AllReduce(_) => "all_reduce",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::Broadcast(_) => "broadcast",
            Self::Reduce(..) => "reduce",
            Self::AllToAll => "all_to_all",
        }
    }
}

impl<Root: fmt::Display> Collective<Root> {
    /// What follows the source in program text: `, sum`, ` from 2`, `, max to 0`.
    pub fn arguments(&self) -> String {
        match self {
            Self::AllGather | Self::AllToAll => String::new(),
            Self::AllReduce(op) | Self::ReduceScatter(op) => format!(", {op}"),
            Self::Broadcast(root) => format!(" from {root}"),
            Self::Reduce(op, root) => format!(", {op} to {root}"),
        }
    }
}

/// What an engine is asked to enqueue.
#[derive(Clone, Debug)]
pub enum CollectiveRequest {
    /// A collective of all ranks.
    Collective {
        /// Which.
        collective: Collective,
        /// The type of the elements, for those that reduce.
        dtype: DType,
        /// What is written.
        target: DeviceSlice,
        /// What is read.
        source: DeviceSlice,
    },
    /// Sends and receives, all at once: none waits for another of the same request.
    Exchange {
        /// To whom, and what.
        sends: Vec<(Rank, DeviceSlice)>,
        /// From whom, and where to.
        receives: Vec<(Rank, DeviceSlice)>,
    },
}

impl CollectiveRequest {
    /// Its name, for errors.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Collective { collective, .. } => collective.name(),
            Self::Exchange { .. } => "exchange",
        }
    }

    /// All device memory that it names.
    pub fn slices(&self) -> Vec<&DeviceSlice> {
        match self {
            Self::Collective { target, source, .. } => vec![target, source],
            Self::Exchange { sends, receives } => {
                let both = sends.iter().chain(receives);
                both.map(|(_, slice)| slice).collect()
            }
        }
    }

    /// Fails where lengths do not fit together in a world of `world` ranks, or a rank is not in it.
    pub(crate) fn check(&self, world: usize) -> Result<()> {
        let checked = match self {
            Self::Collective {
                collective,
                dtype,
                target,
                source,
            } => check_collective(*collective, *dtype, target.bytes(), source.bytes(), world),
            Self::Exchange { sends, receives } => {
                let mut both = sends.iter().chain(receives);
                both.try_for_each(|(peer, _)| check_rank(*peer, world))
            }
        };
        checked.map_err(|error| error.with_operation(self.name()))
    }
}

/// A set of sends and receives that a rank does at once, after it has told its peers what it calls.
#[derive(Clone, Debug, Default)]
pub struct RankCall {
    /// What it tells each peer, and what that is expected to tell. Every peer tells as many bytes.
    pub said: Vec<Said>,
    /// To whom, and what.
    pub sends: Vec<(Rank, DeviceSlice)>,
    /// From whom, and where to.
    pub receives: Vec<(Rank, DeviceSlice)>,
    /// How what is received is combined; it is as long as the memory of each receive, which is not written then.
    pub reduction: Option<Reduction>,
}

/// What two ranks tell each other of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// The other rank.
    pub peer: Rank,
    /// What this rank tells.
    pub told: Vec<u8>,
    /// What the other is expected to tell.
    pub expected: Vec<u8>,
}

/// A reduction of what all peers send with what this rank has, in the order of ranks.
#[derive(Clone, Debug)]
pub struct Reduction {
    /// The operator.
    pub op: ReduceOp,
    /// The type of the elements.
    pub dtype: DType,
    /// What this rank has.
    pub own: DeviceSlice,
    /// What is written; it may be what is sent.
    pub target: DeviceSlice,
}

/// A communicator of the vendor's library that the application has (`ncclComm_t` on GPUs), to be adopted: calls that
/// go to the library use it, where it would make one of its own otherwise.
///
/// It stays the application's, which destroys it. Nothing here does, and nothing here aborts it: where a rank is lost,
/// calls fail with an error that names it, but what stands in streams inside the library ends only when the
/// application aborts the communicator.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct VendorCommunicator(usize);

impl VendorCommunicator {
    /// The communicator `raw` of the library.
    ///
    /// # Safety
    /// `raw` is a communicator of the library that is loaded here, for this rank's device, whose calls block (NCCL's
    /// default). It is not destroyed before everything that adopted it has been dropped and the streams that its calls were
    /// enqueued on are done, and aborted only once an error has told that a rank is lost. While a call is made, no other
    /// thread makes one with it, unless the library allows that.
    pub unsafe fn from_raw(raw: *mut c_void) -> Self {
        Self(raw as usize)
    }

    /// What the library takes.
    pub fn as_raw(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}

/// Without the address, which is another on every rank.
impl fmt::Debug for VendorCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VendorCommunicator")
    }
}

/// The collectives of all ranks. Every rank enqueues the same ones in the same order with fitting
/// lengths.
pub trait CollectiveEngine: Send + Sync + fmt::Debug {
    /// Name and version, for tables.
    fn name(&self) -> String;

    /// Enqueues `request` on `stream`. Does not block.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where lengths do not fit
    /// together or a rank is out of range;
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed) once the engine was aborted.
    fn enqueue(&self, stream: &Stream, request: &CollectiveRequest) -> Result<()>;

    /// Does `call` on this thread, and blocks until it is done. Where a peer tells something else than was expected, that
    /// is given, with the peer, and nothing more can be done with the engine.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) after the deadline;
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where the engine works in streams alone.
    fn call(&self, _: &RankCall, _: Deadline) -> Result<Option<(Rank, Vec<u8>)>> {
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("{} does no call outside of streams", self.name()),
        )
        .with_operation("call")
        .with_help("enqueue it"))
    }

    /// Tells the engine of memory that later requests name, which it may then access at all ranks directly.
    /// Every rank calls it at the same time with as many bytes. Blocks until all have. The engine keeps the
    /// memory for as long as it lives.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where the engine, or this kind of memory,
    /// cannot be accessed so.
    fn register(&self, slice: &DeviceSlice) -> Result<()> {
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("{} cannot register {slice:?}", self.name()),
        )
        .with_operation("register memory")
        .with_help("use it as it is: nothing needs to be registered"))
    }

    /// The library's communicator, for calls of the library itself; null once it was aborted. It is the engine's, and
    /// valid for as long as that lives.
    fn raw_communicator(&self) -> *mut c_void;

    /// Ends what is under way, so that a lost peer does not hold this rank. Of an adopted communicator, it only ends
    /// its use here.
    fn abort(&self);
}

fn check_collective(
    collective: Collective,
    dtype: DType,
    target: usize,
    source: usize,
    world: usize,
) -> Result<()> {
    // The shorter side, how often it makes the longer one, and whether elements are reduced.
    let (part, whole, times, reduces) = match collective {
        Collective::AllGather => (source, target, world, false),
        Collective::ReduceScatter(_) => (target, source, world, true),
        Collective::AllReduce(_) | Collective::Reduce(..) => (source, target, 1, true),
        Collective::Broadcast(_) | Collective::AllToAll => (source, target, 1, false),
    };
    if part.checked_mul(times) != Some(whole) {
        return Err(Error::invalid(format!(
            "the target has {target} bytes and the source {source}; \
             expected one to be {times} times the other"
        ))
        .with_help("pass slices of fitting lengths"));
    }
    if collective == Collective::AllToAll && !source.is_multiple_of(world) {
        return Err(Error::invalid(format!(
            "the source has {source} bytes; expected a multiple of the {world} ranks"
        ))
        .with_help("pass as many bytes for every rank"));
    }
    if reduces && !part.is_multiple_of(dtype.size()) {
        return Err(Error::invalid(format!(
            "a slice has {part} bytes; expected a multiple of the {} bytes of {dtype}",
            dtype.size()
        ))
        .with_help("pass whole elements"));
    }
    match collective {
        Collective::AllReduce(op) | Collective::ReduceScatter(op) => op.check(dtype),
        Collective::Reduce(op, root) => op.check(dtype).and_then(|()| check_rank(root, world)),
        Collective::Broadcast(root) => check_rank(root, world),
        Collective::AllGather | Collective::AllToAll => Ok(()),
    }
}

/// Fails unless a communicator that is adopted has the ranks that it is to serve.
pub(super) fn check_adopted(
    (rank, world): (Rank, usize),
    (expected_rank, expected_world): (Rank, usize),
) -> Result<()> {
    if (rank, world) == (expected_rank, expected_world) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Mismatch,
        format!(
            "the communicator has this process as rank {rank} of {world}; expected rank {expected_rank} of {expected_world}"
        ),
    )
    .with_operation("adopt a communicator")
    .with_help("pass one of the same ranks in the same order"))
}

fn check_rank(rank: Rank, world: usize) -> Result<()> {
    if rank < world {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "rank {rank} is out of range; expected a rank below {world}"
    ))
    .with_help("name a rank of the world")
    .with_peer(rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_and_roots_that_do_not_fit_are_refused() {
        let check = |collective, target, source| {
            check_collective(collective, DType::F32, target, source, 4).is_ok()
        };
        let (sum, all_to_all) = (ReduceOp::Sum, Collective::AllToAll);
        assert!(check(Collective::AllGather, 36, 9) && !check(Collective::AllGather, 35, 9));
        assert!(check(all_to_all, 12, 12) && !check(all_to_all, 10, 10));
        assert!(
            check(Collective::AllReduce(sum), 8, 8) && !check(Collective::AllReduce(sum), 9, 9)
        );
        let scatter = Collective::ReduceScatter(sum);
        assert!(check(scatter, 8, 32) && !check(scatter, 6, 24) && !check(scatter, 8, 8));
        assert!(check(Collective::Broadcast(3), 5, 5) && !check(Collective::Broadcast(4), 5, 5));
        assert!(check(Collective::Reduce(sum, 0), 4, 4));
        assert!(
            !check(Collective::Reduce(sum, 0), 4, 8) && !check(Collective::Reduce(sum, 9), 4, 4)
        );
    }
}

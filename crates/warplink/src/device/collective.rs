//! Collectives of the vendor's library, as a baseline and as a fallback.

use super::reduce_op::ReduceOp;
use super::slice::DeviceSlice;
use super::stream::Stream;
use crate::deadline::Deadline;
use crate::debug::debug_fields;
use crate::dtype::DType;
use crate::error::{Error, Rank, Result};
use crate::named::named;
use std::ffi::c_void;
use std::fmt;

/// Gathers one byte string from every rank, in rank order; used by engines to join.
pub type AllGatherBytes<'a> = &'a mut dyn FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>>;

named! {
    /// Kind of collective.
    #[non_exhaustive]
    pub enum CollectiveKind: "collective" {
        /// Every rank gets the reduction of all ranks' inputs.
        AllReduce = "all_reduce",
        /// Every rank gets the inputs of all, in rank order.
        AllGather = "all_gather",
        /// Every rank gets its part of the reduction of all ranks' inputs.
        ReduceScatter = "reduce_scatter",
        /// Part p of a rank's output is that rank's part of rank p's input.
        AllToAll = "all_to_all",
        /// Every rank gets the root's input.
        Broadcast = "broadcast",
        /// The root gets the reduction of all ranks' inputs.
        Reduce = "reduce",
        /// The root gets the inputs of all, in rank order.
        Gather = "gather",
        /// Every rank gets its part of the root's input.
        Scatter = "scatter",
        /// No rank proceeds until all have arrived.
        Barrier = "barrier",
    }
}

impl CollectiveKind {
    /// Whether it reduces, so that the element type matters.
    pub const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
    }

    /// Whether one rank has a special role.
    pub const fn has_root(self) -> bool {
        matches!(
            self,
            Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter
        )
    }

    /// Parts of the input and of the output, for `world` ranks.
    pub const fn rows(self, world: usize) -> (usize, usize) {
        match self {
            Self::AllReduce | Self::Broadcast | Self::Reduce => (1, 1),
            Self::AllGather | Self::Gather => (1, world),
            Self::ReduceScatter | Self::Scatter => (world, 1),
            Self::AllToAll => (world, world),
            Self::Barrier => (0, 0),
        }
    }
}

/// A collective of the engine. `Root` is a rank, or an expression for one in program text.
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
    /// Kind of the collective.
    pub const fn kind(&self) -> CollectiveKind {
        match self {
            Self::AllGather => CollectiveKind::AllGather,
            Self::AllReduce(_) => CollectiveKind::AllReduce,
            Self::ReduceScatter(_) => CollectiveKind::ReduceScatter,
            Self::Broadcast(_) => CollectiveKind::Broadcast,
            Self::Reduce(..) => CollectiveKind::Reduce,
            Self::AllToAll => CollectiveKind::AllToAll,
        }
    }

    /// Name in program text and errors.
    pub const fn name(&self) -> &'static str {
        self.kind().name()
    }
}

impl<Root: fmt::Display> Collective<Root> {
    /// Arguments after the source in program text: `, sum`, ` from 2`, `, max to 0`.
    pub fn arguments(&self) -> String {
        match self {
            Self::AllGather | Self::AllToAll => String::new(),
            Self::AllReduce(op) | Self::ReduceScatter(op) => format!(", {op}"),
            Self::Broadcast(root) => format!(" from {root}"),
            Self::Reduce(op, root) => format!(", {op} to {root}"),
        }
    }
}

/// A request to an engine.
#[derive(Clone, Debug)]
pub enum CollectiveRequest {
    /// A collective over all ranks.
    Collective {
        /// Kind.
        collective: Collective,
        /// Element type, for reductions.
        dtype: DType,
        /// Output.
        target: DeviceSlice,
        /// Input.
        source: DeviceSlice,
    },
    /// Sends and receives that progress concurrently: none waits for another of the same request.
    Exchange {
        /// Destination rank and data.
        sends: Vec<(Rank, DeviceSlice)>,
        /// Source rank and destination memory.
        receives: Vec<(Rank, DeviceSlice)>,
    },
}

impl CollectiveRequest {
    /// Name for errors.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Collective { collective, .. } => collective.name(),
            Self::Exchange { .. } => "exchange",
        }
    }

    /// All device memory that it references.
    pub fn slices(&self) -> Vec<&DeviceSlice> {
        match self {
            Self::Collective { target, source, .. } => vec![target, source],
            Self::Exchange { sends, receives } => {
                let both = sends.iter().chain(receives);
                both.map(|(_, slice)| slice).collect()
            }
        }
    }

    /// Validates lengths and ranks for a world of `world` ranks.
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

/// Sends and receives of one rank, preceded by an exchange of headers that describe the call.
#[derive(Clone, Debug, Default)]
pub struct RankCall {
    /// Header for each peer, and the header expected from it. All headers have the same length.
    pub headers: Vec<CallHeader>,
    /// Destination rank and data.
    pub sends: Vec<(Rank, DeviceSlice)>,
    /// Source rank and destination memory.
    pub receives: Vec<(Rank, DeviceSlice)>,
    /// Reduction of the received data. If present, it is as long as each receive, whose memory is then not
    /// written.
    pub reduction: Option<Reduction>,
}

/// Headers that two ranks exchange about a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallHeader {
    /// The other rank.
    pub peer: Rank,
    /// Header sent by this rank.
    pub sent: Vec<u8>,
    /// Header expected from the other rank.
    pub expected: Vec<u8>,
}

/// Reduction of the data of all peers and this rank, in rank order.
#[derive(Clone, Debug)]
pub struct Reduction {
    /// The operator.
    pub op: ReduceOp,
    /// The type of the elements.
    pub dtype: DType,
    /// This rank's contribution.
    pub own: DeviceSlice,
    /// Output; may alias the sent data.
    pub target: DeviceSlice,
}

/// A communicator of the vendor's library that the application owns (`ncclComm_t` on GPUs), adopted for calls
/// that go to the library instead of creating a new one.
///
/// The application keeps ownership and destroys it; nothing here destroys or aborts it. When a rank is lost,
/// calls fail with an error that names it, but work already inside the library in a stream ends only when the
/// application aborts the communicator.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct VendorCommunicator(usize);

impl VendorCommunicator {
    /// Wraps the library's communicator `raw`.
    ///
    /// # Safety
    /// `raw` must be a communicator of the library that is loaded here, for this rank's device, with blocking
    /// calls (NCCL's default). It must stay valid until everything that adopted it has been dropped and the
    /// streams with its calls are complete, and may be aborted only after an error has reported a lost rank.
    /// No other thread may use it during a call unless the library allows that.
    pub unsafe fn from_raw(raw: *mut c_void) -> Self {
        Self(raw as usize)
    }

    /// The library's pointer.
    pub fn as_raw(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}

// Omits the address, which differs between ranks.
debug_fields!(VendorCommunicator);

/// Collectives over all ranks. Every rank must enqueue the same ones in the same order with matching lengths.
pub trait CollectiveEngine: Send + Sync + fmt::Debug {
    /// Name and version.
    fn name(&self) -> String;

    /// Enqueues `request` on `stream`. Does not block.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if lengths do not match or a rank is
    /// out of range; [`ErrorKind::Closed`](crate::ErrorKind::Closed) after an abort.
    fn enqueue(&self, stream: &Stream, request: &CollectiveRequest) -> Result<()>;

    /// Executes `call` on this thread and blocks until it is complete. If a peer's header differs from the
    /// expected one, returns the peer and its header; the engine is unusable afterwards.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) after the deadline;
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if the engine works only in streams.
    fn call(&self, _: &RankCall, _: Deadline) -> Result<Option<(Rank, Vec<u8>)>> {
        Err(
            Error::unsupported(format!("{} does no call outside of streams", self.name()))
                .with_operation("call")
                .with_help("enqueue it"),
        )
    }

    /// Registers memory that later requests use, so that the engine may access it directly on all ranks.
    /// Collective: every rank calls it at the same time with the same length. Blocks until all have. The
    /// engine holds the memory as long as it lives.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if the engine cannot register this kind of
    /// memory.
    fn register(&self, slice: &DeviceSlice) -> Result<()> {
        Err(
            Error::unsupported(format!("{} cannot register {slice:?}", self.name()))
                .with_operation("register memory")
                .with_help("use it as it is: nothing needs to be registered"),
        )
    }

    /// The library's communicator, for direct calls of the library; null after an abort. Owned by the engine
    /// and valid as long as it lives.
    fn raw_communicator(&self) -> *mut c_void;

    /// Aborts operations in flight, so that a lost peer does not block this rank. An adopted communicator is
    /// not aborted, only no longer used.
    fn abort(&self);
}

fn check_collective(
    collective: Collective,
    dtype: DType,
    target: usize,
    source: usize,
    world: usize,
) -> Result<()> {
    // Shorter side, longer side, their ratio, and whether elements are reduced.
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

/// Fails unless an adopted communicator has the expected rank and world.
pub(super) fn check_adopted(
    (rank, world): (Rank, usize),
    (expected_rank, expected_world): (Rank, usize),
) -> Result<()> {
    if (rank, world) == (expected_rank, expected_world) {
        return Ok(());
    }
    Err(Error::mismatch(format!(
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

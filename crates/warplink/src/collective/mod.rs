//! Collectives: what all ranks of a communicator do together, on any memory.
//!
//! A call only enqueues, and asks no other rank. Kernels access the other ranks' workspaces, which were mapped when the
//! [`Collectives`] were joined, and, for large data, memory of calls that a thread has published
//! (`program/execute/publication`). Every algorithm is a program
//! (`programs/`), verified with all others that share the workspace, and run by GPUs and the host device alike.
//!
//! | module | subject |
//! |---|---|
//! | `bound` | calls that are bound to their memory |
//! | `call` | a call, and what ranks tell one another of it |
//! | `algorithm` | the algorithms: one program each |
//! | `choice`, `estimate` | which of them does a call; how long each takes by the cost model |
//! | `direct` | the path by kernels of our own |
//! | `engine` | the path by the vendor's library |
//! | `experts` | rows of tokens to the ranks of their experts, and back |
//! | `join` | which path does the calls, and joining it |
//! | `launches` | kernels of calls that were made before |
//! | `pieces` | calls on more memory than one launch takes |
//! | `recent` | a map that keeps what was used last |
//! | `messages` | sends and receives between pairs of ranks |
//! | `record`, `witness` | the calls of the engine that ranks made, and what they tell one another of them |
//! | `trouble` | what is told of calls that do not end, or that differ |
//!
//! # What makes one workspace safe for all
//! All programs use half `epoch % 2` of it, and in each launch every rank meets every other
//! (`announce` and `agree`). So a rank in launch e + 2 knows that all others have begun launch e + 1, and are done
//! with launch e, whose half it writes to. What they announce is the call itself: a rank that calls something
//! else is found in that launch. In a hybrid cube mesh one program alone uses the workspace; there, a rank meets those
//! that it is linked with, and reaches no others.

mod algorithm;
mod bound;
mod call;
mod choice;
mod direct;
mod engine;
mod enqueue;
mod estimate;
mod experts;
mod fused;
mod join;
mod launches;
mod messages;
mod pieces;
mod recent;
mod record;
mod trouble;
mod witness;

pub use algorithm::Algorithm;
pub use bound::BoundCall;
pub use call::{Call, CollectiveKind};
pub use choice::Choice;
pub use experts::{Dispatched, ExpertOptions, Experts};
#[doc(hidden)]
pub use fused::fused_programs;
pub use fused::{
    Epilogue, Fused, FusedBytes, FusedKind, FusedMemory, Norm, QUANTIZED_BLOCK, Quantization,
};
pub use messages::{MAX_MESSAGES, Message, Parts};

use crate::device::Turns;
use crate::device::{DeviceSlice, InUse, ReduceOp, Stream, VendorCommunicator};
use crate::dtype::DType;
use crate::error::{Rank, Result};
use crate::program::execute::{Executor, RankContext};
use crate::program::section::MAX_TENSOR_BYTES;
use choice::Machine;
use engine::EngineCollectives;
use join::Served;
use launches::Overlap;
use messages::Lines;
use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
pub(crate) use trouble::Known;

/// Bytes of a workspace unless options say otherwise.
pub const DEFAULT_WORKSPACE_BYTES: usize = 10 << 20;

/// The fewest bytes of a workspace for each rank.
const MIN_BYTES_PER_RANK: usize = 64 << 10;

/// The most bytes of input or output that one launch of the direct path takes.
pub const MAX_LAUNCH_BYTES: usize = MAX_TENSOR_BYTES;

/// The most ranks that the direct path serves.
pub const MAX_DIRECT_RANKS: usize = 8;

/// What does the calls of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectivePath {
    /// Kernels that store into memory of the peers: ranks of one machine.
    Direct,
    /// The vendor's library (NCCL on GPUs).
    Engine,
}

/// How collectives are done; the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveOptions {
    /// Bytes of the workspace of each rank, of which a fifth is for packets, in a hybrid cube mesh all; at least 64 KiB
    /// for each rank. Parts of it are rounded down to pages of 4 KiB. Messages between pairs of ranks have four
    /// times as many of their own, on the host device half as many.
    pub workspace_bytes: usize,
    /// The only algorithm that is allowed on the direct path; where there is none, the hardware model chooses.
    pub algorithm: Option<Algorithm>,
    /// The most multiprocessors that a call takes on the direct path, at least 2; where there is none, as many as the
    /// hardware model finds the fewest that are fast. For calls beside kernels that must not be held up.
    /// Messages take two for each rank where that is more.
    pub multiprocessors: Option<usize>,
    /// How many lanes (blocks) move data in a launch, and the threads of each, instead of those that the hardware model
    /// finds fast: the least number that there are programs for and that is no smaller. To measure with.
    pub lanes: Option<usize>,
    /// See [`lanes`](Self::lanes).
    pub threads: Option<usize>,
    /// The only path that is allowed. Where there is none, it is the direct one, unless there are more than
    /// [`MAX_DIRECT_RANKS`] ranks or one cannot map the memory of another. In a hybrid cube mesh, the direct one does what
    /// its links serve, and the other the rest.
    pub path: Option<CollectivePath>,
    /// The communicator of the vendor's library that calls by [`CollectivePath::Engine`] use, of the same ranks in the
    /// same order. Where there is none, one is made.
    pub communicator: Option<VendorCommunicator>,
    /// The most bytes of input or output that one launch of the direct path takes, [`MAX_LAUNCH_BYTES`] at most. Longer calls
    /// are several, with the same results.
    pub launch_bytes: usize,
}

impl Default for CollectiveOptions {
    fn default() -> Self {
        Self {
            workspace_bytes: DEFAULT_WORKSPACE_BYTES,
            algorithm: None,
            multiprocessors: None,
            lanes: None,
            threads: None,
            path: None,
            communicator: None,
            launch_bytes: MAX_LAUNCH_BYTES,
        }
    }
}

/// The collectives of a communicator. Clones are the same.
///
/// Every rank makes the same calls in the same order, with the same counts, types, operators and roots. A call
/// enqueues on the stream that it is given, which may record a graph, and does not block, but for the first one of its
/// kind, which may compile its kernel for a second or so ([`prepare`](Self::prepare)). Streams may differ from
/// call to call and from rank to rank: launches happen in the order of the calls, also in a graph. Launches of graphs,
/// and calls beside them, are for the caller to order alike on all ranks. A graph keeps neither the collectives nor the memory of its calls:
/// do not launch it after they are gone. For calls that are to run side by side, use communicators of their own.
///
/// Input and output may be the same memory; for all-gather and gather, the input may be this rank's part of the
/// output, for reduce-scatter and scatter the output its part of the input. Other overlaps are refused.
/// All-to-all in place by the vendor's library goes through a copy of the input, in memory that the collectives keep.
///
/// Where ranks call different things, that is an error of all: on the direct path in the call itself, on the other
/// when ranks [`synchronize`](crate::Communicator::synchronize), perhaps some calls later.
///
/// On the direct path, inputs are reduced in the order of ranks, and all ranks get the same results, bit for bit; on
/// the other, results are what the vendor's library promises.
#[derive(Clone, Debug)]
pub struct Collectives(Arc<InUse<Inner>>);

struct Inner {
    context: RankContext,
    machine: Machine,
    path: Served,
    turns: Turns,
    /// For messages between pairs of ranks, where the direct path serves.
    lines: Option<Lines>,
    /// What was called last.
    last: Mutex<Option<Call>>,
    /// For calls that are bound.
    executor: OnceLock<Executor>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Collectives")
            .field("machine", &self.machine)
            .finish_non_exhaustive()
    }
}

impl Collectives {
    /// Which implementation runs the calls. In a hybrid cube mesh it is the direct path for some, as
    /// [`path_of`](Self::path_of) tells.
    pub fn path(&self) -> CollectivePath {
        match self.0.path.direct() {
            Some(_) => CollectivePath::Direct,
            None => CollectivePath::Engine,
        }
    }

    /// Which implementation runs a call. One that is not valid fails on either.
    pub fn path_of(&self, call: &Call) -> CollectivePath {
        let does = || {
            let checked = call.checked(self.0.machine.world);
            checked.is_ok_and(|call| self.0.machine.does(&call))
        };
        match &self.0.path {
            Served::Direct(_) => CollectivePath::Direct,
            Served::Both(..) if does() => CollectivePath::Direct,
            Served::Both(..) | Served::Engine(_) => CollectivePath::Engine,
        }
    }

    /// Whether [`send_receive`](Self::send_receive) and [`all_to_all_v`](Self::all_to_all_v) reach the other ranks. Where
    /// they do not, in a hybrid cube mesh on the direct path alone or without the vendor's library, they fail.
    pub fn serves_messages(&self) -> bool {
        self.path_of_messages().is_some()
    }

    /// Which implementation runs [`send_receive`](Self::send_receive) and [`all_to_all_v`](Self::all_to_all_v); `None` where
    /// they do not reach the other ranks ([`serves_messages`](Self::serves_messages)).
    pub fn path_of_messages(&self) -> Option<CollectivePath> {
        if self.0.lines.is_some() {
            return Some(CollectivePath::Direct);
        }
        let engine = self.0.path.engine().ok().flatten();
        engine.map(|_| CollectivePath::Engine)
    }

    /// Has `stream` wait for all calls that were enqueued so far, but for those that were recorded into graphs.
    ///
    /// # Errors
    /// The fault that ended the device's work.
    pub fn precede(&self, stream: &Stream) -> Result<()> {
        self.0.turns.precede(stream)
    }

    /// The library's communicator (`ncclComm_t` on GPUs) that does calls; `None` where the direct path does all. It is
    /// valid for as long as these collectives are and no rank is lost.
    pub fn communicator(&self) -> Option<*mut c_void> {
        let engine = self.0.path.engine().ok().flatten();
        engine.map(EngineCollectives::communicator)
    }

    /// How a call is done, where the direct path does it ([`path_of`](Self::path_of)).
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where the options ask for an algorithm that does not do
    /// it, or where the direct path does not.
    pub fn choice(&self, call: &Call) -> Result<Choice> {
        let call = call.checked(self.0.machine.world)?;
        if self.0.path.direct().is_none() {
            return Err(engine::no_choice(&call));
        }
        self.0.machine.choose(&call)
    }

    /// How many lanes of this rank's kernels have moved data from or to users' memory of the peers directly, where it
    /// lies; 0 where the direct path does not serve. Blocks for as long as reading some bytes of the device takes.
    ///
    /// # Errors
    /// The device's fault when it is raised.
    pub fn direct_lanes(&self) -> Result<u64> {
        let direct = self.0.path.direct();
        let of_calls = direct.map_or(Ok(0), |direct| direct.workspace.direct_lanes())?;
        let of_messages = self.0.lines.as_ref().map_or(Ok(0), Lines::direct_lanes)?;
        Ok(of_calls + of_messages)
    }

    /// The workspace of a rank, as it is mapped here; of this rank, its own. What it holds between calls is
    /// undefined, and it must not be written; memory to write to is shared by
    /// [`Communicator::export_handle`](crate::Communicator::export_handle). `None` where the direct path does not serve,
    /// and for ranks that no link of a hybrid cube mesh leads to.
    pub fn peer_buffer(&self, rank: Rank) -> Option<&DeviceSlice> {
        self.0.path.direct()?.workspace.memory(rank)
    }

    /// `output` becomes the reduction of all ranks' `input`s, element by element.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for slices of lengths that do not fit, or that
    /// overlap in part; so for all collectives. That ranks call something else is an error of the stream
    /// ([`synchronize`](crate::Communicator::synchronize)): [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch).
    pub fn all_reduce(
        &self,
        output: &DeviceSlice,
        input: &DeviceSlice,
        dtype: DType,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let kind = CollectiveKind::AllReduce;
        self.reduction(kind, (output, input), (dtype, op), None, stream)
    }

    /// `output` becomes this rank's part of the reduction of all ranks' `input`s; an `input` has `world` times the
    /// bytes of `output`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter(
        &self,
        output: &DeviceSlice,
        input: &DeviceSlice,
        dtype: DType,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let kind = CollectiveKind::ReduceScatter;
        self.reduction(kind, (output, input), (dtype, op), None, stream)
    }

    /// On `root`, `output` becomes the reduction of all ranks' `input`s; on others it is left alone, and may be the
    /// input.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn reduce(
        &self,
        output: &DeviceSlice,
        input: &DeviceSlice,
        dtype: DType,
        op: ReduceOp,
        root: Rank,
        stream: &Stream,
    ) -> Result<()> {
        let kind = CollectiveKind::Reduce;
        self.reduction(kind, (output, input), (dtype, op), Some(root), stream)
    }

    /// `output` becomes all ranks' `input`s, in rank order.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_gather(
        &self,
        output: &DeviceSlice,
        input: &DeviceSlice,
        stream: &Stream,
    ) -> Result<()> {
        let kind = CollectiveKind::AllGather;
        self.movement(kind, input.bytes(), (output, input), None, stream)
    }

    /// Part p of `output` becomes this rank's part of rank p's `input`, for each rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_to_all(
        &self,
        output: &DeviceSlice,
        input: &DeviceSlice,
        stream: &Stream,
    ) -> Result<()> {
        let kind = CollectiveKind::AllToAll;
        let count = input.bytes() / self.0.machine.world;
        self.movement(kind, count, (output, input), None, stream)
    }

    /// `output` becomes `root`'s `input`; that of others is not read, and may be the output.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn broadcast(
        &self,
        output: &DeviceSlice,
        input: &DeviceSlice,
        root: Rank,
        stream: &Stream,
    ) -> Result<()> {
        let kind = CollectiveKind::Broadcast;
        self.movement(kind, output.bytes(), (output, input), Some(root), stream)
    }

    /// On `root`, `output` becomes all ranks' `input`s, in rank order; on others it is left alone, and may be the
    /// input.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn gather(
        &self,
        output: &DeviceSlice,
        input: &DeviceSlice,
        root: Rank,
        stream: &Stream,
    ) -> Result<()> {
        let kind = CollectiveKind::Gather;
        self.movement(kind, input.bytes(), (output, input), Some(root), stream)
    }

    /// `output` becomes this rank's part of `root`'s `input`; that of others is not read, and may be the output.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn scatter(
        &self,
        output: &DeviceSlice,
        input: &DeviceSlice,
        root: Rank,
        stream: &Stream,
    ) -> Result<()> {
        let kind = CollectiveKind::Scatter;
        self.movement(kind, output.bytes(), (output, input), Some(root), stream)
    }

    /// What follows in the stream waits until all ranks' streams have come to it.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn barrier(&self, stream: &Stream) -> Result<()> {
        let call = Call {
            kind: CollectiveKind::Barrier,
            op: None,
            dtype: DType::U8,
            count: 0,
            root: None,
        };
        self.launch(&call, &[], Overlap::Apart, stream)
    }
}

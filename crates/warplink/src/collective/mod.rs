//! Collectives of a communicator, on any memory.
//!
//! A call only enqueues and does not communicate with other hosts. Kernels access the other ranks' workspaces, which are mapped
//! when the [`Collectives`] are joined, and, for large data, the memory of calls, which a background thread publishes
//! (`program/execute/publication`). Every algorithm is a program (`programs/`), verified together with all others that
//! share the workspace, and executed by GPUs and the host device alike.
//!
//! | module | subject |
//! |---|---|
//! | `bound` | calls bound to fixed memory |
//! | `call` | a call, and its encoding for announcements |
//! | `algorithm` | the algorithms: one program each |
//! | `choice`, `estimate` | selection of the algorithm; its estimated time |
//! | `direct` | the direct path: our own kernels |
//! | `engine` | the engine path: the vendor's library |
//! | `enqueue` | validation of a call's memory, and its launch |
//! | `experts` | expert parallelism: dispatch and combine |
//! | `fused` | collectives of rows with an epilogue |
//! | `join` | selecting and joining a path |
//! | `launches` | cache of call kernels |
//! | `pieces` | splitting calls that exceed one launch |
//! | `programs` | collectives of host programs |
//! | `recent` | LRU cache |
//! | `messages` | sends and receives between pairs of ranks |
//! | `text` | program texts made from options |
//! | `record`, `comparison` | flight recorder of engine calls, and its exchange between ranks |
//! | `diagnosis` | diagnosis of calls that do not complete or that differ |
//!
//! # Why one workspace is safe for all programs
//! Every program uses half `epoch % 2` of it, and in each launch every rank synchronizes with every other
//! (`announce` and `agree`). So when a rank is in launch e + 2, all others have begun launch e + 1, and have finished
//! launch e, whose half it writes to. The announcement contains the call itself, so a rank that makes a different
//! call is detected in that launch. In a hybrid cube mesh only one program uses the workspace; there, a rank synchronizes
//! with the ranks that it is linked with, and accesses no others.

mod algorithm;
mod bound;
mod call;
mod choice;
mod comparison;
mod diagnosis;
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
mod programs;
mod recent;
mod record;
mod text;

pub use algorithm::Algorithm;
pub use bound::BoundCall;
pub use call::{Call, CollectiveKind};
pub use choice::Choice;
pub use experts::{Dispatched, ExpertOptions, Experts, Overflow, Routing, RowLayout, Tokens};
#[doc(hidden)]
pub use experts::{dispatch_program, expert_programs};
#[doc(hidden)]
pub use fused::fused_programs;
pub use fused::{
    Epilogue, Fused, FusedBytes, FusedKind, FusedMemory, Norm, QUANTIZED_BLOCK, Quantization, Wire,
};
pub use messages::{MAX_MESSAGES, Message, Parts, message_kernels};

use crate::device::Turns;
use crate::device::{DeviceSlice, InUse, ReduceOp, Stream, VendorCommunicator};
use crate::dtype::DType;
use crate::error::{Rank, Result};
use crate::named::named;
use crate::program::execute::{Executor, RankContext};
use crate::program::section::MAX_TENSOR_BYTES;
use call::Overlap;
use choice::Machine;
pub(crate) use diagnosis::JoinedCollectives;
use engine::EngineCollectives;
use join::Paths;
use messages::Messages;
use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

/// Default size of a workspace.
pub const DEFAULT_WORKSPACE_BYTES: usize = 10 << 20;

/// Minimum size of a workspace for each rank.
const MIN_BYTES_PER_RANK: usize = 64 << 10;

/// Element type of calls that do not reduce; their operator is ignored.
const BYTES: (DType, ReduceOp) = (DType::U8, ReduceOp::Sum);

/// Maximum bytes of input or output of one launch on the direct path.
pub const MAX_LAUNCH_BYTES: usize = MAX_TENSOR_BYTES;

/// Maximum ranks of the direct path.
pub const MAX_DIRECT_RANKS: usize = 8;

named! {
    /// Implementation of a communicator's collectives.
    pub enum CollectivePath: "path" {
        /// Kernels that access peers' memory, for ranks of one machine.
        Direct = "direct",
        /// The vendor's library (NCCL on GPUs).
        Engine = "engine",
    }
}

/// Options of collectives; equal on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveOptions {
    /// Size of each rank's workspace, a fifth of which is for packets, or all of it in a hybrid cube mesh; at
    /// least 64 KiB for each rank. Parts are rounded down to pages of 4 KiB. Fused calls have twice as many bytes
    /// in addition where links carry packets of 128 bytes whole. Messages have a workspace of their own, four times
    /// as large, or half as large on the host device.
    pub workspace_bytes: usize,
    /// Restricts the direct path to one algorithm; by default the hardware model chooses.
    pub algorithm: Option<Algorithm>,
    /// Maximum multiprocessors of a call on the direct path, at least 2; by default as few as the hardware
    /// model finds fast. For calls concurrent with kernels that must not be delayed. Messages use two for
    /// each rank if that is more.
    pub multiprocessors: Option<usize>,
    /// Number of lanes (blocks) that move data, and threads of each, for measurements; rounded up to a
    /// supported number. By default chosen by the hardware model.
    pub lanes: Option<usize>,
    /// See [`lanes`](Self::lanes).
    pub threads: Option<usize>,
    /// Restricts the path. By default the direct one, unless there are more than [`MAX_DIRECT_RANKS`] ranks
    /// or one cannot map the memory of another. In a hybrid cube mesh, the direct path executes calls that
    /// its links support, and the engine the others.
    pub path: Option<CollectivePath>,
    /// Communicator of the vendor's library to adopt for [`CollectivePath::Engine`], with the same ranks in
    /// the same order. By default one is created.
    pub communicator: Option<VendorCommunicator>,
    /// Maximum bytes of input or output of one launch on the direct path, at most [`MAX_LAUNCH_BYTES`].
    /// Longer calls are split, with identical results.
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

impl CollectiveOptions {
    /// Options that restrict the path alone.
    pub fn on(path: CollectivePath) -> Self {
        Self {
            path: Some(path),
            ..Self::default()
        }
    }
}

/// Collectives of a communicator. Clones share them.
///
/// Every rank makes the same calls in the same order, with the same counts, types, operators and roots. A
/// call enqueues on its stream, which may be capturing, and does not block, except the first of its kind,
/// which may compile a kernel for 0.2 to 0.35 s ([`prepare`](Self::prepare)). Streams may differ between
/// calls and ranks: launches execute in call order, also within a graph. The caller must order launches of
/// graphs, and calls concurrent with them, identically on all ranks. A graph keeps neither the collectives
/// nor the memory of its calls alive. For concurrent calls, use several communicators.
///
/// Input and output may be the same memory; for all-gather and gather, the input may be this rank's part of
/// the output, for reduce-scatter and scatter the output its part of the input. Other overlaps are rejected.
/// In-place all-to-all on the engine path copies the input to internal memory.
///
/// If ranks make different calls, all ranks get an error: on the direct path in the call itself, on the
/// engine path when ranks [`synchronize`](crate::Communicator::synchronize), perhaps some calls later.
///
/// On the direct path, inputs are reduced in rank order, and all ranks get bitwise identical results; on the
/// engine path, results are as the vendor's library defines.
#[derive(Clone, Debug)]
pub struct Collectives(Arc<InUse<Inner>>);

struct Inner {
    context: RankContext,
    machine: Machine,
    path: Paths,
    turns: Turns,
    /// Messages between pairs of ranks, on the direct path.
    messages: Option<Messages>,
    /// The most recent call, for errors.
    last: Mutex<Option<Call>>,
    /// Executor of bound calls.
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
    /// Path of the calls. In a hybrid cube mesh the direct path executes only some; see
    /// [`path_of`](Self::path_of).
    pub fn path(&self) -> CollectivePath {
        match self.0.path.direct() {
            Some(_) => CollectivePath::Direct,
            None => CollectivePath::Engine,
        }
    }

    /// Path of a call. An invalid call fails on either.
    pub fn path_of(&self, call: &Call) -> CollectivePath {
        let does = || {
            let checked = call.checked(self.0.machine.world);
            checked.is_ok_and(|call| self.0.machine.does(&call))
        };
        match &self.0.path {
            Paths::Direct(_) => CollectivePath::Direct,
            Paths::Both(..) if does() => CollectivePath::Direct,
            Paths::Both(..) | Paths::Engine(_) => CollectivePath::Engine,
        }
    }

    /// Whether [`send_receive`](Self::send_receive) and [`all_to_all_v`](Self::all_to_all_v) are available.
    /// In a hybrid cube mesh they fail without the vendor's library.
    pub fn serves_messages(&self) -> bool {
        self.path_of_messages().is_some()
    }

    /// Path of [`send_receive`](Self::send_receive) and [`all_to_all_v`](Self::all_to_all_v); `None` if they
    /// are not available ([`serves_messages`](Self::serves_messages)).
    pub fn path_of_messages(&self) -> Option<CollectivePath> {
        if self.0.messages.is_some() {
            return Some(CollectivePath::Direct);
        }
        let engine = self.0.path.engine().ok().flatten();
        engine.map(|_| CollectivePath::Engine)
    }

    /// Makes `stream` wait for all calls enqueued so far, except captured ones.
    ///
    /// # Errors
    /// The fault that aborted the device's work.
    pub fn precede(&self, stream: &Stream) -> Result<()> {
        self.0.turns.precede(stream)
    }

    /// The vendor library's communicator (`ncclComm_t` on GPUs); `None` if the direct path executes all
    /// calls. Valid as long as these collectives, until a rank is lost.
    pub fn communicator(&self) -> Option<*mut c_void> {
        let engine = self.0.path.engine().ok().flatten();
        engine.map(EngineCollectives::communicator)
    }

    /// How a call is executed on the direct path ([`path_of`](Self::path_of)).
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if the options require an algorithm that
    /// does not implement it, or the direct path does not support it.
    pub fn choice(&self, call: &Call) -> Result<Choice> {
        let call = call.checked(self.0.machine.world)?;
        if self.0.path.direct().is_none() {
            return Err(engine::no_choice(&call));
        }
        self.0.machine.choose(&call)
    }

    /// Number of lanes of this rank's kernels that accessed peers' user memory directly; 0 without the direct
    /// path. Blocks while it reads some bytes of the device.
    ///
    /// # Errors
    /// The device's fault once raised.
    pub fn direct_lanes(&self) -> Result<u64> {
        let direct = self.0.path.direct();
        let of_calls = direct.map_or(Ok(0), |direct| direct.workspace.direct_lanes())?;
        let messages = self.0.messages.as_ref();
        let of_messages = messages.map_or(Ok(0), Messages::direct_lanes)?;
        Ok(of_calls + of_messages)
    }

    /// A rank's workspace as mapped here. Its contents are undefined, and it must not be written; to share
    /// writable memory use [`Communicator::share`](crate::Communicator::share). `None` without the direct path, and
    /// for ranks that are not linked in a hybrid cube mesh.
    pub fn peer_buffer(&self, rank: Rank) -> Option<&DeviceSlice> {
        self.0.path.direct()?.workspace.memory(rank)
    }

    /// Reduces all ranks' `input`s element-wise into `output` on every rank.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for slices of wrong lengths or with
    /// partial overlap; likewise for all collectives. Different calls on ranks fail the stream
    /// ([`synchronize`](crate::Communicator::synchronize)):
    /// [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch).
    pub fn all_reduce(
        &self,
        output: &DeviceSlice,
        input: &DeviceSlice,
        dtype: DType,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let (memory, reduction) = ((output, input), (dtype, op));
        self.enqueue_on(CollectiveKind::AllReduce, memory, reduction, 0, stream)
    }

    /// Reduces all ranks' `input`s and writes this rank's part to `output`; an `input` has `world` times the
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
        let (memory, reduction) = ((output, input), (dtype, op));
        self.enqueue_on(CollectiveKind::ReduceScatter, memory, reduction, 0, stream)
    }

    /// Reduces all ranks' `input`s into `output` on `root`; the output of other ranks is not modified, and
    /// may be the input.
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
        let (memory, reduction) = ((output, input), (dtype, op));
        self.enqueue_on(CollectiveKind::Reduce, memory, reduction, root, stream)
    }

    /// Concatenates all ranks' `input`s, in rank order, into `output`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_gather(
        &self,
        output: &DeviceSlice,
        input: &DeviceSlice,
        stream: &Stream,
    ) -> Result<()> {
        let memory = (output, input);
        self.enqueue_on(CollectiveKind::AllGather, memory, BYTES, 0, stream)
    }

    /// Part p of `output` receives this rank's part of rank p's `input`, for each rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_to_all(
        &self,
        output: &DeviceSlice,
        input: &DeviceSlice,
        stream: &Stream,
    ) -> Result<()> {
        let memory = (output, input);
        self.enqueue_on(CollectiveKind::AllToAll, memory, BYTES, 0, stream)
    }

    /// Copies `root`'s `input` to every `output`; inputs of other ranks are not read, and may be the output.
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
        let memory = (output, input);
        self.enqueue_on(CollectiveKind::Broadcast, memory, BYTES, root, stream)
    }

    /// Concatenates all ranks' `input`s, in rank order, into `output` on `root`; the output of other ranks is
    /// not modified, and may be the input.
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
        let memory = (output, input);
        self.enqueue_on(CollectiveKind::Gather, memory, BYTES, root, stream)
    }

    /// Copies this rank's part of `root`'s `input` to `output`; inputs of other ranks are not read, and may
    /// be the output.
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
        let memory = (output, input);
        self.enqueue_on(CollectiveKind::Scatter, memory, BYTES, root, stream)
    }

    /// Barrier between the ranks' streams.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn barrier(&self, stream: &Stream) -> Result<()> {
        let (dtype, op) = BYTES;
        let call = Call::new(CollectiveKind::Barrier, op, dtype, 0, 0);
        self.launch(&call, &[], Overlap::Apart, stream)
    }
}

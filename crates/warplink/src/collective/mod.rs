//! Collectives: what all ranks of a communicator do together, on any memory.
//!
//! A call only enqueues. It registers nothing and asks no other rank: kernels access of other ranks nothing but
//! a workspace that was mapped once, when the [`Collectives`] were joined. Every algorithm is a program
//! (`programs/`), verified with all others that share the workspace, and run by GPUs and the host device alike.
//!
//! | module | subject |
//! |---|---|
//! | `call` | a call, and what ranks tell one another of it |
//! | `algorithm` | the algorithms: one program each |
//! | `choice` | which of them does a call |
//! | `launches` | kernels of calls that were made before |
//! | `trouble` | what is told of calls that do not end, or that differ |
//! | `turns` | streams that use the workspace one after the other |
//!
//! # What makes one workspace safe for all
//! All programs use half `epoch % 2` of it, and in each launch every rank meets every other
//! (`announce` and `agree`). So a rank in launch e + 2 knows that all others have begun launch e + 1, and are done
//! with launch e, whose half it writes to. What they announce is the call itself: a rank that calls something
//! else is found in that launch.

mod algorithm;
mod call;
mod choice;
mod enqueue;
mod launches;
mod trouble;
mod turns;

pub use algorithm::Algorithm;
pub use call::{Call, CollectiveKind};
pub use choice::Choice;

use crate::device::{DeviceSlice, InUse, ReduceOp, Stream};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::cost::{DeviceDescription, HardwareModel};
use crate::program::execute::{RankContext, SharedWorkspace};
use crate::program::section::{ScratchInstance, WorkspaceLayout};
use choice::Machine;
use launches::{Launches, Overlap};
use std::fmt;
use std::sync::{Arc, Mutex};
pub(crate) use trouble::Known;
use turns::Turns;

/// Bytes of a workspace unless options say otherwise.
pub const DEFAULT_WORKSPACE_BYTES: usize = 10 << 20;

/// The fewest bytes of a workspace for each rank.
const MIN_BYTES_PER_RANK: usize = 64 << 10;

/// The most lanes of a kernel that shares the workspace.
const MAX_LANES: usize = 129;

/// The most ranks.
pub const MAX_RANKS: usize = 32;

/// How collectives are done; the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveOptions {
    /// Bytes of the workspace of each rank, of which half is for packets.
    pub workspace_bytes: usize,
    /// The only algorithm that is allowed; where there is none, the hardware model chooses.
    pub algorithm: Option<Algorithm>,
}

impl Default for CollectiveOptions {
    fn default() -> Self {
        Self {
            workspace_bytes: DEFAULT_WORKSPACE_BYTES,
            algorithm: None,
        }
    }
}

/// The collectives of a communicator. Clones are the same.
///
/// Every rank makes the same calls in the same order, with the same counts, types, operators and roots. A call
/// enqueues on the stream that it is given, which may record a graph, and does not block. Streams may differ
/// from call to call and from rank to rank: launches happen in the order of the calls. Graphs and calls
/// beside them are for the caller to order alike on all ranks. For calls that are to run side by side, use
/// communicators of their own.
///
/// Input and output may be the same memory; for all-gather and gather, the input may be this rank's part of the
/// output, for reduce-scatter and scatter the output its part of the input. Other overlaps are refused.
///
/// All ranks get the same results, bit for bit.
#[derive(Clone, Debug)]
pub struct Collectives(Arc<InUse<Inner>>);

struct Inner {
    context: RankContext,
    workspace: SharedWorkspace,
    machine: Machine,
    launches: Launches,
    turns: Turns,
    /// What was called last.
    last: Mutex<Option<Call>>,
    /// Where ranks announce, in the area of packets.
    announcements: ScratchInstance,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Collectives")
            .field("machine", &self.machine)
            .finish_non_exhaustive()
    }
}

impl Collectives {
    /// Joins the collectives of all ranks. Blocks until every rank has called it.
    pub(crate) fn join(context: RankContext, options: &CollectiveOptions) -> Result<Self> {
        let (rank, world) = (context.rank(), context.world());
        let machine = context.agree_on(Self::machine(&context, options))?;
        let told = format!("{options:?} {machine:?}");
        let all = context.all_gather(told.as_bytes())?;
        if let Some(peer) = all.iter().position(|other| other != told.as_bytes()) {
            return Err(Error::new(
                ErrorKind::Mismatch,
                "the ranks have other options or another hardware model; expected the same on all",
            )
            .with_operation("join the collectives")
            .with_rank(rank)
            .with_peer(peer)
            .with_help("pass the same options on every rank"));
        }
        // One program of each kind of room has all the scratch that others have.
        let mut scratch = Vec::new();
        for algorithm in [Algorithm::OneShot, Algorithm::Chunks] {
            let call = Call {
                kind: CollectiveKind::AllReduce,
                op: Some(ReduceOp::Sum),
                dtype: DType::U8,
                count: 1,
                root: None,
            };
            let forced = Machine {
                forced: Some(algorithm),
                ..machine.clone()
            };
            let choice = forced.choose(&call)?;
            let program = launches::rank_program(&machine, rank, &call, &choice)?;
            scratch.extend(program.scratch);
        }
        let announcements = scratch
            .iter()
            .find(|scratch| &*scratch.name == "C")
            .cloned();
        let announcements = announcements.ok_or_else(|| {
            Error::new(ErrorKind::Internal, "the programs have nowhere to announce")
        })?;
        let layout = WorkspaceLayout::of(&scratch);
        let workspace = SharedWorkspace::join(&context, layout, MAX_LANES)?;
        let turns = Turns::new(&context.device);
        let in_flight = context.in_flight.clone();
        debug_assert_eq!(machine.world, world);
        let inner = Inner {
            context,
            workspace,
            machine,
            launches: Launches::default(),
            turns,
            last: Mutex::default(),
            announcements,
        };
        Ok(Self(Arc::new(InUse::new(inner, &in_flight))))
    }

    fn machine(context: &RankContext, options: &CollectiveOptions) -> Result<Machine> {
        let world = context.world();
        if world > MAX_RANKS {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{world} ranks; expected at most {MAX_RANKS}"),
            )
            .with_operation("join the collectives")
            .with_help("use the vendor's collectives: Communicator::collective_engine"));
        }
        let least = MIN_BYTES_PER_RANK * world;
        if options.workspace_bytes < least {
            return Err(Error::invalid(format!(
                "a workspace of {} bytes; expected at least {least} for {world} ranks",
                options.workspace_bytes
            ))
            .with_operation("join the collectives")
            .with_help("give the workspace more bytes"));
        }
        let model = HardwareModel::find(&DeviceDescription::of(&*context.device), world)?;
        // Half is for packets, of which half is data; each is in two halves by epoch.
        let aligned = |bytes: usize| bytes / 4096 * 4096;
        Ok(Machine {
            world,
            kernels: model.link.transfer_kernels(),
            packet_bytes: aligned(options.workspace_bytes / 8),
            plain_bytes: aligned(options.workspace_bytes / 4),
            forced: options.algorithm,
        })
    }

    /// How a call is done.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the options ask for an algorithm that does not do it.
    pub fn choice(&self, call: &Call) -> Result<Choice> {
        call.check(self.0.machine.world)?;
        self.0.machine.choose(call)
    }

    /// The workspace of a rank, as it is mapped here; of this rank, its own. What it holds between calls is
    /// undefined, and it must not be written.
    pub fn peer_buffer(&self, rank: Rank) -> Option<&DeviceSlice> {
        self.0.workspace.memory(rank)
    }

    /// `output` becomes the reduction of all ranks' `input`s, element by element in the order of ranks.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for slices of lengths that do not fit, or that overlap in part; so for all
    /// collectives. That ranks call something else is an error of the stream
    /// ([`synchronize`](crate::Communicator::synchronize)): [`ErrorKind::Mismatch`].
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

    /// `output` becomes this rank's part of the reduction of all ranks' `input`s, which are as many times as long
    /// as there are ranks.
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
        self.enqueue(&call, &[], Overlap::Apart, stream)
    }
}

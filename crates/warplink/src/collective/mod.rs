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
//! | `direct` | the path by kernels of our own |
//! | `engine` | the path by the vendor's library |
//! | `experts` | rows of tokens to the ranks of their experts, and back |
//! | `launches` | kernels of calls that were made before |
//! | `messages` | sends and receives between pairs of ranks |
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
mod direct;
mod engine;
mod enqueue;
mod experts;
mod launches;
mod messages;
mod trouble;
mod turns;

pub use algorithm::Algorithm;
pub use call::{Call, CollectiveKind};
pub use choice::Choice;
pub use experts::{Dispatched, ExpertOptions, Experts};
pub use messages::{MAX_MESSAGES, Message, Parts};

use crate::device::{DeviceSlice, InUse, ReduceOp, Stream, VendorCommunicator};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::cost::{DeviceDescription, HardwareModel};
use crate::program::execute::RankContext;
use choice::Machine;
use direct::Direct;
use engine::EngineCollectives;
use launches::Overlap;
use messages::Lines;
use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex};
pub(crate) use trouble::Known;
use turns::Turns;

/// Bytes of a workspace unless options say otherwise.
pub const DEFAULT_WORKSPACE_BYTES: usize = 10 << 20;

/// The fewest bytes of a workspace for each rank.
const MIN_BYTES_PER_RANK: usize = 64 << 10;

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
    /// Bytes of the workspace of each rank, of which half is for packets; at least 64 KiB for each rank. Parts of it
    /// are rounded down to pages of 4 KiB. Messages between pairs of ranks have half as many of their own.
    pub workspace_bytes: usize,
    /// The only algorithm that is allowed; where there is none, the hardware model chooses.
    pub algorithm: Option<Algorithm>,
    /// The only path that is allowed. Where there is none, it is the direct one, unless there are more than
    /// [`MAX_DIRECT_RANKS`] ranks or one cannot map the memory of another.
    pub path: Option<CollectivePath>,
    /// The communicator of the vendor's library that calls by [`CollectivePath::Engine`] use, of the same ranks in the
    /// same order. Where there is none, one is made.
    pub communicator: Option<VendorCommunicator>,
}

impl Default for CollectiveOptions {
    fn default() -> Self {
        Self {
            workspace_bytes: DEFAULT_WORKSPACE_BYTES,
            algorithm: None,
            path: None,
            communicator: None,
        }
    }
}

/// The collectives of a communicator. Clones are the same.
///
/// Every rank makes the same calls in the same order, with the same counts, types, operators and roots. A call
/// enqueues on the stream that it is given, which may record a graph, and does not block, but for the first one of its
/// kind, which may compile its kernel for a second or so ([`prepare`](Self::prepare)). Streams may differ from
/// call to call and from rank to rank: launches happen in the order of the calls. Graphs and calls beside them
/// are for the caller to order alike on all ranks. A graph keeps neither the collectives nor the memory of its calls:
/// do not launch it after they are gone. For calls that are to run side by side, use communicators of their own.
///
/// Input and output may be the same memory; for all-gather and gather, the input may be this rank's part of the
/// output, for reduce-scatter and scatter the output its part of the input. Other overlaps are refused, and so is
/// all-to-all in place by the vendor's library.
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
}

/// What does the calls.
enum Served {
    Direct(Box<Direct>),
    Engine(EngineCollectives),
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
        let rank = context.rank();
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
        let path = match options.path {
            Some(CollectivePath::Direct) => {
                Served::Direct(Box::new(Direct::join(&context, &machine)?))
            }
            Some(CollectivePath::Engine) => {
                Served::Engine(EngineCollectives::join(&context, options.communicator)?)
            }
            None => Self::either(&context, &machine, options)?,
        };
        let lines = match &path {
            Served::Direct(_) => Some(Lines::join(&context, options.workspace_bytes / 2)?),
            Served::Engine(_) => None,
        };
        let in_flight = context.in_flight.clone();
        let inner = Inner {
            turns: Turns::new(&context.device),
            context,
            machine,
            path,
            lines,
            last: Mutex::default(),
        };
        Ok(Self(Arc::new(InUse::new(inner, &in_flight))))
    }

    /// The direct path where all ranks can map one another's memory, else the engine; alike on all ranks.
    fn either(
        context: &RankContext,
        machine: &Machine,
        options: &CollectiveOptions,
    ) -> Result<Served> {
        let mut near = machine.world <= MAX_DIRECT_RANKS;
        for peer in 0..machine.world {
            near &= context.memory.is_near(context.group.job_rank(peer)?)?;
        }
        let by_engine =
            || EngineCollectives::join(context, options.communicator).map(Served::Engine);
        if !near {
            return by_engine();
        }
        let joined = Direct::join(context, machine);
        // Whether this rank failed for a reason that another path does not mend; its peers know only that it failed.
        let hopeless = joined
            .as_ref()
            .err()
            .is_some_and(|error| !cannot_map(error));
        let all = context.all_gather(&[u8::from(hopeless)])?;
        let first = all.iter().position(|other| other != &[0]);
        match (joined, first) {
            (Ok(direct), None) => Ok(Served::Direct(Box::new(direct))),
            (Err(error), None) => {
                tracing::warn!(%error, "collectives go by the vendor's library");
                by_engine()
            }
            (Err(error), Some(_)) => Err(error),
            (Ok(_), Some(peer)) => Err(Error::new(
                ErrorKind::PeerFailed,
                "another rank failed to map the workspaces",
            )
            .with_operation("join the collectives")
            .with_rank(context.rank())
            .with_peer(peer)),
        }
    }

    fn machine(context: &RankContext, options: &CollectiveOptions) -> Result<Machine> {
        let world = context.world();
        if options.path == Some(CollectivePath::Direct) && world > MAX_DIRECT_RANKS {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{world} ranks on the direct path; expected at most {MAX_DIRECT_RANKS}"),
            )
            .with_operation("join the collectives")
            .with_help("leave the path open, or use fewer ranks"));
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
            most_lanes: Machine::most_lanes(
                context.device.properties().multiprocessors,
                context.ranks_per_device()?,
            ),
            forced: options.algorithm,
        })
    }

    /// Which implementation runs the calls.
    pub fn path(&self) -> CollectivePath {
        match self.0.path {
            Served::Direct(_) => CollectivePath::Direct,
            Served::Engine(_) => CollectivePath::Engine,
        }
    }

    /// The library's communicator (`ncclComm_t` on GPUs) that does the calls; `None` where the direct path does. It is
    /// valid for as long as these collectives are and no rank is lost.
    pub fn communicator(&self) -> Option<*mut c_void> {
        match &self.0.path {
            Served::Direct(_) => None,
            Served::Engine(engine) => Some(engine.communicator()),
        }
    }

    /// How a call is done, where the direct path does it.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the options ask for an algorithm that does not do it.
    pub fn choice(&self, call: &Call) -> Result<Choice> {
        let call = call.checked(self.0.machine.world)?;
        self.0.machine.choose(&call)
    }

    /// How many lanes of this rank's kernels have moved data from or to users' memory of the peers directly, where it
    /// lies; 0 where the direct path does not serve. Blocks for as long as reading some bytes of the device takes.
    ///
    /// # Errors
    /// The device's fault when it is raised.
    pub fn direct_lanes(&self) -> Result<u64> {
        match &self.0.path {
            Served::Direct(direct) => direct.workspace.direct_lanes(),
            Served::Engine(_) => Ok(0),
        }
    }

    /// The workspace of a rank, as it is mapped here; of this rank, its own. What it holds between calls is
    /// undefined, and it must not be written. `None` where the direct path does not serve.
    pub fn peer_buffer(&self, rank: Rank) -> Option<&DeviceSlice> {
        match &self.0.path {
            Served::Direct(direct) => direct.workspace.memory(rank),
            Served::Engine(_) => None,
        }
    }

    /// `output` becomes the reduction of all ranks' `input`s, element by element.
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

/// Whether the memory of ranks cannot be mapped, so that another path is needed.
fn cannot_map(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Unsupported
            | ErrorKind::Driver
            | ErrorKind::InvalidHandle
            | ErrorKind::PeerFailed
    )
}

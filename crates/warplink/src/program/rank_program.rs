//! A program for one rank, with every loop, branch and expression resolved: what an executor runs
//! and the verifier follows.

use super::area::Area;
use super::grid::Grid;
use super::ir::{Backend, Collective, Direction, ElementwiseOp, Protocol, Role};
use super::section::instance::{SectionInstance, SectionMemory};
use super::section::layout::ScratchInstance;
use super::section::{FreeNames, RowStep};
pub use super::site::{Call, Site};
pub use super::tensor::{Range, TensorId, TensorInstance};
use crate::device::{MatmulSpec, ReduceOp};
use crate::dtype::DType;
use crate::error::{Error, Rank, Result};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

/// Index of a transfer in [`RankProgram::transfers`].
pub type TransferId = usize;

/// Index of an exchange in [`RankProgram::exchanges`].
pub type ExchangeId = usize;

/// What one rank does.
#[derive(Clone, Debug)]
pub struct RankProgram {
    /// The rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub world: usize,
    /// The streams in use; the first is always the caller's.
    pub streams: Vec<StreamKind>,
    /// The tensors, in order of declaration; an `allocate` in a loop makes one per iteration. Each
    /// has memory of its own for the whole run.
    pub tensors: Vec<TensorInstance>,
    /// The scratch that its kernels use, in order of declaration.
    pub scratch: Vec<ScratchInstance>,
    /// The transfers, in order of declaration.
    pub transfers: Vec<TransferInstance>,
    /// The transfers of each exchange of handles.
    pub exchanges: Vec<Vec<TransferId>>,
    /// What the host enqueues (or, for `Share`, does), in order.
    pub operations: Vec<Operation>,
    /// Tensors that may be a part of another one's memory, and which: all at once.
    pub in_place: Vec<(TensorId, Range)>,
    /// What outputs are at the end.
    pub expected: Vec<Expected>,
    /// How tensors are cut of which parts are accessed that are not contiguous.
    pub(super) grids: HashMap<TensorId, Arc<Grid>>,
}

/// What a part of an output is at the end of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// The part; every axis of it that has more than one element.
    pub target: Area,
    /// How the terms are combined, in order.
    pub operator: Option<ReduceOp>,
    /// What it is made of.
    pub terms: Vec<ExpectedTerm>,
    /// What is added to each row.
    pub plus: Option<Operand>,
    /// The function of rows that the terms are given to, and which of its results it is.
    pub rows: Option<(Arc<RowStep>, usize)>,
    /// The statement.
    pub site: Site,
}

/// What an output is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpectedTerm {
    /// An input.
    Operand(Operand),
    /// A product.
    Product {
        /// The left matrix, row by row.
        a: Operand,
        /// The right one.
        b: Operand,
        /// Its columns.
        columns: usize,
        /// Its rows.
        depth: usize,
    },
}

/// A part of a rank's input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Whose it is.
    pub rank: Rank,
    /// The tensor's name, which has another number on another rank.
    pub name: Arc<str>,
    /// How long the tensor is on the rank that says so.
    pub bytes: usize,
    /// The part, with this rank's number of the tensor.
    pub area: Area,
}

impl RankProgram {
    /// Whether it has an output of that name, memory of the caller that it writes.
    pub fn is_output(&self, name: &str) -> bool {
        let mut tensors = self.tensors.iter();
        tensors.any(|tensor| *tensor.name == *name && tensor.role == Role::Output)
    }

    /// The kernel sections that it launches, in order.
    pub fn sections(&self) -> impl Iterator<Item = &SectionInstance> {
        let operations = self.operations.iter();
        operations.filter_map(|operation| operation.kind.section())
    }

    /// The names of the tensors that its kernels announce.
    pub fn announced(&self) -> BTreeSet<&str> {
        let names = self.sections().flat_map(|section| {
            let announced = section.announced().into_iter();
            announced.map(|tensor| section.tensors[tensor].name.as_str())
        });
        names.collect()
    }

    /// Has kernels take announced tensors of these names for out of reach.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a name that no kernel announces.
    pub fn withhold(&mut self, names: &[String]) -> Result<()> {
        let announced = self.announced();
        if let Some(name) = names.iter().find(|name| !announced.contains(name.as_str())) {
            let all: Vec<&str> = announced.into_iter().collect();
            return Err(Error::invalid(format!(
                "'{name}' is not announced by any kernel; expected one of: {}",
                all.join(", ")
            )));
        }
        for operation in &mut self.operations {
            if let OperationKind::Kernel(section) = &mut operation.kind {
                let withheld = section.announced().into_iter();
                let withheld = withheld.filter(|at| names.contains(&section.tensors[*at].name));
                let withheld = withheld.collect();
                Arc::make_mut(section).withheld = withheld;
            }
        }
        Ok(())
    }

    /// Whether anything in it is done by the collective engine.
    pub fn needs_engine(&self) -> bool {
        let collective =
            |operation: &Operation| matches!(operation.kind, OperationKind::Collective { .. });
        self.operations.iter().any(collective)
            || self
                .transfers
                .iter()
                .any(|transfer| transfer.backend == Backend::Nccl)
    }

    /// Whether anything is computed on this rank.
    pub fn computes(&self) -> bool {
        self.operations.iter().any(|operation| {
            matches!(
                operation.kind,
                OperationKind::Matmul { .. }
                    | OperationKind::PostMatmul { .. }
                    | OperationKind::Elementwise { .. }
            )
        })
    }

    /// Whether kernels at both ends may do the transfers of this rank, as far as it is for it to say. Nothing
    /// multiplies matrices, beside which such kernels find no room, or leave none. As a wait may unpack what
    /// the peer sent, on its own stream and once for each post, everything is on one stream, and each receive
    /// is waited for after each post: then no wait holds up more than it does without kernels.
    pub fn suits_transfer_kernels(&self) -> bool {
        let mut posted = HashSet::new();
        for operation in &self.operations {
            let enqueues = !matches!(
                operation.kind,
                OperationKind::Allocate(_) | OperationKind::Deallocate(_) | OperationKind::Share(_)
            );
            if enqueues && operation.stream != 0 {
                return false;
            }
            match &operation.kind {
                OperationKind::Matmul { .. } | OperationKind::PostMatmul { .. } => return false,
                OperationKind::Post(group) => {
                    let mut receives = group
                        .iter()
                        .filter(|id| self.transfers[**id].direction == Direction::Receive);
                    if !receives.all(|id| posted.insert(*id)) {
                        return false;
                    }
                }
                OperationKind::Wait(group) => {
                    for id in group {
                        posted.remove(id);
                    }
                }
                _ => {}
            }
        }
        posted.is_empty()
    }

    /// The tensors that kernels access at other ranks, in the order in which their kernels name them: what
    /// [`verify`](super::verify::verify) has seen to fit together is at one place on all ranks.
    pub(super) fn shared_tensors(&self) -> Vec<TensorId> {
        let mut known = HashSet::new();
        let all = self.shared_names().into_iter();
        all.map(|(_, _, tensor)| tensor)
            .filter(|tensor| known.insert(*tensor))
            .collect()
    }

    /// The names by which kernels access tensors at other ranks: the operation, the name, and the tensor of this rank.
    pub(super) fn shared_names(&self) -> Vec<(usize, String, TensorId)> {
        let mut names = Vec::new();
        for (index, operation) in self.operations.iter().enumerate() {
            let Some(section) = operation.kind.section() else {
                continue;
            };
            for name in FreeNames::of(&section.section).remote {
                let tensor = section.tensor(&name).map(|index| &section.tensors[index]);
                if let Some(SectionMemory::Tensor(id)) = tensor.map(|tensor| tensor.memory) {
                    names.push((index, name, id));
                }
            }
        }
        names
    }

    /// Whether the collective engine carries any transfer or collective of this rank.
    pub fn uses_engine(&self) -> bool {
        self.transfers.iter().any(TransferInstance::is_engine)
            || self.engine_work().next().is_some()
    }

    /// Whether the engine of all ranks carries any transfer or collective of this rank.
    pub fn uses_engine_of_all(&self) -> bool {
        let of_all = |operation: &Operation| {
            matches!(
                operation.kind,
                OperationKind::Collective { members: None, .. }
            )
        };
        self.transfers.iter().any(TransferInstance::is_engine) || self.operations.iter().any(of_all)
    }

    /// The lists of ranks among which this rank's collectives are, but for all ranks; each once, in one
    /// order on all ranks.
    pub fn parts(&self) -> BTreeSet<Arc<[Rank]>> {
        let members = |operation: &Operation| match &operation.kind {
            OperationKind::Collective { members, .. } => members.clone(),
            _ => None,
        };
        self.operations.iter().filter_map(members).collect()
    }

    /// The operations that are work of the collective engine, in the host's order.
    pub(super) fn engine_work(&self) -> impl Iterator<Item = (usize, &Operation)> {
        let operations = self.operations.iter().enumerate();
        operations.filter(|(_, operation)| self.is_engine_work(&operation.kind))
    }

    /// Whether the engine's operations are on several streams, where events put them in order.
    pub(super) fn orders_engine(&self) -> bool {
        let mut streams = self.engine_work().map(|(_, operation)| operation.stream);
        let first = streams.next();
        streams.any(|stream| Some(stream) != first)
    }

    /// Whether an operation is work of the collective engine.
    pub fn is_engine_work(&self, kind: &OperationKind) -> bool {
        let engine = |id: &TransferId| self.transfers[*id].is_engine();
        matches!(kind, OperationKind::Collective { .. }) || kind.posted().iter().any(engine)
    }
}

/// Which stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StreamKind {
    /// The one that the program was started on.
    Caller,
    /// One of the pool, by number from 0.
    Pool(usize),
    /// One of high priority, by number from 0.
    High(usize),
}

impl fmt::Display for StreamKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Caller => f.write_str("caller"),
            Self::Pool(number) => write!(f, "pool({number})"),
            Self::High(number) => write!(f, "high({number})"),
        }
    }
}

/// One end of a transfer.
///
/// The n-th send declared for a peer and tag belongs to the n-th receive that the peer declares for
/// this rank and tag.
#[derive(Clone, Debug)]
pub struct TransferInstance {
    /// Its name in the program.
    pub name: Arc<str>,
    /// Which way it goes.
    pub direction: Direction,
    /// What is sent, or where it is received.
    pub range: Range,
    /// The element type of that.
    pub dtype: DType,
    /// The other rank.
    pub peer: Rank,
    /// Tells transfers between the same two ranks apart.
    pub tag: i64,
    /// How many transfers with this direction, peer and tag were declared before it.
    pub ordinal: usize,
    /// What carries it.
    pub backend: Backend,
    /// The exchange that it is shared in.
    pub exchange: ExchangeId,
    /// Its declaration.
    pub site: Site,
}

impl TransferInstance {
    /// Whether this end copies, or takes part in an exchange of the engine; the other ends only signal.
    pub const fn initiates(&self) -> bool {
        !matches!(
            (self.direction, self.backend),
            (Direction::Send, Backend::Direct(Protocol::Get))
                | (Direction::Receive, Backend::Direct(Protocol::Put))
        )
    }

    /// Whether the collective engine carries it.
    pub const fn is_engine(&self) -> bool {
        matches!(self.backend, Backend::Nccl)
    }
}

/// One operation: the host enqueues it on its stream (or, for `Share`, does it at once).
#[derive(Clone, Debug)]
pub struct Operation {
    /// What is done.
    pub kind: OperationKind,
    /// The current stream, an index into [`RankProgram::streams`].
    pub stream: usize,
    /// The statement.
    pub site: Site,
}

/// What an operation does.
#[derive(Clone, Debug)]
pub enum OperationKind {
    /// The tensor exists from here on.
    Allocate(TensorId),
    /// The tensor is not used after this, in the order of the stream.
    Deallocate(TensorId),
    /// The range is set to 0.
    Zero(Range),
    /// A copy between ranges of the same length.
    Copy {
        /// What is written.
        target: Range,
        /// What is read.
        source: Range,
    },
    /// A matmul: `c = a · b (+ bias) (+ c)`.
    Matmul {
        /// Sizes, type, transposes, rows that are apart, and whether there is a bias and `c` is added to.
        spec: MatmulSpec,
        /// Left operand.
        a: Area,
        /// Right operand.
        b: Area,
        /// Result.
        c: Area,
        /// A vector that is added to each row.
        bias: Option<Range>,
    },
    /// Each element of the target is computed of the sources' elements at its place, in order.
    Elementwise {
        /// What is computed.
        op: ElementwiseOp,
        /// Element type of the target.
        dtype: DType,
        /// Element type of the sources: the target's, but for a cast.
        source_dtype: DType,
        /// What is written; may be one of the sources. Where one of all these is not contiguous, all
        /// have axes, of the same extents.
        target: Area,
        /// What it is computed of.
        sources: Vec<Area>,
    },
    /// The host exchanges handles with the peers of the exchange's transfers, and goes on when each
    /// peer has shared the matching transfers. Nothing is enqueued.
    Share(ExchangeId),
    /// A group of transfers: all signals that wait for nothing first, then the parts that move
    /// bytes, which may run in any order or at once.
    Post(Vec<TransferId>),
    /// A group of sends by put whose bytes are products with one right operand, each stored straight
    /// into its receiver's memory: what the sends name as theirs is not touched.
    PostMatmul {
        /// Of each product.
        spec: MatmulSpec,
        /// The sends.
        group: Vec<TransferId>,
        /// Left operand of each.
        a: Vec<Range>,
        /// Right operand of all.
        b: Range,
        /// A vector that is added to each row of each.
        bias: Option<Range>,
    },
    /// The stream waits until all posts so far of the transfers are complete.
    Wait(Vec<TransferId>),
    /// A collective, run by an engine.
    Collective {
        /// Which one.
        collective: Collective<Rank>,
        /// The ranks that take part, in the order of their parts; all ranks where there is none.
        members: Option<Arc<[Rank]>>,
        /// Element type of both.
        dtype: DType,
        /// What is written; on a reduce, only on the root.
        target: Range,
        /// What is read; on a broadcast, only on the root.
        source: Range,
    },
    /// A kernel section, which all ranks launch.
    Kernel(Arc<SectionInstance>),
    /// The operation's stream waits for what this other stream was given so far: record an event
    /// there, wait for it here.
    Synchronize(usize),
}

impl OperationKind {
    /// A word for it, as in program text.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Allocate(_) => "allocate",
            Self::Deallocate(_) => "deallocate",
            Self::Zero(_) => "zero",
            Self::Copy { .. } => "copy",
            Self::Matmul { spec, .. } if spec.transposed_b => "linear",
            Self::Matmul { .. } => "matmul",
            Self::Elementwise { op, .. } => op.name(),
            Self::Share(_) => "share",
            Self::Post(_) => "post",
            Self::PostMatmul { .. } => "post matmul",
            Self::Wait(_) => "wait",
            Self::Collective { collective, .. } => collective.name(),
            Self::Kernel(_) => "kernel",
            Self::Synchronize(_) => "synchronize",
        }
    }

    /// The section that it launches.
    pub fn section(&self) -> Option<&SectionInstance> {
        match self {
            Self::Kernel(section) => Some(section),
            _ => None,
        }
    }

    /// The transfers that it posts.
    pub fn posted(&self) -> &[TransferId] {
        match self {
            Self::Post(group) | Self::PostMatmul { group, .. } => group,
            _ => &[],
        }
    }
}

/// The place of `rank` among the members of a collective.
pub fn place_among(members: Option<&[Rank]>, rank: Rank) -> Option<usize> {
    match members {
        Some(members) => members.iter().position(|member| *member == rank),
        None => Some(rank),
    }
}

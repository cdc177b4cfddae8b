//! A program for one rank, with every loop, branch and expression resolved. Input of the executor and the verifier.

use super::area::Area;
use super::grid::Grid;
use super::ir::{Backend, Collective, Direction, ElementwiseOp, Protocol, Role};
pub use super::section::TensorId;
use super::section::instance::{SectionInstance, SectionMemory};
use super::section::layout::ScratchInstance;
use super::section::{FreeNames, RowStep};
pub use super::site::{CallSite, Site};
pub use super::tensor::{Range, TensorInstance};
use crate::device::{MatmulSpec, ReduceOp};
use crate::dtype::DType;
use crate::error::{Error, Rank, Result};
use crate::named::listed;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

/// Index of a transfer in [`RankProgram::transfers`].
pub type TransferId = usize;

/// Index of an exchange in [`RankProgram::exchanges`].
pub type ExchangeId = usize;

/// The resolved program of one rank.
#[derive(Clone, Debug)]
pub struct RankProgram {
    /// The rank.
    pub rank: Rank,
    /// Number of ranks.
    pub world: usize,
    /// The streams in use; the first is always the caller's.
    pub streams: Vec<StreamKind>,
    /// The tensors, in order of declaration; an `allocate` in a loop makes one per iteration. Each has its own memory
    /// for the whole run.
    pub tensors: Vec<TensorInstance>,
    /// Scratch used by its kernels, in order of declaration.
    pub scratch: Vec<ScratchInstance>,
    /// The transfers, in order of declaration.
    pub transfers: Vec<TransferInstance>,
    /// The transfers of each exchange of handles.
    pub exchanges: Vec<Vec<TransferId>>,
    /// Operations in host order. The host enqueues each, except `Share`, which it runs itself.
    pub operations: Vec<Operation>,
    /// Tensors that may alias a part of another tensor, with that part; all at once.
    pub in_place: Vec<(TensorId, Range)>,
    /// Expected values of outputs.
    pub expected: Vec<Expected>,
    /// Whether they depend on integers in inputs; then `expected` has some of those for the greatest integers.
    pub expects_words: bool,
    /// Grids of the tensors with accesses to non-contiguous parts.
    pub(super) grids: HashMap<TensorId, Arc<Grid>>,
}

/// Expected value of a part of an output at the end of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// The part, with every axis that has more than one element.
    pub target: Area,
    /// Operator that combines the terms in order.
    pub operator: Option<ReduceOp>,
    /// Terms.
    pub terms: Vec<ExpectedTerm>,
    /// Bias added to each row.
    pub plus: Option<InputPart>,
    /// Row function applied to the terms, and the index of its result.
    pub rows: Option<(Arc<RowStep>, usize)>,
    /// The statement.
    pub site: Site,
}

/// Term of an expected value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpectedTerm {
    /// An input.
    Operand(InputPart),
    /// A product.
    Product {
        /// Left matrix, row-major.
        a: InputPart,
        /// Right matrix.
        b: InputPart,
        /// Columns of the product.
        columns: usize,
        /// Inner dimension.
        depth: usize,
    },
}

/// A part of a rank's input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputPart {
    /// Rank that owns the input.
    pub rank: Rank,
    /// Name of the tensor; its index may differ on the other rank.
    pub name: Arc<str>,
    /// Length of the tensor on the rank that states the expectation.
    pub bytes: usize,
    /// The part, with this rank's index of the tensor.
    pub area: Area,
}

impl RankProgram {
    /// Whether it has an output of that name.
    pub fn is_output(&self, name: &str) -> bool {
        let mut tensors = self.tensors.iter();
        tensors.any(|tensor| *tensor.name == *name && tensor.role == Role::Output)
    }

    /// Kernel sections that it launches, in order.
    pub fn sections(&self) -> impl Iterator<Item = &SectionInstance> {
        let operations = self.operations.iter();
        operations.filter_map(|operation| operation.kind.section())
    }

    /// Names of the tensors announced by its kernels.
    pub fn announced(&self) -> BTreeSet<&str> {
        let names = self.sections().flat_map(|section| {
            let announced = section.announced().into_iter();
            announced.map(|tensor| section.tensors[tensor].name.as_str())
        });
        names.collect()
    }

    /// Makes kernels treat the announced tensors of these names as unreachable.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a name that no kernel announces.
    pub fn withhold(&mut self, names: &[String]) -> Result<()> {
        let announced = self.announced();
        if let Some(name) = names.iter().find(|name| !announced.contains(name.as_str())) {
            let expected = if announced.is_empty() {
                "none, since no kernel announces a tensor".to_owned()
            } else {
                listed(announced)
            };
            return Err(Error::invalid(format!(
                "'{name}' is not announced by any kernel; expected {expected}"
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

    /// Whether this rank computes anything.
    pub fn computes(&self) -> bool {
        self.operations.iter().any(|operation| {
            matches!(
                operation.kind,
                OperationKind::Matmul(_)
                    | OperationKind::PostMatmul(_)
                    | OperationKind::Elementwise(_)
            )
        })
    }

    /// Whether this rank allows kernels at both ends to perform its transfers. Requires that nothing multiplies
    /// matrices, because a matmul and a transfer kernel compete for the device, and a single stream, on which all transfers of
    /// a group are waited for before anything else. These kernels order less than the protocols that the verifier follows: a
    /// wait covers its own transfer alone, a put may be done before its receive is posted, and what is received may be written
    /// at the wait for it. A group that is waited for at once leaves no room for that to show, but in kernel sections, which
    /// access other ranks' memory.
    pub fn suits_transfer_kernels(&self) -> bool {
        let mut posted = HashSet::new();
        for operation in &self.operations {
            // These are done when the plan is made, and enqueue nothing.
            if matches!(
                operation.kind,
                OperationKind::Allocate(_) | OperationKind::Deallocate(_) | OperationKind::Share(_)
            ) {
                continue;
            }
            if operation.stream != 0 {
                return false;
            }
            match &operation.kind {
                OperationKind::Wait(group) => {
                    for id in group {
                        posted.remove(id);
                    }
                }
                _ if !posted.is_empty() => return false,
                OperationKind::Post(group) => posted.extend(group.iter().copied()),
                OperationKind::Matmul(_)
                | OperationKind::PostMatmul(_)
                | OperationKind::Kernel(_) => return false,
                _ => {}
            }
        }
        // All are waited for within the run, so that the next run may post them again.
        posted.is_empty()
    }

    /// Tensors that kernels access on other ranks, in order of first use. Tensors that
    /// [`verify`](super::verify::verify) has found to match have the same position on all ranks.
    pub(super) fn shared_tensors(&self) -> Vec<TensorId> {
        let mut known = HashSet::new();
        let all = self.shared_names().into_iter();
        all.map(|(_, _, tensor)| tensor)
            .filter(|tensor| known.insert(*tensor))
            .collect()
    }

    /// Names under which kernels access tensors on other ranks: the operation, the name, and this rank's tensor.
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

    /// Whether the engine that spans all ranks carries any transfer or collective of this rank.
    pub fn uses_engine_of_all(&self) -> bool {
        self.transfers.iter().any(TransferInstance::is_engine)
            || self.collectives().any(|it| it.members.is_none())
    }

    /// Whether only the vendor's library can execute some engine operation of this rank: sends and receives, and
    /// collectives of some of the ranks.
    pub fn needs_library(&self) -> bool {
        self.transfers.iter().any(TransferInstance::is_engine) || !self.parts().is_empty()
    }

    /// The lists of ranks of this rank's collectives, without the list of all ranks. Each occurs once, in the same
    /// order on all ranks.
    pub fn parts(&self) -> BTreeSet<Arc<[Rank]>> {
        self.collectives()
            .filter_map(|it| it.members.clone())
            .collect()
    }

    fn collectives(&self) -> impl Iterator<Item = &CollectiveOperation> {
        let operations = self.operations.iter();
        operations.filter_map(|operation| match &operation.kind {
            OperationKind::Collective(it) => Some(it),
            _ => None,
        })
    }

    /// The operations that the collective engine performs, in host order.
    pub(super) fn engine_work(&self) -> impl Iterator<Item = (usize, &Operation)> {
        let operations = self.operations.iter().enumerate();
        operations.filter(|(_, operation)| self.is_engine_work(&operation.kind))
    }

    /// Whether engine operations use several streams, which events must then put in order.
    pub(super) fn orders_engine(&self) -> bool {
        let mut streams = self.engine_work().map(|(_, operation)| operation.stream);
        let first = streams.next();
        streams.any(|stream| Some(stream) != first)
    }

    /// Whether the collective engine performs an operation.
    pub fn is_engine_work(&self, kind: &OperationKind) -> bool {
        let engine = |id: &TransferId| self.transfers[*id].is_engine();
        matches!(kind, OperationKind::Collective(_)) || kind.posted().iter().any(engine)
    }
}

/// Kind of stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StreamKind {
    /// The stream on which the program was started.
    Caller,
    /// A pool stream, numbered from 0.
    Pool(usize),
    /// A high-priority stream, numbered from 0.
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
/// The n-th send declared for a peer and tag matches the n-th receive that the peer declares for this rank and tag.
#[derive(Clone, Debug)]
pub struct TransferInstance {
    /// Its name in the program.
    pub name: Arc<str>,
    /// Direction.
    pub direction: Direction,
    /// Memory to send from or receive into.
    pub range: Range,
    /// Element type of the range.
    pub dtype: DType,
    /// The other rank.
    pub peer: Rank,
    /// Distinguishes transfers between the same two ranks.
    pub tag: i64,
    /// Number of transfers with this direction, peer and tag that were declared before it.
    pub ordinal: usize,
    /// Implementation that performs it.
    pub backend: Backend,
    /// The exchange that shares it.
    pub exchange: ExchangeId,
    /// Its declaration.
    pub site: Site,
}

impl TransferInstance {
    /// Whether this end copies, or takes part in an engine exchange; otherwise it only signals.
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

/// One operation: the host enqueues it on its stream, or runs it at once if it is `Share`.
#[derive(Clone, Debug)]
pub struct Operation {
    /// Kind of operation and its operands.
    pub kind: OperationKind,
    /// The current stream, an index into [`RankProgram::streams`].
    pub stream: usize,
    /// The statement.
    pub site: Site,
}

/// Kind of an operation.
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
        /// Destination.
        target: Range,
        /// Source.
        source: Range,
    },
    /// A matmul.
    Matmul(MatmulOperation),
    /// An elementwise operation.
    Elementwise(ElementwiseOperation),
    /// The host exchanges handles with the peers of the exchange's transfers and blocks until each peer has shared
    /// the matching transfers. Nothing is enqueued.
    Share(ExchangeId),
    /// A group of transfers: first all signals that wait for nothing, so that no peer is blocked by a copy in the
    /// group; then the parts that move bytes, in any order or concurrently.
    Post(Vec<TransferId>),
    /// Products that are sent.
    PostMatmul(StoredMatmul),
    /// The stream waits until all posts so far of the transfers are complete.
    Wait(Vec<TransferId>),
    /// A collective.
    Collective(CollectiveOperation),
    /// A kernel section, which all ranks launch.
    Kernel(Arc<SectionInstance>),
    /// The operation's stream waits for the work enqueued so far on this other stream: record an event there, wait
    /// for it here.
    Synchronize(usize),
}

/// A matmul: `c = a · b (+ bias) (+ c)`.
#[derive(Clone, Debug)]
pub struct MatmulOperation {
    /// Sizes, type, transposes, strided rows, whether there is a bias, and whether the result is added to `c`.
    pub spec: MatmulSpec,
    /// Left operand.
    pub a: Area,
    /// Right operand.
    pub b: Area,
    /// Result.
    pub c: Area,
    /// A vector that is added to each row.
    pub bias: Option<Range>,
}

/// Combines the sources elementwise, in order, and stores the result in the target.
#[derive(Clone, Debug)]
pub struct ElementwiseOperation {
    /// Operation.
    pub op: ElementwiseOp,
    /// Element type of the target.
    pub dtype: DType,
    /// Element type of the sources; differs from the target's only in a cast.
    pub source_dtype: DType,
    /// Destination; may be one of the sources. If any area is not contiguous, all have axes, with equal extents.
    pub target: Area,
    /// Operands, in order.
    pub sources: Vec<Area>,
}

/// A group of put sends whose bytes are products with one right operand, each stored straight into its receiver's
/// memory. The source ranges of the sends are not accessed.
#[derive(Clone, Debug)]
pub struct StoredMatmul {
    /// Spec of each product.
    pub spec: MatmulSpec,
    /// The sends.
    pub group: Vec<TransferId>,
    /// Left operand of each product.
    pub a: Vec<Range>,
    /// Right operand of all products.
    pub b: Range,
    /// Vector added to each row of each product.
    pub bias: Option<Range>,
}

/// A collective, run by an engine.
#[derive(Clone, Debug)]
pub struct CollectiveOperation {
    /// Kind of collective.
    pub collective: Collective<Rank>,
    /// Participating ranks, in the order of their parts; `None` for all ranks.
    pub members: Option<Arc<[Rank]>>,
    /// Element type of source and target.
    pub dtype: DType,
    /// Destination; for a reduce, only on the root.
    pub target: Range,
    /// Source; for a broadcast, only on the root.
    pub source: Range,
}

impl CollectiveOperation {
    /// Number of participating ranks, of `world`.
    pub fn count(&self, world: usize) -> usize {
        self.members.as_ref().map_or(world, |members| members.len())
    }
}

impl OperationKind {
    /// Keyword in program text.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Allocate(_) => "allocate",
            Self::Deallocate(_) => "deallocate",
            Self::Zero(_) => "zero",
            Self::Copy { .. } => "copy",
            Self::Matmul(it) if it.spec.transposed_b => "linear",
            Self::Matmul(_) => "matmul",
            Self::Elementwise(it) => it.op.name(),
            Self::Share(_) => "share",
            Self::Post(_) => "post",
            Self::PostMatmul(_) => "post matmul",
            Self::Wait(_) => "wait",
            Self::Collective(it) => it.collective.name(),
            Self::Kernel(_) => "kernel",
            Self::Synchronize(_) => "synchronize",
        }
    }

    /// Section of a kernel launch.
    pub fn section(&self) -> Option<&SectionInstance> {
        match self {
            Self::Kernel(section) => Some(section),
            _ => None,
        }
    }

    /// Transfers that it posts.
    pub fn posted(&self) -> &[TransferId] {
        match self {
            Self::Post(group) => group,
            Self::PostMatmul(it) => &it.group,
            _ => &[],
        }
    }
}

/// Position of `rank` among the members of a collective.
pub fn place_among(members: Option<&[Rank]>, rank: Rank) -> Option<usize> {
    match members {
        Some(members) => members.iter().position(|member| *member == rank),
        None => Some(rank),
    }
}

//! From a rank program and the caller's memory to a plan.

use super::RankContext;
use super::plan::Plan;
use super::pool::Pool;
use super::resolve::Resolver;
use crate::device::DeviceSlice;
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::p2p::{Direction, Protocol, Transfer, TransferRequest};
use crate::program::ir::{Backend, Role};
use crate::program::rank_program::{OperationKind, RankProgram, TensorInstance, TransferInstance};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The caller's memory for a program's inputs and outputs, by name. Slices are borrowed: the plan
/// holds them as long as it lives.
pub type Bindings = BTreeMap<String, DeviceSlice>;

/// A program prepared for this rank, to be bound to memory.
pub struct Prepared {
    context: RankContext,
    pool: Arc<Pool>,
    name: String,
    rank_program: Arc<RankProgram>,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Prepared {
    pub(super) fn new(
        context: RankContext,
        pool: Arc<Pool>,
        name: String,
        rank_program: RankProgram,
    ) -> Self {
        Self {
            context,
            pool,
            name,
            rank_program: Arc::new(rank_program),
        }
    }

    /// The program as this rank runs it.
    pub fn rank_program(&self) -> &RankProgram {
        &self.rank_program
    }

    /// Binds inputs and outputs to memory and exchanges handles with the peers, so that runs only
    /// enqueue. Every rank calls this at the same time, also where only one of them has new memory;
    /// mappings that are still right are kept. Outputs that are not bound are allocated. Blocks
    /// until the peers have bound theirs.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for an input that is
    /// missing, a name that the program does not have, or memory of another length than the
    /// tensor's; [`ErrorKind::PeerFailed`](crate::ErrorKind::PeerFailed), with what it says, where that
    /// happens to a rank that this one exchanges with; and what else the exchange says. Ranks that do not
    /// exchange with one that fails may have their plan; all drop it and bind again.
    pub fn bind(&self, bindings: &Bindings) -> Result<Plan> {
        self.bind_inner(bindings)
            .map_err(|error| error.on_rank(self.context.rank()))
    }

    fn bind_inner(&self, bindings: &Bindings) -> Result<Plan> {
        let (memory, pooled) = self
            .memory(bindings)
            .inspect_err(|error| self.refuse(error))?;
        self.plan(memory, pooled.clone())
            .inspect_err(|_| self.pool.give_back(pooled))
    }

    /// The plan over `memory`, of which `pooled` came from the pool.
    fn plan(&self, memory: Vec<Tensor>, pooled: Vec<Region>) -> Result<Plan> {
        let requests = self
            .requests(&memory)
            .inspect_err(|error| self.refuse(error))?;
        let transfers = self.exchange(&requests)?;
        let rank_program = &self.rank_program;
        let has = |test: fn(&OperationKind) -> bool| {
            rank_program
                .operations
                .iter()
                .any(|operation| test(&operation.kind))
        };
        let computes = has(|kind| {
            matches!(
                kind,
                OperationKind::Matmul { .. }
                    | OperationKind::PostMatmul { .. }
                    | OperationKind::Sum { .. }
            )
        });
        let compute = if computes {
            Some(self.context.device.compute()?)
        } else {
            None
        };
        let direct = |transfer: &TransferInstance| matches!(transfer.backend, Backend::Direct(_));
        let collective = has(|kind| matches!(kind, OperationKind::Collective { .. }))
            || rank_program
                .transfers
                .iter()
                .any(|transfer| !direct(transfer));
        let engine = if collective {
            Some((self.context.engine)()?)
        } else {
            None
        };
        let streams = rank_program
            .streams
            .iter()
            .map(|kind| self.pool.stream(*kind))
            .collect::<Result<Vec<_>>>()?;
        let commands = Resolver {
            rank_program,
            memory: &memory,
            transfers: &transfers,
            context: &self.context,
            streams: &streams,
            compute,
        }
        .commands()?;
        Ok(Plan::new(
            self.context.clone(),
            self.name.clone(),
            rank_program.clone(),
            self.pool.clone(),
            pooled,
            memory,
            transfers,
            engine,
            streams,
            commands,
        ))
    }

    /// The memory of every tensor, and what of it came from the pool.
    fn memory(&self, bindings: &Bindings) -> Result<(Vec<Tensor>, Vec<Region>)> {
        let invalid = |what: String| Error::invalid(what).during(format!("bind '{}'", self.name));
        let outer = |tensor: &&TensorInstance| tensor.role != Role::Local;
        for name in bindings.keys() {
            if !self
                .rank_program
                .tensors
                .iter()
                .filter(outer)
                .any(|tensor| *tensor.name == **name)
            {
                let names: Vec<&str> = self
                    .rank_program
                    .tensors
                    .iter()
                    .filter(outer)
                    .map(|tensor| &*tensor.name)
                    .collect();
                return Err(
                    invalid(format!("the program has no input or output '{name}'"))
                        .help(format!("it has {}", names.join(", "))),
                );
            }
        }
        let mut tensors = Vec::with_capacity(self.rank_program.tensors.len());
        let mut pooled = Vec::new();
        let touched = self.rank_program.touched();
        for (index, tensor) in self.rank_program.tensors.iter().enumerate() {
            let bound = bindings
                .get(&*tensor.name)
                .filter(|_| tensor.role != Role::Local);
            let made = match (bound, tensor.role) {
                (Some(slice), _) if slice.bytes() != tensor.bytes => Err(invalid(format!(
                    "'{}' is {:?} of {}, {} bytes, but is bound to {}",
                    tensor.name,
                    tensor.shape,
                    tensor.dtype,
                    tensor.bytes,
                    slice.bytes()
                ))),
                (Some(slice), _) => Ok(Tensor::Bound(slice.clone())),
                (None, Role::Input) => {
                    Err(invalid(format!("the input '{}' is not bound", tensor.name)))
                }
                (None, Role::Local) if !touched.contains(&index) => Ok(Tensor::Nothing),
                (None, _) => self.pool.take(tensor.bytes).map(|region| {
                    pooled.push(region.clone());
                    Tensor::Pooled(region)
                }),
            };
            match made {
                Ok(tensor) => tensors.push(tensor),
                Err(error) => {
                    self.pool.give_back(pooled);
                    return Err(error);
                }
            }
        }
        Ok((tensors, pooled))
    }

    /// The direct transfers of the program, in its order.
    fn direct(&self) -> impl Iterator<Item = (&TransferInstance, Protocol)> {
        self.rank_program
            .transfers
            .iter()
            .filter_map(|transfer| match transfer.backend {
                Backend::Direct(protocol) => Some((transfer, protocol)),
                Backend::Nccl => None,
            })
    }

    /// Tells the peers that this rank cannot bind, which would otherwise wait for it.
    fn refuse(&self, error: &Error) {
        let lanes: Vec<_> = self
            .direct()
            .map(|(transfer, _)| (transfer.peer, tag(transfer), transfer.direction))
            .collect();
        self.context.transfers.refuse(&lanes, &error.to_string());
    }

    /// What is to be exchanged, over `memory`.
    fn requests(&self, memory: &[Tensor]) -> Result<Vec<TransferRequest>> {
        let mut registered: HashMap<usize, Region> = HashMap::new();
        let mut requests = Vec::new();
        for (transfer, protocol) in self.direct() {
            let range = transfer.range;
            let tag = tag(transfer);
            let region = match (&memory[range.tensor], registered.get(&range.tensor)) {
                (Tensor::Nothing, _) => {
                    requests.push(TransferRequest::store(range.bytes, transfer.peer, tag));
                    continue;
                }
                (Tensor::Pooled(region), _) => region.clone(),
                (_, Some(region)) => region.clone(),
                (Tensor::Bound(slice), None) => {
                    let region = self.context.memory.register(slice)?;
                    registered.insert(range.tensor, region.clone());
                    region
                }
            };
            let part = region.range(range.offset_bytes..range.end())?;
            let request = match transfer.direction {
                Direction::Send => TransferRequest::send(&part, transfer.peer, tag),
                Direction::Receive => TransferRequest::receive(&part, transfer.peer, tag),
            };
            requests.push(request.protocol(protocol));
        }
        Ok(requests)
    }

    /// Exchanges the direct transfers of all exchanges in one batch: every range is known, so
    /// nothing has to wait for the program to get there.
    fn exchange(&self, requests: &[TransferRequest]) -> Result<Vec<Option<Transfer>>> {
        let mut exchanged = self
            .context
            .transfers
            .exchange(requests, self.context.deadline())?
            .into_iter();
        Ok(self
            .rank_program
            .transfers
            .iter()
            .map(|transfer| match transfer.backend {
                Backend::Direct(_) => exchanged.next(),
                Backend::Nccl => None,
            })
            .collect())
    }
}

/// Set in the tags of programs' transfers, to keep them apart from those of the caller's own.
const PROGRAM_TAGS: u64 = 1 << 63;

/// Tags of programs are signed; as numbers they only have to differ.
fn tag(transfer: &TransferInstance) -> u64 {
    PROGRAM_TAGS | (transfer.tag as u64 & !PROGRAM_TAGS)
}

/// The memory of one tensor.
#[derive(Clone, Debug)]
pub(super) enum Tensor {
    Bound(DeviceSlice),
    Pooled(Region),
    /// There is none: nothing on this rank accesses it.
    Nothing,
}

impl Tensor {
    pub(super) fn slice(&self) -> Option<&DeviceSlice> {
        match self {
            Self::Bound(slice) => Some(slice),
            Self::Pooled(region) => Some(region.slice()),
            Self::Nothing => None,
        }
    }
}

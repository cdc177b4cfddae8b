//! Turns a rank program and the caller's memory into a plan.

use super::agreement::Digest;
use super::context::{ProgramCollectives, RankContext};
use super::kernel::{BoundKernels, KernelMemory};
use super::launches::Launches;
use super::memory::{Bindings, PlanMemory};
use super::plan::{Plan, PlanParts};
use super::pool::Pool;
use super::replaced::replaceable;
use super::resolve::{Engines, Resolver};
use crate::device::DeviceKind;
use crate::error::{Error, Result};
use crate::exchange::Matching;
use crate::memory::Region;
use crate::p2p::{Direction, Protocol, Transfer, TransferRequest};
use crate::program::diagnostic::Diagnostic;
use crate::program::ir::Backend;
use crate::program::rank_program::{RankProgram, TensorId, TransferInstance};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// A program prepared for this rank, ready to be bound to memory.
pub struct Prepared {
    pub(super) context: RankContext,
    pub(super) pool: Arc<Pool>,
    pub(super) name: String,
    pub(super) program: Arc<RankProgram>,
    // Equal on every rank.
    pub(super) digest: Arc<Digest>,
    // Whether any rank uses collectives of all ranks; if so, all of them must join these.
    pub(super) uses_engine_of_all: bool,
    // Collectives that execute them in place of the engine, if possible; `None` if the engine does in any case.
    pub(super) collectives: Option<Arc<ProgramCollectives>>,
    // Whether kernels at both ends may perform the transfers of all ranks, so that all choose the same path.
    pub(super) suits_transfer_kernels: bool,
    // Limit for the kernels of a transfer.
    pub(super) multiprocessors_per_transfer: Option<usize>,
    pub(super) eager_only: Option<Arc<Diagnostic>>,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Prepared {
    /// The program as unrolled for this rank.
    pub fn rank_program(&self) -> &RankProgram {
        &self.program
    }

    /// The same program with announced tensors of these names treated as unreachable by kernels, to exercise that
    /// case with reachable memory. Every rank passes the same names.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) on devices other than the host device, whose kernels
    /// determine reachability themselves; [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a
    /// name that no kernel announces.
    pub fn without_reaching(mut self, names: &[String]) -> Result<Self> {
        if self.context.device.kind() != DeviceKind::Host && !names.is_empty() {
            let message = "kernels of this device determine reachability themselves; expected the host device";
            return Err(Error::unsupported(message)
                .with_help("declare tensors unreachable on the host device only"));
        }
        Arc::make_mut(&mut self.program).withhold(names)?;
        Ok(self)
    }

    /// Reason why the program cannot run as a graph, if the verifier found one.
    pub fn eager_only(&self) -> Option<&Diagnostic> {
        self.eager_only.as_deref()
    }

    /// Binds inputs and outputs to memory and exchanges handles with the peers, so that runs only enqueue.
    /// Collective: every rank calls it at the same time, even if only one of them has new memory; mappings that are
    /// still valid are kept. Outputs that are not bound are allocated. Blocks until every rank has bound its own
    /// memory: either all ranks get a plan, or none does.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a missing input, a name that the program
    /// does not have, or memory of another length than the tensor's;
    /// [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch), on every rank, if one brings another program, other
    /// parameters or another number of streams; [`ErrorKind::PeerFailed`](crate::ErrorKind::PeerFailed), with the
    /// cause, if another rank fails; and the errors of the exchange. All ranks may bind again.
    pub fn bind(&self, bindings: &Bindings) -> Result<Plan> {
        let bound = self.context.fault.with_outcome(self.plan(bindings));
        bound.map_err(|error| {
            let group = &self.context.group;
            group.with_job_ranks(error.with_rank(self.context.rank()))
        })
    }

    fn plan(&self, bindings: &Bindings) -> Result<Plan> {
        let exchange = &self.context.transfers;
        let local = PlanMemory::bind(&self.program, bindings, &self.pool)
            .map_err(|error| error.with_operation(format!("bind '{}'", self.name)))
            .and_then(|memory| {
                let requests = self.requests(&memory)?;
                let kernels = KernelMemory::prepare(&self.context, &self.program, &memory)?;
                Ok((memory, requests, kernels))
            });
        // A rank whose binding failed still takes part in the votes below: the others would otherwise wait until
        // their deadline.
        let published = local
            .as_ref()
            .map_err(Error::clone)
            .and_then(|(_, requests, _)| exchange.publish_all(requests, self.context.deadline()));
        let agreed = self
            .context
            .agree(published.as_ref().map(|_| &*self.digest));
        let published = match (published, agreed) {
            (Ok(published), Ok(())) => published,
            (Ok(published), Err(error)) => {
                // Peers would take these offers for those of the next attempt.
                exchange.withdraw(published);
                return Err(error);
            }
            (Err(_), Err(error)) | (Err(error), Ok(())) => return Err(error),
        };
        // All ranks have reached this point, so ranks that are left out of the exchange join the engine too.
        let engines = match self.engines() {
            Ok(engines) => engines,
            Err(error) => {
                exchange.withdraw(published);
                // The other ranks are on their way to the last vote, so this one has to join it with its error.
                return self.context.agree_on(Err(error));
            }
        };
        // Not `?`: an error here must reach the vote at the end.
        let transfers = exchange.complete(published, self.context.deadline());
        let resolved = local.and_then(|(memory, _, kernels)| {
            // Either all ranks have kernels or none has, because they bring the same program.
            let kernels =
                kernels.map(|kernels| kernels.exchange(&self.context, memory.slices(), |_| true));
            let kernels = kernels.transpose()?;
            let mut sections = self.program.sections();
            if let Some(kernels) = &kernels
                && sections.any(|section| section.may_note())
            {
                // Each watched plan costs a read from the device per synchronization.
                let notes = &self.context.kernel_notes;
                notes.watch(&kernels.reach, &self.program);
            }
            self.resolve(memory, transfers?, &engines, kernels)
        });
        self.context.agree_on(resolved)
    }

    /// Joins the collectives and engines that this rank takes part in. All ranks join those of subgroups in the same
    /// order, which avoids a deadlock: all ranks of the first unjoined engine join it next.
    fn engines(&self) -> Result<Engines> {
        let mut engines = Engines::default();
        if self.uses_engine_of_all {
            if let Some(collectives) = &self.collectives {
                engines.direct = collectives.join(&self.context)?;
            }
            if engines.direct.is_none() {
                let engine = self.context.engines.of_all()?;
                engines.joined.insert(None, engine);
            }
        }
        for ranks in self.program.parts() {
            let engine = self.context.engines.of_part(&ranks)?;
            engines.joined.insert(Some(ranks), engine);
        }
        Ok(engines)
    }

    /// Builds the plan over `memory` and the exchanged `transfers`.
    fn resolve(
        &self,
        memory: PlanMemory,
        transfers: Vec<Transfer>,
        engines: &Engines,
        kernels: Option<BoundKernels>,
    ) -> Result<Plan> {
        let program = &self.program;
        let mut exchanged = transfers.into_iter();
        let transfers: Vec<Option<Arc<Transfer>>> = program
            .transfers
            .iter()
            .map(|transfer| match transfer.backend {
                Backend::Direct(_) => exchanged.next().map(Arc::new),
                Backend::Nccl => None,
            })
            .collect();
        let compute = if program.computes() {
            Some(self.context.device.compute()?)
        } else {
            None
        };
        let streams = program.streams.iter().map(|kind| self.pool.stream(*kind));
        let streams = streams.collect::<Result<Vec<_>>>()?;
        let commands = Resolver::new(
            program,
            &memory,
            &transfers,
            &*self.context.device,
            compute.clone(),
            engines,
            kernels.as_ref(),
        )
        .commands()?;
        Ok(Plan::new(PlanParts {
            launches: Launches::new(&commands),
            context: self.context.clone(),
            name: self.name.clone(),
            program: program.clone(),
            collectives: engines.direct.clone(),
            commands,
            transfers: transfers.into_iter().flatten().collect(),
            kernels,
            streams,
            replaceable: replaceable(program, &memory),
            memory,
            compute,
            eager_only: self.eager_only.clone(),
        }))
    }

    /// Direct transfers of the program, in program order.
    fn direct(&self) -> impl Iterator<Item = (&TransferInstance, Protocol)> {
        self.program
            .transfers
            .iter()
            .filter_map(|transfer| match transfer.backend {
                Backend::Direct(protocol) => Some((transfer, protocol)),
                Backend::Nccl => None,
            })
    }

    /// Requests for the exchange of handles, over `memory`.
    fn requests(&self, memory: &PlanMemory) -> Result<Vec<TransferRequest>> {
        let mut registered: HashMap<TensorId, Region> = HashMap::new();
        let mut requests = Vec::new();
        let path = self.context.path(self.suits_transfer_kernels);
        for (transfer, protocol) in self.direct() {
            let range = transfer.range;
            let tag = tag(transfer);
            // Once per tensor: several transfers may be of parts of one.
            let region = match registered.entry(range.tensor) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => {
                    let Some(region) = memory.region(range.tensor, &self.context.memory)? else {
                        // Sends of posted matmuls: the tensor has a shape but no memory, as the result goes straight
                        // to the receiver.
                        let store = TransferRequest::store(range.bytes, transfer.peer, tag);
                        requests.push(store.with_path(path));
                        continue;
                    };
                    place.insert(region)
                }
            };
            let part = region.slice(range.offset_bytes..range.end())?;
            let request = match transfer.direction {
                Direction::Send => TransferRequest::send(&part, transfer.peer, tag),
                Direction::Receive => TransferRequest::receive(&part, transfer.peer, tag),
            };
            let request = request.with_protocol(protocol).with_path(path);
            requests.push(match self.multiprocessors_per_transfer {
                Some(most) => request.with_multiprocessors(most),
                None => request,
            });
        }
        Ok(requests)
    }
}

/// Bit set in the tags of programs' transfers, to separate them from tags chosen by the caller.
const PROGRAM_TAGS: u64 = 1 << 63;

/// Program tags are signed; the conversion only has to keep them distinct.
fn tag(transfer: &TransferInstance) -> u64 {
    PROGRAM_TAGS | (transfer.tag as u64 & !PROGRAM_TAGS)
}

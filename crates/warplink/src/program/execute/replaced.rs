//! Memory substituted for a plan's own in one run.
//!
//! Memory that peers access was exchanged when the plan was bound and is fixed. All other memory is referenced by
//! commands of this rank only, so a run can substitute it without notifying a peer; what this rank puts is part of that.

use super::memory::{Bindings, PlanMemory};
use crate::device::{CollectiveRequest, Compute, DeviceSlice, Elementwise};
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::p2p::{Direction, Protocol, Transfer};
use crate::program::ir::{Backend, Role};
use crate::program::rank_program::{OperationKind, RankProgram, TensorId, TransferInstance};
use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

/// Substitutes for the memory of tensors; by default none.
#[derive(Debug, Default)]
pub(super) struct Replaced<'a> {
    // Pairs of the plan's own memory and its substitute, of equal length.
    pairs: Vec<(&'a DeviceSlice, &'a DeviceSlice)>,
    /// Computes on substitutes, if the program computes.
    pub(super) compute: Option<&'a Arc<dyn Compute>>,
}

impl<'a> Replaced<'a> {
    /// Substitutes the memory `given` by name for that of tensors among `replaceable`.
    pub(super) fn new(
        program: &RankProgram,
        memory: &'a PlanMemory,
        (replaceable, compute): (&HashSet<TensorId>, Option<&'a Arc<dyn Compute>>),
        given: &'a Bindings,
    ) -> Result<Self> {
        let pair = |(name, slice): (&'a String, &'a DeviceSlice)| {
            let named = |id: &&TensorId| *program.tensors[**id].name == **name;
            let own = replaceable.iter().find(named);
            let own = own.and_then(|id| memory.tensor_slice(*id)).ok_or_else(|| {
                Error::invalid(format!(
                    "the memory of '{name}' cannot be replaced in a run"
                ))
                .with_help("replace inputs and outputs that the plan lists as replaceable")
            })?;
            if own.bytes() != slice.bytes() {
                return Err(Error::invalid(format!(
                    "'{name}' has {} bytes; expected the {} of the tensor",
                    slice.bytes(),
                    own.bytes()
                )));
            }
            Ok((own, slice))
        };
        let pairs = given.iter().map(pair).collect::<Result<Vec<_>>>()?;
        Ok(Self { pairs, compute })
    }

    /// Whether `slice` is replaced.
    pub(super) fn has(&self, slice: &DeviceSlice) -> bool {
        self.pairs.iter().any(|(own, _)| lies_in(slice, own))
    }

    /// Memory used for `slice` in this run.
    pub(super) fn of<'s>(&self, slice: &'s DeviceSlice) -> Result<Cow<'s, DeviceSlice>> {
        match self.pairs.iter().find(|(own, _)| lies_in(slice, own)) {
            Some((own, other)) => {
                let offset = (slice.address() - own.address()) as usize;
                other.slice(offset..offset + slice.bytes()).map(Cow::Owned)
            }
            None => Ok(Cow::Borrowed(slice)),
        }
    }

    fn owned(&self, slice: &DeviceSlice) -> Result<DeviceSlice> {
        self.of(slice).map(Cow::into_owned)
    }

    /// `request` with the memory of this run.
    pub(super) fn of_elementwise(&self, request: &Elementwise) -> Result<Elementwise> {
        let mut request = request.clone();
        for operand in std::iter::once(&mut request.target).chain(&mut request.sources) {
            operand.slice = self.owned(&operand.slice)?;
        }
        Ok(request)
    }

    /// Memory that `transfer` copies in this run instead of its buffer, if that is replaced.
    pub(super) fn of_send(&self, transfer: &Transfer) -> Result<Option<DeviceSlice>> {
        // Only there is this rank the one that reads the buffer; in other transfers the peer, or a mapped handle, has
        // its address.
        let sends = transfer.direction() == Direction::Send && transfer.protocol() == Protocol::Put;
        let buffer = transfer.region().map(Region::memory);
        let buffer = buffer.filter(|buffer| sends && self.has(buffer));
        buffer.map(|buffer| self.owned(buffer)).transpose()
    }

    /// `request` with the memory of this run.
    pub(super) fn of_request<'r>(
        &self,
        request: &'r CollectiveRequest,
    ) -> Result<Cow<'r, CollectiveRequest>> {
        if self.pairs.is_empty() {
            return Ok(Cow::Borrowed(request));
        }
        Ok(Cow::Owned(match request {
            CollectiveRequest::Collective {
                collective,
                dtype,
                target,
                source,
            } => CollectiveRequest::Collective {
                collective: *collective,
                dtype: *dtype,
                target: self.owned(target)?,
                source: self.owned(source)?,
            },
            CollectiveRequest::Exchange { sends, receives } => {
                let each = |pieces: &[(usize, DeviceSlice)]| {
                    let piece =
                        |(peer, slice): &(usize, DeviceSlice)| Ok((*peer, self.owned(slice)?));
                    pieces.iter().map(piece).collect::<Result<Vec<_>>>()
                };
                CollectiveRequest::Exchange {
                    sends: each(sends)?,
                    receives: each(receives)?,
                }
            }
        }))
    }
}

/// Inputs and outputs that no peer accesses, that no kernel uses, and whose memory is bound to no other tensor. Operands of
/// several matmuls that are stored at peers at once are excluded as well: a device may have prepared them together.
pub(super) fn replaceable(program: &RankProgram, memory: &PlanMemory) -> HashSet<TensorId> {
    let put = |transfer: &TransferInstance| {
        transfer.direction == Direction::Send
            && transfer.backend == Backend::Direct(Protocol::Put)
            && !memory.is_staged(transfer.range.tensor)
    };
    let transfers = program.transfers.iter().filter(|one| !put(one));
    free(program, memory, transfers)
}

/// As [`replaceable`], without what this rank puts: memory that its device copies itself, wherever it is.
pub(super) fn untransferred(program: &RankProgram, memory: &PlanMemory) -> HashSet<TensorId> {
    free(program, memory, program.transfers.iter())
}

/// The same, but for tensors of `transfers`, as far as these are prepared.
fn free<'a>(
    program: &RankProgram,
    memory: &PlanMemory,
    transfers: impl Iterator<Item = &'a TransferInstance>,
) -> HashSet<TensorId> {
    let direct = transfers.filter(|transfer| !transfer.is_engine());
    let mut fixed: HashSet<TensorId> = direct.map(|transfer| transfer.range.tensor).collect();
    for operation in &program.operations {
        match &operation.kind {
            // Launch arguments of kernels are prepared with addresses of all ranks.
            OperationKind::Kernel(section) => fixed.extend(section.user_tensors()),
            OperationKind::PostMatmul(it) if it.a.len() > 1 => {
                let ranges = it.a.iter().chain([&it.b]).chain(&it.bias);
                fixed.extend(ranges.map(|range| range.tensor));
            }
            _ => {}
        }
    }
    let alone = |id: TensorId| {
        let own = memory.tensor_slice(id);
        // Substitution goes by address: a range that two tensors share would be replaced for both.
        let mut others = (0..memory.tensors()).filter(|other| *other != id);
        own.is_some_and(|own| {
            !others.any(|other| memory.tensor_slice(other).is_some_and(|o| own.overlaps(o)))
        })
    };
    let candidates = program.tensors.iter().enumerate();
    candidates
        .filter(|(_, tensor)| tensor.role != Role::Local)
        .map(|(id, _)| id)
        .filter(|id| !fixed.contains(id) && alone(*id))
        .collect()
}

fn lies_in(slice: &DeviceSlice, whole: &DeviceSlice) -> bool {
    let (start, end) = (slice.address(), slice.address() + slice.bytes() as u64);
    slice.kind() == whole.kind()
        && start >= whole.address()
        && end <= whole.address() + whole.bytes() as u64
}

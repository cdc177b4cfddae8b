//! Memory of a plan's tensors: bound by the caller or taken from the pool.

use super::pool::Pool;
use super::replaced::untransferred;
use crate::device::{DeviceSlice, Stream};
use crate::error::{Error, Result};
use crate::memory::{MemoryRegistry, Region};
use crate::program::ir::Role;
use crate::program::rank_program::{Range, RankProgram, TensorId, TensorInstance};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Memory of the caller for a program's inputs and outputs, by name. The plan holds a reference to each slice for its
/// lifetime.
pub type Bindings = BTreeMap<String, DeviceSlice>;

/// Memory of one tensor.
#[derive(Clone, Debug)]
pub(super) enum TensorMemory {
    Bound(DeviceSlice),
    Pooled(Region),
    /// The caller's memory, and a shareable region that peers map instead; a run copies between them.
    Staged {
        bound: DeviceSlice,
        region: Region,
    },
    /// No memory: no operation of this rank accesses it.
    Nothing,
}

impl TensorMemory {
    fn slice(&self) -> Option<&DeviceSlice> {
        match self {
            Self::Bound(slice) => Some(slice),
            Self::Pooled(region) | Self::Staged { region, .. } => Some(region.memory()),
            Self::Nothing => None,
        }
    }

    /// Memory as bound by the caller.
    fn callers(&self) -> Option<&DeviceSlice> {
        match self {
            Self::Staged { bound, .. } => Some(bound),
            _ => self.slice(),
        }
    }
}

/// Memory of every tensor of a rank program. Pooled regions return to the pool on drop.
#[derive(Debug)]
pub(super) struct PlanMemory {
    pub(super) pool: Arc<Pool>,
    tensors: Vec<TensorMemory>,
}

impl PlanMemory {
    /// Binds the tensors of `program` to `bindings`, and the remaining ones to memory of `pool`.
    pub(super) fn bind(
        program: &RankProgram,
        bindings: &Bindings,
        pool: &Arc<Pool>,
    ) -> Result<Self> {
        check_names(program, bindings)?;
        let touched = program.touched();
        let mut memory = Self {
            pool: pool.clone(),
            tensors: Vec::with_capacity(program.tensors.len()),
        };
        for (id, tensor) in program.tensors.iter().enumerate() {
            let bound = match tensor.role {
                Role::Local => None,
                Role::Input | Role::Output => bindings.get(&*tensor.name),
            };
            let next = match (bound, tensor.role) {
                (Some(slice), _) => TensorMemory::Bound(of_length(slice, tensor)?),
                (None, Role::Input) => {
                    return Err(Error::invalid(format!(
                        "the input '{}' is not bound",
                        tensor.name
                    ))
                    .with_help("bind every input of the program"));
                }
                (None, Role::Local) if !touched.contains(&id) => TensorMemory::Nothing,
                (None, _) => TensorMemory::Pooled(pool.take(tensor.bytes)?),
            };
            memory.tensors.push(next);
        }
        // Before staging, which would hide an overlap in the caller's memory.
        memory.check_overlaps(program)?;
        if !pool.is_reached_by_peers()? {
            memory.stage(program)?;
        }
        Ok(memory)
    }

    /// Substitutes shareable regions for the caller's memory that the program exposes to peers.
    fn stage(&mut self, program: &RankProgram) -> Result<()> {
        // Memory that no peer maps stays the caller's, which saves the copies.
        let own = untransferred(program, self);
        for id in 0..self.tensors.len() {
            if let TensorMemory::Bound(bound) = &self.tensors[id]
                && !own.contains(&id)
            {
                self.tensors[id] = TensorMemory::Staged {
                    region: self.pool.take(bound.bytes())?,
                    bound: bound.clone(),
                };
            }
        }
        Ok(())
    }

    /// Enqueues the copies from the caller's memory to its staging regions, before a run.
    pub(super) fn copy_in(&self, stream: &Stream) -> Result<()> {
        self.tensors.iter().try_for_each(|tensor| match tensor {
            // Outputs, too: a program may update only a part of one, and all of it is copied back.
            TensorMemory::Staged { bound, region } => stream.copy(region.memory(), bound),
            _ => Ok(()),
        })
    }

    /// Enqueues the copies of outputs back to the caller's memory, after a run.
    pub(super) fn copy_out(&self, program: &RankProgram, stream: &Stream) -> Result<()> {
        let tensors = self.tensors.iter().zip(&program.tensors);
        for (memory, tensor) in tensors {
            if let (TensorMemory::Staged { bound, region }, Role::Output) = (memory, tensor.role) {
                stream.copy(bound, region.memory())?;
            }
        }
        Ok(())
    }

    /// Memory of a tensor as bound by the caller, if this rank accesses it.
    pub(super) fn callers_slice(&self, id: TensorId) -> Option<&DeviceSlice> {
        self.tensors.get(id)?.callers()
    }

    /// Fails if an output overlaps another tensor: the verifier assumes that tensors do not alias. Inputs are only
    /// read, so they may overlap each other.
    fn check_overlaps(&self, program: &RankProgram) -> Result<()> {
        let mut bound: Vec<(&DeviceSlice, &TensorInstance)> = self
            .tensors
            .iter()
            .zip(&program.tensors)
            .filter_map(|(memory, tensor)| match memory {
                TensorMemory::Bound(slice) => Some((slice, tensor)),
                _ => None,
            })
            .collect();
        bound.sort_by_key(|(slice, _)| slice.address());
        // Among tensors with lower start addresses: the output that ends last, and the tensor that ends last.
        let mut output: Option<(&DeviceSlice, &TensorInstance)> = None;
        let mut any: Option<(&DeviceSlice, &TensorInstance)> = None;
        let end = |slice: &DeviceSlice| slice.address() + slice.bytes() as u64;
        for next in bound {
            // One pass over the sorted tensors suffices: if any earlier tensor reaches into this one, the earlier one
            // that ends last does.
            let before = if next.1.role == Role::Output {
                any
            } else {
                output
            };
            if let Some(before) = before
                && before.0.overlaps(next.0)
            {
                return Err(Error::invalid(format!(
                    "'{}' and '{}' are bound to memory that overlaps; expected memory of its own for \
                     every output",
                    before.1.name, next.1.name
                )));
            }
            let later = |last: &Option<(&DeviceSlice, &TensorInstance)>| {
                last.is_none_or(|(slice, _)| end(slice) < end(next.0))
            };
            if later(&any) {
                any = Some(next);
            }
            if next.1.role == Role::Output && later(&output) {
                output = Some(next);
            }
        }
        Ok(())
    }

    /// Memory of a tensor for peers to map, if this rank accesses it.
    pub(super) fn region(&self, id: TensorId, memory: &MemoryRegistry) -> Result<Option<Region>> {
        Ok(match &self.tensors[id] {
            TensorMemory::Pooled(region) | TensorMemory::Staged { region, .. } => {
                Some(region.clone())
            }
            // The pool's regions are registered already; the caller's memory is not.
            TensorMemory::Bound(slice) => Some(memory.register(slice)?),
            TensorMemory::Nothing => None,
        })
    }

    /// Whether peers map another region than the caller's memory.
    pub(super) fn is_staged(&self, id: TensorId) -> bool {
        matches!(self.tensors.get(id), Some(TensorMemory::Staged { .. }))
    }

    /// Number of tensors.
    pub(super) fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Memory of every tensor that this rank accesses.
    pub(super) fn slices(&self) -> BTreeMap<TensorId, DeviceSlice> {
        let all = self.tensors.iter().enumerate();
        all.filter_map(|(id, tensor)| Some((id, tensor.slice()?.clone())))
            .collect()
    }

    /// Memory of a tensor, if this rank accesses it.
    pub(super) fn tensor_slice(&self, id: TensorId) -> Option<&DeviceSlice> {
        self.tensors.get(id)?.slice()
    }

    pub(super) fn slice(&self, range: &Range) -> Result<DeviceSlice> {
        let tensor = self
            .tensor_slice(range.tensor)
            .ok_or_else(|| Error::internal("a tensor without memory is accessed"))?;
        tensor.slice(range.offset_bytes..range.end())
    }
}

impl Drop for PlanMemory {
    fn drop(&mut self) {
        let pooled = self.tensors.drain(..).filter_map(|tensor| match tensor {
            TensorMemory::Pooled(region) | TensorMemory::Staged { region, .. } => Some(region),
            TensorMemory::Bound(_) | TensorMemory::Nothing => None,
        });
        self.pool.give_back(pooled);
    }
}

/// Fails if a binding names no input or output.
fn check_names(program: &RankProgram, bindings: &Bindings) -> Result<()> {
    let outer = program.tensors.iter().filter(|t| t.role != Role::Local);
    let names: Vec<&str> = outer.map(|tensor| &*tensor.name).collect();
    match bindings.keys().find(|name| !names.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => Err(
            Error::invalid(format!("the program has no input or output '{name}'"))
                .with_help(format!("it has {}", names.join(", "))),
        ),
    }
}

fn of_length(slice: &DeviceSlice, tensor: &TensorInstance) -> Result<DeviceSlice> {
    if slice.bytes() == tensor.bytes {
        return Ok(slice.clone());
    }
    Err(Error::invalid(format!(
        "'{}' is {:?} of {}, {} bytes, but is bound to {}",
        tensor.name,
        tensor.shape,
        tensor.dtype,
        tensor.bytes,
        slice.bytes()
    )))
}

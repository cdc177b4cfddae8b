//! The memory of a plan's tensors: bound by the caller or taken from the pool.

use super::pool::Pool;
use super::replaced::replaceable;
use crate::device::{DeviceSlice, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Region;
use crate::program::ir::Role;
use crate::program::rank_program::{Range, RankProgram, TensorId, TensorInstance};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The caller's memory for a program's inputs and outputs, by name. Slices are borrowed: the plan
/// holds them as long as it lives.
pub type Bindings = BTreeMap<String, DeviceSlice>;

/// The memory of one tensor.
#[derive(Clone, Debug)]
pub(super) enum TensorMemory {
    Bound(DeviceSlice),
    Pooled(Region),
    /// The caller's, and memory that peers can map in its place: a run copies the one there and back.
    Staged {
        bound: DeviceSlice,
        region: Region,
    },
    /// There is none: nothing on this rank accesses it.
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

    /// As the caller has it.
    fn callers(&self) -> Option<&DeviceSlice> {
        match self {
            Self::Staged { bound, .. } => Some(bound),
            _ => self.slice(),
        }
    }
}

/// The memory of every tensor of a rank program. What came from the pool goes back when this is dropped.
#[derive(Debug)]
pub(super) struct PlanMemory {
    pub(super) pool: Arc<Pool>,
    tensors: Vec<TensorMemory>,
}

impl PlanMemory {
    /// Binds the tensors of `program` to `bindings`, and those that are not bound to memory of `pool`.
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
        memory.check_overlaps(program)?;
        if !pool.is_reached_by_peers()? {
            memory.stage(program)?;
        }
        Ok(memory)
    }

    /// Puts memory that peers map in the place of the caller's, where the program has them reach it.
    fn stage(&mut self, program: &RankProgram) -> Result<()> {
        let own = replaceable(program, self);
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

    /// Enqueues the copies from the caller's memory to what takes its place, before a run.
    pub(super) fn copy_in(&self, stream: &Stream) -> Result<()> {
        self.tensors.iter().try_for_each(|tensor| match tensor {
            TensorMemory::Staged { bound, region } => stream.copy(region.memory(), bound),
            _ => Ok(()),
        })
    }

    /// Enqueues the copies of outputs back to the caller's memory, behind a run.
    pub(super) fn copy_out(&self, program: &RankProgram, stream: &Stream) -> Result<()> {
        let tensors = self.tensors.iter().zip(&program.tensors);
        for (memory, tensor) in tensors {
            if let (TensorMemory::Staged { bound, region }, Role::Output) = (memory, tensor.role) {
                stream.copy(bound, region.memory())?;
            }
        }
        Ok(())
    }

    /// The memory of a tensor as the caller has it, if this rank accesses it.
    pub(super) fn callers_slice(&self, id: TensorId) -> Option<&DeviceSlice> {
        self.tensors.get(id)?.callers()
    }

    /// Fails where an output is bound to bytes of another tensor: the verifier counts on it that
    /// tensors are apart. Inputs are only read, so they may overlap.
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
        // The output that ends last, and the tensor that does, of those that start before.
        let mut output: Option<(&DeviceSlice, &TensorInstance)> = None;
        let mut any: Option<(&DeviceSlice, &TensorInstance)> = None;
        let end = |slice: &DeviceSlice| slice.address() + slice.bytes() as u64;
        for next in bound {
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

    pub(super) fn tensor(&self, id: TensorId) -> &TensorMemory {
        &self.tensors[id]
    }

    /// How many tensors there are.
    pub(super) fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// The memory of every tensor that this rank accesses.
    pub(super) fn slices(&self) -> BTreeMap<TensorId, DeviceSlice> {
        let all = self.tensors.iter().enumerate();
        all.filter_map(|(id, tensor)| Some((id, tensor.slice()?.clone())))
            .collect()
    }

    /// The memory of a tensor, if this rank accesses it.
    pub(super) fn tensor_slice(&self, id: TensorId) -> Option<&DeviceSlice> {
        self.tensors.get(id)?.slice()
    }

    pub(super) fn slice(&self, range: &Range) -> Result<DeviceSlice> {
        let tensor = self.tensor_slice(range.tensor).ok_or_else(|| {
            Error::new(ErrorKind::Internal, "a tensor without memory is accessed")
        })?;
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

/// Fails where a binding names no input or output.
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

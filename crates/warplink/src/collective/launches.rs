//! The kernels of calls that were made before.

use super::algorithm::Algorithm;
use super::call::Call;
use super::choice::Machine;
use crate::device::Readying;
use crate::error::{Error, ErrorKind, Result};
use crate::program::execute::{SharedKernel, SharedWorkspace};
use crate::program::section::SectionInstance;
use crate::program::{OperationKind, RankProgram};
use crate::sync::lock;
use rustc_hash::FxHashMap;
use std::sync::{Arc, Mutex};

/// The most calls that are remembered.
const MAX_REMEMBERED: usize = 4096;

/// What tells calls apart that need kernels of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub(super) call: Call,
    /// Whether all memory starts at multiples of 16 bytes.
    pub(super) aligned: bool,
    /// How input and output lie to each other.
    pub(super) overlap: Overlap,
}

/// How input and output lie to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Overlap {
    Apart,
    /// They are the same memory, or the one is a part of the other.
    Shared,
}

/// Makes kernels, and remembers them.
#[derive(Debug, Default)]
pub(super) struct Launches {
    // Shapes are this process's own, and each call looks for one.
    known: Mutex<FxHashMap<Shape, Arc<SharedKernel>>>,
}

impl Launches {
    /// The kernel for a call; made where there is none.
    pub(super) fn get(
        &self,
        shape: &Shape,
        make: impl FnOnce() -> Result<SharedKernel>,
    ) -> Result<Arc<SharedKernel>> {
        if let Some(known) = lock(&self.known).get(shape) {
            return Ok(known.clone());
        }
        let made = Arc::new(make()?);
        let mut known = lock(&self.known);
        if known.len() >= MAX_REMEMBERED {
            // What is made of the same text again costs little.
            known.clear();
        }
        Ok(known.entry(*shape).or_insert(made).clone())
    }
}

/// The kernel for a call, on rank `rank`.
pub(super) fn make(
    workspace: &SharedWorkspace,
    machine: &Machine,
    rank: usize,
    shape: &Shape,
    readying: Readying,
) -> Result<SharedKernel> {
    let choice = machine.choose(&shape.call)?;
    let program = machine.rank_program(rank, &shape.call, &choice)?;
    let mut section = section(&program)?;
    section.shared_tensors = shape.overlap == Overlap::Shared;
    section.published = choice.algorithm == Algorithm::Direct;
    let tell = Arc::new(Call::difference);
    workspace.kernel(Arc::new(section), shape.aligned, tell, readying)
}

/// The only kernel of a program, as one that serves all counts.
pub(super) fn section(program: &RankProgram) -> Result<SectionInstance> {
    let mut kernels = program
        .operations
        .iter()
        .filter_map(|operation| match &operation.kind {
            OperationKind::Kernel(section) => Some(section),
            _ => None,
        });
    match (kernels.next(), kernels.next()) {
        (Some(section), None) => Ok(SectionInstance {
            sizes_vary: true,
            ..(**section).clone()
        }),
        _ => Err(Error::new(
            ErrorKind::Internal,
            "a collective is a program with one kernel",
        )),
    }
}

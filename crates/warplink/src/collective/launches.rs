//! The kernels of calls that were made before.

use super::algorithm::Algorithm;
use super::call::Call;
use super::choice::{Choice, Machine};
use super::recent::Recent;
use crate::device::{Readying, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::program::execute::{CodeWanted, SharedKernel, SharedWorkspace, TellDifference};
use crate::program::section::SectionInstance;
use crate::program::{OperationKind, RankProgram};
use crate::sync::lock;
use std::sync::{Arc, Mutex};

/// The most calls whose kernels are kept, and the most kernels that others are made like.
const MAX_KEPT: usize = 4096;
const MAX_MODELS: usize = 512;

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

/// What calls have alike that may have the same code: all but the count and the factor, of which the code does not depend,
/// and how they are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Form {
    shape: Shape,
    algorithm: Algorithm,
    lanes: usize,
    threads: usize,
}

/// Makes kernels, and keeps those of the calls that were made last.
#[derive(Debug)]
pub(super) struct Launches {
    // Shapes are this process's own, and each call looks for one.
    kept: Mutex<Recent<Shape, Arc<SharedKernel>>>,
    /// For each form, a kernel whose code others use too.
    models: Mutex<Recent<Form, Arc<SharedKernel>>>,
}

impl Default for Launches {
    fn default() -> Self {
        Self {
            kept: Mutex::new(Recent::new(MAX_KEPT)),
            models: Mutex::new(Recent::new(MAX_MODELS)),
        }
    }
}

impl Form {
    fn of(shape: &Shape, choice: &Choice) -> Self {
        let op = shape.call.op.map(|op| match op.factor() {
            Some(_) => ReduceOp::scaled_sum(1.0),
            None => op,
        });
        // Counts of as many bits.
        let count = usize::BITS - shape.call.count.leading_zeros();
        let call = Call {
            op,
            count: count as usize,
            ..shape.call
        };
        Self {
            shape: Shape { call, ..*shape },
            algorithm: choice.algorithm,
            lanes: choice.lanes,
            threads: choice.threads,
        }
    }
}

impl Launches {
    /// The kernel for a call, on rank `rank`; made where there is none. That of a count which was not met before costs as much
    /// as unrolling its program: the code is that of another count.
    pub(super) fn get(
        &self,
        shape: &Shape,
        workspace: &SharedWorkspace,
        machine: &Machine,
        rank: usize,
        readying: Readying,
    ) -> Result<Arc<SharedKernel>> {
        if let Some(kept) = lock(&self.kept).get(shape) {
            return Ok(kept.clone());
        }
        let choice = machine.choose(&shape.call)?;
        let form = Form::of(shape, &choice);
        let model = lock(&self.models).get(&form).cloned();
        let section = |count: usize| -> Result<SectionInstance> {
            let call = Call {
                count,
                ..shape.call
            };
            // More of what is longer.
            let chunks = if count == shape.call.count {
                choice.chunks
            } else {
                machine.shape(choice.algorithm, &call).chunks
            };
            let choice = Choice { chunks, ..choice };
            let program = machine.rank_program(rank, &call, &choice)?;
            let mut section = section(&program)?;
            section.shared_tensors = shape.overlap == Overlap::Shared;
            section.published = choice.algorithm == Algorithm::Direct;
            Ok(section)
        };
        let mut wanted = CodeWanted {
            section: Arc::new(section(shape.call.count)?),
            aligned: shape.aligned,
            readying,
            model: model.as_deref(),
            largest: None,
        };
        let tell: Arc<TellDifference> = Arc::new(Call::difference);
        let made = match workspace.kernel_like(&wanted) {
            Some(made) => Arc::new(made?),
            None => {
                // The longest of the form, whose code may be the same: then it is that of all between.
                let most = usize::MAX.checked_shr(shape.call.count.leading_zeros());
                let most = most.filter(|most| *most > shape.call.count);
                wanted.largest = most.and_then(|most| section(most).ok());
                let made = Arc::new(workspace.kernel(&wanted, tell)?);
                drop(lock(&self.models).insert(form, made.clone()));
                made
            }
        };
        // Dropped without the lock.
        let before = lock(&self.kept).insert(*shape, made.clone());
        drop(before);
        Ok(made)
    }
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

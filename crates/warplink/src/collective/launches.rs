//! Cache of call kernels.

use super::algorithm::Algorithm;
use super::call::Call;
use super::choice::{Choice, Machine};
use super::diagnosis::difference;
use super::recent::Recent;
use crate::device::{Readying, ReduceOp};
use crate::error::{Error, Result};
use crate::program::execute::{
    CodeWanted, SharedKernel, SharedWorkspace, TellDifference, calls_differ,
};
use crate::program::section::SectionInstance;
use crate::program::{OperationKind, RankProgram};
use crate::sync::lock;
use std::sync::{Arc, Mutex};

/// Maximum cached calls, and maximum kernels whose code others share.
const MAX_KEPT: usize = 4096;
const MAX_MODELS: usize = 512;

/// Cache key: calls with different keys need different kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct CallKey {
    pub(super) call: Call,
    /// Whether all addresses are multiples of 16 bytes.
    pub(super) aligned: bool,
    /// Overlap of input and output.
    pub(super) overlap: Overlap,
}

/// Overlap of input and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Overlap {
    Apart,
    /// Equal, or one contains the other.
    Shared,
}

/// Cache key of code: everything that the code depends on, which excludes count and factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Form {
    shape: CallKey,
    algorithm: Algorithm,
    lanes: usize,
    threads: usize,
}

/// Creates kernels, and caches those of recent calls.
#[derive(Debug)]
pub(super) struct Launches {
    // Looked up by every call.
    kept: Mutex<Recent<CallKey, Arc<SharedKernel>>>,
    /// For each form, a kernel whose code others share.
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
    fn of(shape: &CallKey, choice: &Choice) -> Self {
        // The factor is a kernel parameter, so it does not affect the code.
        let op = shape.call.op.map(|op| match op.factor() {
            Some(_) => ReduceOp::scaled_sum(1.0),
            None => op,
        });
        // Counts with the same bit length.
        let count = usize::BITS - shape.call.count.leading_zeros();
        let call = Call {
            op,
            count: count as usize,
            ..shape.call
        };
        Self {
            shape: CallKey { call, ..*shape },
            algorithm: choice.algorithm,
            lanes: choice.lanes,
            threads: choice.threads,
        }
    }
}

impl Launches {
    /// The kernel of a call on rank `rank`, created on a miss. A new count of a known form only costs
    /// unrolling its program, since the code is shared.
    pub(super) fn get(
        &self,
        shape: &CallKey,
        workspace: &SharedWorkspace,
        machine: &Machine,
        rank: usize,
        readying: Readying,
    ) -> Result<Arc<SharedKernel>> {
        // Fast path: the same call was made before.
        if let Some(kept) = lock(&self.kept).get(shape) {
            return Ok(kept.clone());
        }
        let choice = machine.choose(&shape.call)?;
        let form = Form::of(shape, &choice);
        // The lock is released while code is compiled; two threads that compile the same form do no harm.
        let model = lock(&self.models).get(&form).cloned();
        let section = |count: usize| -> Result<SectionInstance> {
            let call = Call {
                count,
                ..shape.call
            };
            // More chunks for longer data.
            let chunks = if count == shape.call.count {
                choice.chunks
            } else {
                machine.shape(choice.algorithm, &call).chunks
            };
            let choice = Choice { chunks, ..choice };
            let program = machine.rank_program(rank, &call, &choice)?;
            let mut section = section(&program)?;
            // In place, a step may overwrite what another one reads, so the emitter treats all tensors as one.
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
        let tell: Arc<TellDifference> =
            Arc::new(|own: &[u32], theirs: &[u32]| calls_differ(difference(own, theirs)));
        let made = match workspace.kernel_like(&wanted) {
            Some(made) => Arc::new(made?),
            None => {
                // The longest count of the form: if its code is the same, so is that of every count in
                // between.
                let most = usize::MAX.checked_shr(shape.call.count.leading_zeros());
                let most = most.filter(|most| *most > shape.call.count);
                wanted.largest = most.and_then(|most| section(most).ok());
                let made = Arc::new(workspace.kernel(&wanted, tell)?);
                drop(lock(&self.models).insert(form, made.clone()));
                made
            }
        };
        // Dropped outside the lock.
        let before = lock(&self.kept).insert(*shape, made.clone());
        drop(before);
        Ok(made)
    }
}

/// The only kernel of a program, in a form that serves all counts.
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
        _ => Err(Error::internal("a collective is a program with one kernel")),
    }
}

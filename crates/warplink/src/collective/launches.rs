//! Cache of call kernels.

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
use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};

/// Maximum cached calls, and maximum kernels whose code others share.
const MAX_KEPT: usize = 4096;
const MAX_MODELS: usize = 512;

/// Bytes of calls whose kernels are compiled in the background when another call of the same kind has compiled its own:
/// every power of two, as logarithms.
const AHEAD: RangeInclusive<u32> = 10..=30;

/// Cache key: calls with different keys need different kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
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
    shape: Shape,
    algorithm: Algorithm,
    lanes: usize,
    threads: usize,
}

/// Creates kernels, and caches those of recent calls.
#[derive(Debug)]
pub(super) struct Launches {
    // Looked up by every call.
    kept: Mutex<Recent<Shape, Arc<SharedKernel>>>,
    /// For each form, a kernel whose code others share.
    models: Mutex<Recent<Form, Arc<SharedKernel>>>,
    /// Calls whose kernels of all sizes are compiled already, or in the background; with a count of 0.
    ahead: Mutex<HashSet<Shape>>,
    /// Maximum bytes of a tensor in one launch.
    launch_bytes: usize,
}

impl Shape {
    /// The same call with another count.
    fn of_count(&self, count: usize) -> Self {
        let call = Call { count, ..self.call };
        Self { call, ..*self }
    }

    /// Section of the kernel on rank `rank`.
    fn section(&self, machine: &Machine, rank: usize, choice: &Choice) -> Result<SectionInstance> {
        let program = machine.rank_program(rank, &self.call, choice)?;
        let mut section = section(&program)?;
        section.shared_tensors = self.overlap == Overlap::Shared;
        section.published = choice.algorithm == Algorithm::Direct;
        Ok(section)
    }

    /// Sections of such calls of every size up to `launch_bytes`, the largest first: its kernel takes longest to
    /// compile, and applications that try all sizes begin with the smallest.
    fn all_sizes(
        self,
        machine: Machine,
        rank: usize,
        launch_bytes: usize,
    ) -> impl Iterator<Item = SectionInstance> + Send {
        let sizes = AHEAD.rev().map(|bits| 1_usize << bits);
        let sizes = sizes.filter(move |bytes| *bytes <= launch_bytes);
        sizes.filter_map(move |bytes| {
            let shape = self.of_count(bytes / self.call.dtype.size());
            let choice = machine.choose(&shape.call).ok()?;
            shape.section(&machine, rank, &choice).ok()
        })
    }
}

impl Form {
    fn of(shape: &Shape, choice: &Choice) -> Self {
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
            shape: Shape { call, ..*shape },
            algorithm: choice.algorithm,
            lanes: choice.lanes,
            threads: choice.threads,
        }
    }
}

impl Launches {
    pub(super) fn new(launch_bytes: usize) -> Self {
        Self {
            kept: Mutex::new(Recent::new(MAX_KEPT)),
            models: Mutex::new(Recent::new(MAX_MODELS)),
            ahead: Mutex::default(),
            launch_bytes,
        }
    }

    /// The kernel of a call on rank `rank`, created on a miss. A new count of a known form only costs
    /// unrolling its program, since the code is shared.
    pub(super) fn get(
        &self,
        shape: &Shape,
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
        let model = lock(&self.models).get(&form).cloned();
        let section = |count: usize| -> Result<SectionInstance> {
            let other = shape.of_count(count);
            // More chunks for longer data.
            let chunks = if count == shape.call.count {
                choice.chunks
            } else {
                machine.shape(choice.algorithm, &other.call).chunks
            };
            other.section(machine, rank, &Choice { chunks, ..choice })
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
                // The longest count of the form: if its code is the same, so is that of every count in
                // between.
                let most = usize::MAX.checked_shr(shape.call.count.leading_zeros());
                let most = most.filter(|most| *most > shape.call.count);
                wanted.largest = most.and_then(|most| section(most).ok());
                let made = Arc::new(workspace.kernel(&wanted, tell)?);
                drop(lock(&self.models).insert(form, made.clone()));
                let kind = form.shape.of_count(0);
                // A barrier has no size.
                if shape.call.count > 0 && lock(&self.ahead).insert(kind) {
                    let sections = form
                        .shape
                        .all_sizes(machine.clone(), rank, self.launch_bytes);
                    workspace.compile_ahead(sections, shape.aligned);
                }
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
        _ => Err(Error::new(
            ErrorKind::Internal,
            "a collective is a program with one kernel",
        )),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::collective::algorithm::tests::machine;
    use crate::collective::call::CollectiveKind;
    use crate::dtype::DType;
    use crate::program::section::kernel_text;
    use std::collections::BTreeSet;

    fn text(section: &SectionInstance) -> String {
        kernel_text(section, &vec![true; section.tensors.len()]).unwrap()
    }

    /// Of other sizes between powers of two, a few choose an algorithm of their own.
    #[test]
    fn kernels_of_all_sizes_are_compiled_after_the_first() {
        for (world, kind) in [2, 8]
            .into_iter()
            .flat_map(|world| CollectiveKind::ALL.map(|kind| (world, kind)))
        {
            if kind == CollectiveKind::Barrier {
                continue;
            }
            let machine = machine(world);
            let call = Call {
                kind,
                op: kind.reduces().then_some(ReduceOp::Sum),
                dtype: DType::BF16,
                count: 1,
                root: kind.has_root().then_some(1),
            };
            let shape = Shape {
                call,
                aligned: true,
                overlap: Overlap::Apart,
            };
            let ahead = shape.all_sizes(machine.clone(), 0, usize::MAX);
            let ahead: BTreeSet<String> = ahead.map(|section| text(&section)).collect();
            assert!((5..20).contains(&ahead.len()), "{call}: {}", ahead.len());
            let mut missing = Vec::new();
            for bits in 10..30 {
                for bytes in [1_usize << bits, 3 << (bits - 1)] {
                    let shape = shape.of_count(bytes / 2);
                    let choice = machine.choose(&shape.call).unwrap();
                    if !ahead.contains(&text(&shape.section(&machine, 0, &choice).unwrap())) {
                        missing.push(bytes);
                    }
                }
            }
            assert!(
                missing.len() <= 2 && !missing.iter().any(|bytes| bytes.is_power_of_two()),
                "{call}: {missing:?}"
            );
            // A launch that is limited needs no kernels above its limit.
            assert_eq!(shape.all_sizes(machine, 0, 4096).count(), 3);
        }
    }
}

//! Cache of call kernels.

use super::algorithm::Algorithm;
use super::call::{Call, Overlap};
use super::choice::Choice;
use super::recent::Recent;
use crate::device::{DeviceSlice, Readying, ReduceOp};
use crate::error::{Error, Result};
use crate::program::RankProgram;
use crate::program::execute::{CodeWanted, SharedKernel, SharedWorkspace};
use crate::program::section::SectionInstance;
use crate::sync::lock;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

/// Cache key: calls with different keys need different kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct CallKey {
    pub(super) call: Call,
    /// Whether all addresses are multiples of 16 bytes.
    pub(super) aligned: bool,
    /// Overlap of input and output.
    pub(super) overlap: Overlap,
}

/// Whether kernels may access all of a slice in vectors.
pub(super) fn is_aligned(slice: &DeviceSlice) -> bool {
    slice.address().is_multiple_of(16)
}

/// Cache key of code: everything that the code depends on, which excludes count and factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Form {
    shape: CallKey,
    algorithm: Algorithm,
    lanes: usize,
    threads: usize,
}

/// Kernels of recent launches, by keys that determine them, and for each form a kernel whose code others share.
pub(super) struct KernelCache<K, F> {
    // Looked up by every launch.
    kept: Mutex<Recent<K, Arc<SharedKernel>>>,
    models: Mutex<Recent<F, Arc<SharedKernel>>>,
}

impl<K: Copy + Eq + Hash, F: Copy + Eq + Hash> KernelCache<K, F> {
    /// An empty cache for so many launches and forms.
    pub(super) fn new(most_kept: usize, most_models: usize) -> Self {
        Self {
            kept: Mutex::new(Recent::new(most_kept)),
            models: Mutex::new(Recent::new(most_models)),
        }
    }

    /// Fast path: the kernel of a recent launch.
    pub(super) fn get(&self, key: &K) -> Option<Arc<SharedKernel>> {
        lock(&self.kept).get(key).cloned()
    }

    /// Creates the kernel of a launch on memory that is `aligned` to 16 bytes or not, from its section for a size. If the
    /// form is known and its code serves, that only costs unrolling the program. If the code for the `largest` size of the
    /// form is the same, it serves every size in between.
    pub(super) fn create(
        &self,
        workspace: &SharedWorkspace,
        (key, form): (K, F),
        (aligned, readying): (bool, Readying),
        (size, largest): (usize, Option<usize>),
        section: impl Fn(usize) -> Result<SectionInstance>,
    ) -> Result<Arc<SharedKernel>> {
        // The locks are released while code is compiled; two threads that compile the same form do no harm.
        let model = lock(&self.models).get(&form).cloned();
        let mut wanted = CodeWanted {
            section: Arc::new(section(size)?),
            aligned,
            readying,
            model: model.as_deref(),
            largest: None,
        };
        let created = match workspace.kernel_like(&wanted) {
            Some(kernel) => Arc::new(kernel?),
            None => {
                let largest = largest.filter(|largest| *largest > size);
                wanted.largest = largest.and_then(|largest| section(largest).ok());
                let kernel = Arc::new(workspace.kernel(&wanted)?);
                let before = lock(&self.models).insert(form, kernel.clone());
                drop(before);
                kernel
            }
        };
        // Dropped outside the lock.
        let before = lock(&self.kept).insert(key, created.clone());
        drop(before);
        Ok(created)
    }
}

impl Form {
    pub(super) fn of(shape: &CallKey, choice: &Choice) -> Self {
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

/// The only kernel of a program, in a form that serves all counts.
pub(super) fn section(program: &RankProgram) -> Result<SectionInstance> {
    let mut kernels = program.sections();
    match (kernels.next(), kernels.next()) {
        (Some(section), None) => Ok(SectionInstance {
            sizes_vary: true,
            ..section.clone()
        }),
        _ => Err(Error::internal("a collective is a program with one kernel")),
    }
}

//! Compiles a section to the text of a kernel: one call of `warplink/steps.cuh` per step.
//!
//! Rank, world, lanes, threads, types, operators and the alignment of tensors are constants of the kernel. Sizes and
//! the integers around the section are launch arguments, so one kernel serves all sizes. Loops stay loops; lists of
//! sources and targets are expanded.
//! | module | subject |
//! |---|---|
//! | [`emit`] | the text, in CUDA C++; nothing outside of it depends on that language |
//! | [`scope`] | visible integers |
//! | [`range`] | value ranges of integers |
//! | [`hazard`] | placement of thread barriers |

mod emit;
mod hazard;
mod range;
mod scope;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;

use super::{Packing, SectionInstance, SectionTensor, WorkspaceLayout};
use crate::error::Result;
use crate::program::expr::Expr;
use std::sync::Arc;

/// Name of the kernel function.
pub(crate) const KERNEL: &str = "section";

/// Words of a lane's trace before the times of its steps.
pub(crate) const TIMES_HEADER: usize = 3;

/// Maximum tensor size, so that 32 bits count the packets of a step: they hold 8 bytes of data, or 4 in `packets8`.
pub(crate) const MAX_TENSOR_BYTES: usize = 16 << 30;
const MAX_TENSOR_BYTES_OF_PACKETS8: usize = 8 << 30;

/// Addresses passed to a launch.
#[derive(Clone, Debug)]
pub(crate) struct Addresses {
    /// Start of each tensor of the section on each rank; 0 if not mapped.
    pub(crate) tensors: Vec<Vec<u64>>,
    /// Signals of each rank.
    pub(crate) signals: Vec<u64>,
    /// Epochs of all lanes.
    pub(crate) epochs: u64,
    /// Number of epochs: the maximum number of lanes of the kernels that share them.
    pub(crate) lanes: u64,
    /// Tables of the allocations published by the ranks; 0 if there are none.
    pub(crate) tables: u64,
}

/// First location word of a tensor that is not published to peers: never a valid allocation number.
pub(crate) const UNPUBLISHED: u64 = u64::MAX;

impl Addresses {
    /// For each tensor of `instance`, whether it and its rows are aligned to 16 bytes on every rank that maps it.
    pub(crate) fn aligned(&self, instance: &SectionInstance) -> Vec<bool> {
        let tensors = instance.tensors.iter().zip(&self.tensors);
        let aligned = tensors.map(|(tensor, bases)| {
            let rows = tensor.strides.iter().rev().skip(1);
            bases.iter().all(|base| base.is_multiple_of(16))
                && rows
                    .map(|stride| stride * tensor.dtype.size())
                    .all(|bytes| bytes.is_multiple_of(16))
        });
        aligned.collect()
    }

    /// Index of the first location word in a launch. Each announced tensor has two: the number of its allocation
    /// among those published by this rank, and its byte offset in the allocation.
    pub(crate) fn first_place(&self, instance: &SectionInstance) -> usize {
        (instance.tensors.len() + 1) * instance.world + 3
    }

    /// The launch argument words of `instance`.
    pub(crate) fn words(&self, instance: &SectionInstance) -> Arc<[u64]> {
        let sizes = sizes(instance).into_iter().map(|size| size as u64);
        let integers = variables(instance).map(|(_, value)| value as u64);
        let tensors = self.tensors.iter().flatten().copied();
        let mut published = Vec::new();
        if instance.published {
            published.push(self.tables);
            let places = instance.announced().len();
            published.extend(std::iter::repeat_n([UNPUBLISHED, 0], places).flatten());
        }
        tensors
            .chain(self.signals.iter().copied())
            .chain([self.epochs, self.lanes])
            .chain(published)
            .chain(instance.factor().map(|factor| factor.value().to_bits()))
            .chain(integers)
            .chain(sizes)
            .collect()
    }
}

/// The text of the kernel of `instance`; `aligned` is the result of [`Addresses::aligned`].
///
/// # Errors
/// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) with its place, if kernels cannot perform a step.
pub(crate) fn text(instance: &SectionInstance, aligned: &[bool]) -> Result<String> {
    emit::kernel(instance, aligned, false)
}

/// As [`text`], for a kernel that records the start time of each step. Its arguments have two more words: the address
/// of the times of all lanes, and the maximum number of recorded steps per lane. A lane's record has [`TIMES_HEADER`]
/// words (number of steps, end of the last step, epoch), then two words per step: start time, and position with the
/// line in the upper half. Times are in nanoseconds of a device clock.
///
/// # Errors
/// As [`text`].
pub(crate) fn traced_text(instance: &SectionInstance, aligned: &[bool]) -> Result<String> {
    emit::kernel(instance, aligned, true)
}

/// Memory of a program of two ranks that any two ranks of a group run.
#[derive(Clone, Debug)]
pub(crate) struct PairLayout {
    /// Layout of a region of the workspace: that of one pair of ranks.
    pub(crate) layout: WorkspaceLayout,
    /// Bytes of a region. A rank has one for each peer.
    pub(crate) region: usize,
    /// Maximum messages of a launch.
    pub(crate) max_messages: usize,
}

/// The text of a kernel of many messages, each a launch of the sections of a program's two ranks. Tensors named in
/// `counts` are the count of a message, the others its data.
///
/// # Errors
/// As [`text`].
pub(crate) fn pair_text(
    sections: &[Arc<SectionInstance>; 2],
    layout: &PairLayout,
    counts: &[&str],
) -> Result<String> {
    emit::pair(sections, layout, counts)
}

/// Description of a tensor that is too large for a kernel, if any.
pub(crate) fn too_large(instance: &SectionInstance) -> Option<String> {
    let mut scratch = instance.scratch.iter();
    let max_bytes = if scratch.any(|scratch| scratch.packing == Packing::Packets8) {
        MAX_TENSOR_BYTES_OF_PACKETS8
    } else {
        MAX_TENSOR_BYTES
    };
    let mut tensors = instance.tensors.iter();
    let large =
        |tensor: &&SectionTensor| span(tensor).saturating_mul(tensor.dtype.size()) > max_bytes;
    let tensor = tensors.find(large)?;
    Some(format!(
        "'{}' is larger than {max_bytes} bytes",
        tensor.name
    ))
}

/// Number of elements from a tensor's first to its last, inclusive.
fn span(tensor: &SectionTensor) -> usize {
    let axes = tensor.shape.iter().zip(&tensor.strides);
    axes.map(|(extent, stride)| extent.saturating_mul(*stride))
        .max()
        .unwrap_or(1)
}

/// Kernel constant for the integer `name`, if it is one. The number of lanes follows from sizes, so that a kernel that serves
/// others serves any number: compiling one takes longer than thousands of launches.
fn constant(instance: &SectionInstance, name: &str) -> Option<&'static str> {
    let is = |expression: &Expr| matches!(expression, Expr::Name(other) if other == name);
    if is(&instance.section.lanes) {
        (!instance.sizes_vary).then_some("lanes")
    } else if is(&instance.section.threads) {
        Some("threads")
    } else {
        None
    }
}

/// Integers passed as launch arguments.
fn variables(instance: &SectionInstance) -> impl Iterator<Item = (&str, i64)> {
    let integers = instance.integers.iter();
    integers
        .filter(|(name, _)| constant(instance, name).is_none())
        .map(|(name, value)| (name.as_str(), *value))
}

/// Extents and strides of tensors without duplicates, so that the kernel computes with equal values once; with
/// duplicates if sizes vary. Strides of 1 are kernel constants.
fn sizes(instance: &SectionInstance) -> Vec<usize> {
    let mut sizes = Vec::new();
    for tensor in &instance.tensors {
        for size in tensor.shape.iter().chain(&tensor.strides) {
            if instance.sizes_vary || !sizes.contains(size) {
                sizes.push(*size);
            }
        }
    }
    sizes
}

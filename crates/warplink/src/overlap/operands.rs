//! Binds the caller's memory to a program's tensors.

use crate::device::DeviceSlice;
use crate::error::{Error, Result};
use crate::program::Bindings;

/// A caller's slice for a tensor of the program.
pub(super) struct BoundOperands {
    name: String,
    slice: DeviceSlice,
    /// Whether every outer index has its own part.
    parted: bool,
    written: bool,
}

impl BoundOperands {
    /// An input with a part for each outer index: A.
    pub(super) fn parted(name: impl Into<String>, slice: &DeviceSlice) -> Self {
        Self {
            name: name.into(),
            slice: slice.clone(),
            parted: true,
            written: false,
        }
    }

    /// An output, with a part for each outer index: C and G.
    pub(super) fn written(name: impl Into<String>, slice: &DeviceSlice) -> Self {
        Self {
            written: true,
            ..Self::parted(name, slice)
        }
    }

    /// An input shared by all outer indices: B and the bias.
    pub(super) fn shared(name: impl Into<String>, slice: &DeviceSlice) -> Self {
        Self {
            parted: false,
            ..Self::parted(name, slice)
        }
    }

    /// Name in the program.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether it is an output.
    pub(super) fn is_written(&self) -> bool {
        self.written
    }

    /// Part of one outer index.
    pub(super) fn part(&self, index: usize, outer: usize) -> Result<DeviceSlice> {
        // Shared operands are the same in every iteration.
        if !self.parted || outer == 1 {
            return Ok(self.slice.clone());
        }
        let bytes = self.slice.bytes();
        if !bytes.is_multiple_of(outer) {
            return Err(Error::invalid(format!(
                "'{}' has {bytes} bytes, which are not {outer} equal parts",
                self.name
            )));
        }
        // Parts are contiguous: the outer dimensions come first in memory.
        let each = bytes / outer;
        self.slice.slice(index * each..(index + 1) * each)
    }
}

/// Members of a family by their names in the program: `B[0]`, `B[1]`, …
pub(super) fn family(
    name: &str,
    slices: &[DeviceSlice],
    expected: usize,
    make: fn(String, &DeviceSlice) -> BoundOperands,
) -> Result<Vec<BoundOperands>> {
    if slices.len() != expected {
        return Err(Error::invalid(format!(
            "{name} has {} slices; expected {expected}",
            slices.len()
        )));
    }
    Ok(slices
        .iter()
        .enumerate()
        .map(|(index, slice)| make(format!("{name}[{index}]"), slice))
        .collect())
}

/// Bindings of the program's tensors for one outer index.
pub(super) fn bindings(tensors: &[BoundOperands], index: usize, outer: usize) -> Result<Bindings> {
    tensors
        .iter()
        .map(|tensor| Ok((tensor.name.clone(), tensor.part(index, outer)?)))
        .collect()
}

//! Arrays partitioned into one part per rank.

use crate::array::Array;
use crate::errors::invalid;
use pyo3::prelude::*;
use warplink::DType;
use warplink::collective::Parts;

/// Partition of an array into one part per rank.
pub(crate) struct Cut {
    counts: Vec<usize>,
    displacements: Vec<usize>,
}

impl Cut {
    /// For counts and displacements in elements of `each` units. Values that overflow exceed any memory, and are
    /// rejected by the length check.
    pub(crate) fn new(counts: Vec<usize>, displacements: Option<Vec<usize>>, each: usize) -> Self {
        let in_units = |elements: &usize| elements.saturating_mul(each);
        let counts: Vec<usize> = counts.iter().map(in_units).collect();
        let displacements = match displacements {
            Some(displacements) => displacements.iter().map(in_units).collect(),
            None => {
                let next = |end: &mut usize, count: &usize| {
                    let start = *end;
                    // The library checks each end against the array, where a saturated one fails.
                    *end = end.saturating_add(*count);
                    Some(start)
                };
                counts.iter().scan(0, next).collect()
            }
        };
        Self {
            counts,
            displacements,
        }
    }

    pub(crate) fn parts(&self) -> Parts<'_> {
        Parts {
            counts: &self.counts,
            displacements: &self.displacements,
        }
    }
}

/// Fails if counts in device memory are not 64-bit integers; memory without a type is accepted.
pub(crate) fn check_counts(counts: &Array, whose: &str) -> PyResult<()> {
    let is_wide = match (counts.element, counts.item_bytes) {
        (Some(element), _) => matches!(element.name, "i64" | "u64"),
        // A type that has no name here is judged by its size alone.
        (None, bytes) => bytes.is_none_or(|bytes| bytes == size_of::<u64>()),
    };
    if is_wide {
        return Ok(());
    }
    let found = counts.element.map_or("others", |element| element.name);
    Err(invalid(format!(
        "{whose} counts are {found}; expected i64 or u64"
    )))
}

/// The largest type that elements of both arrays consist of, and the number of its units per element.
pub(crate) fn unit(target: &Array, source: &Array) -> PyResult<(DType, usize)> {
    let differ = match (target.element, source.element) {
        (Some(target), Some(source)) => target != source,
        _ => target
            .item_bytes
            .zip(source.item_bytes)
            .is_some_and(|(a, b)| a != b),
    };
    if differ {
        let of = |array: &Array| match (array.element, array.item_bytes) {
            (Some(element), _) => element.name.to_owned(),
            (None, bytes) => format!("{} bytes", bytes.unwrap_or(1)),
        };
        return Err(invalid(format!(
            "the target has elements of {}; expected {}, as the source has",
            of(target),
            of(source)
        )));
    }
    let bytes = target.item_bytes.or(source.item_bytes).unwrap_or(1).max(1);
    // Wide units have fewer and larger accesses. There is no u16, so that f16 moves 2 bytes; moves do not interpret
    // values.
    let types = [DType::U64, DType::U32, DType::F16];
    let dtype = types
        .into_iter()
        .find(|dtype| bytes.is_multiple_of(dtype.size()));
    let dtype = dtype.unwrap_or(DType::U8);
    Ok((dtype, bytes / dtype.size()))
}

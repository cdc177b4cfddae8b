//! Tensors that start at 0, without a step that sets them.
//!
//! An accumulation into bytes that are still 0 is a store; bytes are set only where something reads
//! them before anything is written there, and outputs at the end.

use super::Unroller;
use crate::program::ir::{ElementwiseOp, Role};
use crate::program::rank_program::{Operation, OperationKind, Range, Site, TensorId};
use std::collections::{BTreeMap, HashMap};

/// Bytes of tensors that are still 0, in the host's order, and were not set.
#[derive(Default)]
pub(super) struct Zeros {
    /// By tensor, where parts start and end, each with where it was declared last.
    parts: HashMap<TensorId, BTreeMap<usize, (usize, Declared)>>,
    /// Operations to insert before an operation.
    early: BTreeMap<usize, Vec<Operation>>,
}

/// Where a part of a tensor was declared to be 0.
#[derive(Clone)]
pub(super) struct Declared {
    /// The operation before which that is.
    operation: usize,
    /// The stream that was current.
    stream: usize,
    site: Site,
}

impl Zeros {
    /// `range` is 0 from here on: a tensor that is declared, or what is lent for one.
    pub(super) fn start(&mut self, range: &Range, declared: Declared) {
        self.take(range);
        let parts = self.parts.entry(range.tensor).or_default();
        // Neighbours stay apart: each may come to be set at its own place and stream.
        parts.insert(range.offset_bytes, (range.end(), declared));
    }

    /// Takes out the parts of `range` that are still 0, each with where it was declared.
    fn take(&mut self, range: &Range) -> Vec<(Range, Declared)> {
        let (from, to) = (range.offset_bytes, range.end());
        let Some(parts) = self.parts.get_mut(&range.tensor) else {
            return Vec::new();
        };
        let before = parts.range(..from).next_back().map(|(start, _)| *start);
        let touched: Vec<usize> = parts
            .range(before.unwrap_or(from)..to)
            .filter(|(_, (end, _))| *end > from)
            .map(|(start, _)| *start)
            .collect();
        let mut taken = Vec::new();
        for start in touched {
            let Some((end, declared)) = parts.remove(&start) else {
                continue;
            };
            if start < from {
                parts.insert(start, (from, declared.clone()));
            }
            if end > to {
                parts.insert(to, (end, declared.clone()));
            }
            let part = Range::of(range.tensor, start.max(from)..end.min(to));
            taken.push((part, declared));
        }
        taken
    }

    /// Takes out the parts of `range` that are still 0, neighbours as one: wherever they were declared, they are set together.
    fn take_joined(&mut self, range: &Range) -> Vec<Range> {
        let mut joined: Vec<Range> = Vec::new();
        for (part, _) in self.take(range) {
            match joined.last_mut() {
                Some(last) if last.end() == part.offset_bytes => last.bytes += part.bytes,
                _ => joined.push(part),
            }
        }
        joined
    }

    /// Whether all of `range` is still 0.
    fn is_zero(&self, range: &Range) -> bool {
        let Some(parts) = self.parts.get(&range.tensor) else {
            return false;
        };
        let mut reached = range.offset_bytes;
        let before = parts.range(..=reached).next_back();
        let first = before.map_or(reached, |(start, _)| *start);
        for (start, (end, _)) in parts.range(first..) {
            if *start > reached {
                break;
            }
            reached = reached.max(*end);
            if *end >= range.end() {
                return true;
            }
        }
        false
    }

    /// Takes `range` out if all of it is still 0.
    fn take_whole(&mut self, range: &Range) -> bool {
        let within = self.is_zero(range);
        if within {
            self.take(range);
        }
        within
    }
}

impl Unroller<'_> {
    /// Makes an operation one that counts on no bytes to be set to 0, where it can be; else has them
    /// set before it, on the same stream.
    pub(super) fn with_zeros(&mut self, kind: OperationKind) -> OperationKind {
        // The common case: programs without tensors that start at 0.
        if self.zeros.parts.is_empty() {
            return kind;
        }
        let areas = self.made.areas(&kind);
        // Parts are byte ranges and cannot describe strided accesses; such a tensor is zeroed where it is declared.
        let gaps = areas.filter(|area| !area.is_contiguous());
        let tensors: Vec<TensorId> = gaps.map(|area| area.span.tensor).collect();
        for tensor in tensors {
            self.zero_at_start(tensor);
        }
        let mut kind = kind;
        match &mut kind {
            OperationKind::Matmul(it) if it.spec.accumulate => {
                // A store instead of an addition to 0, which saves a fill and the read.
                it.spec.accumulate = !self.zeros.take_whole(&it.c.span);
                if it.spec.accumulate {
                    self.set_to_zero(it.c.span);
                }
            }
            OperationKind::Elementwise(it) if it.op == ElementwiseOp::Sum => {
                // One source has to stay.
                let mut left = it.sources.len();
                it.sources.retain(|source| {
                    let zero = source.is_contiguous() && self.zeros.is_zero(&source.span);
                    let dropped = left > 1 && zero;
                    left -= usize::from(dropped);
                    !dropped
                });
            }
            _ => {}
        }
        let accesses = self.made.accesses(&kind);
        for access in accesses.iter().filter(|access| access.reads) {
            self.set_to_zero(access.area.span);
        }
        // After the reads: an access that does both needs its zeros first.
        for access in accesses.iter().filter(|access| access.writes) {
            self.zeros.take(&access.area.span);
        }
        kind
    }

    /// Zeroes the remaining parts of a tensor where it is declared `= 0`, by this program or by one that it is lent to.
    /// Applies to tensors with non-contiguous accesses.
    fn zero_at_start(&mut self, tensor: TensorId) {
        let left = self.zeros.take(&self.made.whole(tensor));
        self.zeros.parts.remove(&tensor);
        for (part, declared) in left {
            let early = self.zeros.early.entry(declared.operation).or_default();
            early.push(Operation {
                kind: OperationKind::Zero(part),
                stream: declared.stream,
                site: declared.site,
            });
        }
    }

    /// Position from which the next declared tensor is 0.
    pub(super) fn declared_here(&self) -> Declared {
        Declared {
            operation: self.made.operations.len(),
            stream: self.current,
            site: self.here(),
        }
    }

    /// Sets what is left of outputs, at the end.
    pub(super) fn finish_zeros(&mut self) {
        for tensor in 0..self.made.tensors.len() {
            let instance = &self.made.tensors[tensor];
            // Other tensors are not read after the program.
            if instance.role != Role::Output {
                continue;
            }
            let site = instance.site.clone();
            for part in self.zeros.take_joined(&self.made.whole(tensor)) {
                // On the caller's stream, into which all others have joined.
                self.push_zero(part, 0, site.clone());
            }
        }
        // Inserted in one pass at the end: insertions during unrolling would shift the positions of those before.
        let mut early = std::mem::take(&mut self.zeros.early);
        if early.is_empty() {
            return;
        }
        let operations = std::mem::take(&mut self.made.operations);
        for (index, operation) in operations.into_iter().enumerate() {
            let before = early.remove(&index).unwrap_or_default();
            self.made.operations.extend(before);
            self.made.operations.push(operation);
        }
    }

    fn set_to_zero(&mut self, range: Range) {
        for part in self.zeros.take_joined(&range) {
            self.push_zero(part, self.current, self.here());
        }
    }

    fn push_zero(&mut self, part: Range, stream: usize, site: Site) {
        self.made.operations.push(Operation {
            kind: OperationKind::Zero(part),
            stream,
            site,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(from: usize, to: usize) -> Range {
        Range::of(3, from..to)
    }

    fn declared(operation: usize) -> Declared {
        Declared {
            operation,
            stream: 0,
            site: Site::default(),
        }
    }

    #[test]
    fn parts_are_taken_once() {
        let mut zeros = Zeros::default();
        assert_eq!(zeros.take_joined(&range(0, 8)), []);
        zeros.start(&range(0, 100), declared(0));
        assert_eq!(zeros.take_joined(&range(10, 20)), [range(10, 20)]);
        assert_eq!(zeros.take_joined(&range(10, 20)), []);
        assert!(!zeros.take_whole(&range(15, 25)));
        assert!(zeros.take_whole(&range(20, 25)));
        assert_eq!(
            zeros.take_joined(&range(5, 30)),
            [range(5, 10), range(25, 30)]
        );
        assert!(zeros.is_zero(&range(30, 100)) && !zeros.is_zero(&range(29, 100)));
        assert_eq!(
            zeros.take_joined(&range(0, 100)),
            [range(0, 5), range(30, 100)]
        );
        zeros.start(&range(20, 40), declared(1));
        zeros.start(&range(60, 80), declared(2));
        zeros.start(&range(30, 60), declared(3));
        assert!(zeros.take_whole(&range(20, 80)));
        assert!(!zeros.is_zero(&range(0, 1)));
    }

    #[test]
    fn each_part_is_set_where_it_was_declared_last() {
        let mut zeros = Zeros::default();
        zeros.start(&range(0, 100), declared(0));
        zeros.take(&range(0, 30));
        zeros.start(&range(20, 50), declared(4));
        zeros.start(&range(40, 60), declared(7));
        zeros.take(&range(55, 80));
        let taken = zeros.take(&range(0, 100)).into_iter();
        let taken: Vec<(Range, usize)> = taken.map(|(part, it)| (part, it.operation)).collect();
        let expected = [(range(20, 40), 4), (range(40, 55), 7), (range(80, 100), 0)];
        assert_eq!(taken, expected);
        assert!(zeros.take(&range(0, 100)).is_empty());
        // What was said before does not come back.
        zeros.start(&range(10, 20), declared(9));
        let again = zeros.take(&range(0, 100));
        assert_eq!(again.len(), 1);
        assert_eq!((again[0].0, again[0].1.operation), (range(10, 20), 9));
    }
}

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
    /// By tensor, where parts start and end.
    parts: HashMap<TensorId, BTreeMap<usize, usize>>,
    /// By tensor, where parts start and end that were declared to be 0, each where that was said last.
    declared: HashMap<TensorId, BTreeMap<usize, (usize, Declared)>>,
    /// Operations to insert before an operation.
    early: BTreeMap<usize, Vec<Operation>>,
}

/// Where a part of a tensor was declared to be 0.
#[derive(Clone)]
pub(super) struct Declared {
    /// The operation before which that is.
    pub(super) operation: usize,
    /// The stream that was current.
    pub(super) stream: usize,
    pub(super) site: Site,
}

impl Zeros {
    /// `range` is 0 from here on: a tensor that is declared, or what is lent for one.
    pub(super) fn start(&mut self, range: &Range, declared: Declared) {
        self.take(range);
        let parts = self.parts.entry(range.tensor).or_default();
        let (mut start, mut end) = (range.offset_bytes, range.end());
        if let Some((&before, _)) = parts
            .range(..start)
            .next_back()
            .filter(|part| *part.1 == start)
        {
            start = before;
        }
        // Neighbours merge: `is_zero` then finds a range across both in a single part.
        if let Some(after) = parts.remove(&end) {
            end = after;
        }
        parts.insert(start, end);
        self.declare(range, declared);
    }

    /// Notes where `range` was declared to be 0; what was said of it before counts no more.
    fn declare(&mut self, range: &Range, declared: Declared) {
        let (from, to) = (range.offset_bytes, range.end());
        let parts = self.declared.entry(range.tensor).or_default();
        let before = parts.range(..from).next_back().map(|(start, _)| *start);
        let touched: Vec<usize> = parts
            .range(before.unwrap_or(from)..to)
            .filter(|(_, (end, _))| *end > from)
            .map(|(start, _)| *start)
            .collect();
        for start in touched {
            let Some((end, earlier)) = parts.remove(&start) else {
                continue;
            };
            if end > to {
                // Unlike zero parts, declarations do not merge: each is zeroed at its own place and stream.
                parts.insert(to, (end, earlier.clone()));
            }
            if start < from {
                parts.insert(start, (from, earlier));
            }
        }
        parts.insert(from, (to, declared));
    }

    /// Takes out what of a whole tensor is still 0: parts, each with where that was declared.
    fn take_declared(&mut self, whole: &Range) -> Vec<(Range, Declared)> {
        let tensor = whole.tensor;
        let left = self.take(whole);
        self.parts.remove(&tensor);
        let declared = self.declared.remove(&tensor).unwrap_or_default();
        let mut taken = Vec::new();
        for part in left {
            let first = declared.range(..=part.offset_bytes).next_back();
            let first = first.map_or(part.offset_bytes, |(start, _)| *start);
            for (start, (end, declared)) in declared.range(first..part.end()) {
                let (start, end) = ((*start).max(part.offset_bytes), (*end).min(part.end()));
                if start < end {
                    let range = Range::of(tensor, start..end);
                    taken.push((range, declared.clone()));
                }
            }
        }
        taken
    }

    /// Takes out the parts of `range` that are still 0.
    fn take(&mut self, range: &Range) -> Vec<Range> {
        let (from, to) = (range.offset_bytes, range.end());
        let Some(parts) = self.parts.get_mut(&range.tensor) else {
            return Vec::new();
        };
        let before = parts.range(..from).next_back().map(|(start, _)| *start);
        let first = before.unwrap_or(from);
        let touched: Vec<(usize, usize)> = parts
            .range(first..to)
            .map(|(start, end)| (*start, *end))
            .filter(|(_, end)| *end > from)
            .collect();
        let mut taken = Vec::new();
        for (start, end) in touched {
            parts.remove(&start);
            if start < from {
                parts.insert(start, from);
            }
            if end > to {
                parts.insert(to, end);
            }
            let (start, end) = (start.max(from), end.min(to));
            taken.push(Range::of(range.tensor, start..end));
        }
        taken
    }

    /// Whether all of `range` is still 0. Parts never touch one another.
    fn is_zero(&self, range: &Range) -> bool {
        self.parts.get(&range.tensor).is_some_and(|parts| {
            let part = parts.range(..=range.offset_bytes).next_back();
            part.is_some_and(|(_, end)| *end >= range.end())
        })
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

    /// Has what is left of a tensor set where it is declared to be 0, by this program or by one that it is lent
    /// to. This is done for tensors of which parts are accessed that are not contiguous.
    fn zero_at_start(&mut self, tensor: TensorId) {
        let whole = self.made.whole(tensor);
        for (part, declared) in self.zeros.take_declared(&whole) {
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
            for part in self.zeros.take(&self.made.whole(tensor)) {
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
        for part in self.zeros.take(&range) {
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
        assert_eq!(zeros.take(&range(0, 8)), []);
        zeros.start(&range(0, 100), declared(0));
        assert_eq!(zeros.take(&range(10, 20)), [range(10, 20)]);
        assert_eq!(zeros.take(&range(10, 20)), []);
        assert!(!zeros.take_whole(&range(15, 25)));
        assert!(zeros.take_whole(&range(20, 25)));
        assert_eq!(zeros.take(&range(5, 30)), [range(5, 10), range(25, 30)]);
        assert!(zeros.is_zero(&range(30, 100)) && !zeros.is_zero(&range(29, 100)));
        assert_eq!(zeros.take(&range(0, 100)), [range(0, 5), range(30, 100)]);
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
        let taken = zeros.take_declared(&range(0, 100)).into_iter();
        let taken: Vec<(Range, usize)> = taken.map(|(part, it)| (part, it.operation)).collect();
        let expected = [(range(20, 40), 4), (range(40, 55), 7), (range(80, 100), 0)];
        assert_eq!(taken, expected);
        assert!(zeros.take_declared(&range(0, 100)).is_empty());
        // What was said before does not come back.
        zeros.start(&range(10, 20), declared(9));
        let again = zeros.take_declared(&range(0, 100));
        assert_eq!(again.len(), 1);
        assert_eq!((again[0].0, again[0].1.operation), (range(10, 20), 9));
    }
}

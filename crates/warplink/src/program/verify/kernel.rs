//! Kernel sections among the operations of streams.
//!
//! A kernel is launched by all ranks, like a collective: what its lanes do with one another is looked at
//! apart (`lanes`), over several runs of the program; here it is one operation that accesses what the
//! lanes of all ranks access of this rank's tensors, and that may wait for all ranks.

use super::diagnostics::Diagnostics;
use super::kernel_accesses::KernelAccesses;
use super::lanes::{self, Launch};
use super::link::Links;
use super::meetings::Meeting;
use super::state::Run;
use super::violation::Violations;
use crate::program::diagnostic::{DiagnosticKind, Place};
use crate::program::rank_program::{OperationKind, RankProgram};
use crate::program::section::{SectionInstance, too_large};

/// The kernels of all ranks in their order, as `make` changes them.
pub(super) fn operations(
    ranks: &[RankProgram],
    links: &Links,
    make: impl Fn(&SectionInstance) -> SectionInstance,
) -> Vec<Vec<SectionInstance>> {
    let of_meeting = |meeting: &Meeting| {
        let calls = meeting.calls();
        calls
            .filter_map(
                |(rank, operation)| match &ranks[rank].operations[operation].kind {
                    OperationKind::Kernel(section) => Some(make(section)),
                    _ => None,
                },
            )
            .collect::<Vec<_>>()
    };
    let all = links.meetings.all.iter().map(of_meeting);
    all.filter(|sections| sections.len() == ranks.len())
        .collect()
}

/// Checks what the lanes of all kernels do, and gives what they access.
pub(super) fn check(
    ranks: &[RankProgram],
    links: &Links,
    diagnostics: &mut Diagnostics<'_>,
) -> KernelAccesses {
    let mut launches: Vec<Launch<'_>> = Vec::new();
    let mut operations: Vec<Vec<usize>> = Vec::new();
    // Those of all ranks are in the host's order.
    for meeting in &links.meetings.all {
        let mut sections = Vec::with_capacity(ranks.len());
        let mut places = Vec::with_capacity(ranks.len());
        for (rank, operation) in meeting.calls() {
            if let OperationKind::Kernel(section) = &ranks[rank].operations[operation].kind {
                sections.push(&**section);
                places.push(operation);
            }
        }
        if sections.len() == ranks.len() {
            launches.push(Launch::new(sections, launches.is_empty()));
            operations.push(places);
        }
    }
    let mut accesses = KernelAccesses::default();
    // What no kernel can be made of.
    for (rank, program) in ranks.iter().enumerate() {
        for operation in &program.operations {
            if let OperationKind::Kernel(section) = &operation.kind
                && let Some(message) = too_large(section)
            {
                let place = Place {
                    rank,
                    site: section.site.clone(),
                };
                diagnostics.add(DiagnosticKind::OutOfBounds, vec![place.clone()], |_| {
                    format!("{place}: {message}; expected a kernel for parts of it")
                });
            }
        }
    }
    if launches.is_empty() || !diagnostics.list.is_empty() {
        return accesses;
    }
    let found = lanes::check(ranks, &launches, diagnostics);
    for (by_rank, operations) in found.into_iter().zip(operations) {
        for (rank, (does, operation)) in by_rank.into_iter().zip(operations).enumerate() {
            accesses.insert(rank, operation, does);
        }
    }
    accesses
}

impl Run<'_> {
    /// What a kernel accesses once all ranks have come.
    pub(super) fn finish_kernel(
        &mut self,
        stream: usize,
        operation: usize,
        violations: &mut Violations,
    ) {
        let (rank, links) = (self.streams[stream].rank, self.links);
        // Kernels of a program share words and the epoch, so that they come one after another.
        if let Some((before, done)) = &self.launched[rank]
            && !done.precedes(&self.streams[stream].clock)
        {
            violations.unordered_kernel(rank, *before, operation);
        }
        self.tick(stream);
        for (range, mode) in links.kernels.of(rank, operation) {
            self.touch((stream, operation), (rank, *range), *mode, violations);
        }
        let done = self.streams[stream].clock.snapshot(stream);
        self.launched[rank] = Some((operation, done));
        if let Some(number) = self.collective_number(rank, operation) {
            let meeting = &mut self.collectives[number];
            meeting.left += 1;
            // That all ranks have come says nothing about their memory.
            if meeting.left == self.links.meetings.all[number].len() {
                meeting.all = None;
            }
        }
    }
}

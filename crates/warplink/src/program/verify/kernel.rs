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
use crate::error::Rank;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::rank_program::RankProgram;
use crate::program::section::{SectionInstance, too_large};

/// The kernels of all ranks in their order: of each, the operation of each rank and its section.
pub(super) fn kernels<'a>(
    ranks: &'a [RankProgram],
    links: &'a Links,
) -> impl Iterator<Item = Vec<(usize, &'a SectionInstance)>> {
    let of_meeting = |meeting: &'a Meeting| {
        let section = |(rank, operation): (Rank, usize)| {
            Some((operation, ranks[rank].operations[operation].kind.section()?))
        };
        meeting.calls().map(section).collect::<Option<Vec<_>>>()
    };
    // Those of all ranks are in the host's order.
    links.meetings.all.iter().filter_map(of_meeting)
}

/// Checks what the lanes of all kernels do, and gives what they access.
pub(super) fn check(
    ranks: &[RankProgram],
    links: &Links,
    diagnostics: &mut Diagnostics<'_>,
) -> KernelAccesses {
    let mut accesses = KernelAccesses::default();
    // What no kernel can be made of.
    for section in ranks.iter().flat_map(RankProgram::sections) {
        if let Some(message) = too_large(section) {
            let at = (section.rank, &section.site);
            let message = format!("{message}; expected a kernel for parts of it");
            diagnostics.add_made(Diagnostic::at(DiagnosticKind::OutOfBounds, at, message));
        }
    }
    let kernels: Vec<_> = kernels(ranks, links).collect();
    let launches = kernels.iter().enumerate().map(|(number, kernel)| {
        let sections = kernel.iter().map(|(_, section)| *section);
        Launch::new(sections.collect(), number == 0)
    });
    let launches: Vec<Launch<'_>> = launches.collect();
    if launches.is_empty() || !diagnostics.list.is_empty() {
        return accesses;
    }
    let found = lanes::check(ranks, &launches, diagnostics);
    for (by_rank, kernel) in found.into_iter().zip(kernels) {
        for (rank, (does, (operation, _))) in by_rank.into_iter().zip(kernel).enumerate() {
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

//! Kernel sections among the operations of streams.
//!
//! All ranks launch a kernel, as they call a collective. The interaction of its lanes is verified separately
//! (`lanes`), over several runs of the program. Here a kernel is one operation that makes all accesses of any rank's
//! lanes to this rank's tensors, and that may wait for all ranks.

use super::diagnostics::Diagnostics;
use super::kernel_accesses::KernelAccesses;
use super::lanes::{self, JointLaunch};
use super::link::Links;
use super::meetings::Meeting;
use super::state::SimulatedRun;
use super::violation::Violations;
use crate::error::Rank;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::rank_program::RankProgram;
use crate::program::section::{SectionInstance, too_large};

/// Kernels of all ranks in program order; each item holds the operation and section of every rank.
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
    // Meetings of all ranks are in the host's order.
    links.meetings.all.iter().filter_map(of_meeting)
}

/// Checks the lanes of all kernels, and returns their accesses.
pub(super) fn check(
    ranks: &[RankProgram],
    links: &Links,
    diagnostics: &mut Diagnostics<'_>,
) -> KernelAccesses {
    let mut accesses = KernelAccesses::default();
    // Sections that exceed the limits of a kernel.
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
        // The first kernel starts a run: from there on, scratch of earlier runs counts as stale.
        JointLaunch::new(sections.collect(), number == 0)
    });
    let launches: Vec<JointLaunch<'_>> = launches.collect();
    // Lanes of a kernel that exceeds the limits might have too many steps to simulate in bounded time.
    if launches.is_empty() || !diagnostics.list.is_empty() {
        return accesses;
    }
    let found = lanes::check(ranks, &launches, diagnostics);
    let found = found.unwrap_or_else(|diagnostic| {
        diagnostics.add_made(diagnostic);
        Vec::new()
    });
    for (by_rank, kernel) in found.into_iter().zip(kernels) {
        for (rank, (does, (operation, _))) in by_rank.into_iter().zip(kernel).enumerate() {
            accesses.insert(rank, operation, does);
        }
    }
    accesses
}

impl SimulatedRun<'_> {
    /// Performs the accesses of a kernel once all ranks have arrived.
    pub(super) fn finish_kernel(
        &mut self,
        stream: usize,
        operation: usize,
        violations: &mut Violations,
    ) {
        let (rank, links) = (self.streams[stream].rank, self.links);
        // Kernels of a program share signal words and the epoch, so they must not overlap.
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
            // The ranks' arrival orders no memory accesses, so the joined clock is dropped after the last rank.
            if meeting.left == self.links.meetings.all[number].len() {
                meeting.all = None;
            }
        }
    }
}

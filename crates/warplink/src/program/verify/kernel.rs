//! Kernel sections among the operations of streams.
//!
//! A kernel is launched by all ranks, like a collective: what its lanes do with one another is looked at
//! apart (`lanes`), over several runs of the program; here it is one operation that accesses what the
//! lanes of all ranks access of this rank's tensors, and that may wait for all ranks.

use super::diagnostics::{Diagnostics, place_of};
use super::lanes::{self, Launch};
use super::link::Links;
use super::meetings::Meeting;
use super::memory::Mode as AccessMode;
use super::state::Run;
use super::violation::Violations;
use crate::error::Rank;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::rank_program::{OperationKind, Range, RankProgram};
use crate::program::section::{SectionInstance, SectionTensor};
use std::collections::HashMap;

/// What kernels access of each rank's tensors, by rank and operation.
#[derive(Debug, Default)]
pub(super) struct KernelAccesses(HashMap<(Rank, usize), Vec<(Range, AccessMode)>>);

/// Whether ranks launch different kernels, or one a kernel and the other a collective, which is reported.
pub(super) fn differ(
    ranks: &[RankProgram],
    (first, a): (Rank, usize),
    (rank, b): (Rank, usize),
    diagnostics: &mut Diagnostics<'_>,
) -> bool {
    let (one, other) = (&ranks[first].operations[a], &ranks[rank].operations[b]);
    let Some(difference) = difference(&one.kind, &other.kind) else {
        return false;
    };
    let places = vec![place_of(ranks, rank, b), place_of(ranks, first, a)];
    diagnostics.add(DiagnosticKind::CollectiveOrder, places.clone(), |said| {
        format!(
            "{} and {} differ: {difference}; expected the same on every rank",
            said.say(&places[0]),
            said.say(&places[1])
        )
    });
    true
}

/// Why two ranks do not launch the same kernel; `None` where they do, or where both are collectives.
fn difference(one: &OperationKind, other: &OperationKind) -> Option<&'static str> {
    let (a, b) = match (one, other) {
        (OperationKind::Kernel(a), OperationKind::Kernel(b)) => (a, b),
        (OperationKind::Kernel(_), _) | (_, OperationKind::Kernel(_)) => {
            return Some("one is a kernel, the other a collective");
        }
        _ => return None,
    };
    let names = |tensors: &[SectionTensor]| {
        let own = tensors.iter();
        own.map(|t| {
            (
                t.name.clone(),
                t.dtype,
                t.offset,
                t.shape.clone(),
                t.strides.clone(),
            )
        })
        .collect::<Vec<_>>()
    };
    if a.section != b.section {
        return Some("they are different kernels");
    }
    if (a.lanes, a.threads) != (b.lanes, b.threads) {
        return Some("they have other numbers of lanes or threads");
    }
    if a.operators != b.operators {
        return Some("they have other operators");
    }
    if names(&a.tensors) != names(&b.tensors) || a.scratch != b.scratch {
        return Some("their tensors have other shapes");
    }
    None
}

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
            launches.push(Launch::new(sections));
            operations.push(places);
        }
    }
    if launches.is_empty() {
        return KernelAccesses::default();
    }
    let mut accesses = HashMap::new();
    let found = lanes::check(ranks, &launches, diagnostics);
    for (by_rank, operations) in found.into_iter().zip(operations) {
        for (rank, (list, operation)) in by_rank.into_iter().zip(operations).enumerate() {
            accesses.insert((rank, operation), list);
        }
    }
    KernelAccesses(accesses)
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
        for (range, mode) in links
            .kernels
            .0
            .get(&(rank, operation))
            .into_iter()
            .flatten()
        {
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

/// Reports kernels of a rank that may run side by side.
pub(super) fn report_unordered(
    ranks: &[RankProgram],
    (rank, before, after): (Rank, usize, usize),
    diagnostics: &mut Diagnostics<'_>,
) {
    let places = vec![place_of(ranks, rank, after), place_of(ranks, rank, before)];
    diagnostics.add(DiagnosticKind::Race, places.clone(), |said| {
        format!(
            "{} is not ordered after the kernel before it, {}; kernels of a program use one workspace",
            said.say(&places[0]),
            said.say(&places[1])
        )
    });
}

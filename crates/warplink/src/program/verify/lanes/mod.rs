//! The lanes of kernel sections: what they do with one another's memory, over several launches.
//!
//! A program's kernels are followed over twice as many runs as their use of the epoch has a period, so that each launch
//! is seen beside the next that does the same, and two more, since a rank may be a launch ahead of another. Each lane keeps two clocks: of what it sees, which
//! signals and streams hand on, and of what is over, which packets hand on too. Between two launches a
//! rank's stream writes all of its tensors: what a peer reads before it was told that it may, or has not told
//! to be read when the launch ends, is a race with that. Scratch starts without anything in it, in every run: what an
//! earlier one wrote may only be read where scratch is declared to persist.
//!
//! Only the device knows which of the tensors that a lane announces are reachable, and two lanes may find other ones so
//! in one launch. So kernels that ask for it are followed as several, one for each [`Reach`], in turns.
//!
//! What is assumed of a launch: all of its lanes are on the device together, so that each gets as far as it
//! can; it starts when the one before it on its rank has ended.

mod agreement;
mod launch;
mod memory;
mod reach;
mod report;
mod run;

pub(super) use reach::{Reach, Reaches};

use super::diagnostics::Diagnostics;
use super::kernel_accesses::OnRank;
use super::memory::Mode as AccessMode;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::Program;
use crate::program::rank_program::{Range, RankProgram};
use crate::program::section::{MAX_PERIOD, SectionInstance};
use run::Run;

/// The most steps of all lanes in all launches that are followed, each counted with its operands.
const MAX_STEPS: usize = 1 << 24;

/// The most of them in the launches that are under way at a time, which are all in memory.
const MAX_HELD_STEPS: usize = 1 << 22;

/// The most lanes of all ranks. Lanes that learn of few others take time in proportion to their number, some seconds for
/// so many; where each learns of each, the limits of steps come first.
const MAX_ALL_LANES: usize = 1 << 14;

/// How many launches more than two periods are followed.
const MORE_RUNS: usize = 2;

/// A kernel that all ranks launch.
pub(super) struct Launch<'a> {
    /// Where what it announces is reachable; not said of one that is still to be followed as several.
    reach: Option<Reach>,
    /// The section of each rank.
    sections: Vec<&'a SectionInstance>,
    /// The program that it is of, where several are followed.
    program: Option<&'a Program>,
    /// Whether a run of its program begins with it.
    begins: bool,
}

impl<'a> Launch<'a> {
    pub(super) fn new(sections: Vec<&'a SectionInstance>, begins: bool) -> Self {
        Self {
            reach: None,
            sections,
            program: None,
            begins,
        }
    }

    /// The same kernel, where what it announces is reachable in some lanes.
    fn where_reachable(&self, reach: &Reach) -> Self {
        Self {
            reach: Some(reach.clone()),
            sections: self.sections.clone(),
            program: self.program,
            begins: self.begins,
        }
    }

    /// A kernel of `program`, which is one of several.
    pub(super) fn named(
        sections: Vec<&'a SectionInstance>,
        program: &'a Program,
        reach: Reach,
        begins: bool,
    ) -> Self {
        Self {
            reach: Some(reach),
            sections,
            program: Some(program),
            begins,
        }
    }

    fn is_reachable(&self, lane: usize, tensor: usize) -> bool {
        self.reach
            .as_ref()
            .is_none_or(|reach| reach.holds(lane, tensor))
    }
}

/// What a launch does on each rank.
pub(super) type Does = Vec<OnRank>;

/// What a launch accesses of a rank's tensors.
type RankAccesses = Vec<(Range, AccessMode)>;

/// Follows the kernels of a program, in their order, over several runs; what each does.
pub(super) fn check(
    ranks: &[RankProgram],
    kernels: &[Launch<'_>],
    diagnostics: &mut Diagnostics<'_>,
) -> Vec<Does> {
    let sections = kernels.iter().flat_map(|kernel| &kernel.sections);
    let reaches = kernels.iter().map(|kernel| Reaches::of(kernel.sections[0]));
    let prepared = period(sections.copied())
        .and_then(|period| Ok((period, reaches.collect::<Result<Vec<_>, _>>()?)));
    let (period, reaches) = match prepared {
        Ok(prepared) => prepared,
        Err(diagnostic) => {
            diagnostics.add_made(diagnostic);
            return Vec::new();
        }
    };
    if reaches.iter().any(|reaches| reaches.len() > 1) {
        let sections = kernels.iter().flat_map(|kernel| &kernel.sections);
        let why = "what an earlier launch wrote depends on which tensors it reached";
        if let Some(diagnostic) = persistent(sections.copied(), why) {
            diagnostics.add_made(diagnostic);
            return Vec::new();
        }
    }
    let mut followed = Vec::with_capacity(kernels.len());
    for (kernel, reaches) in kernels.iter().zip(&reaches) {
        let all = reaches.main.iter().chain(&reaches.further);
        followed.extend(all.map(|reach| kernel.where_reachable(reach)));
    }
    let Some(sequence) = reach::sequence(&reaches, (period, runs(period)), MAX_STEPS) else {
        diagnostics.add_made(too_large());
        return Vec::new();
    };
    let mut found = follow(ranks, &followed, &sequence, diagnostics).into_iter();
    let merged = reaches
        .iter()
        .map(|reaches| found.by_ref().take(reaches.len()).reduce(merge));
    merged.flatten().collect()
}

/// Refuses scratch that persists, for a reason.
pub(super) fn persistent<'a>(
    sections: impl IntoIterator<Item = &'a SectionInstance>,
    why: &str,
) -> Option<Diagnostic> {
    let mut all = sections.into_iter().flat_map(|section| {
        let tensors = 0..section.tensors.len();
        tensors.filter_map(move |tensor| Some((section.rank, section.scratch_of(tensor)?)))
    });
    let (rank, scratch) = all.find(|(_, scratch)| scratch.persistent)?;
    let message = format!(
        "the scratch '{}' persists, but {why}; expected scratch that each run writes before it reads it",
        scratch.name
    );
    let at = (rank, &scratch.site);
    Some(Diagnostic::at(DiagnosticKind::Malformed, at, message))
}

/// What a kernel does that does the one or the other.
fn merge(mut all: Does, other: Does) -> Does {
    for (all, other) in all.iter_mut().zip(other) {
        for access in other.accesses {
            if !all.accesses.contains(&access) {
                all.accesses.push(access);
            }
        }
        all.waits |= other.waits;
    }
    all
}

/// After how many runs programs with these sections do the same again.
///
/// # Errors
/// Where that is more than may be followed.
pub(super) fn period<'a>(
    sections: impl Iterator<Item = &'a SectionInstance>,
) -> Result<usize, Diagnostic> {
    let mut period = 1;
    for section in sections {
        let shared = gcd(period, section.period);
        period = (period / shared).saturating_mul(section.period);
        if period > MAX_PERIOD {
            let message = format!(
                "the remainders of the epoch in this kernel and others repeat after {period} launches only; \
                 expected at most {MAX_PERIOD}"
            );
            let at = (section.rank, &section.site);
            return Err(Diagnostic::at(DiagnosticKind::Malformed, at, message));
        }
    }
    Ok(period as usize)
}

/// How many runs are followed of what does the same again after `period` of them: each is followed again, and a rank may
/// be some ahead of another.
pub(super) const fn runs(period: usize) -> usize {
    2 * period + MORE_RUNS
}

fn too_large() -> Diagnostic {
    let message = format!(
        "the kernels are too large to verify; expected at most \
         {MAX_HELD_STEPS} steps and operands of them in a launch, and {MAX_STEPS} in all launches that are followed"
    );
    Diagnostic::new(DiagnosticKind::Malformed, message, Vec::new())
}

/// Follows launches in the order of `sequence`, which names kernels by number.
pub(super) fn follow(
    ranks: &[RankProgram],
    kernels: &[Launch<'_>],
    sequence: &[usize],
    diagnostics: &mut Diagnostics<'_>,
) -> Vec<Does> {
    let run = Run::new(ranks, kernels, sequence).and_then(|mut run| {
        let machine = run.go()?;
        Ok((run, machine))
    });
    match run {
        Ok((run, machine)) => {
            report::report(&run, &machine, diagnostics);
            run.done()
        }
        Err(diagnostic) => {
            diagnostics.add_made(diagnostic);
            Vec::new()
        }
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

//! The lanes of kernel sections: what they do with one another's memory, over several launches.
//!
//! A program's kernels are followed over as many runs as their use of the epoch has a period, and two more,
//! since a rank may be a launch ahead of another. Each lane keeps two clocks: of what it sees, which
//! signals and streams hand on, and of what is over, which packets hand on too. Between two launches a
//! rank's stream writes all of its tensors: what a peer reads before it was told that it may, or has not told
//! to be read when the launch ends, is a race with that. Scratch starts without anything in it.
//!
//! Only the device knows whether the tensors that a lane announces are reachable, and two lanes may find them so or
//! not in one launch. So kernels that ask for it are followed as several, one for each [`Reach`], in turns.
//!
//! What is assumed of a launch: all of its lanes are on the device together, so that each gets as far as it
//! can; it starts when the one before it on its rank has ended.

mod agreement;
mod launch;
mod memory;
mod report;
mod run;

use super::diagnostics::Diagnostics;
use super::kernel_accesses::OnRank;
use super::memory::Mode as AccessMode;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::ir::Program;
use crate::program::rank_program::{Range, RankProgram};
use crate::program::section::{MAX_PERIOD, SectionInstance};
use run::Run;

/// The most steps of all lanes in all launches that are followed.
const MAX_STEPS: usize = 1 << 21;

/// How many launches more than the period are followed.
const MORE_RUNS: u64 = 2;

/// In which lanes the announced tensors are reachable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    All,
    None,
    /// In every other lane, from the second on.
    Odd,
}

impl Reach {
    pub(super) fn holds(self, lane: usize) -> bool {
        match self {
            Self::All => true,
            Self::None => false,
            Self::Odd => lane % 2 == 1,
        }
    }

    /// Those in which a kernel of these sections is followed.
    pub(super) fn of<'a>(
        mut sections: impl Iterator<Item = &'a SectionInstance>,
    ) -> &'static [Self] {
        if sections.any(|section| !section.announced().is_empty()) {
            &[Self::All, Self::None, Self::Odd]
        } else {
            &[Self::All]
        }
    }
}

/// A kernel that all ranks launch.
pub(super) struct Launch<'a> {
    /// Where what it announces is reachable.
    pub(super) reach: Reach,
    /// The section of each rank.
    sections: Vec<&'a SectionInstance>,
    /// The program that it is of, where several are followed.
    program: Option<&'a Program>,
}

impl<'a> Launch<'a> {
    pub(super) fn new(sections: Vec<&'a SectionInstance>) -> Self {
        Self {
            reach: Reach::All,
            sections,
            program: None,
        }
    }

    /// The same kernel, where what it announces is reachable elsewhere.
    fn where_reachable(&self, reach: Reach) -> Self {
        Self {
            reach,
            sections: self.sections.clone(),
            program: self.program,
        }
    }

    /// A kernel of `program`, which is one of several.
    pub(super) fn named(
        sections: Vec<&'a SectionInstance>,
        program: &'a Program,
        reach: Reach,
    ) -> Self {
        Self {
            reach,
            sections,
            program: Some(program),
        }
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
    let runs = runs(sections.copied());
    let mut followed = Vec::with_capacity(kernels.len());
    // For each kernel, the first of those that it is followed as, and how many they are.
    let mut forms = Vec::with_capacity(kernels.len());
    for kernel in kernels {
        let reaches = Reach::of(kernel.sections.iter().copied());
        forms.push((followed.len(), reaches.len()));
        followed.extend(reaches.iter().map(|reach| kernel.where_reachable(*reach)));
    }
    let most = forms.iter().map(|(_, count)| *count).max().unwrap_or(1) as u64;
    let mut sequence = Vec::new();
    let mut run = |form: u64| {
        sequence.extend(
            forms
                .iter()
                .map(|(first, count)| first + form as usize % count),
        );
    };
    for form in 0..most {
        (0..runs).for_each(|_| run(form));
    }
    if most > 1 {
        (0..most * runs).for_each(&mut run);
    }
    let mut found = follow(ranks, &followed, &sequence, diagnostics).into_iter();
    let merged = forms
        .iter()
        .map(|(_, count)| found.by_ref().take(*count).reduce(merge));
    merged.flatten().collect()
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

/// How many runs of programs with these sections are followed.
pub(super) fn runs<'a>(sections: impl Iterator<Item = &'a SectionInstance>) -> u64 {
    let period = sections.fold(1, |period, section| {
        let shared = gcd(period, section.period);
        (period / shared).saturating_mul(section.period)
    });
    period.min(MAX_PERIOD) + MORE_RUNS
}

/// Follows launches in the order of `sequence`, which names kernels by number.
pub(super) fn follow(
    ranks: &[RankProgram],
    kernels: &[Launch<'_>],
    sequence: &[usize],
    diagnostics: &mut Diagnostics<'_>,
) -> Vec<Does> {
    let mut run = match Run::new(ranks, kernels, sequence) {
        Ok(run) => run,
        Err(diagnostic) => {
            diagnostics.add_made(diagnostic);
            return Vec::new();
        }
    };
    match run.go() {
        Ok(true) => {}
        Ok(false) => {
            diagnostics.add(DiagnosticKind::Malformed, Vec::new(), |_| {
                format!(
                    "the kernels are too large to verify; expected at most {MAX_STEPS} steps of all \
                     lanes in {} launches",
                    sequence.len()
                )
            });
            return Vec::new();
        }
        Err(diagnostic) => {
            diagnostics.add_made(diagnostic);
            return Vec::new();
        }
    }
    report::report(&run, diagnostics);
    run.done()
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

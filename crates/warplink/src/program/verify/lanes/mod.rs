//! Verifies the lanes of kernel sections: their accesses to one another's memory, over several launches.
//!
//! A program's kernels are simulated for twice the period of their epoch use, so that each launch is checked against
//! the next equivalent one, plus two runs, because a rank may be one launch ahead of another. Each lane keeps two
//! clocks: visible memory, which signals and streams propagate, and completed steps, which packets propagate too, to the
//! threads that wait for them (`knowledge.rs`).
//! Between two launches a rank's stream writes all of its tensors. This makes a peer's read a race if it is not
//! ordered after the start of the launch, or if its completion is not signalled before the launch ends. Scratch is
//! uninitialized at the start of every run: bytes written by an earlier run may be read only if the scratch is
//! declared persistent.
//!
//! Only the device knows which announced tensors a lane can reach, and two lanes of one launch may find different
//! ones reachable. So kernels that ask for reachability are simulated as several variants, one for each [`Reach`], in
//! turns.
//!
//! Words of memory that lanes read as integers have unknown values. Kernels that read any are simulated under several
//! [`Valuation`]s, each of which gives these words other values; no order follows from a value.
//!
//! Assumptions about a launch: all of its lanes are resident on the device together, so that each gets as far as it
//! can; it starts when the previous launch on its rank has ended.

mod agreement;
mod announcements;
mod knowledge;
mod launch;
mod memory;
mod reach;
mod report;
mod run;
mod state;
mod values;
mod words;

pub(super) use reach::{Reach, Reaches};
pub(super) use words::{Valuation, WordUse};

use super::diagnostics::Diagnostics;
use super::kernel_accesses::{OnRank, either};
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::Program;
use crate::program::rank_program::RankProgram;
use crate::program::section::{MAX_PERIOD, SectionInstance, StepCache, common_multiple};
use agreement::Agreement;
use state::LaneRun;
use std::collections::HashSet;
use std::rc::Rc;

/// Limit on the simulated steps of all lanes in all launches, each counted with its operands; bounds the time.
const MAX_STEPS: usize = 1 << 24;

/// Limit on the steps of the launches in flight, which are all in memory.
const MAX_HELD_STEPS: usize = 1 << 22;

/// Limit on the lanes of all ranks. With sparse communication the time is proportional to the number of lanes, some
/// seconds at this limit; if every lane learns of every other, the limits on steps are reached first.
const MAX_ALL_LANES: usize = 1 << 14;

/// Limit on the steps of a rank's section that are kept for further launches.
const MAX_CACHED_STEPS: usize = 1 << 16;

/// Runs simulated in addition to two periods, because a rank may be ahead of another.
const MORE_RUNS: usize = 2;

/// A kernel that all ranks launch.
#[derive(Clone)]
pub(super) struct JointLaunch<'a> {
    /// Lanes in which the announced tensors are reachable; `None` before the kernel is split into variants.
    reach: Option<Reach>,
    /// Section of each rank.
    sections: Vec<&'a SectionInstance>,
    /// Program of the kernel, if several programs are simulated.
    program: Option<&'a Program>,
    /// Whether a run of its program begins with this kernel.
    begins: bool,
    caches: Caches,
}

/// Steps of each rank's section. Launches of a section in other variants and under other valuations share them.
pub(super) type Caches = Rc<[StepCache]>;

/// Empty caches of so many ranks.
pub(super) fn caches(world: usize) -> Caches {
    (0..world)
        .map(|_| StepCache::new(MAX_CACHED_STEPS))
        .collect()
}

impl<'a> JointLaunch<'a> {
    pub(super) fn new(sections: Vec<&'a SectionInstance>, begins: bool) -> Self {
        Self {
            reach: None,
            caches: caches(sections.len()),
            sections,
            program: None,
            begins,
        }
    }

    /// The variant of the kernel with the announced tensors reachable in some lanes.
    fn where_reachable(&self, reach: &Reach) -> Self {
        Self {
            reach: Some(reach.clone()),
            ..self.clone()
        }
    }

    /// A kernel of `program`, which is one of several.
    pub(super) fn named(
        (sections, caches): (Vec<&'a SectionInstance>, Caches),
        program: &'a Program,
        reach: Reach,
        begins: bool,
    ) -> Self {
        Self {
            reach: Some(reach),
            sections,
            program: Some(program),
            begins,
            caches,
        }
    }

    fn is_reachable(&self, lane: usize, tensor: usize) -> bool {
        self.reach
            .as_ref()
            .is_none_or(|reach| reach.holds(lane, tensor))
    }
}

/// Effects of a launch on each rank.
pub(super) type Does = Vec<OnRank>;

/// Simulates the kernels of a program in order over several runs; returns the effects of each.
///
/// # Errors
/// Why they cannot be simulated.
pub(super) fn check(
    ranks: &[RankProgram],
    kernels: &[JointLaunch<'_>],
    diagnostics: &mut Diagnostics<'_>,
) -> Result<Vec<Does>, Diagnostic> {
    let sections = kernels.iter().flat_map(|kernel| &kernel.sections);
    // By rank 0's section: conditions on reachability are in the text, which all ranks share.
    let reaches = kernels.iter().map(|kernel| Reaches::of(kernel.sections[0]));
    let period = period(sections.copied())?;
    let reaches = reaches.collect::<Result<Vec<_>, _>>()?;
    // Launches of different variants follow one another here, and what they leave in persistent scratch would depend
    // on the order.
    if reaches.iter().any(|reaches| reaches.len() > 1) {
        let sections = kernels.iter().flat_map(|kernel| &kernel.sections);
        let why = "what an earlier launch wrote depends on which tensors it reached";
        persistent(sections.copied(), why)?;
    }
    let mut followed = Vec::with_capacity(kernels.len());
    for (kernel, reaches) in kernels.iter().zip(&reaches) {
        let all = reaches.main.iter().chain(&reaches.further);
        followed.extend(all.map(|reach| kernel.where_reachable(reach)));
    }
    let sequence = reach::sequence(&reaches, (period, runs(period)), MAX_STEPS);
    let sequence = sequence.ok_or_else(too_large)?;
    let found = follow(ranks, &followed, &sequence, diagnostics)?;
    let mut found = found.into_iter();
    let merged = reaches
        .iter()
        .map(|reaches| found.by_ref().take(reaches.len()).reduce(merge));
    Ok(merged.flatten().collect())
}

/// Rejects persistent scratch, with the reason `why`.
pub(super) fn persistent<'a>(
    sections: impl IntoIterator<Item = &'a SectionInstance>,
    why: &str,
) -> Result<(), Diagnostic> {
    let mut all = sections.into_iter().flat_map(|section| {
        let tensors = 0..section.tensors.len();
        tensors.filter_map(move |tensor| Some((section.rank, section.scratch_of(tensor)?)))
    });
    let Some((rank, scratch)) = all.find(|(_, scratch)| scratch.persistent) else {
        return Ok(());
    };
    let message = format!(
        "the scratch '{}' persists, but {why}; expected scratch that each run writes before it reads it",
        scratch.name
    );
    let at = (rank, &scratch.site);
    Err(Diagnostic::at(DiagnosticKind::Malformed, at, message))
}

/// Effects of a kernel that has the one or the other, depending on what it reaches, or on the words that it reads.
fn merge(mut all: Does, other: Does) -> Does {
    for (all, other) in all.iter_mut().zip(other) {
        if all.accesses != other.accesses {
            // Bytes that only one of them accesses may race, but nothing may rely on their being written.
            all.accesses = either(&all.accesses, &other.accesses);
        }
        all.waits |= other.waits;
    }
    all
}

/// Number of runs after which programs with these sections repeat their accesses.
///
/// # Errors
/// The period exceeds the limit on simulated runs.
pub(super) fn period<'a>(
    sections: impl Iterator<Item = &'a SectionInstance>,
) -> Result<usize, Diagnostic> {
    let mut period = 1;
    for section in sections {
        period = common_multiple(period, section.period);
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

/// Number of runs to simulate for a period of `period` runs: every run of the period twice, and more because a rank
/// may be ahead of another.
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

/// Simulates launches in the order of `sequence`, which names kernels by number, under every valuation until one shows
/// a violation. A valuation in which ranks announce different values is of a launch that fails, as the program wants it;
/// unless all are, or an `agree` fails in every valuation.
///
/// # Errors
/// Why they cannot be simulated.
pub(super) fn follow(
    ranks: &[RankProgram],
    kernels: &[JointLaunch<'_>],
    sequence: &[usize],
    diagnostics: &mut Diagnostics<'_>,
) -> Result<Vec<Does>, Diagnostic> {
    let uses = WordUse::of(kernels);
    let simulate = |valuation| {
        let mut run = LaneRun::new(ranks, kernels, sequence, (valuation, &uses))?;
        let machine = run.go()?;
        match run.failed.take() {
            Some(diagnostic) => Err(diagnostic),
            None => Ok((run, machine)),
        }
    };
    let mut all: Option<Vec<Does>> = None;
    let (mut agreed, mut differing) = (HashSet::new(), Vec::new());
    let mut valuations = Valuation::of(&uses);
    let (first, mut taken, mut most) = (valuations.len(), 0, 0);
    let mut next = 0;
    loop {
        if next == first {
            valuations.extend(Valuation::further(&uses, taken, most));
        }
        let Some(valuation) = valuations.get(next).copied() else {
            break;
        };
        next += 1;
        let (run, machine) = simulate(valuation)?;
        (taken, most) = (taken.max(run.taken), most.max(run.words.most.get()));
        // Also from a valuation whose launch fails: an `agree` that holds there is one that can hold.
        agreed.extend(run.agreed());
        // Announced words differ by the invented values, and the launch fails as intended: no violation of the
        // program.
        if run.words.are_read() && run.announcements.differ() {
            differing.push((valuation, run.differing()));
            continue;
        }
        report::report(&run, &machine, diagnostics);
        let done = run.done();
        all = Some(match all {
            Some(all) => {
                let both = all.into_iter().zip(done);
                both.map(|(one, other)| merge(one, other)).collect()
            }
            None => done,
        });
        // One valuation with a violation suffices; further ones would mostly repeat it.
        if !diagnostics.list.is_empty() {
            break;
        }
    }
    let fails =
        |(_, steps): &(Valuation, HashSet<Agreement>)| all.is_none() || !steps.is_subset(&agreed);
    if diagnostics.list.is_empty()
        && let Some((valuation, _)) = differing.into_iter().find(|one| fails(one))
        // Simulated again instead of kept, as a run holds the clocks and histories of all its launches.
        && let Ok((run, machine)) = simulate(valuation)
    {
        report::report(&run, &machine, diagnostics);
        return Ok(run.done());
    }
    Ok(all.unwrap_or_default())
}

//! Checks that ranks access only ranks they have a link to.

use super::diagnostics::{Diagnostics, place_of_transfer};
use super::unroll_all;
use crate::error::Rank;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind, RankSite};
use crate::program::ir::{Backend, Program};
use crate::program::parameters::Parameters;
use crate::program::section::{LaneStepKind, ReadValues, SectionInstance};
use std::collections::BTreeSet;

/// Verifies that each rank accesses memory and signals only of ranks that `linked` connects it with, by the lanes of
/// kernels and by transfers. The collective engine routes its own traffic, so its operations are skipped.
/// [`verify`](super::verify) performs all other checks.
///
/// # Errors
/// The program cannot be unrolled, or accesses a rank without a link.
pub fn verify_links(
    program: &Program,
    world: usize,
    streams: usize,
    parameters: &Parameters,
    linked: impl Fn(Rank, Rank) -> bool,
) -> Result<(), Vec<Diagnostic>> {
    let mut diagnostics = Diagnostics::new(program);
    let ranks = unroll_all(program, world, streams, parameters, &mut diagnostics)?;
    for (rank, own) in ranks.iter().enumerate() {
        let apart = |peer: &Rank| *peer != rank && !linked(rank, *peer);
        for (number, transfer) in own.transfers.iter().enumerate() {
            if transfer.backend != Backend::Nccl && apart(&transfer.peer) {
                let place = place_of_transfer(&ranks, rank, number);
                report(&mut diagnostics, place, transfer.peer);
            }
        }
        for section in own.sections() {
            of_lanes(section, &apart, &mut diagnostics);
        }
    }
    diagnostics.end_of_stage()
}

/// Reports accesses of a kernel's lanes to ranks that are `apart`, in all of its launches.
fn of_lanes(
    section: &SectionInstance,
    apart: &impl Fn(&Rank) -> bool,
    diagnostics: &mut Diagnostics<'_>,
) {
    let cases = match section.reachable_cases() {
        Ok(cases) => cases,
        Err(message) => {
            let place = RankSite::new(section.rank, &section.site);
            diagnostics.add(DiagnosticKind::Malformed, [place], |[kernel]| {
                format!("{kernel}: {message}")
            });
            return;
        }
    };
    for case in &cases {
        for lane in 0..section.lanes {
            for epoch in 0..section.period {
                let reachable = |tensor: usize| case.contains(&tensor);
                let with =
                    |values: &ReadValues<'_>| section.steps_where(lane, epoch, &reachable, values);
                // The largest values may not go together.
                let steps = with(&|word| Some(word.most)).or_else(|_| with(&|_| Some(0)));
                let steps = match steps {
                    Ok((steps, _)) => steps,
                    Err(diagnostic) => {
                        diagnostics.add_made(diagnostic);
                        continue;
                    }
                };
                for step in &steps {
                    for peer in reached(&step.kind).into_iter().filter(apart) {
                        let place = RankSite::new(section.rank, &step.site);
                        report(diagnostics, place, peer);
                    }
                }
            }
        }
    }
}

/// Ranks whose memory or signals a step accesses. A signal is waited for in local memory, so waits are excluded.
fn reached(kind: &LaneStepKind) -> BTreeSet<Rank> {
    let parts = kind.targets().iter().chain(kind.sources());
    let signalled = match kind {
        LaneStepKind::Signal { peer, .. } => Some(*peer),
        _ => None,
    };
    parts.map(|part| part.rank).chain(signalled).collect()
}

fn report(diagnostics: &mut Diagnostics<'_>, place: RankSite, peer: Rank) {
    let rank = place.rank;
    diagnostics.add(DiagnosticKind::OutOfBounds, [place], |_| {
        format!("rank {rank} accesses rank {peer}; expected ranks that a link connects it with")
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING: &str = "program ring(offset) {
    input X: i32[4]
    output Y: i32[4]
    scratch S: packets8 i32[2, world, 4]
    kernel lane in 0..1 threads 128 {
        put X to S[epoch % 2][rank] on (rank + offset) % world
        Y = copy(S[epoch % 2][(rank - offset) % world])
    }
}";

    /// On a ring of four, ranks at distance two are not linked.
    #[test]
    fn a_step_that_leaves_the_links_is_found() {
        let program: Program = RING.parse().unwrap();
        let linked = |a: Rank, b: Rank| (a + 1) % 4 == b || (b + 1) % 4 == a;
        let check = |offset| {
            let given = Parameters::new().with("offset", offset);
            verify_links(&program, 4, 1, &given, linked)
        };
        check(1).unwrap();
        check(3).unwrap();
        let found = check(2).unwrap_err();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            (found[0].kind, found[0].repeated),
            (DiagnosticKind::OutOfBounds, 7)
        );
        assert!(found[0].lines().contains(&6), "{}", found[0]);
        assert!(
            found[0].message.contains("rank 0 accesses rank 2"),
            "{}",
            found[0]
        );
    }
}

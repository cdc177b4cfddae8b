//! What lanes did wrong, in words.

use super::agreement;
use super::memory::{Actor, STREAM, Was, Wrong};
use super::run::{Finding, Place as Memory, Run};
use crate::error::Rank;
use crate::program::diagnostic::{DiagnosticKind, Place};
use crate::program::rank_program::{Range, Site};
use crate::program::section::{LaneStep, LaneStepKind, SectionInstance};
use crate::program::text::summary;
use crate::program::verify::diagnostics::Diagnostics;
use std::sync::Arc;

/// The most links of a chain that a message spells out.
const MAX_SAID: usize = 4;

/// Reports what is wrong: unordered accesses, lanes that never end, signals that nobody waits for.
pub(super) fn report(run: &Run<'_>, diagnostics: &mut Diagnostics<'_>) {
    crossed_signals(run, diagnostics);
    // What is left over lets later launches run ahead, and is the cause of what they do wrong.
    if run.is_over() {
        lost_signals(run, diagnostics);
        outliving_signals(run, diagnostics);
    }
    let (unwritten, races): (Vec<&Finding>, Vec<&Finding>) = run
        .findings
        .iter()
        .partition(|finding| matches!(finding.wrong, Wrong::Unwritten | Wrong::Stale(_)));
    for finding in &races {
        say(run, finding, diagnostics);
    }
    for finding in unwritten {
        // Where the write is there but unordered, it is the order that is wrong.
        let place = |other: &Finding| (other.part.rank, run.name_of(&other.actor, &other.part));
        if !races.iter().any(|race| place(race) == place(finding)) {
            say(run, finding, diagnostics);
        }
    }
    if !run.is_over() {
        stuck(run, diagnostics);
    } else if diagnostics.list.is_empty() {
        agreement::report(run, diagnostics);
        circles(run, diagnostics);
        unsteady(run, diagnostics);
    }
}

/// Where a lane's step stands, with the launch among the indices.
pub(super) fn place(run: &Run<'_>, actor: &Actor) -> Place {
    let (rank, launch) = (actor.rank as Rank, actor.launch as usize);
    let steps = run.steps(launch, rank, actor.lane as usize);
    let site = steps.ok().and_then(|steps| {
        let step = steps.get(actor.step as usize)?;
        let launch = (Arc::from("launch"), i64::from(actor.launch));
        Some(Site {
            indices: step.site.indices.iter().cloned().chain([launch]).collect(),
            ..step.site.clone()
        })
    });
    Place {
        rank,
        site: site.unwrap_or_default(),
    }
}

/// A step in words; with its program, where several are followed.
pub(super) fn told(run: &Run<'_>, said: &Diagnostics<'_>, actor: &Actor, place: &Place) -> String {
    match run.program(actor.launch as usize) {
        None => said.say(place),
        Some(program) => {
            let text = summary(program, place.site.position());
            format!("{place} of '{}': `{text}`", program.name)
        }
    }
}

fn say(run: &Run<'_>, finding: &Finding, diagnostics: &mut Diagnostics<'_>) {
    let Finding {
        actor,
        writes,
        part,
        wrong,
    } = finding;
    let name = run.name_of(actor, part);
    let owner = part.rank;
    let verb = if *writes { "writes" } else { "reads" };
    match wrong {
        Wrong::Unordered(other, was) if actor.lane == STREAM => {
            let places = vec![place(run, other)];
            let did = match was {
                Was::Read => "reads",
                Was::Write => "writes",
            };
            diagnostics.add(DiagnosticKind::Race, places.clone(), |said| {
                format!(
                    "{} {did} '{name}' of rank {owner}, which does not wait until that is done before its \
                     launch {} ends",
                    told(run, said, other, &places[0]),
                    actor.launch
                )
            });
        }
        // The rank had ended its launch when it was accessed there.
        Wrong::Unordered(other, _)
            if other.lane == STREAM && other.step == 1 && actor.launch <= other.launch =>
        {
            let places = vec![place(run, actor)];
            diagnostics.add(DiagnosticKind::Race, places.clone(), |said| {
                format!(
                    "{} {verb} '{name}' of rank {owner}, which does not wait until that is done before its \
                     launch {} ends",
                    told(run, said, actor, &places[0]),
                    other.launch
                )
            });
        }
        Wrong::Unordered(other, _) if other.lane == STREAM => {
            let places = vec![place(run, actor)];
            diagnostics.add(DiagnosticKind::Race, places.clone(), |said| {
                format!(
                    "{} {verb} '{name}' of rank {owner} without waiting until that rank's launch {} has \
                     started",
                    told(run, said, actor, &places[0]),
                    actor.launch
                )
            });
        }
        Wrong::Unordered(other, was) => {
            let mut places = vec![place(run, actor), place(run, other)];
            places.dedup();
            let did = match was {
                Was::Read => "reads",
                Was::Write => "writes",
            };
            diagnostics.add(DiagnosticKind::Race, places.clone(), |said| match &places[..] {
                [one, two] => format!(
                    "{} {verb} '{name}' of rank {owner}, unordered with {}, which {did} it",
                    told(run, said, actor, one),
                    told(run, said, other, two)
                ),
                _ => format!(
                    "{} {verb} '{name}' of rank {owner} and {did} overlapping elements of it, in no order \
                     among its threads",
                    told(run, said, actor, &places[0])
                ),
            });
        }
        Wrong::Unwritten => {
            let places = vec![place(run, actor)];
            diagnostics.add(DiagnosticKind::UnwrittenRead, places.clone(), |said| {
                format!(
                    "{} reads '{name}' of rank {owner}, which nothing wrote before",
                    told(run, said, actor, &places[0])
                )
            });
        }
        Wrong::Stale(other) => {
            let places = vec![place(run, actor), place(run, other)];
            diagnostics.add(DiagnosticKind::UnwrittenRead, places.clone(), |said| {
                format!(
                    "{} reads '{name}' of rank {owner}, which nothing wrote in this run of the program since {} \
                     did in an earlier one; expected it to be written in each run, or 'scratch persistent {name}'",
                    told(run, said, actor, &places[0]),
                    told(run, said, other, &places[1])
                )
            });
        }
        Wrong::Overwritten(other) => {
            let places = vec![place(run, actor), place(run, other)];
            diagnostics.add(DiagnosticKind::Race, places.clone(), |said| {
                format!(
                    "{} waits for packets in '{name}' of rank {owner} that {} may overwrite before they \
                     are read",
                    told(run, said, actor, &places[0]),
                    told(run, said, other, &places[1])
                )
            });
        }
        Wrong::SameFlag(other) => {
            let mut places = vec![place(run, actor), place(run, other)];
            places.dedup();
            diagnostics.add(DiagnosticKind::Race, places.clone(), |said| {
                format!(
                    "{} stores packets in '{name}' of rank {owner} where {} stored packets in the same \
                     launch; a reader cannot tell one from the other",
                    told(run, said, actor, &places[0]),
                    told(run, said, other, places.last().unwrap_or(&places[0]))
                )
            });
        }
    }
}

/// The step that a lane is held up at.
fn at(run: &Run<'_>, lane: usize) -> Actor {
    let rank = lane / run.width;
    Actor {
        launch: run.launch_of(rank) as u32,
        rank: rank as u32,
        lane: (lane % run.width) as u32,
        step: run.lanes[lane].next as u32,
    }
}

/// Reports who waits for whom: from the first lane that does not end, as far as that leads.
fn stuck(run: &Run<'_>, diagnostics: &mut Diagnostics<'_>) {
    let held = run
        .lanes
        .iter()
        .enumerate()
        .filter(|(_, lane)| lane.running);
    let Some(first) = held.map(|(index, _)| index).min_by_key(|index| {
        // The launch before holds up the next.
        (run.launch_of(index / run.width), *index)
    }) else {
        return;
    };
    let (mut chain, mut next) = (Vec::new(), Some(first));
    let mut circle = false;
    while let Some(lane) = next {
        if chain.contains(&lane) {
            circle = true;
            break;
        }
        chain.push(lane);
        next = waits_for(run, lane).filter(|other| run.lanes[*other].running);
    }
    let places: Vec<Place> = chain
        .iter()
        .map(|lane| place(run, &at(run, *lane)))
        .collect();
    let mut once = places.clone();
    once.dedup();
    diagnostics.add(DiagnosticKind::Deadlock, once, |said| {
        let mut message = String::new();
        for (position, (lane, place)) in chain.iter().zip(&places).take(MAX_SAID).enumerate() {
            let lead = if position == 0 { "" } else { "; " };
            message += &format!(
                "{lead}{} waits for {}",
                told(run, said, &at(run, *lane), place),
                what(run, *lane)
            );
        }
        if chain.len() > MAX_SAID {
            message += &format!("; and {} more like these", chain.len() - MAX_SAID);
        }
        if circle {
            message += "; each waits for the next and the last for one before it";
        }
        message
    });
}

/// The lane that another waits for, where it waits for a signal.
fn waits_for(run: &Run<'_>, lane: usize) -> Option<usize> {
    let state = &run.lanes[lane];
    match &state.steps.get(state.next)?.kind {
        LaneStepKind::Wait(peer) => {
            let (rank, number) = (lane / run.width, lane % run.width);
            let wakes = |step: &LaneStep| matches!(step.kind, LaneStepKind::Signal { peer, lane } if (peer, lane) == (rank, number));
            // The lane that has yet to signal, or that of the same number, which may be a launch behind.
            let all = peer * run.width..(peer + 1) * run.width;
            let mut late = all.filter(|other| {
                let state = &run.lanes[*other];
                state.running && state.steps[state.next..].iter().any(wakes)
            });
            Some(late.next().unwrap_or(peer * run.width + number))
        }
        _ => None,
    }
}

/// What a lane waits for, in words.
fn what(run: &Run<'_>, lane: usize) -> String {
    let (rank, number) = (lane / run.width, lane % run.width);
    let state = &run.lanes[lane];
    match state.steps.get(state.next).map(|step| &step.kind) {
        Some(LaneStepKind::Wait(peer)) => {
            let word = run.words.get(&(rank, number, *peer));
            let awaited = word.map_or(0, |word| word.awaited) + 1;
            format!("signal {awaited} of rank {peer}, which never arrives")
        }
        Some(LaneStepKind::Agree { peer, .. }) => {
            format!("the announcement of rank {peer}, which never arrives")
        }
        Some(LaneStepKind::Move { sources, .. }) => {
            let actor = at(run, lane);
            let packets = sources.iter().filter(|part| run.is_packets(&actor, part));
            let mut names: Vec<&str> = packets.map(|part| run.name_of(&actor, part)).collect();
            names.dedup();
            format!("packets in '{}', which do not come", names.join("' or '"))
        }
        _ => "nothing".to_owned(),
    }
}

/// Two lanes that signal one word: who waits cannot tell one from the other.
fn crossed_signals(run: &Run<'_>, diagnostics: &mut Diagnostics<'_>) {
    for (actor, other) in &run.crossed {
        let places = vec![place(run, actor), place(run, other)];
        diagnostics.add(DiagnosticKind::Race, places.clone(), |said| {
            format!(
                "{} signals the same lane of the same rank as {} in the same launch; a wait cannot tell one \
                 from the other",
                told(run, said, actor, &places[0]),
                told(run, said, other, &places[1])
            )
        });
    }
}

/// What is waited for in a later run may be another signal there, if a run leaves more or fewer of them.
fn outliving_signals(run: &Run<'_>, diagnostics: &mut Diagnostics<'_>) {
    for (sender, actor) in &run.outlived {
        let places = vec![place(run, sender), place(run, actor)];
        diagnostics.add(DiagnosticKind::LostSignal, places.clone(), |said| {
            format!(
                "{} signals rank {}, which waits for that only in a later run: {}; expected a wait in the run that \
                 signals",
                told(run, said, sender, &places[0]),
                actor.rank,
                told(run, said, actor, &places[1])
            )
        });
    }
}

/// Signals that nobody waits for are taken for those of the next launch.
fn lost_signals(run: &Run<'_>, diagnostics: &mut Diagnostics<'_>) {
    for ((rank, _, _), word) in &run.words {
        let Some(last) = word.last.filter(|_| word.signalled > word.awaited) else {
            continue;
        };
        let places = vec![place(run, &last)];
        diagnostics.add(DiagnosticKind::LostSignal, places.clone(), |said| {
            format!(
                "{} signals rank {rank}, which waits for {} of the {} signals; the next launch would take \
                 what is left for its own",
                told(run, said, &last, &places[0]),
                word.awaited,
                word.signalled
            )
        });
    }
}

/// Kernels that do not access the same in every launch: at the first step that differs.
fn unsteady(run: &Run<'_>, diagnostics: &mut Diagnostics<'_>) {
    for (rank, launch, range) in &run.unsteady {
        let (rank, launch) = (*rank, *launch);
        let actor = accessing(run, launch, rank, range).unwrap_or(Actor {
            launch: launch as u32,
            rank: rank as u32,
            lane: 0,
            step: 0,
        });
        let name = &run.ranks[rank].tensors[range.tensor].name;
        let places = vec![place(run, &actor)];
        diagnostics.add(DiagnosticKind::Malformed, places.clone(), |said| {
            format!(
                "{}: what the kernel reads and writes of '{name}' of rank {rank} depends on the epoch; expected \
                 the same in every launch",
                told(run, said, &actor, &places[0])
            )
        });
    }
}

/// The first step of a launch that accesses a part of a rank's tensor.
fn accessing(run: &Run<'_>, launch: usize, rank: Rank, range: &Range) -> Option<Actor> {
    let (from, to) = (range.offset_bytes, range.offset_bytes + range.bytes);
    for of in 0..run.ranks.len() {
        for lane in 0..run.section(launch, of).lanes {
            let steps = run.steps(launch, of, lane).ok()?;
            let touches = |step: &LaneStep| {
                let LaneStepKind::Move {
                    targets, sources, ..
                } = &step.kind
                else {
                    return false;
                };
                let mut parts = targets
                    .iter()
                    .chain(sources)
                    .filter(|part| part.rank == rank);
                parts.any(|part| {
                    let (place, bytes) = run.bytes_of(launch, part);
                    place == Memory::Tensor(range.tensor) && bytes.start < to && from < bytes.end
                })
            };
            if let Some(step) = steps.iter().position(touches) {
                return Some(Actor {
                    launch: launch as u32,
                    rank: of as u32,
                    lane: lane as u32,
                    step: step as u32,
                });
            }
        }
    }
    None
}

/// Where lanes may each find other tensors reachable, two that learn of one another are followed in each two cases;
/// three are not.
fn circles(run: &Run<'_>, diagnostics: &mut Diagnostics<'_>) {
    let mut done: Vec<&SectionInstance> = Vec::new();
    for kernel in run.kernels {
        let section = kernel.sections[0];
        if done.iter().any(|other| std::ptr::eq(*other, section)) {
            continue;
        }
        done.push(section);
        let same = run.kernels.iter().zip(&run.taught);
        let same = same.filter(|(other, _)| std::ptr::eq(other.sections[0], section));
        if same.clone().count() < 2 {
            continue;
        }
        // Each lane by the first of those that it is connected with.
        let mut first: Vec<usize> = (0..section.lanes).collect();
        let root = |first: &[usize], mut lane: usize| {
            while first[lane] != lane {
                lane = first[lane];
            }
            lane
        };
        for (one, other) in same.flat_map(|(_, taught)| taught) {
            let (one, other) = (root(&first, *one), root(&first, *other));
            first[one.max(other)] = one.min(other);
        }
        let roots: Vec<usize> = (0..section.lanes).map(|lane| root(&first, lane)).collect();
        let together = |of: usize| {
            (0..section.lanes)
                .filter(|lane| roots[*lane] == of)
                .collect()
        };
        let many = (0..section.lanes)
            .map(together)
            .find(|all: &Vec<usize>| all.len() > 2);
        let Some(lanes) = many else { continue };
        let place = Place {
            rank: section.rank,
            site: section.site.clone(),
        };
        diagnostics.add(DiagnosticKind::Malformed, vec![place.clone()], |_| {
            format!(
                "{place}: lanes {}, {} and {} wait for one another by signals or packets, and each may find other \
                 tensors reachable; expected at most two lanes that do",
                lanes[0], lanes[1], lanes[2]
            )
        });
    }
}

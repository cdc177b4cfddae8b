//! Messages for violations of lanes.

use super::agreement;
use super::knowledge::Knowledge;
use super::memory::{RankMemory, STREAM, Was, Wrong};
use super::state::{Finding, LaneRun};
use crate::error::Rank;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind, RankSite};
use crate::program::machine::{Actor, Machine};
use crate::program::rank_program::{Range, Site};
use crate::program::section::{LaneStep, LaneStepKind, Part, SectionInstance};
use crate::program::site::with_index;
use crate::program::text::summary;
use crate::program::verify::diagnostics::{Diagnostics, chained};

/// Limit on the links of a chain that a message spells out, to keep it readable.
const MAX_SAID: usize = 4;

/// Reports violations: unordered accesses, lanes that never end, signals without a wait.
pub(super) fn report(
    run: &LaneRun<'_>,
    machine: &Machine<Knowledge>,
    diagnostics: &mut Diagnostics<'_>,
) {
    crossed_signals(run, diagnostics);
    // A leftover signal lets later launches run ahead and causes their violations.
    if run.is_over() {
        lost_signals(run, machine, diagnostics);
        outliving_signals(run, diagnostics);
    }
    let (unwritten, races): (Vec<&Finding<'_>>, Vec<&Finding<'_>>) = run
        .findings
        .iter()
        .partition(|finding| matches!(finding.wrong, Wrong::Unwritten | Wrong::Stale(_)));
    for finding in &races {
        say(run, finding, diagnostics);
    }
    for finding in unwritten {
        // If the write exists but is unordered, the race is the cause; report that alone.
        if !races.iter().any(|race| race.memory == finding.memory) {
            say(run, finding, diagnostics);
        }
    }
    if !run.is_over() {
        stuck(run, machine, diagnostics);
    } else if diagnostics.list.is_empty() {
        // Only for a program without other violations, which may be their cause.
        agreement::report(run, diagnostics);
        circles(run, diagnostics);
        unsteady(run, diagnostics);
    }
}

/// Place of a lane's step, with the launch among the indices.
fn place(run: &LaneRun<'_>, actor: &Actor) -> RankSite {
    let (rank, launch) = (actor.rank as Rank, actor.launch as usize);
    let steps = run.steps(launch, rank, actor.lane as usize);
    let site = steps.ok().and_then(|steps| {
        let step = steps.get(actor.step as usize)?;
        Some(Site {
            indices: with_index(&step.site.indices, "launch", actor.launch.into()),
            ..step.site.clone()
        })
    });
    RankSite {
        rank,
        site: site.unwrap_or_default(),
    }
}

/// Reports a violation by steps; `message` gets their descriptions. The same step may be given twice.
pub(super) fn by_steps<const N: usize>(
    run: &LaneRun<'_>,
    diagnostics: &mut Diagnostics<'_>,
    kind: DiagnosticKind,
    actors: [&Actor; N],
    message: impl FnOnce([String; N]) -> String,
) {
    let places = actors.map(|actor| place(run, actor));
    let mut once = places.to_vec();
    // Two lanes, or launches, at one statement make one place.
    once.dedup();
    diagnostics.add_by(kind, once, |said| {
        message(std::array::from_fn(|number| {
            told(run, said, actors[number], &places[number])
        }))
    });
}

/// Description of a step; names its program if several are simulated.
fn told(run: &LaneRun<'_>, said: &Diagnostics<'_>, actor: &Actor, place: &RankSite) -> String {
    match run.program(actor.launch as usize) {
        None => said.say(place),
        Some(program) => {
            let text = summary(program, place.site.position());
            format!("{place} of '{}': `{text}`", program.name)
        }
    }
}

fn say(run: &LaneRun<'_>, finding: &Finding<'_>, diagnostics: &mut Diagnostics<'_>) {
    let Finding {
        actor,
        writes,
        memory: (owner, name),
        wrong,
    } = finding;
    let verb = if *writes { "writes" } else { "reads" };
    let (kind, actors) = match wrong {
        // The stream between launches has no statement that a message could show.
        Wrong::Unordered(other, _) if actor.lane == STREAM => {
            (DiagnosticKind::Race, [other, other])
        }
        Wrong::Unordered(other, _) if other.lane == STREAM => {
            (DiagnosticKind::Race, [actor, actor])
        }
        Wrong::Unordered(other, _) | Wrong::Overwritten(other) | Wrong::SameFlag(other) => {
            (DiagnosticKind::Race, [actor, other])
        }
        Wrong::Unannounced => (DiagnosticKind::Malformed, [actor, actor]),
        Wrong::Unwritten => (DiagnosticKind::UnwrittenRead, [actor, actor]),
        Wrong::Stale(other) => (DiagnosticKind::UnwrittenRead, [actor, other]),
    };
    by_steps(run, diagnostics, kind, actors, |[first, second]| {
        // The other step, if the two have different places.
        let second = Some(second).filter(|second| *second != first);
        let did = match wrong {
            Wrong::Unordered(_, Was::Read) => "reads",
            _ => "writes",
        };
        match (wrong, second) {
            (Wrong::Unordered(..), _) if actor.lane == STREAM => format!(
                "{first} {did} '{name}' of rank {owner}, which does not wait until that is done before its launch \
                 {} ends",
                actor.launch
            ),
            // The rank had already ended its launch when a peer accessed its memory.
            (Wrong::Unordered(other, _), _)
                if other.lane == STREAM && other.step == 1 && actor.launch <= other.launch =>
            {
                format!(
                    "{first} {verb} '{name}' of rank {owner}, which does not wait until that is done before its \
                     launch {} ends",
                    other.launch
                )
            }
            (Wrong::Unordered(other, _), _) if other.lane == STREAM => format!(
                "{first} {verb} '{name}' of rank {owner} without waiting until that rank's launch {} has started",
                actor.launch
            ),
            (Wrong::Unordered(..), Some(second)) => format!(
                "{first} {verb} '{name}' of rank {owner}, unordered with {second}, which {did} it"
            ),
            (Wrong::Unordered(..), None) => format!(
                "{first} {verb} '{name}' of rank {owner} and {did} overlapping elements of it, in no order among its \
                 threads"
            ),
            (Wrong::Unwritten, _) => {
                format!("{first} reads '{name}' of rank {owner}, which nothing wrote before")
            }
            (Wrong::Stale(_), second) => format!(
                "{first} reads '{name}' of rank {owner}, which nothing wrote in this run of the program since {} did in \
                 an earlier one; expected it to be written in each run, or 'scratch persistent {name}'",
                second.unwrap_or_default()
            ),
            (Wrong::Unannounced, _) => format!(
                "{first} {verb} '{name}' of rank {owner}, which has not announced it to this lane; expected a tensor of a \
                 rank that has, since no other rank knows where it is"
            ),
            (Wrong::Overwritten(_), second) => format!(
                "{first} waits for packets in '{name}' of rank {owner} that {} may overwrite before they are read",
                second.unwrap_or_default()
            ),
            (Wrong::SameFlag(_), second) => format!(
                "{first} stores packets in '{name}' of rank {owner} where {} stored packets in the same launch; a \
                 reader cannot tell one from the other",
                second.unwrap_or_else(|| first.clone())
            ),
        }
    });
}

/// Reports the wait-for chain from the first lane that does not end.
fn stuck(run: &LaneRun<'_>, machine: &Machine<Knowledge>, diagnostics: &mut Diagnostics<'_>) {
    // An earlier launch blocks the next one, so start with the earliest.
    let mut next = machine
        .blocked()
        .min_by_key(|actor| (actor.launch, actor.rank, actor.lane));
    let mut chain: Vec<Actor> = Vec::new();
    let mut circle = false;
    while let Some(actor) = next {
        circle = chain.contains(&actor);
        if circle {
            break;
        }
        chain.push(actor);
        next = waits_for(machine, &actor);
    }
    let places: Vec<RankSite> = chain.iter().map(|actor| place(run, actor)).collect();
    if places.is_empty() {
        return;
    }
    let mut once = places.clone();
    once.dedup();
    diagnostics.add_by(DiagnosticKind::Deadlock, once, |said| {
        let links = chain.iter().zip(&places).map(|(actor, place)| {
            let step = told(run, said, actor, place);
            format!("{step} waits for {}", what(run, machine, actor))
        });
        let mut message = chained(links, MAX_SAID);
        if circle {
            message += "; each waits for the next and the last for one before it";
        }
        message
    });
}

/// Blocked lane that another one waits for, if it waits for a signal.
fn waits_for(machine: &Machine<Knowledge>, actor: &Actor) -> Option<Actor> {
    let LaneStepKind::Wait(peer) = machine.steps_from(actor).first()?.kind else {
        return None;
    };
    let waiting = (actor.rank as Rank, actor.lane as usize);
    let wakes = |step: &LaneStep| matches!(step.kind, LaneStepKind::Signal { peer, lane } if (peer, lane) == waiting);
    let others = || machine.blocked().filter(|it| it.rank as Rank == peer);
    // The lane that has yet to signal, or else the one with the same number, which may be a launch behind.
    let late = others().find(|other| machine.steps_from(other).iter().any(wakes));
    late.or_else(|| others().find(|other| other.lane == actor.lane))
}

/// Description of the dependency that a lane waits for.
fn what(run: &LaneRun<'_>, machine: &Machine<Knowledge>, actor: &Actor) -> String {
    let (rank, lane) = (actor.rank as Rank, actor.lane as usize);
    match machine.steps_from(actor).first().map(|step| &step.kind) {
        Some(LaneStepKind::Wait(peer)) => {
            let word = machine.words.get(&(rank, lane, *peer));
            let awaited = word.map_or(0, |word| word.awaited) + 1;
            format!("signal {awaited} of rank {peer}, which never arrives")
        }
        Some(LaneStepKind::Agree { peer, .. }) => {
            format!("the announcement of rank {peer}, which never arrives")
        }
        Some(kind) => {
            let section = |part: &Part| run.section(actor.launch as usize, part.rank);
            let packets = kind
                .sources()
                .iter()
                .filter(|part| section(part).packets_of(part).is_some());
            let mut names: Vec<&str> = packets.map(|part| run.name_of(actor, part)).collect();
            names.dedup();
            format!("packets in '{}', which do not come", names.join("' or '"))
        }
        None => "nothing".to_owned(),
    }
}

/// Reports two lanes that signal one word: the waiter cannot distinguish them.
fn crossed_signals(run: &LaneRun<'_>, diagnostics: &mut Diagnostics<'_>) {
    for (actor, other) in &run.crossed {
        let kind = DiagnosticKind::Race;
        by_steps(run, diagnostics, kind, [actor, other], |[one, other]| {
            format!(
                "{one} signals the same lane of the same rank as {other} in the same launch; a wait cannot tell one \
                 from the other"
            )
        });
    }
}

/// Reports signals consumed in a later run: if another run leaves more or fewer of them, the wait consumes the wrong
/// one.
fn outliving_signals(run: &LaneRun<'_>, diagnostics: &mut Diagnostics<'_>) {
    for (sender, actor) in &run.outlived {
        let (kind, rank) = (DiagnosticKind::LostSignal, actor.rank);
        by_steps(run, diagnostics, kind, [sender, actor], |[signal, wait]| {
            format!(
                "{signal} signals rank {rank}, which waits for that only in a later run: {wait}; expected a wait in the \
                 run that signals"
            )
        });
    }
}

/// Reports signals without a wait: the next launch would mistake them for its own.
fn lost_signals(
    run: &LaneRun<'_>,
    machine: &Machine<Knowledge>,
    diagnostics: &mut Diagnostics<'_>,
) {
    for ((rank, _, _), word) in &machine.words {
        let Some(last) = word.last.filter(|_| word.signalled > word.awaited) else {
            continue;
        };
        let (kind, awaited, all) = (DiagnosticKind::LostSignal, word.awaited, word.signalled);
        by_steps(run, diagnostics, kind, [&last], |[last]| {
            format!(
                "{last} signals rank {rank}, which waits for {awaited} of the {all} signals; the next launch would take \
                 what is left for its own"
            )
        });
    }
}

/// Reports kernels whose accesses differ between launches, at the first step that differs.
fn unsteady(run: &LaneRun<'_>, diagnostics: &mut Diagnostics<'_>) {
    for (rank, launch, range) in &run.unsteady {
        let (rank, launch) = (*rank, *launch);
        let actor = accessing(run, launch, rank, range).unwrap_or(Actor {
            launch: launch as u32,
            rank: rank as u32,
            lane: 0,
            step: 0,
        });
        let name = &run.ranks[rank].tensors[range.tensor].name;
        let kind = DiagnosticKind::Malformed;
        by_steps(run, diagnostics, kind, [&actor], |[step]| {
            format!(
                "{step}: what the kernel reads and writes of '{name}' of rank {rank} depends on the epoch; expected \
                 the same in every launch"
            )
        });
    }
}

/// First step of a launch that accesses a part of a rank's tensor.
fn accessing(run: &LaneRun<'_>, launch: usize, rank: Rank, range: &Range) -> Option<Actor> {
    let (from, to) = (range.offset_bytes, range.offset_bytes + range.bytes);
    for of in 0..run.ranks.len() {
        for lane in 0..run.section(launch, of).lanes {
            let steps = run.steps(launch, of, lane).ok()?;
            let touches = |step: &LaneStep| {
                let kind = &step.kind;
                let mut parts = kind
                    .targets()
                    .iter()
                    .chain(kind.sources())
                    .filter(|part| part.rank == rank);
                parts.any(|part| {
                    let (place, bytes) = run.bytes_of(launch, part);
                    place == RankMemory::Tensor(range.tensor)
                        && bytes.start < to
                        && from < bytes.end
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

/// Reports communication cycles among lanes if reachability may differ per lane: two lanes that learn of one another
/// are simulated in every pair of cases, but three are not.
fn circles(run: &LaneRun<'_>, diagnostics: &mut Diagnostics<'_>) {
    let mut done: Vec<&SectionInstance> = Vec::new();
    for kernel in run.kernels {
        let section = kernel.sections[0];
        if done.iter().any(|other| std::ptr::eq(*other, section)) {
            continue;
        }
        done.push(section);
        let same = run.kernels.iter().zip(&run.synchronized);
        let same = same.filter(|(other, _)| std::ptr::eq(other.sections[0], section));
        if same.clone().count() < 2 {
            continue;
        }
        // Union-find: each lane points to the first lane of its component.
        let mut first: Vec<usize> = (0..section.lanes).collect();
        let root = |first: &[usize], mut lane: usize| {
            while first[lane] != lane {
                lane = first[lane];
            }
            lane
        };
        for (one, other) in same.flat_map(|(_, synchronized)| synchronized) {
            let (one, other) = (root(&first, *one), root(&first, *other));
            first[one.max(other)] = one.min(other);
        }
        let roots: Vec<usize> = (0..section.lanes).map(|lane| root(&first, lane)).collect();
        let locating = run.locating(section);
        let together = |of: usize| {
            let lanes = locating.iter().copied();
            lanes.filter(|lane| roots[*lane] == of).collect()
        };
        let many = (0..section.lanes)
            .map(together)
            .find(|all: &Vec<usize>| all.len() > 2);
        let Some(lanes) = many else { continue };
        let message = format!(
            "lanes {}, {} and {} wait for one another by signals or packets, and each may find other tensors reachable; \
             expected at most two lanes that do",
            lanes[0], lanes[1], lanes[2]
        );
        let at = (section.rank, &section.site);
        diagnostics.add_made(Diagnostic::at(DiagnosticKind::Malformed, at, message));
    }
}

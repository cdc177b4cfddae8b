//! Wait-for graph of a program that does not terminate.

use super::diagnostics::{Diagnostics, chained, place_of, place_of_transfer};
use super::state::{Item, Need, SimulatedRun};
use crate::error::Rank;
use crate::program::diagnostic::{DiagnosticKind, RankSite};
use crate::program::ir::{Backend, Direction};
use crate::program::rank_program::OperationKind;
use std::collections::{HashMap, HashSet};

/// Limit on the links of a chain that a message spells out, to keep it readable.
const MAX_SAID: usize = 6;

/// Node of the wait-for graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Agent {
    Host(Rank),
    Stream(usize),
}

/// Reason why an agent is blocked.
struct Blocked {
    rank: Rank,
    /// Operation at which it is blocked.
    operation: usize,
    /// Description of the missing dependency.
    what: String,
    /// Agent that must satisfy the dependency; `None` if no agent will.
    on: Option<Agent>,
    /// Additional place that the description mentions.
    also: Option<RankSite>,
}

/// Reports the agents that are blocked; `false` if every agent finished.
pub(super) fn report(run: &SimulatedRun<'_>, diagnostics: &mut Diagnostics<'_>) -> bool {
    let hosts = (0..run.ranks.len())
        .filter(|&rank| run.hosts[rank].next < run.ranks[rank].operations.len())
        .map(Agent::Host);
    let streams = (0..run.streams.len())
        .filter(|&stream| !run.streams[stream].queue.is_empty())
        .map(Agent::Stream);
    let stuck: Vec<Agent> = hosts.chain(streams).collect();
    // Every agent waits for exactly one other, so following the edges ends in a cycle or at a dependency that no
    // agent satisfies.
    let mut seen: HashMap<Agent, usize> = HashMap::new();
    for (walk, &start) in stuck.iter().enumerate() {
        let (mut chain, mut next) = (Vec::new(), Some(start));
        while let Some(agent) = next {
            if let Some(&earlier) = seen.get(&agent) {
                // A chain that runs into an earlier walk ends in a cycle, or a missing dependency, which that walk
                // has reported.
                if earlier == walk {
                    let from = chain.iter().position(|(a, _)| *a == agent).unwrap_or(0);
                    say(run, &chain[from..], true, diagnostics);
                }
                break;
            }
            seen.insert(agent, walk);
            let Some(blocked) = why(run, agent) else {
                break;
            };
            next = blocked.on;
            chain.push((agent, blocked));
            if next.is_none() {
                say(run, &chain[chain.len() - 1..], false, diagnostics);
            }
        }
    }
    // A failure must never pass without a message, even if `why` has no reason for the agents of a chain.
    if !stuck.is_empty() && diagnostics.list.is_empty() {
        let blocked: Vec<_> = stuck
            .iter()
            .take(1)
            .filter_map(|&agent| Some((agent, why(run, agent)?)))
            .collect();
        say(run, &blocked, false, diagnostics);
    }
    !stuck.is_empty()
}

fn say(
    run: &SimulatedRun<'_>,
    chain: &[(Agent, Blocked)],
    circle: bool,
    diagnostics: &mut Diagnostics<'_>,
) {
    // Report a cycle once, wherever it is entered: start at its lowest place.
    let lowest = (0..chain.len()).min_by_key(|&index| {
        let place = place_of(run.ranks, chain[index].1.rank, chain[index].1.operation);
        (place.rank, place.site.line, place.site.column)
    });
    let order: Vec<usize> = (0..chain.len())
        .map(|index| (index + lowest.unwrap_or(0)) % chain.len())
        .collect();
    let mut places: Vec<RankSite> = Vec::new();
    for &index in &order {
        let blocked = &chain[index].1;
        places.push(place_of(run.ranks, blocked.rank, blocked.operation));
        places.extend(blocked.also.clone());
    }
    let mut once = HashSet::new();
    places.retain(|place| once.insert(place.clone()));
    diagnostics.add_by(DiagnosticKind::Deadlock, places, |said| {
        let links = order.iter().map(|&index| {
            let blocked = &chain[index].1;
            let place = place_of(run.ranks, blocked.rank, blocked.operation);
            format!("{} waits for {}", said.say(&place), blocked.what)
        });
        let mut message = chained(links, MAX_SAID);
        if circle {
            message += "; each waits for the next and the last for the first";
        }
        message
    });
}

fn why(run: &SimulatedRun<'_>, agent: Agent) -> Option<Blocked> {
    match agent {
        Agent::Host(rank) => why_host(run, rank),
        Agent::Stream(stream) => why_stream(run, stream),
    }
}

fn why_host(run: &SimulatedRun<'_>, rank: Rank) -> Option<Blocked> {
    let operation = run.hosts[rank].next;
    let OperationKind::Share(exchange) = run.ranks[rank].operations.get(operation)?.kind else {
        return None;
    };
    let (_, id) = run.missing_share(rank, exchange)?;
    let peer = run.ranks[rank].transfers[id].peer;
    let partner = &run.ranks[peer].transfers[run.links.partners[rank][id]];
    let also = place_of(run.ranks, peer, run.links.shares[peer][partner.exchange]);
    Some(Blocked {
        rank,
        operation,
        what: format!(
            "rank {peer} to share '{}' ({}), which its host has not reached",
            partner.name, also.site
        ),
        on: Some(Agent::Host(peer)),
        also: Some(also),
    })
}

fn why_stream(run: &SimulatedRun<'_>, stream: usize) -> Option<Blocked> {
    let rank = run.streams[stream].rank;
    let (operation, need) = match *run.streams[stream].queue.front()? {
        Item::Operation(operation) => (operation, run.need(stream, operation)?),
        Item::WaitEvent(event, operation) => (operation, Need::Event(event)),
        Item::Record(_) => return None,
    };
    let (what, on, also) = match need {
        Need::Peer(id, number) => {
            let transfer = &run.ranks[rank].transfers[id];
            let (peer, partner) = (transfer.peer, run.links.partners[rank][id]);
            let verb = match (transfer.direction, transfer.backend) {
                (_, Backend::Nccl) => "post it to the engine",
                (Direction::Send, _) => "receive",
                (Direction::Receive, _) => "send",
            };
            let name = &run.ranks[peer].transfers[partner].name;
            post_of(run, peer, partner, number).map_or_else(
                || {
                    let times = run.links.posts[peer][partner].len();
                    let declared = place_of_transfer(run.ranks, peer, partner);
                    let what = format!(
                        "rank {peer} to {verb} ('{name}', declared in {}), which it posts {times} \
                         times and not {number}",
                        declared.site
                    );
                    (what, None, Some(declared))
                },
                |(on, place)| {
                    let what = format!("rank {peer} to {verb}: '{name}' of {}", place.site);
                    (what, Some(on), Some(place))
                },
            )
        }
        Need::Own(id, number) => {
            let (on, place) = post_of(run, rank, id, number)?;
            let what = format!("its own post of {}", place.site);
            (what, Some(on), Some(place))
        }
        Need::Engine(before) => {
            let place = place_of(run.ranks, rank, before);
            let what = format!("the engine, which is still at {}", place.site);
            (what, Some(agent_of(run, rank, before)), Some(place))
        }
        Need::Collective(absent, number) => {
            let meeting = run.links.meetings.all.get(number)?;
            let (_, operation) = meeting.call(meeting.place(absent)?)?;
            let place = place_of(run.ranks, absent, operation);
            let what = format!("rank {absent} to reach the collective, {}", place.site);
            (what, Some(agent_of(run, absent, operation)), Some(place))
        }
        Need::Event(event) => {
            let other = run.events[event].stream;
            let stream = other - run.first_stream[rank];
            let what = format!("its stream {}", run.ranks[rank].streams[stream]);
            (what, Some(Agent::Stream(other)), None)
        }
    };
    Some(Blocked {
        rank,
        operation,
        what,
        on,
        also,
    })
}

/// Place where a rank posts a transfer for the `number`-th time, and the agent that has to reach it.
fn post_of(
    run: &SimulatedRun<'_>,
    rank: Rank,
    id: usize,
    number: usize,
) -> Option<(Agent, RankSite)> {
    let posts = &run.links.posts[rank][id];
    let operation = *posts.get(number.checked_sub(1)?)?;
    Some((
        agent_of(run, rank, operation),
        place_of(run.ranks, rank, operation),
    ))
}

/// Agent that has to reach an operation: its stream, or the host that has not enqueued it yet.
fn agent_of(run: &SimulatedRun<'_>, rank: Rank, operation: usize) -> Agent {
    // What the host has not enqueued is in no stream's queue: the host is blocked before it, at a `share`.
    if operation >= run.hosts[rank].next {
        Agent::Host(rank)
    } else {
        let stream = run.ranks[rank].operations[operation].stream;
        Agent::Stream(run.first_stream[rank] + stream)
    }
}

//! Checks consistency between ranks before the simulation: transfers and their partners, collectives, inputs and
//! outputs.

use super::diagnostics::{Diagnostics, place_of, place_of_transfer};
use super::kernel_accesses::KernelAccesses;
use super::meetings::{Meetings, meetings};
use super::numbers::Numbers;
use super::shared::shared_tensors;
use crate::error::Rank;
use crate::program::diagnostic::{DiagnosticKind, RankSite};
use crate::program::ir::{Backend, Direction, Role, Sharding};
use crate::program::partners;
use crate::program::rank_program::{OperationKind, RankProgram, TransferId};
use std::cell::OnceCell;
use std::collections::HashMap;

/// Limit on the unmatched transfers of a rank that are counted, which bounds the time for a wholly mismatched program.
const MAX_UNMATCHED: usize = 10_000;

/// Relations between the ranks' programs.
pub(super) struct Links {
    /// For each rank and transfer, the peer's matching transfer.
    pub(super) partners: Vec<Vec<TransferId>>,
    /// For each rank and transfer, the operations that post it, in the host's order.
    pub(super) posts: Vec<Vec<Vec<usize>>>,
    /// For each rank, the operations that share its exchanges.
    pub(super) shares: Vec<Vec<usize>>,
    /// Collectives and kernels with their members.
    pub(super) meetings: Meetings,
    /// For each rank, the numbers of its posts and waits.
    pub(super) numbers: Vec<Numbers>,
    /// Accesses of kernels, once they are known.
    pub(super) kernels: KernelAccesses,
}

/// Matches the ranks' programs, and reports mismatches.
pub(super) fn link(ranks: &[RankProgram], diagnostics: &mut Diagnostics<'_>) -> Links {
    let mut links = Links {
        partners: partners(ranks, diagnostics),
        posts: Vec::new(),
        shares: Vec::new(),
        meetings: Meetings::default(),
        numbers: ranks.iter().map(Numbers::new).collect(),
        kernels: KernelAccesses::default(),
    };
    for rank_program in ranks {
        let mut posts = vec![Vec::new(); rank_program.transfers.len()];
        let mut shares = vec![0; rank_program.exchanges.len()];
        for (index, operation) in rank_program.operations.iter().enumerate() {
            match &operation.kind {
                // An exchange has exactly one share; its number was assigned by it.
                OperationKind::Share(exchange) => shares[*exchange] = index,
                kind => kind.posted().iter().for_each(|&id| posts[id].push(index)),
            }
        }
        links.posts.push(posts);
        links.shares.push(shares);
    }
    interfaces(ranks, diagnostics);
    links.meetings = meetings(ranks, diagnostics);
    // These compare calls pairwise, which needs matching transfers and meetings.
    if diagnostics.list.is_empty() {
        shared_tensors(ranks, diagnostics);
        engine_pairs(ranks, &links, diagnostics);
    }
    links
}

/// Finds each transfer's partner; a transfer without one is reported and gets 0.
fn partners(ranks: &[RankProgram], diagnostics: &mut Diagnostics<'_>) -> Vec<Vec<TransferId>> {
    // Needed for messages only, so built lazily for the ranks that a message names.
    type Nearest = HashMap<(Direction, Rank), TransferId>;
    let nearest: Vec<OnceCell<Nearest>> = vec![OnceCell::new(); ranks.len()];
    let nearest_of = |rank: Rank| {
        nearest[rank].get_or_init(|| {
            // Reversed, so that the first transfer of a key is the one that stays in the map.
            let keyed = ranks[rank].transfers.iter().enumerate().rev();
            keyed.map(|(id, t)| ((t.direction, t.peer), id)).collect()
        })
    };
    let all = partners::partners(ranks);
    for (rank, own) in all.iter().enumerate() {
        let mut missing = 0;
        for (id, partner) in own.iter().enumerate() {
            let transfer = &ranks[rank].transfers[id];
            match partner {
                None if missing > MAX_UNMATCHED => {}
                None => {
                    missing += 1;
                    // The closest transfer that the peer does share with this rank helps to find the mistake.
                    let key = (transfer.direction.reversed(), rank);
                    let near = nearest_of(transfer.peer).get(&key).copied();
                    unmatched(ranks, (rank, id), near, diagnostics);
                }
                // Compare each pair once, from the sender's side.
                Some(partner) if transfer.direction == Direction::Send => {
                    compare(ranks, (rank, id), *partner, diagnostics);
                }
                Some(_) => {}
            }
        }
    }
    // A missing partner becomes 0, which is never used: diagnostics end the verification after this stage.
    let found = all.into_iter();
    found
        .map(|own| own.into_iter().map(Option::unwrap_or_default).collect())
        .collect()
}

fn unmatched(
    ranks: &[RankProgram],
    (rank, id): (Rank, TransferId),
    near: Option<TransferId>,
    diagnostics: &mut Diagnostics<'_>,
) {
    let transfer = &ranks[rank].transfers[id];
    let place = place_of_transfer(ranks, rank, id);
    let peer = &ranks[transfer.peer];
    let mut places = vec![place];
    places.extend(near.map(|near| place_of_transfer(ranks, transfer.peer, near)));
    diagnostics.add_by(DiagnosticKind::AsymmetricExchange, places.clone(), |said| {
        let (verb, missing) = match transfer.direction {
            Direction::Send => ("sends to", "receive"),
            Direction::Receive => ("receives from", "send"),
        };
        let mut message = format!(
            "{} {verb} rank {} with tag {}, but rank {} shares no matching {missing}",
            said.say(&places[0]),
            transfer.peer,
            transfer.tag,
            transfer.peer
        );
        if transfer.ordinal > 0 {
            message += &format!(" beyond the first {}", transfer.ordinal);
        }
        if let Some(other) = near.map(|near| &peer.transfers[near]) {
            message += &format!(
                "; the nearest it shares is {}, with tag {}",
                said.say(&places[1]),
                other.tag
            );
        }
        message + "; the host would wait forever"
    });
}

fn compare(
    ranks: &[RankProgram],
    (rank, id): (Rank, TransferId),
    partner: TransferId,
    diagnostics: &mut Diagnostics<'_>,
) {
    let send = &ranks[rank].transfers[id];
    let receive = &ranks[send.peer].transfers[partner];
    let differences = [
        (send.range.bytes != receive.range.bytes)
            .then(|| format!("{} bytes against {}", send.range.bytes, receive.range.bytes)),
        (send.dtype != receive.dtype).then(|| format!("{} against {}", send.dtype, receive.dtype)),
        (send.backend != receive.backend)
            .then(|| format!("via {} against via {}", send.backend, receive.backend)),
    ];
    let differences: Vec<String> = differences.into_iter().flatten().collect();
    if differences.is_empty() {
        return;
    }
    let places = [
        place_of_transfer(ranks, rank, id),
        place_of_transfer(ranks, send.peer, partner),
    ];
    diagnostics.add(DiagnosticKind::Mismatch, places, |[send, receive]| {
        let differences = differences.join(", ");
        format!("{send} and its receive {receive} differ: {differences}")
    });
}

/// Inputs and outputs must be the same on every rank, except for the axis that is sharded over ranks.
fn interfaces(ranks: &[RankProgram], diagnostics: &mut Diagnostics<'_>) {
    fn outer(rank_program: &RankProgram) -> impl Iterator<Item = &crate::program::TensorInstance> {
        let tensors = rank_program.tensors.iter();
        tensors.filter(|tensor| tensor.role != Role::Local)
    }
    // Rank 0 as the reference: equality is transitive, so pairs of other ranks need no comparison.
    for (rank, rank_program) in ranks.iter().enumerate().skip(1) {
        // A family may have members on one rank alone, which the caller would have to bind there only.
        for (this, other) in [(rank, 0), (0, rank)] {
            let is_on_other = |name: &str| outer(&ranks[other]).any(|tensor| &*tensor.name == name);
            let Some(alone) = outer(&ranks[this]).find(|tensor| !is_on_other(&tensor.name)) else {
                continue;
            };
            let place = RankSite::new(this, &alone.site);
            diagnostics.add(DiagnosticKind::Mismatch, [place], |[declaration]| {
                let name = &alone.name;
                format!("{declaration} declares '{name}'; expected it on rank {other}, too")
            });
            return;
        }
        for (first, own) in outer(&ranks[0]).zip(outer(rank_program)) {
            let same = first.shape.len() == own.shape.len()
                && first
                    .shape
                    .iter()
                    .zip(&own.shape)
                    .enumerate()
                    .all(|(axis, (a, b))| a == b || own.sharding == Sharding::Ranks(axis));
            if !same {
                let place = |rank, tensor: &crate::program::TensorInstance| {
                    RankSite::new(rank, &tensor.site)
                };
                let places = [place(rank, own), place(0, first)];
                let (own, first) = (&own.shape, &first.shape);
                diagnostics.add(DiagnosticKind::Mismatch, places, |[tensor, _]| {
                    format!("{tensor} has shape {own:?}; expected {first:?} as on rank 0")
                });
            }
        }
    }
}

/// The engine matches sends and receives between two ranks by the order of their posts, not by tag, so the orders
/// must agree.
fn engine_pairs(ranks: &[RankProgram], links: &Links, diagnostics: &mut Diagnostics<'_>) {
    type Sequence = Vec<(usize, TransferId)>;
    let sequences: Vec<HashMap<(Direction, Rank), Sequence>> = ranks
        .iter()
        .map(|rank_program| {
            let mut sequences: HashMap<(Direction, Rank), Sequence> = HashMap::new();
            for (index, operation) in rank_program.operations.iter().enumerate() {
                for &id in operation.kind.posted() {
                    let transfer = &rank_program.transfers[id];
                    if transfer.backend == Backend::Nccl {
                        let key = (transfer.direction, transfer.peer);
                        sequences.entry(key).or_default().push((index, id));
                    }
                }
            }
            sequences
        })
        .collect();
    for (rank, own) in sequences.iter().enumerate() {
        for ((direction, peer), sends) in own {
            if *direction != Direction::Send {
                continue;
            }
            let receives = sequences[*peer].get(&(Direction::Receive, rank));
            // Further posts on one side deadlock in the simulation, which reports them.
            let pairs = sends.iter().zip(receives.into_iter().flatten());
            for (&(operation, id), &(other, theirs)) in pairs {
                if links.partners[rank][id] == theirs {
                    continue;
                }
                let places = [
                    place_of(ranks, rank, operation),
                    place_of(ranks, *peer, other),
                ];
                let tags = [(rank, id), (*peer, theirs)];
                let [sent, received] = tags.map(|(rank, id)| ranks[rank].transfers[id].tag);
                diagnostics.add(DiagnosticKind::Mismatch, places, |[send, receive]| {
                    format!(
                        "{send} posts a send of tag {sent} where {receive} posts a receive of tag {received}; the \
                         engine pairs them in the order of posting"
                    )
                });
                break;
            }
        }
    }
}

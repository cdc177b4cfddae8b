//! Members of each collective and kernel, and whether all of them make the same call.

use super::diagnostics::{Diagnostics, place_of};
use crate::error::Rank;
use crate::program::diagnostic::DiagnosticKind;
use crate::program::rank_program::{CollectiveOperation, OperationKind, RankProgram, place_among};
use crate::program::section::{SectionMemory, SectionTensor};
use crate::program::unroll::ranks_of;
use std::collections::HashMap;
use std::sync::Arc;

/// Ranks that take part in a collective; `None` for all ranks.
type Members = Option<Arc<[Rank]>>;

/// A collective or kernel launch, with the matching calls of all members.
#[derive(Debug)]
pub(in crate::program) struct Meeting {
    members: Members,
    /// Operation of each member, in the order of the members.
    operations: Vec<usize>,
}

/// Meetings of all ranks.
#[derive(Debug, Default)]
pub(in crate::program) struct Meetings {
    pub(in crate::program) all: Vec<Meeting>,
    /// For each rank, its collectives and kernels in the host's order: operation and meeting number.
    calls: Vec<Vec<(usize, usize)>>,
}

impl Meeting {
    /// Number of members.
    pub(in crate::program) const fn len(&self) -> usize {
        self.operations.len()
    }

    /// Index of a rank among the members, if it is one.
    pub(in crate::program) fn place(&self, rank: Rank) -> Option<usize> {
        place_among(self.members.as_deref(), rank)
    }

    /// Rank at an index, and its operation.
    pub(in crate::program) fn call(&self, place: usize) -> Option<(Rank, usize)> {
        let rank = match &self.members {
            Some(members) => *members.get(place)?,
            None => place,
        };
        Some((rank, *self.operations.get(place)?))
    }

    /// Members, each with its operation.
    pub(in crate::program) fn calls(&self) -> impl Iterator<Item = (Rank, usize)> {
        (0..self.len()).filter_map(|place| self.call(place))
    }
}

impl Meetings {
    /// Number of the meeting that an operation of a rank belongs to.
    pub(in crate::program) fn number(&self, rank: Rank, operation: usize) -> Option<usize> {
        let calls = self.calls.get(rank)?;
        let position = calls.binary_search_by_key(&operation, |call| call.0).ok()?;
        Some(calls[position].1)
    }
}

/// Calls among the same ranks.
struct Calls {
    members: Members,
    /// For each member, its operations in the host's order.
    of: Vec<Vec<usize>>,
}

/// Matches the members' calls of each collective and kernel, and reports mismatches.
pub(super) fn meetings(ranks: &[RankProgram], diagnostics: &mut Diagnostics<'_>) -> Meetings {
    let (mut lists, mut numbers) = (Vec::<Calls>::new(), HashMap::<Members, usize>::new());
    for (rank, rank_program) in ranks.iter().enumerate() {
        for (index, operation) in rank_program.operations.iter().enumerate() {
            let members = match &operation.kind {
                OperationKind::Collective(it) => &it.members,
                // A kernel is launched by all ranks.
                OperationKind::Kernel(_) => &None,
                _ => continue,
            };
            // By the list as it is: a list in another order is another communicator of the library.
            let number = match numbers.get(members) {
                Some(number) => *number,
                None => {
                    let count = members
                        .as_ref()
                        .map_or(ranks.len(), |members| members.len());
                    numbers.insert(members.clone(), lists.len());
                    lists.push(Calls {
                        members: members.clone(),
                        of: vec![Vec::new(); count],
                    });
                    lists.len() - 1
                }
            };
            if let Some(place) = place_among(members.as_deref(), rank) {
                // Unrolling has rejected calls by ranks that are not in the list.
                lists[number].of[place].push(index);
            }
        }
    }
    let mut meetings = Meetings {
        all: Vec::new(),
        calls: vec![Vec::new(); ranks.len()],
    };
    for list in &lists {
        list.compare(ranks, diagnostics);
        // Further calls of some members are reported by `compare`.
        // Meetings need a call of every member: an incomplete one would index past a list.
        let fewest = list.of.iter().map(Vec::len).min().unwrap_or(0);
        for index in 0..fewest {
            let meeting = Meeting {
                members: list.members.clone(),
                operations: list.of.iter().map(|calls| calls[index]).collect(),
            };
            for (rank, operation) in meeting.calls() {
                meetings.calls[rank].push((operation, meetings.all.len()));
            }
            meetings.all.push(meeting);
        }
    }
    // Meetings were numbered list by list; `number` searches a rank's calls by operation.
    for calls in &mut meetings.calls {
        calls.sort_unstable();
    }
    meetings
}

impl Calls {
    fn rank(&self, place: usize) -> Rank {
        self.members
            .as_ref()
            .map_or(place, |members| members[place])
    }

    /// Checks that all members make the same calls in the same order.
    fn compare(&self, ranks: &[RankProgram], diagnostics: &mut Diagnostics<'_>) {
        let Some((first, rest)) = self.of.split_first() else {
            return;
        };
        for (own, place) in rest.iter().zip(1..) {
            for position in 0..own.len().max(first.len()) {
                match (first.get(position), own.get(position)) {
                    (Some(&a), Some(&b)) => {
                        // Only the first difference of a rank: later ones usually follow from a missing call.
                        if self.differ(ranks, (0, a), (place, b), diagnostics) {
                            break;
                        }
                    }
                    (None, Some(&more)) => {
                        self.one_more(ranks, (place, more), (0, position), diagnostics);
                        break;
                    }
                    (Some(&more), None) => {
                        self.one_more(ranks, (0, more), (place, position), diagnostics);
                        break;
                    }
                    (None, None) => break,
                }
            }
        }
    }

    fn one_more(
        &self,
        ranks: &[RankProgram],
        (place, operation): (usize, usize),
        (other, count): (usize, usize),
        diagnostics: &mut Diagnostics<'_>,
    ) {
        let less = self.rank(other);
        let place = place_of(ranks, self.rank(place), operation);
        diagnostics.add(DiagnosticKind::CollectiveOrder, [place], |[call]| {
            if let Some(other) = self.in_another_order(ranks, less) {
                return format!(
                    "{call} is among {}, and rank {less} calls one among {other}; expected the same ranks \
                     in the same order on each of them",
                    named(&self.members)
                );
            }
            match &self.members {
                None => format!(
                    "{call} is one collective more than the {count} of rank {less}; expected the same on \
                     every rank"
                ),
                Some(members) => format!(
                    "{call} is one collective more than the {count} that rank {less} calls among {}; \
                     expected the same on each of them, with the list in the same order",
                    ranks_of(members)
                ),
            }
        });
    }

    /// Member list of a collective of `rank` that has the same ranks in another order.
    fn in_another_order(&self, ranks: &[RankProgram], rank: Rank) -> Option<String> {
        let sorted = |members: &Members| {
            let mut list = match members {
                Some(members) => members.to_vec(),
                None => (0..ranks.len()).collect(),
            };
            list.sort_unstable();
            list
        };
        let own = sorted(&self.members);
        ranks[rank]
            .operations
            .iter()
            .find_map(|operation| match &operation.kind {
                OperationKind::Collective(it)
                    if it.members != self.members && sorted(&it.members) == own =>
                {
                    Some(named(&it.members))
                }
                _ => None,
            })
    }

    /// Whether two members call different collectives at one position; reports the difference.
    fn differ(
        &self,
        ranks: &[RankProgram],
        (first_place, a): (usize, usize),
        (place, b): (usize, usize),
        diagnostics: &mut Diagnostics<'_>,
    ) -> bool {
        let (first, rank) = (self.rank(first_place), self.rank(place));
        if kernels_differ(ranks, (first, a), (rank, b), diagnostics) {
            return true;
        }
        let call = |rank: Rank, operation: usize| match &ranks[rank].operations[operation].kind {
            OperationKind::Collective(it) => Some(it),
            _ => None,
        };
        let (Some(their_call), Some(own_call)) = (call(first, a), call(rank, b)) else {
            return false;
        };
        let lengths = |it: &CollectiveOperation| (it.dtype, it.target.bytes, it.source.bytes);
        let kind = if their_call.collective != own_call.collective {
            DiagnosticKind::CollectiveOrder
        } else if lengths(their_call) != lengths(own_call) {
            DiagnosticKind::Mismatch
        } else {
            return false;
        };
        let places = [place_of(ranks, rank, b), place_of(ranks, first, a)];
        diagnostics.add(kind, places, |[call, other]| {
            let (own, theirs, expected) = match kind {
                DiagnosticKind::Mismatch => {
                    let sizes = |it: &CollectiveOperation| {
                        let (dtype, target, source) = lengths(it);
                        format!("{source} bytes of {dtype} into {target}")
                    };
                    let expected = "the same lengths and types";
                    (sizes(own_call), sizes(their_call), expected)
                }
                // With the roots' values, which the source text need not show.
                _ => {
                    let text = |it: &CollectiveOperation| {
                        format!("{}(…{})", it.collective.name(), it.collective.arguments())
                    };
                    let expected = "the same collectives, with the same operators and roots, in the same order";
                    (text(own_call), text(their_call), expected)
                }
            };
            format!("{call} meets {other}: {own} against {theirs}; expected {expected}")
        });
        true
    }
}

fn named(members: &Members) -> String {
    match members {
        Some(members) => ranks_of(members),
        None => "all ranks in order".to_owned(),
    }
}

/// Whether ranks launch different kernels, or one a kernel and the other a collective; reports it.
fn kernels_differ(
    ranks: &[RankProgram],
    (first, a): (Rank, usize),
    (rank, b): (Rank, usize),
    diagnostics: &mut Diagnostics<'_>,
) -> bool {
    // Kernels and collectives of all ranks share one sequence, since both block until all ranks arrive.
    let (one, other) = (&ranks[first].operations[a], &ranks[rank].operations[b]);
    let Some(difference) = kernel_difference(&one.kind, &other.kind) else {
        return false;
    };
    let places = [place_of(ranks, rank, b), place_of(ranks, first, a)];
    diagnostics.add(DiagnosticKind::CollectiveOrder, places, |[one, other]| {
        format!("{one} and {other} differ: {difference}; expected the same on every rank")
    });
    true
}

/// Difference between two ranks' kernel launches; `None` if they match, or if both are collectives.
fn kernel_difference(one: &OperationKind, other: &OperationKind) -> Option<&'static str> {
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
                // Numbers of tensors may differ between ranks, as a name may mean another tensor on each; scratch is
                // laid out the same on all.
                matches!(t.memory, SectionMemory::Scratch(_)).then_some(t.memory),
                t.dtype,
                t.offset,
                t.shape.clone(),
                t.strides.clone(),
            )
        })
        .collect::<Vec<_>>()
    };
    // Positions do not count in this comparison, so that the same text in two places matches.
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

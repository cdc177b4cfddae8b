//! Violations of memory accesses and signals, and their messages.

use super::diagnostics::{Diagnostics, place_of};
use super::memory::{Actor, Memory, Mode, RecordedAccess, Violation};
use super::room;
use crate::error::Rank;
use crate::program::diagnostic::{DiagnosticKind, RankSite};
use crate::program::ir::Role;
use crate::program::rank_program::{Range, RankProgram};

/// Limit on recorded violations: an error in a loop produces more than anyone reads.
const MAX_KEPT: usize = 4096;

/// Violations, buffered until it is known whether the program terminates.
#[derive(Default)]
pub(super) struct Violations {
    /// Owner of the memory, the earlier access, the later one, and the bytes.
    conflicts: Vec<(Rank, RecordedAccess, RecordedAccess, Range)>,
    /// Owner of the memory, the deallocation, the access after it, and the tensor.
    deallocated: Vec<(Rank, RecordedAccess, RecordedAccess, usize)>,
    unwritten: Vec<(Rank, RecordedAccess, Range)>,
    /// Rank, previous post, post.
    signals: Vec<(Rank, usize, usize)>,
    /// Rank, previous kernel, kernel.
    kernels: Vec<(Rank, usize, usize)>,
    /// Rank, kernel, engine operation.
    rooms: Vec<(Rank, usize, usize)>,
}

impl Violations {
    pub(super) fn add(&mut self, rank: Rank, access: RecordedAccess, violation: Violation) {
        if self.is_full() {
            return;
        }
        match violation {
            Violation::Conflict(other, range) => {
                self.conflicts.push((rank, other, access, range));
            }
            Violation::Deallocated(by, tensor) => {
                self.deallocated.push((rank, by, access, tensor));
            }
            Violation::Unwritten(range) => self.unwritten.push((rank, access, range)),
        }
    }

    /// Whether the limit is reached.
    pub(super) fn is_full(&self) -> bool {
        self.conflicts.len() + self.deallocated.len() + self.unwritten.len() >= MAX_KEPT
    }

    pub(super) fn unordered_signal(&mut self, rank: Rank, before: usize, post: usize) {
        if self.signals.len() < MAX_KEPT {
            self.signals.push((rank, before, post));
        }
    }

    pub(super) fn unordered_kernel(&mut self, rank: Rank, before: usize, kernel: usize) {
        if self.kernels.len() < MAX_KEPT {
            self.kernels.push((rank, before, kernel));
        }
    }

    pub(super) fn no_room(&mut self, rank: Rank, kernel: usize, engine: usize) {
        if self.rooms.len() < MAX_KEPT {
            self.rooms.push((rank, kernel, engine));
        }
    }

    pub(super) fn report(&self, ranks: &[RankProgram], diagnostics: &mut Diagnostics<'_>) {
        // Causes before consequences: unordered kernels and lost signals lead to races, which follow.
        for &pair in &self.kernels {
            report_unordered_kernel(ranks, pair, diagnostics);
        }
        self.report_signals(ranks, diagnostics);
        self.report_accesses(ranks, diagnostics);
        for &pair in &self.rooms {
            room::report(ranks, pair, false, diagnostics);
        }
    }

    /// Reports posts that are not ordered after the previous post.
    pub(super) fn report_signals(&self, ranks: &[RankProgram], diagnostics: &mut Diagnostics<'_>) {
        for &(rank, before, post) in &self.signals {
            let places = [post, before].map(|operation| place_of(ranks, rank, operation));
            diagnostics.add(DiagnosticKind::LostSignal, places, |[post, before]| {
                format!(
                    "{post} is not ordered after the post of the same transfer before it, {before}; the \
                     older signal may overwrite the newer one: wait for that transfer itself, or \
                     synchronize with the stream of its post"
                )
            });
        }
    }

    fn report_accesses(&self, ranks: &[RankProgram], diagnostics: &mut Diagnostics<'_>) {
        for (rank, by, access, tensor) in &self.deallocated {
            let (Some(place), Some(freed)) = (place_by(ranks, access), place_by(ranks, by)) else {
                continue;
            };
            let (does, name) = (verb(access), &ranks[*rank].tensors[*tensor].name);
            let kind = DiagnosticKind::UseAfterDeallocate;
            diagnostics.add(kind, [place, freed], |[access, freed]| {
                format!("{access} {does} '{name}' of rank {rank} after {freed}")
            });
        }
        for conflict in &self.conflicts {
            report_conflict(ranks, conflict, diagnostics);
        }
        for (rank, access, range) in &self.unwritten {
            // If the write exists but is unordered, the race is the cause; report that alone.
            let raced = self.conflicts.iter().any(|(owner, a, b, bytes)| {
                owner == rank
                    && (a.actor == access.actor || b.actor == access.actor)
                    && bytes.tensor == range.tensor
                    && bytes.offset_bytes < range.end()
                    && range.offset_bytes < bytes.end()
                    && !matches!(a.actor, Actor::Before)
            });
            let Some(place) = place_by(ranks, access).filter(|_| !raced) else {
                continue;
            };
            let what = describe(&ranks[*rank], range);
            diagnostics.add(DiagnosticKind::UnwrittenRead, [place], |[access]| {
                format!("{access} reads {what} of rank {rank}, which nothing wrote before")
            });
        }
    }
}

/// Reports kernels of a rank that may run concurrently.
fn report_unordered_kernel(
    ranks: &[RankProgram],
    (rank, before, after): (Rank, usize, usize),
    diagnostics: &mut Diagnostics<'_>,
) {
    let places = [after, before].map(|operation| place_of(ranks, rank, operation));
    diagnostics.add(DiagnosticKind::Race, places, |[after, before]| {
        format!(
            "{after} is not ordered after the kernel before it, {before}; kernels of a program use one workspace"
        )
    });
}

/// Place of the operation that makes an access; `None` for the state before the run.
fn place_by(ranks: &[RankProgram], access: &RecordedAccess) -> Option<RankSite> {
    match access.actor {
        Actor::Before => None,
        Actor::Operation(rank, operation) => {
            Some(place_of(ranks, rank as usize, operation as usize))
        }
    }
}

const fn verb(access: &RecordedAccess) -> &'static str {
    match access.mode {
        Mode::Read | Mode::MayRead => "reads",
        Mode::Write | Mode::Update | Mode::MayWrite | Mode::MayUpdate => "writes",
        Mode::Deallocate => "deallocates",
    }
}

/// Stream of an access's operation.
fn stream_of(ranks: &[RankProgram], access: &RecordedAccess) -> String {
    match access.actor {
        Actor::Before => "caller".to_owned(),
        Actor::Operation(rank, operation) => {
            let rank_program = &ranks[rank as usize];
            rank_program.streams[rank_program.operations[operation as usize].stream].to_string()
        }
    }
}

fn report_conflict(
    ranks: &[RankProgram],
    (rank, first, second, range): &(Rank, RecordedAccess, RecordedAccess, Range),
    diagnostics: &mut Diagnostics<'_>,
) {
    let Some(place) = place_by(ranks, second) else {
        return;
    };
    let what = describe(&ranks[*rank], range);
    let freed = [first, second].iter().any(|a| a.mode == Mode::Deallocate);
    let kind = if freed {
        DiagnosticKind::UseAfterDeallocate
    } else {
        DiagnosticKind::Race
    };
    let (does, stream) = (verb(second), stream_of(ranks, second));
    let Some(before) = place_by(ranks, first) else {
        diagnostics.add(kind, [place], |[access]| {
            format!(
                "{access} on {stream} {does} {what} of rank {rank}, unordered with what that rank's caller stream did \
                 before the run"
            )
        });
        return;
    };
    let (did, other) = (verb(first), stream_of(ranks, first));
    let group = if place == before {
        ""
    } else {
        " within the group"
    };
    diagnostics.add(kind, [place, before], |[access, before]| {
        if first.actor == second.actor {
            format!("{access} on {stream} both {did} and {does} {what} of rank {rank}, in no order{group}")
        } else {
            format!(
                "{access} on {stream} {does} {what} of rank {rank}, unordered with {before} on {other}, which {did} it"
            )
        }
    });
}

/// Reports an access to bytes of `rank` that the end of its run does not wait for.
pub(super) fn report_unfinished(
    ranks: &[RankProgram],
    rank: Rank,
    tensor: usize,
    access: &RecordedAccess,
    diagnostics: &mut Diagnostics<'_>,
) {
    let Some(place) = place_by(ranks, access) else {
        return;
    };
    let name = &ranks[rank].tensors[tensor].name;
    let (does, stream) = (verb(access), stream_of(ranks, access));
    diagnostics.add(DiagnosticKind::Race, [place], |[access]| {
        format!(
            "{access} on {stream} {does} '{name}' of rank {rank}, and may still do so when the run ends there; it \
             races with the caller and the next run"
        )
    });
}

/// Reports outputs of a rank with unwritten bytes.
pub(super) fn report_unwritten_outputs(
    rank_program: &RankProgram,
    memory: &Memory,
    diagnostics: &mut Diagnostics<'_>,
) {
    for (tensor, instance) in rank_program.tensors.iter().enumerate() {
        if instance.role != Role::Output {
            continue;
        }
        let Some((start, end)) = memory.unwritten(rank_program.rank, tensor) else {
            continue;
        };
        let range = Range::of(tensor, start..end);
        let place = RankSite::new(rank_program.rank, &instance.site);
        diagnostics.add(DiagnosticKind::UnwrittenOutput, [place], |[output]| {
            let bytes = describe(rank_program, &range);
            format!("{output}: {bytes} is never written")
        });
    }
}

/// `G[3]`, `G[2..4]` or `bytes 10..20 of G`.
fn describe(rank_program: &RankProgram, range: &Range) -> String {
    let tensor = &rank_program.tensors[range.tensor];
    let name = &tensor.name;
    let slice = tensor.bytes / tensor.shape.first().copied().unwrap_or(1).max(1);
    if range.bytes == tensor.bytes {
        return format!("'{name}'");
    }
    if slice == 0 || !range.offset_bytes.is_multiple_of(slice) || !range.bytes.is_multiple_of(slice)
    {
        return format!("bytes {}..{} of '{name}'", range.offset_bytes, range.end());
    }
    let (first, end) = (range.offset_bytes / slice, range.end() / slice);
    match end - first {
        1 => format!("{name}[{first}]"),
        _ => format!("{name}[{first}..{end}]"),
    }
}

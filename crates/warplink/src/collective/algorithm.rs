//! Algorithms: each is a program file for a collective. `chunks` and `direct` share one, since a launch
//! determines which applies.

use super::call::CollectiveKind;
use crate::error::{Error, Result};
use crate::named::named;
use crate::program::Program;
use std::sync::OnceLock;

named! {
    /// Algorithm of a collective.
    #[non_exhaustive]
    pub enum Algorithm: "algorithm" {
        /// Packets, in one step: data goes directly to every rank that needs it.
        OneShot = "one-shot",
        /// Packets, in two steps: to the rank that reduces it, and from there to all. All-reduce only.
        TwoShot = "two-shot",
        /// Chunks through the workspace, with signals; for any length.
        Chunks = "chunks",
        /// Directly between the memory of the calls, if all ranks can access it; for any length. Falls back to
        /// chunks until then.
        Direct = "direct",
        /// Directly between the memory of the calls by the copy engine, for bound calls
        /// ([`Collectives::bind`](crate::Collectives::bind)). Lanes move a part while it starts. All-gather and
        /// all-to-all only.
        CopyEngine = "copy-engine",
        /// Packets over the links of a hybrid cube mesh, in two steps: among directly linked ranks, and between
        /// opposite ranks of the two groups. All-reduce only.
        Cube = "cube",
    }
}

/// Part of the workspace that an algorithm uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkspacePart {
    Packets,
    Plain,
    /// None.
    Nothing,
}

impl Algorithm {
    /// Algorithms for calls on any memory, subject to links and workspace. Ties go to the first. `Direct`
    /// covers chunks, as its fallback.
    pub const CHOICES: [Self; 5] = [
        Self::OneShot,
        Self::TwoShot,
        Self::Cube,
        Self::Chunks,
        Self::Direct,
    ];

    /// Part of the workspace that it uses.
    pub(super) const fn room(self) -> WorkspacePart {
        match self {
            Self::OneShot | Self::TwoShot | Self::Cube => WorkspacePart::Packets,
            Self::Chunks | Self::Direct => WorkspacePart::Plain,
            Self::CopyEngine => WorkspacePart::Nothing,
        }
    }

    /// Number of parts of a call's data; a row of packets holds one.
    pub(super) const fn parts(self, world: usize) -> usize {
        match self {
            Self::TwoShot => world,
            _ => 1,
        }
    }

    /// Rows of its scratch: for each launch, or for each lane if it goes by chunks.
    pub(super) fn rows(self, kind: CollectiveKind, world: usize, chunks: usize) -> usize {
        // One for each rank that sends to a rank.
        let each = match kind {
            CollectiveKind::Broadcast | CollectiveKind::Scatter => 1,
            _ => (world - 1).max(1),
        };
        match self {
            Self::OneShot => each,
            Self::Cube => world,
            // One row per rank for each of the two steps, whose packets are in flight at the same time.
            Self::TwoShot => 2 * world,
            Self::CopyEngine => 0,
            Self::Chunks | Self::Direct => match kind {
                CollectiveKind::AllReduce if world == 2 => chunks.min(3) * world,
                CollectiveKind::AllReduce => 2 * world,
                CollectiveKind::AllToAll => chunks.min(3) * each,
                _ => chunks.min(2) * each,
            },
        }
    }

    /// Whether it implements this kind of collective, subject to links, workspace and binding.
    pub fn supports(self, kind: CollectiveKind) -> bool {
        self.program(kind).is_some()
    }

    /// Its program for a collective, if there is one.
    pub(super) fn program(self, kind: CollectiveKind) -> Option<Result<&'static Program>> {
        let entry = PROGRAMS
            .iter()
            .find(|entry| (entry.kind, entry.algorithm) == (kind, self))?;
        Some(entry.program())
    }
}

/// The in-place program of [`Algorithm::CopyEngine`], if there is one.
pub(super) fn copies_in_place(kind: CollectiveKind) -> Option<Result<&'static Program>> {
    (kind == CollectiveKind::AllGather).then(|| ALL_GATHER_IN_PLACE.program())
}

/// An algorithm's implementation of a collective.
struct ProgramEntry {
    kind: CollectiveKind,
    algorithm: Algorithm,
    text: &'static str,
    parsed: OnceLock<Result<Program>>,
}

impl ProgramEntry {
    const fn new(kind: CollectiveKind, algorithm: Algorithm, text: &'static str) -> Self {
        Self {
            kind,
            algorithm,
            text,
            parsed: OnceLock::new(),
        }
    }

    fn program(&self) -> Result<&Program> {
        // An error is kept as well: the text is fixed, so another attempt would fail alike.
        let parsed = self.parsed.get_or_init(|| Program::parse(self.text));
        parsed.as_ref().map_err(Error::clone)
    }
}

static ALL_GATHER_IN_PLACE: ProgramEntry = ProgramEntry::new(
    CollectiveKind::AllGather,
    Algorithm::CopyEngine,
    include_str!("programs/all_gather_copy_engine_in_place.wlp"),
);

macro_rules! programs {
    ($($kind:ident $algorithm:ident $file:literal),* $(,)?) => {
        static PROGRAMS: [ProgramEntry; [$($file),*].len()] = [$(
            ProgramEntry::new(
                CollectiveKind::$kind,
                Algorithm::$algorithm,
                include_str!(concat!("programs/", $file)),
            ),
        )*];
    };
}

programs! {
    AllReduce OneShot "all_reduce_one_shot.wlp",
    AllReduce TwoShot "all_reduce_two_shot.wlp",
    AllReduce Chunks "all_reduce_chunks.wlp",
    AllReduce Direct "all_reduce_chunks.wlp",
    AllReduce Cube "all_reduce_cube.wlp",
    AllGather OneShot "all_gather_packets.wlp",
    AllGather Chunks "all_gather_chunks.wlp",
    AllGather Direct "all_gather_chunks.wlp",
    AllGather CopyEngine "all_gather_copy_engine.wlp",
    ReduceScatter OneShot "reduce_scatter_packets.wlp",
    ReduceScatter Chunks "reduce_scatter_chunks.wlp",
    ReduceScatter Direct "reduce_scatter_chunks.wlp",
    AllToAll OneShot "all_to_all_packets.wlp",
    AllToAll Chunks "all_to_all_chunks.wlp",
    AllToAll Direct "all_to_all_chunks.wlp",
    AllToAll CopyEngine "all_to_all_copy_engine.wlp",
    Broadcast OneShot "broadcast_packets.wlp",
    Broadcast Chunks "broadcast_chunks.wlp",
    Broadcast Direct "broadcast_chunks.wlp",
    Reduce OneShot "reduce_packets.wlp",
    Reduce Chunks "reduce_chunks.wlp",
    Reduce Direct "reduce_chunks.wlp",
    Gather OneShot "gather_packets.wlp",
    Gather Chunks "gather_chunks.wlp",
    Gather Direct "gather_chunks.wlp",
    Scatter OneShot "scatter_packets.wlp",
    Scatter Chunks "scatter_chunks.wlp",
    Scatter Direct "scatter_chunks.wlp",
    Barrier OneShot "barrier.wlp",
}

#[cfg(test)]
#[path = "algorithm_tests.rs"]
pub(super) mod tests;

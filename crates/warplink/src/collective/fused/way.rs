//! Execution strategies of fused calls, and the texts of their programs.

use crate::collective::algorithm::Algorithm;
use crate::program::expr::PART_UNIT;
use crate::program::section::ROW_ELEMENTS_OF_LINES;

const ONE_SHOT: &str = include_str!("one_shot.wlp");
const DIRECT: &str = include_str!("direct.wlp");
const PUSHED: &str = include_str!("pushed.wlp");
const BY_OWNER: &str = include_str!("by_owner.wlp");
const QUANTIZED: &str = include_str!("quantized.wlp");

/// Statements of [`Way::Gathered`] after the barrier of [`DIRECT`]: each rank computes the remaining results of the
/// others' rows from h.
pub(super) const FOLLOWERS: &str = "
for j in 0..(groups - lane + each) / each {
    for k in 1..world {
        let t = (i + j * each) * world + (rank + k) % world
        if t < tokens {
            {follows} = finished(H[t]{further})
        }
    }
}";

/// Statements of [`ONE_SHOT`] that put a row: as 16-byte packets, by the threads that load it again for the epilogue; and as
/// 128-byte packets, which several threads store together.
const PUT_PACKETS: &str = "if world > 1 {
    P[slot][((world - 1 - r) * tokens + next) * row..((world - 1 - r) * tokens + next) * row + n] on (rank + r) % world for r in 1..world =
        sent(X[next])
}";
const PUT_LINES: &str = "for r in 1..world {
    let place = ((world - 1 - r) * tokens + next) * row
    put X[next] to P[slot][place..place + n] on (rank + r) % world
}";

/// Execution strategy of a fused call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Way {
    /// Every rank gets all rows as packets, and computes all of them.
    OneShot,
    /// A rank reads its rows from all ranks, and stores the results at all.
    Direct,
    /// A rank reads its rows from all ranks, and stores h at all, which compute the remaining results from it: fewer
    /// bytes over links if h is stored at all ranks anyway.
    Gathered,
    /// Every rank gets all rows in scratch, a few at a time, and computes all of them: for two ranks, the fewest bytes
    /// over links, and none are loaded from peers.
    Pushed,
    /// Rows travel as 8-bit floats, to the ranks that own them and back.
    Quantized,
    /// As [`OneShot`](Self::OneShot), in packets of 128 bytes, where links carry these whole: half the bytes over links, but
    /// threads load flags before data.
    Lined,
}

impl Way {
    /// The algorithm option that selects it, or the first of several that it selects.
    pub(super) const fn algorithm(self) -> Algorithm {
        match self {
            Self::OneShot => Algorithm::OneShot,
            Self::Direct => Algorithm::Direct,
            Self::Pushed | Self::Lined => Algorithm::Chunks,
            Self::Gathered | Self::Quantized => Algorithm::TwoShot,
        }
    }

    /// The text of its program, for calls whose rows ranks own, or others.
    pub(super) const fn text(self, by_owner: bool) -> &'static str {
        match (by_owner, self) {
            (_, Self::Quantized) => QUANTIZED,
            (true, _) => BY_OWNER,
            (_, Self::OneShot | Self::Lined) => ONE_SHOT,
            (_, Self::Direct | Self::Gathered) => DIRECT,
            (_, Self::Pushed) => PUSHED,
        }
    }

    /// The packing of rows in [`ONE_SHOT`], the elements of whose multiples rows are, and the statements that put one.
    pub(super) const fn packets(self) -> (&'static str, usize, &'static str) {
        match self {
            Self::Lined => ("packets128", ROW_ELEMENTS_OF_LINES, PUT_LINES),
            _ => ("packets16", PART_UNIT as usize, PUT_PACKETS),
        }
    }
}

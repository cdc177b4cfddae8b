//! Diagnostics: violations found in a program.

use super::site::Site;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::named::named;
use std::fmt;

named! {
    /// Rule violated according to a [`Diagnostic`].
    #[non_exhaustive]
    pub enum DiagnosticKind: "kind of diagnostic" {
        /// A `require` does not hold.
        Requirement = "requirement",
        /// An expression has no value, a name is unknown or bound twice, or a limit is passed.
        Malformed = "malformed",
        /// An index, a range, a peer or a stream is not there.
        OutOfBounds = "out-of-bounds",
        /// Shapes, lengths, element types or protocols do not fit.
        Mismatch = "mismatch",
        /// An input is written.
        InputWritten = "input-written",
        /// A tensor is used after it was deallocated, or deallocated while it may be in use.
        UseAfterDeallocate = "use-after-deallocate",
        /// A wait for a transfer that was not posted before it, as when it names the wrong iteration.
        UnpostedWait = "unposted-wait",
        /// A transfer is shared with a peer that does not share the matching one.
        AsymmetricExchange = "asymmetric-exchange",
        /// Ranks call different collectives, or the same in different orders.
        CollectiveOrder = "collective-order",
        /// A signal may be overwritten before it is seen, or is never waited for.
        LostSignal = "lost-signal",
        /// Hosts or streams wait for one another, or for an event that never happens.
        Deadlock = "deadlock",
        /// Two accesses to the same bytes, at least one a write, without an order.
        Race = "race",
        /// Bytes are read that nothing wrote.
        UnwrittenRead = "unwritten-read",
        /// An output is not written in full.
        UnwrittenOutput = "unwritten-output",
        /// An output differs from the value that the program expects.
        Expectation = "expectation",
        /// A stream's work is not joined to the caller's stream at the end.
        Unjoined = "unjoined",
        /// The program runs, but not as a graph.
        EagerOnly = "eager-only",
    }
}

/// Location in a program's run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RankSite {
    /// The rank.
    pub rank: Rank,
    /// The statement and its loop indices.
    pub site: Site,
}

impl RankSite {
    /// Location of what `site` names, on a rank.
    pub fn new(rank: Rank, site: &Site) -> Self {
        Self {
            rank,
            site: site.clone(),
        }
    }
}

impl fmt::Display for RankSite {
    /// `rank 2, line 12 (j = 3)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, {}", self.rank, self.site)
    }
}

/// A violation prepared for display: broken rule, message and locations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// The broken rule.
    pub kind: DiagnosticKind,
    /// Description, one sentence.
    pub message: String,
    /// Locations of the operations involved, starting with the one that the message begins with.
    pub places: Vec<RankSite>,
    /// Number of further diagnostics of this kind for the same statements, in other iterations or on other ranks.
    pub repeated: usize,
}

impl Diagnostic {
    /// A diagnostic of `kind` at `places`.
    pub fn new(kind: DiagnosticKind, message: impl Into<String>, places: Vec<RankSite>) -> Self {
        Self {
            kind,
            message: message.into(),
            places,
            repeated: 0,
        }
    }

    /// A diagnostic with one location, which begins its message.
    pub(super) fn at(
        kind: DiagnosticKind,
        (rank, site): (Rank, &Site),
        message: impl fmt::Display,
    ) -> Self {
        let place = RankSite::new(rank, site);
        Self::new(kind, format!("{place}: {message}"), vec![place])
    }

    /// The ranks involved, sorted, without duplicates.
    pub fn ranks(&self) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = self.places.iter().map(|place| place.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// The lines involved, starting with the line where the violation was detected.
    pub fn lines(&self) -> Vec<u32> {
        let mut lines: Vec<u32> = Vec::new();
        for place in &self.places {
            // In order of mention, unlike ranks: the first line is the one at fault.
            if !lines.contains(&place.site.line) {
                lines.push(place.site.line);
            }
        }
        lines
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)?;
        match self.repeated {
            0 => Ok(()),
            more => write!(f, " ({more} more in the same statements)"),
        }
    }
}

/// Error that rejects a program, listing every diagnostic on its own line.
pub fn refused(program: &str, diagnostics: &[Diagnostic]) -> Error {
    let kind = match diagnostics {
        // A failed `require` is about the caller's parameters; everything else is an error of the program.
        [only] if only.kind == DiagnosticKind::Requirement => ErrorKind::InvalidArgument,
        _ => ErrorKind::Verification,
    };
    let lines: Vec<String> = diagnostics
        .iter()
        .map(|diagnostic| format!("\n  {diagnostic}"))
        .collect();
    Error::new(
        kind,
        format!("program '{program}' is refused:{}", lines.concat()),
    )
}

impl From<Diagnostic> for Error {
    fn from(diagnostic: Diagnostic) -> Self {
        let kind = match diagnostic.kind {
            DiagnosticKind::Requirement => ErrorKind::InvalidArgument,
            _ => ErrorKind::Verification,
        };
        Self::new(kind, diagnostic.to_string())
    }
}

//! What is wrong with a program.

use super::site::Site;
use crate::error::{Error, ErrorKind, Rank, Result};
use std::fmt;
use std::str::FromStr;

/// Which rule a [`Diagnostic`] says is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DiagnosticKind {
    /// A `require` does not hold.
    Requirement,
    /// An expression has no value, a name is unknown or bound twice, or a limit is passed.
    Malformed,
    /// An index, a range, a peer or a stream is not there.
    OutOfBounds,
    /// Shapes, lengths, element types or protocols do not fit.
    Mismatch,
    /// An input is written.
    InputWritten,
    /// A tensor is used after it was deallocated, or deallocated while it may be in use.
    UseAfterDeallocate,
    /// A wait for a transfer that was not posted before it, as when it names the wrong iteration.
    UnpostedWait,
    /// A transfer is shared with a peer that does not share the matching one.
    AsymmetricExchange,
    /// Ranks call different collectives, or the same in different orders.
    CollectiveOrder,
    /// A signal may be overwritten before it is seen, or is never waited for.
    LostSignal,
    /// Hosts or streams wait for one another, or for what never comes.
    Deadlock,
    /// Two accesses to the same bytes, at least one a write, without an order.
    Race,
    /// Bytes are read that nothing wrote.
    UnwrittenRead,
    /// An output is not written in full.
    UnwrittenOutput,
    /// An output is not what the program expects of it.
    Expectation,
    /// A stream's work is not joined to the caller's stream at the end.
    Unjoined,
    /// The program runs, but not as a graph.
    EagerOnly,
}

impl DiagnosticKind {
    /// Every kind.
    pub const ALL: [Self; 17] = [
        Self::Requirement,
        Self::Malformed,
        Self::OutOfBounds,
        Self::Mismatch,
        Self::InputWritten,
        Self::UseAfterDeallocate,
        Self::UnpostedWait,
        Self::AsymmetricExchange,
        Self::CollectiveOrder,
        Self::LostSignal,
        Self::Deadlock,
        Self::Race,
        Self::UnwrittenRead,
        Self::UnwrittenOutput,
        Self::Expectation,
        Self::Unjoined,
        Self::EagerOnly,
    ];

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Requirement => "requirement",
            Self::Malformed => "malformed",
            Self::OutOfBounds => "out-of-bounds",
            Self::Mismatch => "mismatch",
            Self::InputWritten => "input-written",
            Self::UseAfterDeallocate => "use-after-deallocate",
            Self::UnpostedWait => "unposted-wait",
            Self::AsymmetricExchange => "asymmetric-exchange",
            Self::CollectiveOrder => "collective-order",
            Self::LostSignal => "lost-signal",
            Self::Deadlock => "deadlock",
            Self::Race => "race",
            Self::UnwrittenRead => "unwritten-read",
            Self::UnwrittenOutput => "unwritten-output",
            Self::Expectation => "expectation",
            Self::Unjoined => "unjoined",
            Self::EagerOnly => "eager-only",
        }
    }
}

impl fmt::Display for DiagnosticKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DiagnosticKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Parse,
                    format!("unknown kind of diagnostic '{text}'"),
                )
            })
    }
}

/// A place in the run of a program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The rank.
    pub rank: Rank,
    /// The statement and the loop indices.
    pub site: Site,
}

impl fmt::Display for Place {
    /// `rank 2, line 12 (j = 3)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, {}", self.rank, self.site)
    }
}

/// A violation as it is told to people: the rule, what happens and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// What kind.
    pub kind: DiagnosticKind,
    /// What happens, in a sentence.
    pub message: String,
    /// Where: the operations that take part, the one that the sentence begins with first.
    pub places: Vec<Place>,
    /// How many more diagnostics of this kind concern the same statements, in other iterations or on
    /// other ranks.
    pub repeated: usize,
}

impl Diagnostic {
    /// A diagnostic of `kind` at `places`.
    pub fn new(kind: DiagnosticKind, message: impl Into<String>, places: Vec<Place>) -> Self {
        Self {
            kind,
            message: message.into(),
            places,
            repeated: 0,
        }
    }

    /// A diagnostic of one place, with which its message begins.
    pub(super) fn at(
        kind: DiagnosticKind,
        (rank, site): (Rank, &Site),
        message: impl fmt::Display,
    ) -> Self {
        let place = Place {
            rank,
            site: site.clone(),
        };
        Self::new(kind, format!("{place}: {message}"), vec![place])
    }

    /// The ranks that take part, each once, in order.
    pub fn ranks(&self) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = self.places.iter().map(|place| place.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// The lines that take part, the one where the violation shows first.
    pub fn lines(&self) -> Vec<u32> {
        let mut lines: Vec<u32> = Vec::new();
        for place in &self.places {
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

/// The error of refusing a program for `diagnostics`: all of them, a line each.
pub fn refused(program: &str, diagnostics: &[Diagnostic]) -> Error {
    let kind = match diagnostics {
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

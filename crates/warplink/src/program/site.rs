//! Where something stands in a program: in its text, and among the loops and calls around it.

use std::fmt;
use std::sync::Arc;

/// Where a statement starts in the program's text.
///
/// Two positions always compare equal: a program is what its statements say, wherever they stand.
#[derive(Clone, Copy, Default)]
pub struct Position {
    /// The line, from 1; 0 where a statement was built and not parsed.
    pub line: u32,
    /// The character within the line, from 1; 0 where the statement is the first that starts there.
    pub column: u32,
}

impl PartialEq for Position {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Position {}

impl fmt::Display for Position {
    /// `line 12`, and `line 12, column 9` where it is not the first statement of the line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}", self.line)?;
        match self.column {
            0 => Ok(()),
            column => write!(f, ", column {column}"),
        }
    }
}

impl fmt::Debug for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Where something stands in a program: its line, and the values of the loops around it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Site {
    /// The line of the program's text, from 1; 0 where it was built and not parsed.
    pub line: u32,
    /// The character within the line, from 1; 0 where the statement is the first that starts there.
    pub column: u32,
    /// The indices of the loops around it, outermost first; in a program that was called, of those in it.
    pub indices: Arc<[(Arc<str>, i64)]>,
    /// The call of the program that it stands in; none in the program that is run.
    pub call: Option<Arc<Call>>,
}

/// A call of a program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// Name of the program that is called.
    pub program: Arc<str>,
    /// Where the call stands.
    pub site: Site,
}

impl Site {
    /// This and the calls that lead to it, the innermost first.
    pub fn with_calls(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |site| {
            site.call.as_deref().map(|call| &call.site)
        })
    }

    /// Where the statement starts.
    pub const fn position(&self) -> Position {
        Position {
            line: self.line,
            column: self.column,
        }
    }
}

impl fmt::Display for Site {
    /// `line 12 (i = 0, j = 3)`, `line 12, column 9`, `line 3 of 'ring', called in line 12`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.position())?;
        for (position, (index, value)) in self.indices.iter().enumerate() {
            let lead = if position == 0 { " (" } else { ", " };
            write!(f, "{lead}{index} = {value}")?;
        }
        if !self.indices.is_empty() {
            f.write_str(")")?;
        }
        match self.call.as_deref() {
            Some(Call { program, site }) => write!(f, " of '{program}', called in {site}"),
            None => Ok(()),
        }
    }
}

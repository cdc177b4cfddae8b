//! Location of a statement: position in the text, loop indices and call stack.

use crate::named::comma;
use std::fmt;
use std::sync::Arc;

/// Start of a statement in the program's text.
///
/// Two positions always compare equal, so that programs compare by content, independent of layout.
#[derive(Clone, Copy, Default)]
pub struct Position {
    /// Line, from 1; 0 if the statement was built, not parsed.
    pub line: u32,
    /// Column, from 1; 0 if the statement is the first on its line.
    pub column: u32,
}

impl PartialEq for Position {
    fn eq(&self, _: &Self) -> bool {
        // Programs that differ in layout of the text only are equal.
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

/// Names with their values, outermost first.
pub(super) type Indices = Arc<[(Arc<str>, i64)]>;

/// `outer`, and a further name inside.
pub(super) fn with_index(outer: &Indices, name: impl Into<Arc<str>>, value: i64) -> Indices {
    let outer = outer.iter().cloned();
    outer.chain([(name.into(), value)]).collect()
}

/// Location of a statement: its position and the indices of the loops around it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Site {
    /// Line of the program's text, from 1; 0 if built, not parsed.
    pub line: u32,
    /// Column, from 1; 0 if the statement is the first on its line.
    pub column: u32,
    /// Indices of the enclosing loops, outermost first; in a called program, only of loops in that program.
    pub indices: Arc<[(Arc<str>, i64)]>,
    /// Call of the enclosing program; `None` in the main program.
    pub call: Option<Arc<CallSite>>,
}

/// A call of a program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CallSite {
    /// Name of the called program.
    pub program: Arc<str>,
    /// Location of the call.
    pub site: Site,
}

impl Site {
    /// This site and its callers, innermost first.
    pub fn with_calls(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |site| {
            site.call.as_deref().map(|call| &call.site)
        })
    }

    /// Start of the statement.
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
        if !self.indices.is_empty() {
            let indices = self.indices.iter();
            let indices = indices.map(|(index, value)| format!("{index} = {value}"));
            write!(f, " ({})", comma(indices))?;
        }
        match self.call.as_deref() {
            Some(CallSite { program, site }) => write!(f, " of '{program}', called in {site}"),
            None => Ok(()),
        }
    }
}

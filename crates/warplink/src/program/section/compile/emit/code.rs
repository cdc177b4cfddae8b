//! Text with indented blocks.

use std::fmt::{Display, Write};

/// A line-oriented text buffer with indentation.
#[derive(Debug, Default)]
pub(super) struct Code {
    text: String,
    depth: usize,
}

impl Code {
    /// A line at the current depth.
    pub(super) fn line(&mut self, line: impl Display) {
        let indent = 4 * self.depth;
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{:indent$}{line}", "");
    }

    /// Writes the opening line of a block, its content and its end.
    pub(super) fn block<E>(
        &mut self,
        opening: impl Display,
        inner: impl FnOnce(&mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        self.open(opening);
        let done = inner(self);
        self.close("}");
        done
    }

    /// A line that opens a block.
    pub(super) fn open(&mut self, opening: impl Display) {
        self.line(opening);
        self.depth += 1;
    }

    /// Closes the innermost block.
    pub(super) fn close(&mut self, ending: &str) {
        self.depth = self.depth.saturating_sub(1);
        self.line(ending);
    }

    /// Opens a block; if one is open, as its `else` branch.
    pub(super) fn alternative(&mut self, open: bool, condition: &str) {
        if open {
            self.depth = self.depth.saturating_sub(1);
            self.open(format!("}} else {condition}{{"));
        } else {
            self.open(format!("{condition}{{"));
        }
    }

    /// Appends another text, indented to the current depth.
    pub(super) fn append(&mut self, other: &Self) {
        for line in other.text.lines() {
            self.line(line);
        }
    }

    pub(super) fn into_text(self) -> String {
        self.text
    }
}

/// `expression` without redundant outer parentheses.
pub(super) fn bare(expression: &str) -> &str {
    let Some(inner) = expression
        .strip_prefix('(')
        .and_then(|rest| rest.strip_suffix(')'))
    else {
        return expression;
    };
    let mut depth = 0_usize;
    for character in inner.chars() {
        match character {
            '(' => depth += 1,
            ')' if depth == 0 => return expression,
            ')' => depth -= 1,
            _ => {}
        }
    }
    inner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parentheses_around_all_are_taken_off() {
        assert_eq!(bare("(a + b)"), "a + b");
        assert_eq!(bare("(a + b) * (c)"), "(a + b) * (c)");
        assert_eq!(bare("((a))"), "(a)");
        assert_eq!(bare("a"), "a");
    }
}

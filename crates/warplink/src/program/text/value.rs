//! The text of integers in memory: parsing and printing.
//!
//! ```text
//! words     = place "at" "most" integer                one word
//!           | "count" "(" range ")"                    how many words are in a range
//!           | "position" "(" integer "of" range ")"    where one of them is, from 0 on
//! range     = ["rows" "of"] place ["not"] "in" integer ".." integer
//! ```

use super::operand::{Parsed, Parser};
use super::token::{Token, TokenKind};
use crate::program::section::{DeviceValue, Place, WordRange, WordValue};
use std::fmt::{self, Display, Formatter};

impl Parser<'_> {
    /// Whether `let n =` is followed by a value from memory: `count(E in 0..8)`, unlike the length `count(n)` of a list,
    /// `position(`, or a line that contains `at most`.
    pub(super) fn reads_value(&self) -> bool {
        let text = |ahead: usize| self.peek_at(ahead).text;
        match (text(1), text(2), text(3)) {
            // `count(n)` of a list has one word; that of memory goes on with `in`.
            ("=", "count", "(") if text(5) != ")" => return true,
            ("=", "position", "(") => return true,
            _ => {}
        }
        let ends = |token: &Token<'_>| {
            matches!(token.kind, TokenKind::LineEnd | TokenKind::End) || token.text == ";"
        };
        let mut line = (0..).take_while(|ahead| !ends(&self.peek_at(*ahead)));
        line.any(|ahead| (text(ahead), text(ahead + 1)) == ("at", "most"))
    }

    /// `n = C[rank] at most rows`, `n = count(E[a..b] in lo..hi)`.
    pub(super) fn device_value(&mut self) -> Parsed<DeviceValue> {
        let name = self.name("the name to bind")?;
        self.expect("=")?;
        let (place, gives) = match (self.peek().text, self.peek_at(1).text) {
            ("count", "(") => {
                self.at += 1;
                let (place, range) = self.in_parentheses(Self::word_range)?;
                (place, WordValue::Count(range))
            }
            ("position", "(") => {
                self.at += 1;
                self.in_parentheses(|parser| {
                    let number = parser.integer()?;
                    parser.expect("of")?;
                    let (place, range) = parser.word_range()?;
                    Ok((place, WordValue::Position(number, range)))
                })?
            }
            _ => {
                let place = self.place()?;
                self.expect("at")?;
                self.expect("most")?;
                (place, WordValue::Word(self.integer()?))
            }
        };
        Ok(DeviceValue { name, place, gives })
    }

    /// `E[a..b] in lo..hi`, `rows of E not in lo..hi`.
    fn word_range(&mut self) -> Parsed<(Place, WordRange)> {
        let rows = (self.peek().text, self.peek_at(1).text) == ("rows", "of");
        self.at += if rows { 2 } else { 0 };
        let place = self.place()?;
        let inside = !self.take("not");
        self.expect("in")?;
        let (from, to) = self.bounds()?;
        let range = WordRange {
            rows,
            inside,
            from,
            to,
        };
        Ok((place, range))
    }
}

impl Display for DeviceValue {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { name, place, gives } = self;
        write!(f, "let {name} = ")?;
        match gives {
            WordValue::Word(most) => write!(f, "{place} at most {most}"),
            WordValue::Count(range) => write!(f, "count({}{place} {range})", range.unit()),
            WordValue::Position(number, range) => {
                write!(f, "position({number} of {}{place} {range})", range.unit())
            }
        }
    }
}

impl WordRange {
    /// Before the place that is searched.
    const fn unit(&self) -> &'static str {
        if self.rows { "rows of " } else { "" }
    }
}

impl Display for WordRange {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self {
            inside, from, to, ..
        } = self;
        let not = if *inside { "" } else { "not " };
        write!(f, "{not}in {from}..{to}")
    }
}

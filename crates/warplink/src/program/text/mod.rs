//! Programs as text.
//!
//! ```text
//! text      = {program} program                       the last one is run; each may call those before it
//! program   = "program" NAME "(" [parameter {"," parameter}] ")" block
//! parameter = NAME ["[" "]"] | NAME "=" value {"|" value}
//!                                                      value: a number, a DTYPE or an operator
//! block     = "{" {statement separator} "}"            separator: the end of a line, or ";"
//! statement = "require" condition
//!           | ["optional"] ("input" | "output" | "allocate") NAME ["[" NAME "]"] ":" (DTYPE | NAME)
//!             "[" axis {"," axis} "]" ["column_major" ["if" condition]] ["=" "0"] [each]
//!                                                      with an index, a family with a member for each
//!           | "deallocate" NAME
//!           | "let" NAME "=" (integer | tensor | list)
//!                                                      a tensor here has at least one selection
//!           | tensor "=" (("copy" | "cast") "(" tensor ")" | product
//!                        | ("sum" | "product" | "max" | "min") "(" tensor [each] {"," tensor [each]} ")"
//!                        | collective ["among" NAME])  the name of a list of ranks
//!           | tensor "+=" (product | "sum" "(" tensor [each] {"," tensor [each]} ")")
//!           | NAME "(" [argument {"," argument}] ")"  the name of a program
//!           | "share" "{" {transfer | let | for | if} "}"
//!           | "post" transfer [each] {"," transfer [each]}
//!           | "post" transfer "=" product [each]
//!           | "wait" transfer [each] {"," transfer [each]}
//!           | "get_stream" NAME | "set_stream" stream | "synchronize" stream
//!           | "fork" stream [each] {"," stream [each]} block
//!           | "scratch" ["persistent"] memory {"," memory}
//!                                                      several, and those that persist, without packets
//!           | "function" NAME "(" row {"," row} ")" "{" {"let" NAME "=" value separator}
//!             "return" value {"," value} "}"           a function of rows
//!           | "kernel" NAME "in" "0" ".." integer "threads" integer "{" {step separator} "}"
//!           | "inout" NAME "=" tensor
//!           | "let" NAME "=" words                     integers in an input, for "expect" behind it; see
//!                                                      `text/value.rs`
//!           | "expect" tensor "=" ("copy" "(" input ")" | term
//!                        | operator "(" term [each] {"," term [each]} ")"
//!                        | "reduce" "(" term [each] {"," term [each]} "," (operator | NAME) ")") ["+" input]
//!           | "for" NAME "in" integer ".." integer block
//!           | "if" condition block ["else" (block | "if" …)]
//! memory    = NAME ":" ["packets8" | "packets16" | "packets128"] (DTYPE | NAME) "[" integer {"," integer} "]"
//! row       = NAME ["by" NUMBER]                         one element for each block of so many
//! list      = "[" integer [each] {"," integer [each]} "]"
//! axis      = integer ["over" ("ranks" | "loop")]
//! tensor    = selected | "transpose" "(" selected ")"
//! selected  = NAME {"[" (axis_part {"," axis_part} | integer "of" integer) "]"}
//!                                                      "of" in kernels only
//! axis_part = ":" | integer [".." integer]
//! product   = "matmul" "(" tensor "," tensor ")" ["+" tensor]
//!           | "linear" "(" tensor "," tensor ["," tensor] ")"
//!                                                      the second is transposed: weights are [out, in]
//! transfer  = NAME "=" ("send" tensor "to" | "receive" tensor "from") integer ["tag" integer]
//!             "via" ("get" | "put" | "nccl")           where it is declared, in "share"
//!           | NAME {"[" integer "]"}                   where it is named
//! argument  = NAME "=" (integer | DTYPE | tensor)      a parameter, input or output of that program
//! each      = "for" NAME "in" integer ".." integer
//! stream    = NAME | "caller" | "pool" "(" integer ")" | "high" "(" integer ")"
//! collective = ("all_gather" | "all_to_all") "(" tensor ")"
//!           | ("all_reduce" | "reduce_scatter") "(" tensor "," op ")"
//!           | "broadcast" "(" tensor "from" integer ")" | "reduce" "(" tensor "," op "to" integer ")"
//! op        = "sum" | "max" | "min"
//! operator  = op | "product" | "average" | "scaled_sum"
//! step      = …                                        see `text/section.rs`
//! argument  = NUMBER | source | "reduce" "(" source [each] {"," source [each]} "," (operator | NAME) ")"
//!                                                      of a function of rows
//! value     = NUMBER | NAME | "width" | "-" value | value ("+" | "-" | "*" | "/") value | "(" value ")"
//!           | ("abs" | "sqrt" | "rsqrt" | "exp" | "power_of_two" | "exponent" | "e2m1") "(" value ")"
//!           | ("row_sum" | "row_max") "(" value ")"
//!           | ("min" | "max") "(" value "," value ")" | "round" "(" value "," (DTYPE | NAME) ")"
//!           | "select" "(" value comparison value "," value "," value ")"
//! receiver  = integer ["at" integer]                   a rank, and one of its lanes
//! place     = tensor ["on" integer]
//! input     = tensor ["on" integer]
//! term      = input | ("matmul" | "linear") "(" input "," input ")"
//! source    = place ["if" condition "else" place]
//! ```
//!
//! Integer operators, in descending precedence: `* / %`, `+ -`, `<< >>` and `^` (bitwise exclusive or). There are
//! also `min(a, b)`, `max(a, b)`, `part(n, k)`, `log2(a)`, elements `n[i]` of a list and its `count(n)`, and
//! parentheses; conditions have comparisons, `given(NAME)` for an optional tensor, and `and or not`. `/` rounds down,
//! `%` has the sign of its divisor, and `a << b` is `a` times 2 to the `b`. A statement continues on the next line
//! while a parenthesis or bracket is open, or after a comma or an operator. A comment starts with `#` and ends with
//! the line; comments are not part of the program and are lost when it is printed.
//!
//! Printing a program and parsing it gives the same program.

mod call;
mod collective;
mod expect;
mod function;
mod operand;
mod parse;
mod print;
mod reference;
mod section;
mod share;
mod token;
mod value;

pub use print::summary;

use super::expr::MAX_SHOWN;
use super::ir::Program;
use crate::error::{Error, ErrorKind, Result};
use std::fmt;
use std::str::FromStr;

/// Maximum bytes of a text.
pub const MAX_TEXT_BYTES: usize = 1 << 20;

/// Maximum parameters of a program.
pub const MAX_PARAMETERS: usize = 1024;

/// Maximum nesting depth of blocks.
pub const MAX_BLOCK_DEPTH: usize = 32;

/// Reserved words outside of kernels, which cannot be names.
const RESERVED: [&str; 64] = [
    "program",
    "require",
    "input",
    "output",
    "allocate",
    "deallocate",
    "let",
    "copy",
    "matmul",
    "linear",
    "transpose",
    "column_major",
    "cast",
    "sum",
    "product",
    "max",
    "min",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "share",
    "send",
    "receive",
    "to",
    "from",
    "tag",
    "via",
    "post",
    "wait",
    "get_stream",
    "set_stream",
    "synchronize",
    "caller",
    "pool",
    "high",
    "for",
    "in",
    "if",
    "else",
    "and",
    "or",
    "not",
    "over",
    "loop",
    "rank",
    "world",
    "streams",
    "fork",
    "optional",
    "count",
    "given",
    "reachable",
    "log2",
    "among",
    "part",
    "scratch",
    "integer",
    "kernel",
    "epoch",
    "on",
    "of",
];

/// Whether `name` can be the name of a tensor, integer, transfer or stream.
pub fn is_name(name: &str) -> bool {
    let is_reserved = RESERVED.contains(&name) || section::STEPS.contains(&name);
    is_word(name) && !is_reserved
}

fn is_word(name: &str) -> bool {
    let mut characters = name.chars();
    characters
        .next()
        .is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && characters.all(|next| next.is_ascii_alphanumeric() || next == '_')
}

/// Position and reason of a parse error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// The line, from 1.
    pub line: usize,
    /// The character within the line, from 1.
    pub column: usize,
    /// The error, for example the expected and the actual token.
    pub message: String,
    /// The line's text.
    pub excerpt: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.line.to_string();
        let margin = " ".repeat(number.len());
        let (excerpt, indent) = window(&self.excerpt, self.column - 1);
        let indent: String = excerpt
            .chars()
            .take(indent)
            .map(|c| if c == '\t' { '\t' } else { ' ' })
            .collect();
        writeln!(f, "line {number}, column {}: {}", self.column, self.message)?;
        writeln!(f, "{margin} |")?;
        writeln!(f, "{number} | {excerpt}")?;
        write!(f, "{margin} | {indent}^")
    }
}

/// The part of a long line that is shown around the character with `at` before it, and how many characters are before
/// it there; `…` marks omitted parts. Short lines are shown whole.
pub fn window(line: &str, at: usize) -> (String, usize) {
    let length = line.chars().count();
    if length <= MAX_SHOWN {
        return (line.to_owned(), at);
    }
    // Centred on the position, except near the ends of the line.
    let from = at.saturating_sub(MAX_SHOWN / 2).min(length - MAX_SHOWN);
    let middle: String = line.chars().skip(from).take(MAX_SHOWN).collect();
    let (lead, end) = (from > 0, from + MAX_SHOWN < length);
    let mark = |there: bool| if there { "…" } else { "" };
    let text = format!("{}{middle}{}", mark(lead), mark(end));
    (text, at - from + usize::from(lead))
}

impl std::error::Error for ParseError {}

impl From<ParseError> for Error {
    fn from(error: ParseError) -> Self {
        Self::new(ErrorKind::Parse, error.to_string())
    }
}

impl Program {
    /// Parses a program's text; see [`text`](self) for the grammar.
    ///
    /// # Errors
    /// [`ErrorKind::Parse`] with the line, the column and the expected token; see [`parse_text`](Self::parse_text)
    /// for its parts.
    pub fn parse(text: &str) -> Result<Self> {
        Ok(Self::parse_text(text)?)
    }

    /// Parses a program's text.
    ///
    /// # Errors
    /// Position and reason of the first parse error.
    pub fn parse_text(text: &str) -> Result<Self, ParseError> {
        parse::program(text)
    }
}

impl FromStr for Program {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
}

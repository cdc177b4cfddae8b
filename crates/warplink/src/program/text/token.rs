//! Lexer: words, numbers and signs of a program's text.

use super::{MAX_TEXT_BYTES, ParseError};

/// Kind of token; its text completes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    Word,
    Number(u64),
    /// A number with a point or an exponent, in functions of rows.
    Decimal,
    Sign,
    /// The end of a line where a statement may end.
    LineEnd,
    End,
}

/// A token and where it starts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token<'a> {
    pub(super) kind: TokenKind,
    pub(super) text: &'a str,
    /// Offset into the text, in bytes.
    pub(super) at: usize,
    pub(super) line: u32,
}

/// Signs; longer ones precede their prefixes.
const SIGNS: [&str; 27] = [
    "..", "==", "!=", "<=", ">=", "<<", ">>", "+=", "{", "}", "(", ")", "[", "]", ",", ":", ";",
    "=", "<", ">", "+", "-", "*", "/", "%", "^", "|",
];

/// After one of these a statement continues, so the line's end is ignored.
const CONTINUES: [&str; 23] = [
    "..", "==", "!=", "<=", ">=", "<<", ">>", "+=", ",", ":", "=", "<", ">", "+", "-", "*", "/",
    "%", "^", "|", "and", "or", "not",
];

/// Splits `text` into tokens, the last of which is the end.
pub(super) fn tokens(text: &str) -> Result<Vec<Token<'_>>, ParseError> {
    if text.len() > MAX_TEXT_BYTES {
        return Err(error_at(
            text,
            0,
            format!("the text is longer than {MAX_TEXT_BYTES} bytes"),
        ));
    }
    let mut list: Vec<Token<'_>> = Vec::new();
    let (mut at, mut line, mut open) = (mark_bytes(text), 1, 0_usize);
    while let Some(character) = text[at..].chars().next() {
        let rest = &text[at..];
        let length = match character {
            '\n' => {
                let over = list
                    .last()
                    .is_some_and(|last| !CONTINUES.contains(&last.text));
                if open == 0 && over {
                    list.push(Token {
                        kind: TokenKind::LineEnd,
                        text: "\n",
                        at,
                        line,
                    });
                }
                line += 1;
                1
            }
            '#' => rest.find('\n').unwrap_or(rest.len()),
            _ if character.is_whitespace() => character.len_utf8(),
            _ if character.is_ascii_alphabetic() || character == '_' => {
                let length = span(rest, |c| c.is_ascii_alphanumeric() || c == '_');
                list.push(Token {
                    kind: TokenKind::Word,
                    text: &rest[..length],
                    at,
                    line,
                });
                length
            }
            _ if character.is_ascii_digit() => {
                if let Some(length) = decimal(rest) {
                    list.push(Token {
                        kind: TokenKind::Decimal,
                        text: &rest[..length],
                        at,
                        line,
                    });
                    at += length;
                    continue;
                }
                let length = span(rest, |c| c.is_ascii_alphanumeric() || c == '_');
                let digits = &rest[..length];
                let value = digits.parse().map_err(|_| {
                    error_at(
                        text,
                        at,
                        format!("'{digits}' is not a number below 2^64 in decimal digits"),
                    )
                })?;
                list.push(Token {
                    kind: TokenKind::Number(value),
                    text: digits,
                    at,
                    line,
                });
                length
            }
            _ => {
                let sign = SIGNS
                    .into_iter()
                    .find(|sign| rest.starts_with(sign))
                    .ok_or_else(|| {
                        error_at(
                            text,
                            at,
                            format!("unexpected character {}", quoted(character)),
                        )
                    })?;
                match sign {
                    "(" | "[" => open += 1,
                    ")" | "]" => open = open.saturating_sub(1),
                    // A brace is never inside parentheses: some were left open, and the parser reports that better if
                    // lines end again.
                    "{" | "}" => open = 0,
                    _ => {}
                }
                list.push(Token {
                    kind: TokenKind::Sign,
                    text: sign,
                    at,
                    line,
                });
                sign.len()
            }
        };
        at += length;
    }
    list.push(Token {
        kind: TokenKind::End,
        text: "",
        at,
        line,
    });
    Ok(list)
}

/// Length of the byte order mark that some editors write at the beginning of a text.
pub(super) fn mark_bytes(text: &str) -> usize {
    if text.starts_with('\u{feff}') {
        '\u{feff}'.len_utf8()
    } else {
        0
    }
}

/// A quoted character, followed by its escape if it can be confused with another, or only the escape if it is not
/// printable.
fn quoted(character: char) -> String {
    let escape = character.escape_default();
    if character.is_ascii_graphic() {
        format!("'{character}'")
    } else if character.is_alphanumeric() {
        format!("'{character}' ({escape})")
    } else {
        format!("'{escape}'")
    }
}

/// Length of the number with a point or an exponent at the start of `rest`, if there is one.
fn decimal(rest: &str) -> Option<usize> {
    let digits = |from: usize| span(&rest[from..], |c| c.is_ascii_digit());
    let whole = digits(0);
    let mut end = whole;
    // Two points are a range.
    if rest[end..].starts_with('.') && digits(end + 1) > 0 {
        end += 1 + digits(end + 1);
    }
    if rest[end..].starts_with(['e', 'E']) {
        let sign = usize::from(rest[end + 1..].starts_with(['+', '-']));
        let exponent = digits(end + 1 + sign);
        end += if exponent > 0 { 1 + sign + exponent } else { 0 };
    }
    let over = !rest[end..].starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    (end > whole && over).then_some(end)
}

fn span(rest: &str, belongs: impl Fn(char) -> bool) -> usize {
    rest.find(|c| !belongs(c)).unwrap_or(rest.len())
}

/// An error at a byte of the text.
pub(super) fn error_at(text: &str, at: usize, message: String) -> ParseError {
    let before = text.get(..at).unwrap_or(text);
    let start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let start = start.max(mark_bytes(text)).min(at);
    let line = before.matches('\n').count() + 1;
    let column = before[start..].chars().count() + 1;
    let excerpt = text[start..].lines().next().unwrap_or("");
    // Lines of a megabyte are useless in a message.
    let excerpt = excerpt
        .chars()
        .take((column + 80).min(4096))
        .map(|c| if c.is_control() && c != '\t' { ' ' } else { c })
        .collect();
    ParseError {
        line,
        column,
        message,
        excerpt,
    }
}

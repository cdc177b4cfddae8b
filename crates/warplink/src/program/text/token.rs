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
        let (kind, length) = match character {
            '\n' => {
                let over = list
                    .last()
                    .is_some_and(|last| !CONTINUES.contains(&last.text));
                ((open == 0 && over).then_some(TokenKind::LineEnd), 1)
            }
            '#' => (None, rest.find('\n').unwrap_or(rest.len())),
            _ if character.is_whitespace() => (None, character.len_utf8()),
            _ if character.is_ascii_alphabetic() || character == '_' => {
                // Only ASCII, so that names can be copied into CUDA C++ as they are.
                (Some(TokenKind::Word), span(rest, is_of_word))
            }
            _ if character.is_ascii_digit() => {
                if let Some(length) = decimal(rest) {
                    (Some(TokenKind::Decimal), length)
                } else {
                    // Including letters, so that `0x10` or `1a` is one wrong number instead of a number and a name.
                    let digits = &rest[..span(rest, is_of_word)];
                    let value = digits.parse().map_err(|_| {
                        error_at(
                            text,
                            at,
                            format!("'{digits}' is not a number below 2^64 in decimal digits"),
                        )
                    })?;
                    (Some(TokenKind::Number(value)), digits.len())
                }
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
                    // An unmatched bracket is for the parser to report.
                    ")" | "]" => open = open.saturating_sub(1),
                    // A brace is never inside parentheses: some were left open, and the parser reports that better if
                    // lines end again.
                    "{" | "}" => open = 0,
                    _ => {}
                }
                (Some(TokenKind::Sign), sign.len())
            }
        };
        if let Some(kind) = kind {
            list.push(Token {
                kind,
                text: &rest[..length],
                at,
                line,
            });
        }
        line += u32::from(character == '\n');
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
    let over = !rest[end..].starts_with(is_of_word);
    (end > whole && over).then_some(end)
}

const fn is_of_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '_'
}

fn span(rest: &str, belongs: impl Fn(char) -> bool) -> usize {
    rest.find(|c| !belongs(c)).unwrap_or(rest.len())
}

/// An error at a byte of the text.
pub(super) fn error_at(text: &str, at: usize, message: String) -> ParseError {
    let before = text.get(..at).unwrap_or(text);
    let start = before.rfind('\n').map_or(0, |newline| newline + 1);
    // Editors do not count a byte order mark as a column.
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

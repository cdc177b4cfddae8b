//! Findings of the verifier, with the lines that cause them.

use crate::report::{Object, RefusedProgram};
use serde_json::json;
use std::path::Path;
use warplink::Error;
use warplink::program::text::{ParseError, window};
use warplink::program::{Diagnostic, Site};

/// Maximum number of places named for one line.
const MAX_PLACES: usize = 4;

/// A diagnostic with every involved statement, and its ranks and iterations.
pub(super) fn explain(diagnostic: &Diagnostic, file: &Path, text: &str) -> String {
    format!("{diagnostic}\n{}", excerpts(diagnostic, file, text))
}

/// The statements involved in a diagnostic, and their ranks and iterations.
pub(super) fn excerpts(diagnostic: &Diagnostic, file: &Path, text: &str) -> String {
    let mut out = String::new();
    for ((line, column), names) in statements(diagnostic) {
        let source = (line as usize)
            .checked_sub(1)
            .and_then(|index| text.lines().nth(index));
        let Some(source) = source else {
            continue;
        };
        // Columns are counted behind a byte order mark.
        let source = source.trim_start_matches('\u{feff}');
        let (indent, width) = extent(source, column as usize);
        let (source, indent) = window(source, indent);
        // The window may have cut the statement off.
        let width = width.min(source.chars().count().saturating_sub(indent).max(1));
        let number = line.to_string();
        let margin = " ".repeat(number.len());
        let blank: String = source
            .chars()
            .take(indent)
            .map(|c| if c == '\t' { '\t' } else { ' ' })
            .collect();
        let at = match column {
            0 => number.clone(),
            column => format!("{number}:{column}"),
        };
        out += &format!("{margin}--> {}:{at}\n", file.display());
        out += &format!("{number} | {source}\n");
        let (marks, who) = ("^".repeat(width), who(names));
        out += &format!("{margin} | {blank}{marks} {who}\n");
    }
    out
}

/// The position in a line of the statement that starts at `column`, or of the first one at 0: how
/// many characters are before it, and how many it has.
fn extent(source: &str, column: usize) -> (usize, usize) {
    let code: Vec<char> = source
        .split('#')
        .next()
        .unwrap_or_default()
        .chars()
        .collect();
    let indent = match column.checked_sub(1) {
        Some(before) => before.min(code.len()),
        None => code.iter().take_while(|c| c.is_whitespace()).count(),
    };
    let rest = &code[indent..];
    // One statement of several ends where the next begins.
    let shared = column > 0 || rest.contains(&';');
    let end = rest
        .iter()
        .position(|c| shared && matches!(c, ';' | '{' | '}'));
    let statement: String = rest[..end.unwrap_or(rest.len())].iter().collect();
    (indent, statement.trim_end().chars().count().max(1))
}

/// Line and column of every involved statement, and of the calls that lead to it, with the ranks and iterations there.
fn statements(diagnostic: &Diagnostic) -> Vec<((u32, u32), Vec<String>)> {
    let mut statements: Vec<((u32, u32), Vec<String>)> = Vec::new();
    for place in &diagnostic.places {
        for site in place.site.with_calls() {
            let (start, name) = ((site.line, site.column), name(place.rank, site));
            match statements.iter_mut().find(|(known, _)| *known == start) {
                Some((_, names)) if names.contains(&name) => {}
                Some((_, names)) => names.push(name),
                None => statements.push((start, vec![name])),
            }
        }
    }
    statements
}

/// `rank 0 (j = 1)`.
fn name(rank: usize, site: &Site) -> String {
    let indices = site.indices.iter();
    let indices: Vec<String> = indices
        .map(|(index, value)| format!("{index} = {value}"))
        .collect();
    match &indices[..] {
        [] => format!("rank {rank}"),
        indices => format!("rank {rank} ({})", indices.join(", ")),
    }
}

/// `rank 0 (j = 1), rank 2 (j = 3)`.
fn who(mut names: Vec<String>) -> String {
    let more = names.len().saturating_sub(MAX_PLACES);
    names.truncate(MAX_PLACES);
    match more {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

/// A diagnostic as JSON.
pub(super) fn object(diagnostic: &Diagnostic) -> Object {
    let places = diagnostic.places.iter().map(|place| {
        let object = Object::default().key("rank", place.rank);
        with_calls(with_site(object, &place.site), &place.site)
    });
    Object::default()
        .key("kind", diagnostic.kind.name())
        .key("message", &diagnostic.message)
        .objects("places", places)
        .key("repeated", diagnostic.repeated)
}

/// Adds the position of a statement, and the loops around it with their indices. The column is absent for the first
/// statement of a line.
pub(super) fn with_site(object: Object, site: &Site) -> Object {
    let indices = site.indices.iter();
    let indices = indices.map(|(name, value)| (name.to_string(), *value));
    object
        .key("line", site.line)
        .optional("column", Some(site.column).filter(|column| *column > 0))
        .key("indices", indices.collect::<Vec<_>>())
}

/// Adds the calls that lead to a place, the innermost first.
pub(super) fn with_calls(object: Object, site: &Site) -> Object {
    let calls = site.with_calls().filter_map(|site| site.call.as_deref());
    let calls = calls.map(|call| {
        let object = Object::default().key("program", call.program.to_string());
        with_site(object, &call.site)
    });
    match calls.collect::<Vec<_>>() {
        calls if calls.is_empty() => object,
        calls => object.objects("calls", calls),
    }
}

/// The error of a file that does not parse.
pub(super) fn not_a_program(file: &Path, error: &ParseError) -> RefusedProgram {
    let diagnostic = json!({
        "kind": "parse",
        "message": error.message,
        "line": error.line,
        "column": error.column,
        "excerpt": error.excerpt,
    });
    RefusedProgram {
        error: Error::parse(format!("{}, {error}", file.display())),
        diagnostics: vec![diagnostic],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_several_statements_of_a_line_is_marked() {
        let line = "    for i in 0..2 { C[i] = copy(A); D = copy(B) } # ; }";
        assert_eq!(extent(line, 0), (4, 13));
        assert_eq!(extent(line, 21), (20, 14));
        assert_eq!(extent(line, 37), (36, 11));
        assert_eq!(extent("  wait s, r  # here", 0), (2, 9));
        assert_eq!(extent("  fork pool(0) {", 0), (2, 14));
        assert_eq!(extent("", 7), (0, 1));
    }
}

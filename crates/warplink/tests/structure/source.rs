//! Reading of sources: code apart from comments and texts, library apart from tests, and the paths that code names.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// All sources below a folder, with their text.
pub(crate) fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    files(folder, "rs")
}

/// All files below a folder with this extension, with their text; not those that a build wrote.
pub(crate) fn files(folder: &Path, extension: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if !path.ends_with("target") {
                found.extend(files(&path, extension));
            }
        } else if path.extension().is_some_and(|found| found == extension) {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push((path, text));
        }
    }
    found
}

/// A source without the items that only tests have.
#[derive(Debug)]
pub(crate) struct Source {
    /// Code, of the length of the text: comments and texts are blank.
    pub(crate) code: String,
    /// String literals.
    pub(crate) literals: Vec<String>,
    /// Documentation of items, one paragraph each.
    pub(crate) docs: Vec<String>,
}

impl Source {
    pub(crate) fn new(text: &str) -> Self {
        let pieces = pieces(text);
        let mut code = text.as_bytes().to_vec();
        for piece in &pieces {
            blank(&mut code[piece.start..piece.end]);
        }
        let tests = tests(&code);
        for (start, end) in &tests {
            blank(&mut code[*start..*end]);
        }
        let is_of_library = |piece: &&Piece| {
            let contains = |(start, end): &(usize, usize)| (*start..*end).contains(&piece.start);
            !tests.iter().any(contains)
        };
        let (mut literals, mut docs) = (Vec::new(), Vec::<String>::new());
        let mut last_end = None;
        for piece in pieces.iter().filter(is_of_library) {
            let text = &text[piece.start..piece.end];
            if piece.is_literal {
                literals.push(text.to_owned());
            } else if let Some(line) = text.strip_prefix("///") {
                let goes_on = last_end.is_some_and(|end: usize| {
                    code[end..piece.start].iter().all(u8::is_ascii_whitespace)
                });
                match docs.last_mut() {
                    Some(paragraph) if goes_on && !line.trim().is_empty() => {
                        paragraph.push_str(line);
                    }
                    _ => docs.push(line.to_owned()),
                }
                last_end = Some(piece.end);
            }
        }
        Self {
            code: String::from_utf8(code).unwrap(),
            literals,
            docs,
        }
    }
}

/// Bytes of a text that are no code: the inside of a literal, or a comment.
struct Piece {
    start: usize,
    end: usize,
    is_literal: bool,
}

fn blank(bytes: &mut [u8]) {
    for byte in bytes.iter_mut().filter(|byte| **byte != b'\n') {
        *byte = b' ';
    }
}

/// The comments and the insides of literals, in order.
fn pieces(text: &str) -> Vec<Piece> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(skipped) = text[at..].find(['"', '/', '\'']) {
        let start = at + skipped;
        let (before, from) = (&text[..start], &text[start..]);
        let mut add = |start, length, is_literal| {
            let end = text.len().min(start + length);
            found.push(Piece {
                start,
                end,
                is_literal,
            });
            end
        };
        at = if from.starts_with("//") {
            add(start, from.find('\n').unwrap_or(from.len()), false)
        } else if from.starts_with("/*") {
            add(
                start,
                from.find("*/").map_or(from.len(), |end| end + 2),
                false,
            )
        } else if let Some(inner) = from.strip_prefix('"') {
            let hashes = before.len() - before.trim_end_matches('#').len();
            let is_raw = before[..before.len() - hashes].ends_with('r');
            let end = if is_raw {
                inner.find(&format!("\"{}", "#".repeat(hashes)))
            } else {
                end_of_literal(inner, '"')
            };
            add(start + 1, end.unwrap_or(inner.len()), true) + 1
        } else if let Some(inner) = from.strip_prefix('\'') {
            let one = inner.chars().next().map_or(0, char::len_utf8);
            if inner.starts_with('\\') {
                add(start + 1, end_of_literal(inner, '\'').unwrap_or(1), false) + 1
            } else if inner[one..].starts_with('\'') {
                add(start + 1, one, false) + 1
            } else {
                // A lifetime.
                start + 1
            }
        } else {
            start + 1
        };
        at = at.min(text.len());
    }
    found
}

/// The place of the quote that ends a literal, behind its first one.
fn end_of_literal(inner: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    inner.find(|c| {
        let ends = c == quote && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    })
}

/// The items that only tests have, with their attributes: a declaration up to its semicolon, or up to the end of its
/// braces.
fn tests(code: &[u8]) -> Vec<(usize, usize)> {
    const ONLY: [&str; 2] = ["#[cfg(test)]", "#[cfg(all(test"];
    let mut found: Vec<(usize, usize)> = Vec::new();
    for start in 0..code.len() {
        let is_inside = found.last().is_some_and(|(_, end)| start < *end);
        if is_inside
            || !ONLY
                .iter()
                .any(|only| code[start..].starts_with(only.as_bytes()))
        {
            continue;
        }
        let (mut at, mut depth, mut braces) = (start, 0, 0);
        while let Some(byte) = code.get(at) {
            at += 1;
            match byte {
                b'(' | b'[' => depth += 1,
                b')' | b']' => depth -= 1,
                b'{' => braces += 1,
                b'}' => braces -= 1,
                _ => {}
            }
            let ends = *byte == b';' || (*byte == b'}' && !goes_on(&code[at..]));
            if depth == 0 && braces == 0 && ends {
                break;
            }
        }
        found.push((start, at));
    }
    found
}

/// Whether an item goes on behind its braces: an import, or a constant.
fn goes_on(after: &[u8]) -> bool {
    after.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b';')
}

pub(crate) fn is_part_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The path of modules of a file below `src/`.
pub(crate) fn module(file: &Path) -> Vec<String> {
    let parts = file.with_extension("");
    let parts = parts.iter().map(|part| part.to_string_lossy().into_owned());
    parts
        .filter(|part| part != "mod" && part != "lib")
        .collect()
}

/// The paths that code of a module names from the root of the crate, or from a module above it, as paths from the root.
/// Groups are expanded.
pub(crate) fn paths(code: &str, module: &[String]) -> Vec<Vec<String>> {
    let inner = inner_modules(code);
    let mut found = Vec::new();
    for start in ["crate", "super"] {
        for (at, _) in code.match_indices(start) {
            let (before, after) = (&code[..at], &code[at + start.len()..]);
            let Some(mut after) = after.strip_prefix("::") else {
                continue;
            };
            // Only the first `super` of a path starts one; `$crate` is in the code of a macro's users.
            if before.ends_with(|c| is_part_of_name(c) || "$:".contains(c)) {
                continue;
            }
            let mut path = Vec::new();
            if start == "super" {
                path.extend_from_slice(module);
                let is_in = |(start, end, _): &&(usize, usize, &str)| (*start..*end).contains(&at);
                path.extend(
                    inner
                        .iter()
                        .filter(is_in)
                        .map(|(_, _, name)| (*name).to_owned()),
                );
                path.pop();
                while let Some(rest) = after.strip_prefix("super::") {
                    path.pop();
                    after = rest;
                }
            }
            expand(&path, after, &mut found);
        }
    }
    found
}

/// The modules that a file contains besides its own: their bytes and their names.
fn inner_modules(code: &str) -> Vec<(usize, usize, &str)> {
    let found = code.match_indices("mod ").filter_map(|(at, word)| {
        let rest = &code[at + word.len()..];
        let name = &rest[..rest.find(|c| !is_part_of_name(c))?];
        let braces = at + word.len() + name.len() + 1;
        if code[..at].ends_with(is_part_of_name) || !code[braces..].starts_with('{') {
            return None;
        }
        Some((at, braces + closing(&code[braces..]), name))
    });
    found.collect()
}

/// The length of a group in braces, which starts the code.
fn closing(code: &str) -> usize {
    let mut depth = 0;
    let end = code.find(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        depth == 0
    });
    end.map_or(code.len(), |end| end + 1)
}

/// Adds the paths that `rest` names below `path`.
fn expand(path: &[String], rest: &str, found: &mut Vec<Vec<String>>) {
    let rest = rest.trim_start();
    if rest.starts_with('{') {
        let group = &rest[1..closing(rest).max(2) - 1];
        let (mut depth, mut start) = (0, 0);
        for (at, c) in group.char_indices().chain([(group.len(), ',')]) {
            depth += i32::from(c == '{') - i32::from(c == '}');
            if c == ',' && depth == 0 {
                let entry = group[start..at].trim();
                if !entry.is_empty() {
                    expand(path, entry, found);
                }
                start = at + 1;
            }
        }
        return;
    }
    let name = &rest[..rest.find(|c| !is_part_of_name(c)).unwrap_or(rest.len())];
    let mut path = path.to_vec();
    match name {
        // Everything of the module, or the module.
        "" | "self" => found.push(path),
        "super" => {
            path.pop();
            let rest = rest[name.len()..].strip_prefix("::").unwrap_or_default();
            expand(&path, rest, found);
        }
        _ => {
            path.push(name.to_owned());
            match rest[name.len()..].strip_prefix("::") {
                Some(rest) => expand(&path, rest, found),
                None => found.push(path),
            }
        }
    }
}

#[test]
fn items_of_tests_are_left_out() {
    let text = r#"
        #[cfg(test)]
        mod tests;
        fn kept_a() {}
        impl B {
            #[cfg(test)]
            #[must_use]
            fn left(&self, of: [u8; 2]) -> &str { "left }" }
            fn kept_b<'a>(c: &'a char) { *c == '"'; *c == '{'; "kept, // as a text" /* left */ }
        }
        #[cfg(test)]
        use left::{left};
        fn kept_c() { crate::b::left() } // left
        #[cfg(all(test, not(loom)))]
        mod tests { fn left() { { "left" } } }
        const KEPT_D: u8 = 1;
    "#;
    let source = Source::new(text);
    let code = source.code.replace("crate::b::left", "");
    assert!(!code.contains("left"), "{code}");
    for kept in ["kept_a", "kept_b", "kept_c", "KEPT_D"] {
        assert!(code.contains(kept), "{code} has no {kept}");
    }
    assert_eq!(source.literals, ["kept, // as a text"]);
}

#[test]
fn paths_are_those_from_the_root() {
    let module = ["a", "b"].map(str::to_owned);
    let code =
        "use crate::{c::D, e::{self, F as G}}; use super::super::h; pub(in crate::i) fn j() {}
        mod k { use super::l::*; } $crate::m; mycrate::n; a::super::o";
    let found: BTreeSet<_> = paths(code, &module)
        .iter()
        .map(|path| path.join("/"))
        .collect();
    let expected = ["c/D", "e", "e/F", "h", "i", "a/b/l"];
    assert_eq!(found, BTreeSet::from(expected.map(str::to_owned)));
}

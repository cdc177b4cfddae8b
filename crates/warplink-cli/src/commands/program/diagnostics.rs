//! What the verifier found, beside the lines where it happens.

use serde::Serialize;
use std::path::Path;
use warplink::program::Diagnostic;

/// Most places that are named beside one line.
const MAX_PLACES: usize = 4;

/// A diagnostic with every line that takes part, and which ranks and iterations do.
pub(super) fn explain(diagnostic: &Diagnostic, file: &Path, text: &str) -> String {
    let mut out = format!("{diagnostic}\n");
    for line in diagnostic.lines() {
        let source = (line as usize)
            .checked_sub(1)
            .and_then(|index| text.lines().nth(index));
        let Some(source) = source else {
            continue;
        };
        let statement = source.split('#').next().unwrap_or_default().trim_end();
        let indent = statement.len() - statement.trim_start().len();
        let number = line.to_string();
        let margin = " ".repeat(number.len());
        let blank: String = source
            .chars()
            .take(indent)
            .map(|c| if c == '\t' { '\t' } else { ' ' })
            .collect();
        let carets = "^".repeat(statement.trim_start().chars().count().max(1));
        out += &format!("{margin}--> {}:{line}\n", file.display());
        out += &format!("{number} | {source}\n");
        out += &format!("{margin} | {blank}{carets} {}\n", who(diagnostic, line));
    }
    out
}

/// `rank 0 (j = 1), rank 2 (j = 3)`.
fn who(diagnostic: &Diagnostic, line: u32) -> String {
    let mut names: Vec<String> = Vec::new();
    let here = diagnostic
        .places
        .iter()
        .filter(|place| place.site.line == line);
    for place in here {
        let site = place.site.to_string();
        let indices = site.find(" (").map_or("", |at| &site[at..]);
        let name = format!("rank {}{indices}", place.rank);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let more = names.len().saturating_sub(MAX_PLACES);
    names.truncate(MAX_PLACES);
    match more {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

/// A diagnostic for machines.
#[derive(Debug, Serialize)]
pub(super) struct Json {
    kind: &'static str,
    message: String,
    places: Vec<JsonPlace>,
    repeated: usize,
}

#[derive(Debug, Serialize)]
struct JsonPlace {
    rank: usize,
    line: u32,
    indices: Vec<(String, i64)>,
}

impl From<&Diagnostic> for Json {
    fn from(diagnostic: &Diagnostic) -> Self {
        let place = |place: &warplink::program::Place| JsonPlace {
            rank: place.rank,
            line: place.site.line,
            indices: place
                .site
                .indices
                .iter()
                .map(|(name, value)| (name.to_string(), *value))
                .collect(),
        };
        Self {
            kind: diagnostic.kind.name(),
            message: diagnostic.message.clone(),
            places: diagnostic.places.iter().map(place).collect(),
            repeated: diagnostic.repeated,
        }
    }
}

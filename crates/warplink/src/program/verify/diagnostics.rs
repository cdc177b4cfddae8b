//! Collects diagnostics, and reports each violation once per set of statements.

use crate::error::Rank;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind, RankSite};
use crate::program::expr::shortened;
use crate::program::ir::Program;
use crate::program::rank_program::RankProgram;
use crate::program::text::summary;
use std::collections::HashMap;

/// Limit on the number of distinct diagnostics that are reported: nobody reads more.
pub const MAX_DIAGNOSTICS: usize = 64;

/// Collects diagnostics, one for each kind and set of statements.
pub(super) struct Diagnostics<'p> {
    program: &'p Program,
    pub(super) list: Vec<Diagnostic>,
    known: HashMap<(DiagnosticKind, Vec<(u32, u32)>), usize>,
}

impl<'p> Diagnostics<'p> {
    pub(super) fn new(program: &'p Program) -> Self {
        Self {
            program,
            list: Vec::new(),
            known: HashMap::new(),
        }
    }

    /// Adds a diagnostic; `message` gets the descriptions of the places.
    pub(super) fn add<const N: usize>(
        &mut self,
        kind: DiagnosticKind,
        places: [RankSite; N],
        message: impl FnOnce([String; N]) -> String,
    ) {
        self.add_by(kind, places.to_vec(), |own| {
            message(places.each_ref().map(|place| own.say(place)))
        });
    }

    /// Adds a diagnostic; `message` is evaluated only for the first of its kind at these places.
    pub(super) fn add_by(
        &mut self,
        kind: DiagnosticKind,
        places: Vec<RankSite>,
        message: impl FnOnce(&Self) -> String,
    ) {
        if self.is_new(kind, &places) {
            let message = message(self);
            self.list.push(Diagnostic::new(kind, message, places));
        }
    }

    pub(super) fn add_made(&mut self, diagnostic: Diagnostic) {
        if self.is_new(diagnostic.kind, &diagnostic.places) {
            self.list.push(diagnostic);
        }
    }

    /// Whether a diagnostic is the first of its kind at these places; counts a repetition otherwise.
    fn is_new(&mut self, kind: DiagnosticKind, places: &[RankSite]) -> bool {
        let starts = starts_of(places);
        let next = self.list.len();
        match self.known.get(&(kind, starts.clone())) {
            Some(&index) => self.list[index].repeated += 1,
            // Violations beyond the limit are dropped, not counted: `known` would otherwise grow with the size of the
            // program.
            None if next < MAX_DIAGNOSTICS => {
                self.known.insert((kind, starts), next);
                return true;
            }
            None => {}
        }
        false
    }

    pub(super) fn too_large(&mut self, expected: &str) {
        self.add(DiagnosticKind::Malformed, [], |[]| {
            format!("the program is too large to verify; expected {expected}")
        });
    }

    /// Fails with the diagnostics collected so far, if there are any.
    pub(super) fn end_of_stage(&mut self) -> Result<(), Vec<Diagnostic>> {
        if self.list.is_empty() {
            return Ok(());
        }
        Err(std::mem::take(&mut self.list))
    }

    /// `` rank 2, line 12 (j = 3): `post s` ``.
    pub(super) fn say(&self, place: &RankSite) -> String {
        match summary(self.program, place.site.position()) {
            text if text.is_empty() => place.to_string(),
            text => format!("{place}: `{}`", shortened(text)),
        }
    }
}

/// Start positions of the statements at `places`, sorted so that the discovery order does not matter.
fn starts_of(places: &[RankSite]) -> Vec<(u32, u32)> {
    let starts = places
        .iter()
        .map(|place| (place.site.line, place.site.column));
    let mut starts: Vec<(u32, u32)> = starts.collect();
    starts.sort_unstable();
    starts
}

/// Joins the links of a chain; spells out at most `most`, and counts the rest.
pub(super) fn chained(links: impl ExactSizeIterator<Item = String>, most: usize) -> String {
    let more = links.len().saturating_sub(most);
    let mut message = links.take(most).collect::<Vec<_>>().join("; ");
    if more > 0 {
        message += &format!("; and {more} more like these");
    }
    message
}

/// Place of an operation.
pub(super) fn place_of(ranks: &[RankProgram], rank: Rank, operation: usize) -> RankSite {
    RankSite::new(rank, &ranks[rank].operations[operation].site)
}

/// Place where a transfer is declared.
pub(super) fn place_of_transfer(ranks: &[RankProgram], rank: Rank, transfer: usize) -> RankSite {
    RankSite::new(rank, &ranks[rank].transfers[transfer].site)
}

//! What was measured, as a table and as JSON.

use super::Routing;
use crate::commands::bench::timing::{Submission, Times};
use crate::report::counted;
use crate::report::table::{Align, Table};
use serde::Serialize;
use warplink::Communicator;
use warplink::collective::ExpertOptions;

/// The figures of one method.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figures {
    /// Who does it.
    pub(super) method: String,
    /// Of one call.
    pub(super) dispatch: Times,
    pub(super) combine: Times,
}

/// One number of tokens.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// Of each rank.
    pub(super) tokens: usize,
    /// That come to the rank that reports.
    pub(super) rows: usize,
    pub(super) submission: Submission,
    /// Elements of Warplink's result that were not right.
    pub(super) wrong: u64,
    /// Warplink first.
    pub(super) methods: Vec<Figures>,
}

#[derive(Debug, Serialize)]
pub(super) struct Report {
    benchmark: &'static str,
    dtype: String,
    elements: usize,
    experts: usize,
    top_k: usize,
    routing: Routing,
    device: String,
    ranks: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<String>,
    rows: Vec<Row>,
}

impl Row {
    /// The peer's time for both divided by Warplink's.
    fn speedup(&self) -> Option<f64> {
        let both = |method: &Figures| method.dispatch.median + method.combine.median;
        match self.methods.as_slice() {
            [own, peer, ..] => Some(both(peer) / both(own)),
            _ => None,
        }
    }
}

impl Report {
    pub(super) fn new(
        comm: &Communicator,
        layer: &ExpertOptions,
        routing: Routing,
        peer: Option<&str>,
        rows: Vec<Row>,
    ) -> Self {
        Self {
            benchmark: "expert-parallel",
            dtype: layer.dtype.to_string(),
            elements: layer.elements,
            experts: layer.experts,
            top_k: layer.top_k,
            routing,
            device: comm.device().name(),
            ranks: comm.world(),
            peer: peer.map(str::to_owned),
            rows,
        }
    }

    /// Whether every element was right.
    pub(super) fn is_right(&self) -> bool {
        self.rows.iter().all(|row| row.wrong == 0)
    }

    /// The table.
    pub(super) fn text(&self) -> String {
        let mut columns = vec![
            ("tokens", Align::Right),
            ("rows", Align::Right),
            ("submission", Align::Left),
            ("dispatch us", Align::Right),
            ("combine us", Align::Right),
            ("wrong", Align::Right),
        ];
        if self.peer.is_some() {
            columns.push(("nccl dispatch us", Align::Right));
            columns.push(("nccl combine us", Align::Right));
            columns.push(("speedup", Align::Right));
        }
        let mut table = Table::new(columns.iter().copied());
        for row in &self.rows {
            let mut cells = vec![
                row.tokens.to_string(),
                row.rows.to_string(),
                format!("{:?}", row.submission).to_lowercase(),
            ];
            for method in &row.methods {
                cells.push(format!("{:.2}", method.dispatch.median * 1e6));
                cells.push(format!("{:.2}", method.combine.median * 1e6));
                if cells.len() == 5 {
                    cells.push(row.wrong.to_string());
                }
            }
            cells.extend(row.speedup().map(|times| format!("{times:.2}")));
            cells.resize(columns.len(), String::new());
            table.row(cells);
        }
        let compared = self.peer.as_ref();
        let compared = compared.map_or_else(String::new, |peer| format!(", compared with {peer}"));
        format!(
            "rows of {} {}, top {} of {} experts, {} on {}{compared}\n\n{table}",
            self.elements,
            self.dtype,
            self.top_k,
            self.experts,
            counted(self.ranks, "rank"),
            self.device
        )
    }
}

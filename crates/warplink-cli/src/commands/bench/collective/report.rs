//! What was measured, as a table and as JSON.

use super::Place;
use super::what::{What, name};
use crate::commands::bench::timing::{Submission, Times};
use crate::report::bytes::Bytes;
use crate::report::table::{Align, Table};
use crate::report::{counted, digits};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use warplink::Communicator;

/// The figures of one method.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Figures {
    /// Who does it.
    #[serde(alias = "way")]
    pub(super) method: String,
    /// For one call.
    pub(super) seconds: Times,
    /// Until a call returned, where calls are given one by one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) host: Option<Times>,
    /// The size over the time, in 10^9 bytes a second.
    pub(super) bandwidth: f64,
    /// Corrected as nccl-tests do it.
    pub(super) bus_bandwidth: f64,
    /// Elements that were not right.
    pub(super) wrong: u64,
}

/// One size.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// Of the larger of input and output.
    pub(super) bytes: usize,
    /// Elements of the smaller.
    pub(super) count: usize,
    pub(super) place: Place,
    pub(super) submission: Submission,
    /// Of the direct path, or `engine`, which has no lanes.
    pub(super) algorithm: String,
    pub(super) lanes: usize,
    pub(super) threads: usize,
    /// Warplink first.
    pub(super) methods: Vec<Figures>,
}

#[derive(Debug, Serialize)]
pub(super) struct Report {
    benchmark: &'static str,
    collective: String,
    dtype: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    op: Option<String>,
    /// Whether Warplink's calls are bound to their memory.
    bound: bool,
    device: String,
    ranks: usize,
    peers: Vec<String>,
    pub(super) rows: Vec<Row>,
}

/// What another program measured, as far as it is shown beside Warplink. The aliases are names in older reports.
#[derive(Debug, Deserialize)]
pub(super) struct Beside {
    collective: String,
    #[serde(alias = "type")]
    dtype: String,
    ranks: usize,
    #[serde(default)]
    peers: Vec<String>,
    rows: Vec<BesideRow>,
}

#[derive(Debug, Deserialize)]
struct BesideRow {
    bytes: usize,
    place: Place,
    submission: Submission,
    #[serde(alias = "ways")]
    methods: Vec<Figures>,
}

impl Row {
    /// The figures of a method, if this size has them.
    pub(super) fn figures(&self, method: &str) -> Option<&Figures> {
        self.methods.iter().find(|figures| figures.method == method)
    }

    /// The fastest peer's time divided by Warplink's.
    fn speedup(&self) -> Option<f64> {
        let (own, peers) = self.methods.split_first()?;
        let peers = peers.iter().map(|peer| peer.seconds.median);
        peers
            .min_by(f64::total_cmp)
            .map(|peer| peer / own.seconds.median)
    }
}

impl Beside {
    /// Fails if it is of another collective, element type or number of ranks.
    pub(super) fn check(&self, what: What, world: usize) -> Result<()> {
        let (collective, dtype) = (name(what.kind), what.dtype.to_string());
        ensure!(
            self.collective == collective && self.dtype == dtype && self.ranks == world,
            "the figures beside are of {} of {} on {}; expected {collective} of {dtype} on {world}",
            self.collective,
            self.dtype,
            counted(self.ranks, "rank"),
        );
        Ok(())
    }
}

impl Report {
    pub(super) fn new(
        comm: &Communicator,
        what: What,
        bound: bool,
        peers: Vec<String>,
        rows: Vec<Row>,
    ) -> Self {
        Self {
            benchmark: "collective",
            collective: name(what.kind),
            dtype: what.dtype.to_string(),
            op: what.kind.reduces().then(|| what.op.to_string()),
            bound,
            device: comm.device().name(),
            ranks: comm.world(),
            peers,
            rows,
        }
    }

    /// Adds what another program measured of the same collective.
    pub(super) fn add(&mut self, beside: &Beside) {
        for row in &mut self.rows {
            let of = |other: &&BesideRow| {
                (other.bytes, other.place, other.submission)
                    == (row.bytes, row.place, row.submission)
            };
            let more = beside
                .rows
                .iter()
                .filter(of)
                .flat_map(|other| other.methods.iter().cloned());
            row.methods.extend(more);
        }
        self.peers.extend(beside.peers.iter().cloned());
    }

    /// The methods, in the order in which they are shown. Not every size has each.
    pub(super) fn methods(&self) -> Vec<&str> {
        let mut methods: Vec<&str> = Vec::new();
        for figures in self.rows.iter().flat_map(|row| &row.methods) {
            if !methods.contains(&figures.method.as_str()) {
                methods.push(&figures.method);
            }
        }
        methods
    }

    /// Whether every element of every method was right.
    pub(super) fn is_right(&self) -> bool {
        let mut methods = self.rows.iter().flat_map(|row| &row.methods);
        methods.all(|figures| figures.wrong == 0)
    }

    /// What is measured, in words.
    pub(super) fn title(&self) -> String {
        let mut title = format!("{} of {}", self.collective, self.dtype);
        if let Some(op) = &self.op {
            title += &format!(", {op}");
        }
        if self.bound {
            title += ", bound";
        }
        title + &format!(", {} on {}", counted(self.ranks, "rank"), self.device)
    }

    /// The table.
    pub(super) fn text(&self) -> String {
        let methods = self.methods();
        let mut columns = vec![
            ("bytes".to_owned(), Align::Right),
            ("place".to_owned(), Align::Left),
            ("submission".to_owned(), Align::Left),
            ("algorithm".to_owned(), Align::Left),
            ("lanes".to_owned(), Align::Right),
        ];
        for method in &methods {
            let unit = |unit: &str| (format!("{method} {unit}"), Align::Right);
            columns.extend([unit("us"), unit("host us"), unit("GB/s"), unit("bus GB/s")]);
            columns.push(("wrong".to_owned(), Align::Right));
        }
        if methods.len() > 1 {
            columns.push(("speedup".to_owned(), Align::Right));
        }
        let mut table = Table::new(columns.iter().map(|(name, align)| (name.as_str(), *align)));
        for row in &self.rows {
            let mut cells = vec![
                Bytes(row.bytes as u64).to_string(),
                row.place.name().to_owned(),
                format!("{:?}", row.submission).to_lowercase(),
                row.algorithm.clone(),
                row.lanes.to_string(),
            ];
            for method in &methods {
                let Some(figures) = row.figures(method) else {
                    cells.extend([const { String::new() }; 5]);
                    continue;
                };
                let micro = |times: Times| format!("{:.2}", times.median * 1e6);
                cells.push(micro(figures.seconds));
                cells.push(figures.host.map(micro).unwrap_or_default());
                cells.push(digits(figures.bandwidth));
                cells.push(digits(figures.bus_bandwidth));
                cells.push(figures.wrong.to_string());
            }
            cells.extend(row.speedup().map(|times| format!("{times:.2}")));
            table.row(cells);
        }
        let compared = match self.peers.as_slice() {
            [] => String::new(),
            peers => format!(", compared with {}", peers.join(" and ")),
        };
        format!("{}{compared}\n\n{table}", self.title())
    }
}

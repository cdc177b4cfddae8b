//! Times and bandwidths of collectives, and those of another program beside them.

use super::Placement;
use super::template::{Template, name};
use crate::commands::bench::clock::{Submission, Times};
use crate::commands::bench::plot::{Drawing, Point};
use crate::commands::bench::report::{Columns, Figures, compared, micros, or_empty};
use crate::names::name_of;
use crate::report::bytes::Bytes;
use crate::report::{counted, digits};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// The figures of one method.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct CollectiveTimes {
    #[serde(alias = "way")]
    pub(super) method: String,
    /// For one call.
    pub(super) seconds: Times,
    /// Until a call returned, where calls are submitted one by one.
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
pub(super) struct CollectiveRow {
    /// Of the larger of input and output.
    pub(super) bytes: usize,
    /// Elements of the smaller.
    pub(super) count: usize,
    pub(super) place: Placement,
    pub(super) submission: Submission,
    /// Of the direct path, or `engine`, which has no lanes.
    pub(super) algorithm: String,
    pub(super) lanes: usize,
    pub(super) threads: usize,
    /// Warplink first.
    pub(super) methods: Vec<CollectiveTimes>,
}

#[derive(Debug, Serialize)]
pub(crate) struct CollectiveFigures {
    collective: String,
    dtype: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    op: Option<String>,
    /// Whether Warplink's calls are bound to their memory.
    bound: bool,
    peers: Vec<String>,
    rows: Vec<CollectiveRow>,
}

/// Figures of another program that are shown beside Warplink's. The aliases are names in older reports.
#[derive(Debug, Deserialize)]
pub(super) struct External {
    collective: String,
    #[serde(alias = "type")]
    dtype: String,
    ranks: usize,
    #[serde(default)]
    peers: Vec<String>,
    rows: Vec<ExternalRow>,
}

#[derive(Debug, Deserialize)]
struct ExternalRow {
    bytes: usize,
    place: Placement,
    submission: Submission,
    #[serde(alias = "ways")]
    methods: Vec<CollectiveTimes>,
}

impl CollectiveRow {
    /// The figures of a method, if this size has them.
    pub(super) fn figures(&self, method: &str) -> Option<&CollectiveTimes> {
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

impl External {
    /// Fails if it is of another collective, element type or number of ranks.
    pub(super) fn check(&self, template: Template, world: usize) -> Result<()> {
        let (collective, dtype) = (name(template.kind), template.dtype.to_string());
        ensure!(
            self.collective == collective && self.dtype == dtype && self.ranks == world,
            "the other program's figures are for {} of {} on {}; expected {collective} of {dtype} on {world}",
            self.collective,
            self.dtype,
            counted(self.ranks, "rank"),
        );
        Ok(())
    }
}

impl CollectiveFigures {
    pub(super) fn new(
        template: Template,
        bound: bool,
        peers: Vec<String>,
        rows: Vec<CollectiveRow>,
        beside: Option<&External>,
    ) -> Self {
        let mut figures = Self {
            collective: name(template.kind),
            dtype: template.dtype.to_string(),
            op: template.kind.reduces().then(|| template.op.to_string()),
            bound,
            peers,
            rows,
        };
        if let Some(beside) = beside {
            figures.add(beside);
        }
        figures
    }

    fn add(&mut self, beside: &External) {
        for row in &mut self.rows {
            let same = |other: &&ExternalRow| {
                (other.bytes, other.place, other.submission)
                    == (row.bytes, row.place, row.submission)
            };
            let others = beside.rows.iter().filter(same);
            let more = others.flat_map(|other| other.methods.iter().cloned());
            row.methods.extend(more);
        }
        self.peers.extend(beside.peers.iter().cloned());
    }

    /// The methods, in the order in which they are shown. Not every size has each.
    fn methods(&self) -> Vec<&str> {
        let mut methods: Vec<&str> = Vec::new();
        for measured in self.rows.iter().flat_map(|row| &row.methods) {
            if !methods.contains(&measured.method.as_str()) {
                methods.push(&measured.method);
            }
        }
        methods
    }
}

impl Figures for CollectiveFigures {
    fn is_right(&self) -> bool {
        let mut methods = self.rows.iter().flat_map(|row| &row.methods);
        methods.all(|measured| measured.wrong == 0)
    }

    fn title(&self, job: &str) -> String {
        let mut title = format!("{} of {}", self.collective, self.dtype);
        if let Some(op) = &self.op {
            title += &format!(", {op}");
        }
        if self.bound {
            title += ", bound";
        }
        format!("{title}, {job}{}", compared(&self.peers))
    }

    fn tables(&self) -> String {
        let mut columns = Columns::<CollectiveRow>::new()
            .number("bytes", |row| Bytes(row.bytes as u64).to_string())
            .words("place", |row| name_of(&row.place))
            .words("submission", |row| name_of(&row.submission))
            .words("algorithm", |row| row.algorithm.clone())
            .number("lanes", |row| row.lanes.to_string());
        let methods = self.methods();
        for &method in &methods {
            let of = |cell: fn(&CollectiveTimes) -> String| {
                move |row: &CollectiveRow| or_empty(row.figures(method), cell)
            };
            columns = columns
                .number(
                    format!("{method} us"),
                    of(|measured| micros(measured.seconds.median)),
                )
                .number(
                    format!("{method} host us"),
                    of(|measured| or_empty(measured.host, |host| micros(host.median))),
                )
                .number(
                    format!("{method} GB/s"),
                    of(|measured| digits(measured.bandwidth)),
                )
                .number(
                    format!("{method} bus GB/s"),
                    of(|measured| digits(measured.bus_bandwidth)),
                )
                .number("wrong", of(|measured| measured.wrong.to_string()));
        }
        if methods.len() > 1 {
            columns = columns.number("speedup", |row| {
                or_empty(row.speedup(), |times| format!("{times:.2}"))
            });
        }
        columns.table(&self.rows)
    }

    fn drawing(&self) -> Drawing {
        let points = self.rows.iter().flat_map(|row| {
            let place = match row.place {
                Placement::Out => "",
                Placement::In => "in place, ",
            };
            let group = format!("{place}{}", name_of(&row.submission));
            row.methods.iter().flat_map(move |measured| {
                let point = |what, value, logarithmic| Point {
                    panel: format!("{group}: {what}"),
                    line: measured.method.clone(),
                    size: Bytes(row.bytes as u64).to_string(),
                    value,
                    logarithmic,
                };
                [
                    point("time in us", measured.seconds.median * 1e6, true),
                    point("bus bandwidth in GB/s", measured.bus_bandwidth, false),
                ]
            })
        });
        Drawing::Lines(points.collect())
    }
}
